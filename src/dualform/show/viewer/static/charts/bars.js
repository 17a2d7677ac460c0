// Signed horizontal bars, one row per group: the side of the axis says the sign, as well as the colour.

import { s } from "../dom.js";
import { number } from "../format.js";

const ROW = 20;
const LABEL = 66;
const WIDTH = 220;

/**
 * @param {{label: string, value: number, group: string, mark?: string, masked?: boolean}[]} rows
 * @param {number} extent  the value that fills half of the width (or all of it, where nothing is negative)
 */
export function bars(rows, extent) {
  const signed = rows.some((row) => row.value < 0);
  const space = WIDTH - LABEL - 56;
  const zero = signed ? LABEL + space / 2 : LABEL;
  const unit = extent > 0 ? (signed ? space / 2 : space) / extent : 0;
  const drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${rows.length * ROW + 4}`, class: "bars" });
  rows.forEach((row, i) => {
    const y = i * ROW + 2;
    const length = Math.max(Math.abs(row.value) * unit, row.value ? 1 : 0);
    const x = row.value < 0 ? zero - length : zero;
    drawing.append(s("g", { "data-group": row.group, class: `bar-row${row.masked ? " masked" : ""}${row.mark ? " marked" : ""}` },
      s("title", {}, `${row.label}: ${number(row.value)}`),
      s("rect", { class: "hit", x: 0, y, width: WIDTH, height: ROW }),
      s("text", { x: LABEL - 6, y: y + 14, "text-anchor": "end", class: "bar-label" }, clip(row.label + (row.mark ? ` ${row.mark}` : ""))),
      s("rect", { x, y: y + 3, width: length, height: ROW - 6, class: row.value < 0 ? "negative" : "positive" }),
      row.masked ? s("line", { class: "strike", x1: LABEL, x2: WIDTH - 54, y1: y + ROW / 2, y2: y + ROW / 2 }) : null,
      s("text", { x: WIDTH - 2, y: y + 14, "text-anchor": "end", class: "bar-value" }, number(row.value))));
  });
  drawing.append(s("line", { class: "axis", x1: zero, x2: zero, y1: 0, y2: rows.length * ROW + 4 }));
  return drawing;
}

function clip(text) {
  return text.length > 11 ? `${text.slice(0, 10)}…` : text;
}
