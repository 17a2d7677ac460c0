// TOP: the input, the target, and what the model says; under a mask a ghost of what it said before.

import { announce, button, h, s } from "../dom.js";
import { groupName, number, percent } from "../format.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

const WIDTH = 360;
const ROW = 26;

export function create(app) {
  const panel = new Panel("prediction", "Prediction", [
    button("‹ previous", () => app.step(-1), { "aria-label": "previous test example", class: "small" }),
    button("next ›", () => app.step(1), { "aria-label": "next test example", class: "small" })]);

  function render(answer) {
    const now = state.get();
    const free = Boolean(now.drawn || now.prompt);
    const shown = answer.outputs.map((output) => ({ ...output, shown: (output.after ?? output.before).probability }))
      .sort((a, b) => b.shown - a.shown);
    const right = answer.target === null ? null : answer.before === answer.target;
    panel.body.replaceChildren(
      h("div", { class: "prediction" },
        h("div", { class: "subject" }, picture(app, now, answer),
          app.run.shows_inputs && !free ? h("div", { class: "muted" }, "the input itself, from black to white") : "",
          h("div", { class: "muted" }, free ? (now.drawn ? "drawn" : "typed") : `test ${now.test}`)),
        h("div", { class: "verdict" },
          fact("target", answer.target_name ?? "unknown"),
          fact(answer.masked ? "said, unmasked" : "the model says", answer.before_name, right === null ? "" : right ? "right" : "wrong"),
          answer.masked ? fact("says, masked", answer.after_name) : null,
          answer.flipped ? h("p", { class: "flip" }, `FLIPPED ${answer.before_name} → ${answer.after_name}`) : null,
          answer.masked && !answer.flipped ? h("p", { class: "muted" }, "The prediction stays.") : null,
          answer.masked ? h("p", { class: "note" }, app.note) : null),
        bars(shown, answer)),
    );
    if (answer.masked) announce(`${describeMask(app, now)}: ${answer.flipped ? `flipped from ${answer.before_name} to ${answer.after_name}` : `the prediction stays ${answer.before_name}`}. ${app.note}`);
    panel.element.dataset.shown = JSON.stringify([state.subject(now), now.g, now.s, now.p, now.only, now.start, now.in, now.r]);
    app.predicted(answer);
  }

  return {
    panel,
    keys: [...state.SUBJECT, ...state.MASKING, "by"],
    onlyWhen: (now, changed) => !(changed.size === 1 && changed.has("by") && !now.g.length) && !(changed.size === 1 && changed.has("layer") && now.in === "all"),
    load: (now) => panel.load("/api/prediction", { ...state.subject(now), ...state.mask(now) }, render),
  };
}

function fact(name, value, verdict = "") {
  return h("div", { class: "fact" }, h("span", { class: "muted" }, name), h("strong", {}, value),
    verdict ? h("span", { class: `tag ${verdict}` }, verdict) : null);
}

function picture(app, now, answer) {
  if (now.drawn) return h("canvas", { class: "picture", width: app.run.shape[1], height: app.run.shape[0], role: "img", "aria-label": "the drawn image", dataset: { drawn: now.drawn } });
  if (now.prompt) return h("p", { class: "passage" }, now.prompt);
  if (app.run.kind === "image") return h("img", { class: "picture", src: `/media/test/${now.test}.png`, alt: `test image ${now.test}, target ${answer.target_name ?? "unknown"}` });
  if (answer.text) return h("p", { class: "passage" }, answer.text.length > 400 ? `…${answer.text.slice(-400)}` : answer.text);
  return h("p", { class: "muted" }, "Shown by number.");
}

function bars(outputs, answer) {
  const left = 90;
  const space = WIDTH - left - 64;
  const drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${outputs.length * ROW + 4}`, class: "outputs", role: "img",
    "aria-label": outputs.map((output) => `${output.name} ${percent(output.shown)}`).join(", ") });
  outputs.forEach((output, i) => {
    const y = i * ROW + 2;
    const chosen = output.unit === answer.after;
    drawing.append(s("g", { class: chosen ? "chosen" : "" },
      s("title", {}, `${output.name}: output ${number((output.after ?? output.before).output)}`),
      s("text", { x: left - 8, y: y + 17, "text-anchor": "end", class: "bar-label" }, `${output.name.length > 12 ? `${output.name.slice(0, 11)}…` : output.name}${output.unit === answer.target ? " ◆" : ""}`),
      output.after ? s("rect", { class: "ghost", x: left, y: y + 3, width: Math.max(space * output.before.probability, 1), height: ROW - 6 }) : null,
      s("rect", { class: "solid", x: left, y: y + (output.after ? 7 : 3), width: Math.max(space * output.shown, 1), height: ROW - (output.after ? 14 : 6) }),
      s("text", { x: WIDTH - 2, y: y + 17, "text-anchor": "end", class: "bar-value" }, percent(output.shown))));
  });
  return h("div", { class: "outputs-box" }, drawing,
    h("p", { class: "muted" }, answer.masked ? "outline: before the mask; solid: after it. " : "", answer.target === null ? "" : "◆ target"));
}

/** A mask in words. */
export function describeMask(app, now) {
  const groups = now.g.map((group) => groupName(JSON.parse(group), now.by)).join(", ");
  const parts = [...(groups ? [`${now.by} ${groups}`] : []), ...now.s.map((range) => `steps ${range}`),
    ...now.p.map((sample) => `sample ${sample}`), ...(now.r !== "0" ? [`a random ${percent(Number(now.r) / 1e6)}`] : [])];
  const what = parts.length ? parts.join(", ") : "nothing";
  const which = now.only === "1" ? `only ${what}` : parts.length ? `without ${what}` : "everything";
  return `${which}${now.start === "dropped" ? ", start dropped" : ""}${now.in === "active" ? ` in ${now.layer}` : ""}`;
}
