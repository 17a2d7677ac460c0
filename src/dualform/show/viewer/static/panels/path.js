// WHERE THE ANSWER COMES FROM: the output as a sum over what was trained on, from the start to what the model says.

import { button, choice, h } from "../dom.js";
import { brush, rangeForm } from "../charts/brush.js";
import { figure } from "../charts/figure.js";
import { growth } from "../charts/growth.js";
import { waterfall } from "../charts/waterfall.js";
import { count, number, percent, plural } from "../format.js";
import { key } from "../link.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

const LINES = 5; // groups that have a line along the steps

export function create(app) {
  const panel = new Panel("path", "Where the answer comes from");
  let last = null;

  function question(now) {
    return { ...state.subject(now), by: now.by, than: now.than, references: now.references };
  }

  function tools() {
    const now = state.get();
    const said = app.prediction?.before;
    const others = (app.prediction?.outputs ?? []).filter((output) => output.unit !== said);
    panel.tools.replaceChildren(
      others.length ? choice("rather than", [["", "the target, or the second"], ...others.map((output) => [String(output.unit), output.name]), ["itself", "nothing: the output alone"]], now.than, (than) => state.set({ than })) : "",
      app.run.tests > 1 ? choice("beside", [["16", `${Math.min(16, app.run.tests - 1)} other tests`], ...(app.run.tests > 17 ? [["64", `${Math.min(64, app.run.tests - 1)} other tests`]] : []), ["0", "nothing"]], now.references, (references) => state.set({ references })) : "");
  }

  function render(answer) {
    last = answer.account;
    panel.element.dataset.shown = JSON.stringify([state.subject(state.get()), Boolean(last)]);
    tools();
    if (last) draw();
    else offer(answer);
  }

  function offer(answer) {
    const long = answer.seconds ? ` The last one took ${answer.seconds < 1 ? "less than a second" : `${Math.round(answer.seconds)} s`}.` : "";
    panel.body.replaceChildren(
      h("p", {}, `What each ${state.get().by} added to this output, through all layers and over the whole training.`),
      h("p", { class: "muted" }, `The training's ${count(answer.steps)} steps are gone through once, with the gradients of ${plural(answer.inputs, "input")}.${long} The answer is kept with the run.`),
      button("Find the parts", start, { class: "start" }),
      h("p", { class: "note" }, answer.note));
  }

  function start() {
    panel.load("/api/path", { ...question(state.get()), start_path: "1" }, render);
  }

  function draw() {
    tools();
    if (!last) return;
    const now = state.get();
    const rows = last.bars.map((bar) => ({
      kind: bar.kind, label: bar.name, value: bar.value,
      ...(bar.kind === "group" ? { group: key(bar.group), masked: now.g.includes(key(bar.group)) } : {}),
    }));
    const groups = last.bars.filter((bar) => bar.kind === "group");
    const best = groups.reduce((a, b) => (b.value > (a?.value ?? -Infinity) ? b : a), null);
    const worst = groups.reduce((a, b) => (b.value < (a?.value ?? Infinity) ? b : a), null);
    const summary = best ? `Most in favour: ${best.name} (${number(best.value)}); most against: ${worst.name} (${number(worst.value)}).` : "There are no groups.";
    const fall = waterfall(rows, { label: "this input", value: last.output });
    fall.addEventListener("click", (event) => {
      const group = event.target.closest("[data-group]")?.dataset.group;
      if (group !== undefined && app.run.exact) app.toggleGroup(JSON.parse(group));
    });
    const beside = last.references ? ` From the mean of ${plural(last.references, "reference input")}, bar by bar, to this one: what it has beyond their mean.` : "";
    panel.body.replaceChildren(
      h("p", {}, h("strong", {}, last.question), ` = ${number(last.output)}. Every bar begins where the one above it ended.${beside}`),
      figure(fall, `Parts of “${last.question}” by ${now.by}`, `${summary} Grey bars are no group's. A click on a group masks it.`,
        () => ({ head: ["part", "adds"], rows: [...last.bars.map((bar) => [bar.name, bar.value]), [`this input: ${last.question}`, last.output]] })),
      h("p", { class: "muted path-errors" }, `Parts to about ${percent(last.parts_error, 2)}; the residual is ${percent(last.residual_error, 2)} of the change; ${count(last.gradients)} gradients.`),
      ...along(groups),
      h("p", { class: "note" }, `${last.note} And a mask ${app.note}.`));
  }

  function along(groups) {
    if (!last.together.length) return [];
    const now = state.get();
    const series = [
      ...groups.slice(0, LINES).map((bar, i) => ({ label: bar.name, group: key(bar.group), values: last.over_steps[i] })),
      { label: "all groups", values: last.together, role: "together" }];
    const { drawing, x, stepAt, ...frame } = growth(series, last.steps);
    const end = last.steps.at(-1);
    const form = rangeForm("steps", [0, end], [0, end], [
      ["Show them in D", ([a, b]) => state.set({ steps: [`${a}-${b}`] })],
      ["Mask them", ([a, b]) => app.changeMask({ s: [...state.get().s.filter((one) => one !== `${a}-${b}`), `${a}-${b}`] })],
    ]);
    const snap = ([a, b]) => [last.steps.findLast((step) => step <= a) ?? 0, last.steps.find((step) => step >= b) ?? end];
    const show = brush(drawing, frame, stepAt, x, (range) => { const whole = snap(range); show(...whole); form.put(whole); });
    const peak = last.together.reduce((most, value, b) => (Math.abs(value) > Math.abs(last.together[most]) ? b : most), 0);
    return [
      figure(drawing, `How “${last.question}” came about, by ${now.by}`,
        `The largest change came at steps ${count(last.steps[peak])} to ${count(last.steps[peak + 1] - 1)}.`,
        () => ({ head: ["group", ...last.steps.slice(0, -1).map((step) => `from ${step}`)], rows: series.map((one) => [one.label, ...one.values]) })),
      form.element];
  }

  return {
    panel,
    late: true,
    keys: [...state.SUBJECT, "by", "than", "references"],
    load: (now) => {
      tools();
      return panel.load("/api/path", question(now), render);
    },
    redraw: draw,
    redrawOn: ["g"],
  };
}
