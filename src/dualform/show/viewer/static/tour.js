// The first visit: four steps through the page. It can be skipped at every step, and does not come back.

import { button, h } from "./dom.js";

const KEY = "dualform-tour";
const STEPS = [
  ["prediction", "A test example, and what the model says", "Everything on the page is about one test example. Choose another one from the list of tests, or with j and k."],
  ["layers", "What it was compared with", "Each layer compares this example with every training pattern that it ever saw. A shows the sums by group; B to D show them sorted, along the training, and one by one."],
  ["path", "Where the answer comes from", "The output as a sum over what was trained on, through all layers. It takes a while, so it is found when you ask for it, and kept. It is an account of this training, not a prediction of retraining."],
  ["mask", "Leave something out", "Press a group, or its number key, and see what the model says without what it taught. That removes recorded updates; the model is not retrained. Press ? for all keys."],
];
let wanted = false;

/** Look at the address before the page tidies it: a program that drives a browser gets the tour only if it asks. */
export function prepare() {
  wanted = new URLSearchParams(location.search).has("tour") || (!navigator.webdriver && localStorage.getItem(KEY) === null);
}

/** Begin the tour on a first visit. */
export function start() {
  if (wanted) show();
}

/** Show the tour, whether it was seen or not. */
export function show() {
  let at = 0;
  const title = h("h2", { id: "tour-title", tabindex: "-1" });
  const text = h("p", { id: "tour-text" });
  const place = h("span", { class: "muted" });
  const back = button("Back", () => go(at - 1));
  const next = button("Next", () => (at + 1 < STEPS.length ? go(at + 1) : box.close()), { class: "start" });
  const box = h("dialog", { class: "tour", "aria-labelledby": "tour-title", "aria-describedby": "tour-text", onclose: leave },
    title, text, h("div", { class: "row" }, back, next, button("Skip the tour", () => box.close()), place));

  function go(step) {
    at = step;
    const [panel, heading, words] = STEPS[at];
    for (const element of document.querySelectorAll(".touring")) element.classList.remove("touring");
    const shown = document.getElementById(panel);
    shown?.classList.add("touring");
    shown?.scrollIntoView({ block: "start" });
    title.textContent = heading;
    text.textContent = words;
    place.textContent = `${at + 1} of ${STEPS.length}`;
    back.disabled = at === 0;
    next.textContent = at + 1 < STEPS.length ? "Next" : "Done";
    title.focus(); // a screen reader reads the new step
  }

  function leave() {
    localStorage.setItem(KEY, "seen");
    for (const element of document.querySelectorAll(".touring")) element.classList.remove("touring");
    box.remove();
    scrollTo(0, 0);
  }

  document.body.append(box);
  box.showModal();
  go(0);
}
