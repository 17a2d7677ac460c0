// A waterfall: every bar begins where the one above it ended, and the last one is the sum of all.

import { s } from "../dom.js";
import { across } from "./across.js";
import { number } from "../format.js";

const ROW = 22;
const VALUE = 60;

/**
 * @param {{kind: string, label: string, value: number, group?: string, masked?: boolean}[]} rows
 * @param {{label: string, value: number}} sum
 */
export function waterfall(rows, sum) {
  const width = across(620, 330);
  const left = across(150, 96);
  const reached = [0];
  for (const row of rows) reached.push(reached.at(-1) + row.value);
  const low = Math.min(0, ...reached, sum.value);
  const high = Math.max(0, ...reached, sum.value);
  const x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - VALUE);
  const height = (rows.length + 1) * ROW + 4;
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "waterfall" });
  drawing.append(s("line", { class: "axis", x1: x(0), x2: x(0), y1: 0, y2: height }));
  rows.forEach((row, i) => {
    const y = i * ROW + 2;
    const [a, b] = [x(reached[i]), x(reached[i + 1])];
    const side = row.kind === "group" || row.kind === "others" ? (row.value < 0 ? "negative" : "positive") : "aside";
    drawing.append(s("g", { "data-group": row.group, class: `bar-row fall-${row.kind}${row.masked ? " masked" : ""}` },
      s("title", {}, `${row.label}: ${number(row.value)}`),
      s("rect", { class: "hit", x: 0, y, width, height: ROW }),
      s("text", { x: left - 6, y: y + 15, "text-anchor": "end", class: "bar-label" }, clip(row.label)),
      s("rect", { x: Math.min(a, b), y: y + 4, width: Math.max(Math.abs(b - a), 1), height: ROW - 8, class: side }),
      s("line", { class: "carry", x1: b, x2: b, y1: y + ROW - 4, y2: y + ROW + 4 }),
      s("text", { x: width - 2, y: y + 15, "text-anchor": "end", class: "bar-value" }, `${row.value > 0 ? "+" : ""}${number(row.value)}`)));
  });
  const y = rows.length * ROW + 2;
  drawing.append(s("g", { class: "bar-row fall-sum" },
    s("text", { x: left - 6, y: y + 15, "text-anchor": "end", class: "bar-label" }, clip(sum.label)),
    s("rect", { x: Math.min(x(0), x(sum.value)), y: y + 4, width: Math.max(Math.abs(x(sum.value) - x(0)), 1), height: ROW - 8, class: "sum" }),
    s("text", { x: width - 2, y: y + 15, "text-anchor": "end", class: "bar-value" }, number(sum.value))));
  return drawing;
}

function clip(text) {
  const most = across(22, 14);
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
