// C TIME: attention along the steps of training. A range of steps filters D, or is masked.

import { h } from "../dom.js";
import { brush, rangeForm } from "../charts/brush.js";
import { figure } from "../charts/figure.js";
import { heat } from "../charts/heat.js";
import { count, groupName, learnNames } from "../format.js";
import { key } from "../link.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

export function create(app) {
  const panel = new Panel("time", "C · Time");

  function render(answer) {
    const now = state.get();
    learnNames(now.by, answer.groups, answer.names);
    const names = answer.groups.map((group) => groupName(group, now.by));
    const { drawing, x, stepAt, ...frame } = heat(answer, names, answer.groups.map(key));
    const last = answer.edges.at(-1);
    const snap = ([a, b]) => [Math.floor(a / answer.width) * answer.width, Math.min(Math.ceil(b / answer.width) * answer.width, last)];
    const form = rangeForm("steps", [0, last], [0, last], [
      ["Show them in D", ([a, b]) => state.set({ steps: [`${a}-${b}`] })],
      ["Mask them", ([a, b]) => app.changeMask({ s: [...state.get().s.filter((one) => one !== `${a}-${b}`), `${a}-${b}`] })],
    ]);
    const show = brush(drawing, frame, stepAt, x, (range) => { const whole = snap(range); show(...whole); form.put(whole); });
    const sums = answer.grid[0] ? answer.grid[0].map((_, b) => answer.grid.reduce((sum, row) => sum + row[b], 0)) : [];
    const peak = sums.reduce((best, value, b) => (Math.abs(value) > Math.abs(sums[best]) ? b : best), 0);
    panel.body.replaceChildren(
      figure(drawing, `${answer.layer}: total attention by step and ${now.by}`,
        `Strongest at steps ${count(answer.edges[peak])} to ${count((answer.edges[peak + 1] ?? last) - 1)}; ${answer.epochs.length ? `${answer.epochs.length + 1} epochs (thin lines)` : "no repeated samples"}.`,
        () => ({ head: ["group", ...answer.edges.slice(0, -1).map((edge) => `from ${edge}`)], rows: answer.grid.map((row, i) => [names[i], ...row]) })),
      form.element,
      h("p", { class: "muted" }, "Drag over the strip to choose steps. The line above it is the mean size of the last layer's errors, which falls as the loss falls.",
        answer.left_out ? ` ${count(answer.left_out)} more groups are weaker.` : ""));
  }

  return {
    panel,
    late: true,
    keys: [...state.SUBJECT, "by", "layer"],
    load: (now) => panel.load("/api/time", { ...state.subject(now), by: now.by, layer: now.layer }, render),
  };
}
