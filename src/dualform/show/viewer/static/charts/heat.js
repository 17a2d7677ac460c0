// A strip of cells, steps × group, signed: hue says the sign, strength the size; above it the errors, below it the steps.

import { s } from "../dom.js";
import { across } from "./across.js";
import { count, number } from "../format.js";

const RIGHT = 8;
const ROW = 15;
const LINE = 34;

export function heat(answer, names, keys) {
  const width = across(620, 340);
  const left = across(84, 74);
  const rows = answer.groups.length;
  const bins = answer.edges.length - 1;
  const top = LINE + 16;
  const height = top + rows * ROW + 22;
  const wide = (width - left - RIGHT) / bins;
  const last = answer.edges[bins] || 1;
  const x = (step) => left + (step / last) * (width - left - RIGHT);
  const largest = Math.max(...answer.grid.flat().map(Math.abs), 0) || 1;
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "heat" });
  if (answer.errors) {
    const points = answer.errors.map((value, i) => `${(left + (i + 0.5) * wide).toFixed(1)},${(14 + (1 - value) * LINE).toFixed(1)}`).join(" ");
    drawing.append(s("text", { class: "tick", x: left - 6, y: 14 + LINE / 2, "text-anchor": "end" }, "error size"),
      s("polyline", { class: "errors", points }));
  }
  answer.grid.forEach((values, r) => {
    const y = top + r * ROW;
    const row = s("g", { "data-group": keys[r], class: "heat-row" },
      s("text", { class: "tick", x: left - 6, y: y + 11, "text-anchor": "end" }, names[r].length > 13 ? `${names[r].slice(0, 12)}…` : names[r]));
    values.forEach((value, b) => {
      if (!value) return;
      row.append(s("rect", { x: left + b * wide, y, width: wide + 0.3, height: ROW - 1, class: value < 0 ? "negative" : "positive",
        "fill-opacity": (0.06 + 0.94 * (Math.abs(value) / largest)).toFixed(3) },
      s("title", {}, `${names[r]}, steps ${answer.edges[b]} to ${answer.edges[b + 1] - 1}: ${number(value)}`)));
    });
    drawing.append(row);
  });
  for (const step of answer.epochs.slice(0, 40)) {
    drawing.append(s("line", { class: "epoch", x1: x(step), x2: x(step), y1: top - 5, y2: top + rows * ROW }, s("title", {}, `an epoch begins at step ${step}`)));
  }
  for (const [step, task] of answer.tasks) {
    drawing.append(s("line", { class: "task", x1: x(step), x2: x(step), y1: 2, y2: top + rows * ROW }),
      s("text", { class: "tick", x: x(step) + 3, y: 10 }, String(task)));
  }
  for (const part of [0, 0.25, 0.5, 0.75, 1]) {
    const step = Math.round(part * last);
    drawing.append(s("text", { class: "tick", x: x(step), y: height - 8, "text-anchor": part === 1 ? "end" : part ? "middle" : "start" }, part === 1 ? `step ${count(step)}` : count(step)));
  }
  return { drawing, x, stepAt: (px) => Math.round(Math.min(Math.max((px - left) / (width - left - RIGHT), 0), 1) * last), top, bottom: top + rows * ROW, width };
}
