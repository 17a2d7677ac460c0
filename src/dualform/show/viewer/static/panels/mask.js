// E MASK: what to leave out; what comes of it for this input (in the prediction) and for all tests (here).

import { button, h, toggle } from "../dom.js";
import { count, groupName, percent } from "../format.js";
import { key } from "../link.js";
import { Panel } from "../panel.js";
import { describeMask } from "./prediction.js";
import * as state from "../state.js";

const WAIT = 250; // after the last change, before all tests are asked about
const CHIPS = 40;

export function create(app) {
  const panel = new Panel("mask", "E · Mask");
  const controls = h("div", { class: "mask-controls" });
  const outcome = new Panel("mask-outcome", "On all tests");
  outcome.title.classList.add("small-heading");
  panel.element.append(controls, outcome.element);
  panel.body.remove();
  let timer = null;

  function draw() {
    const now = state.get();
    const masked = state.isMasked(now);
    const groups = app.groups.slice(0, CHIPS);
    controls.replaceChildren(
      h("p", { class: "note" }, app.note),
      app.run.exact ? "" : h("p", { class: "muted" }, "Some layers were recorded with their keys only; nothing can be taken out of their weights."),
      h("div", { class: "chips", role: "group", "aria-label": `groups to mask, by ${now.by}` }, groups.map((group, i) => {
        const name = key(group);
        return button([i < 9 ? h("kbd", { "aria-hidden": "true" }, i + 1) : "", groupName(group, now.by)], () => app.toggleGroup(group),
          { class: "chip", "aria-pressed": String(now.g.includes(name)), "data-group": name, disabled: !app.run.exact });
      })),
      app.groups.length > CHIPS ? h("p", { class: "muted" }, `The ${CHIPS} largest of ${count(app.groups.length)} groups.`) : "",
      now.s.length || now.p.length || now.r !== "0" ? h("div", { class: "chips" },
        now.s.map((range) => removable(`steps ${range}`, () => app.changeMask({ s: now.s.filter((one) => one !== range) }))),
        now.p.map((sample) => removable(`sample ${sample}`, () => app.changeMask({ p: now.p.filter((one) => one !== sample) }))),
        now.r !== "0" ? removable(`a random ${percent(Number(now.r) / 1e6)}`, () => app.changeMask({ r: "0" })) : "") : "",
      h("div", { class: "mask-options" },
        toggle("what the mask does", [["0", "leave these out"], ["1", "all but these"]], now.only, (only) => app.changeMask({ only })),
        toggle("masked layers", [["all", "all layers"], ["active", "active layer"]], now.in, (where) => app.changeMask({ in: where })),
        toggle("the start", [["kept", "start kept"], ["dropped", "start dropped"]], now.start, (start) => app.changeMask({ start }))),
      h("div", { class: "row" },
        button("Undo", app.undo, { disabled: !app.past.length }),
        button("Reset", () => app.changeMask(state.noMask()), { disabled: !masked }),
        button("Random control", () => control(), { disabled: !masked || !lastOutcome?.removed || app.run.shares.length > 0, title: app.run.shares.length ? "needs patterns; this run keeps shares by group" : "a random part of the same size, as a control" })),
      plan());
  }

  function plan() {
    const kept = app.badge?.plan;
    if (!kept) return "";
    if (app.run.shares.length) return h("p", { class: "muted" }, `This run keeps shares by ${app.run.shares.join(", or ")}: masks are unions of these groups.`);
    const text = kept.bins ? `Kept for masks: ${kept.groups} groups × ${kept.bins} bins of ${count(kept.width)} steps (${kept.text}). Other masks take a pass.`
      : `One weight per group would not fit into the memory for masks (${kept.text}); every mask takes a pass.`;
    return h("p", { class: "muted" }, text);
  }

  let lastOutcome = null;
  function control() {
    const now = state.get();
    const share = lastOutcome.removed / lastOutcome.patterns;
    app.changeMask({ ...state.noMask(), in: now.in, r: String(Math.max(Math.round(share * 1e6), 1)), seed: String(Math.floor(Math.random() * 1e6)) });
  }

  function render(answer) {
    const now = state.get();
    lastOutcome = answer;
    const words = describeMask(app, now);
    outcome.body.replaceChildren(
      h("p", {}, h("strong", {}, words), ` · ${count(answer.removed)} of ${count(answer.patterns)} patterns out`),
      h("p", {}, `${count(answer.changed)} of ${count(answer.tests)} predictions change`,
        answer.accuracy_before === null ? "" : [h("br"), "accuracy ", percent(answer.accuracy_before), " → ", h("strong", {}, percent(answer.accuracy_after))]),
      answer.undecided ? h("p", { class: "amber-box undecided", role: "note" }, answer.undecided) : "",
      answer.flips.length ? h("details", {}, h("summary", {}, "Which"), h("p", { class: "flips" }, answer.flips.slice(0, 60).map((test) => button(test, () => app.choose(test), { class: "small" })))) : "");
    app.remember({ words, answer, mask: state.maskOf(now), by: now.by });
    draw();
  }

  function load(now) {
    draw();
    clearTimeout(timer);
    if (!state.isMasked(now) || !app.run.tests) {
      outcome.controller?.abort();
      lastOutcome = null;
      outcome.body.replaceChildren(h("p", { class: "muted" }, app.run.tests ? "Choose what to leave out." : "This run keeps no tests."));
      return null;
    }
    return new Promise((resolve) => {
      timer = setTimeout(() => resolve(outcome.load("/api/mask", state.mask(now), render)), WAIT);
    });
  }

  return { panel, keys: [...state.MASKING, "by"], load, redraw: draw, redrawOn: ["layer"] };
}

function removable(text, remove) {
  return button([text, h("span", { "aria-hidden": "true" }, " ×")], remove, { class: "chip", "aria-label": `remove ${text} from the mask` });
}
