// B CURVES: the strongest patterns of each group, sorted, as in the paper. A range of ranks filters D.

import { h } from "../dom.js";
import { brush, rangeForm } from "../charts/brush.js";
import { figure } from "../charts/figure.js";
import { lines } from "../charts/lines.js";
import { count, groupClass, groupName, learnNames, number } from "../format.js";
import { key } from "../link.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

export function create(app) {
  const panel = new Panel("curves", "B · Curves");

  function render(answer) {
    const now = state.get();
    learnNames(now.by, answer.groups, answer.names);
    const target = app.prediction?.target ?? null;
    const said = app.prediction?.before ?? null;
    const tasks = [...new Set(answer.groups.filter(Array.isArray).map((group) => group[0]))];
    const series = answer.groups.map((group, i) => {
      const of = groupClass(group, now.by);
      return {
        label: groupName(group, now.by), group: key(group), values: answer.curves[i],
        role: of !== null && of === target ? "target" : of !== null && of === said ? "output" : null,
        second: tasks.length > 1 && group[0] !== tasks[0],
      };
    });
    const longest = Math.max(...series.map((one) => one.values.length), 2);
    const { drawing, rankAt, x, ...frame } = lines(series, longest);
    const best = series.reduce((a, b) => ((b.values[0] ?? -Infinity) > (a.values[0] ?? -Infinity) ? b : a));
    const filter = ([a, b]) => state.set({ first: String(Math.max(a, 1)), k: String(Math.min(Math.max(b - a + 1, 1), 60)) });
    const form = rangeForm("ranks", [1, 12], [1, longest], [["Show them in D", filter]]);
    brush(drawing, frame, rankAt, x, (range) => { form.put(range); filter(range); });
    panel.body.replaceChildren(
      figure(drawing, `${answer.layer}: sorted ${answer.of} by ${now.by}`,
        `The strongest pattern is of ${best.label} (${number(best.values[0] ?? 0)}); up to ${longest} patterns a group, strongest first.${tasks.length > 1 ? ` Dashed: ${tasks.slice(1).join(", ")}.` : ""}`,
        () => ({ head: ["group", "1st", "10th", "100th", "last shown"], rows: series.map((one) => [one.label, ...[0, 9, 99, one.values.length - 1].map((i) => one.values[i] ?? "–")]) })),
      form.element, h("p", { class: "muted" }, "Drag over the chart, or give ranks, to list those patterns below.",
        answer.left_out ? ` ${count(answer.left_out)} more groups are weaker.` : ""));
  }

  return {
    panel,
    late: true,
    keys: [...state.SUBJECT, "by", "layer", "of"],
    load: (now) => panel.load("/api/curves", { ...state.subject(now), by: now.by, layer: now.layer, of: now.of === "magnitude" ? "magnitude" : "attention" }, render),
  };
}
