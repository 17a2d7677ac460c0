// Sorted values per group against rank, on a logarithmic axis of ranks.

import { s } from "../dom.js";
import { across } from "./across.js";
import { number } from "../format.js";

const HEIGHT = 230;
const RIGHT = 12;
const TOP = 18;
const BOTTOM = 34;

export function lines(series, longest) {
  const width = across(560, 340);
  const left = across(64, 54);
  const values = series.flatMap((one) => one.values);
  const high = Math.max(...values);
  const low = Math.min(...values);
  const span = high - low || 1;
  const last = Math.log10(Math.max(longest, 2));
  const x = (rank) => left + (Math.log10(rank) / last) * (width - left - RIGHT);
  const y = (value) => TOP + ((high - value) / span) * (HEIGHT - TOP - BOTTOM);
  const drawing = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "lines" });
  for (const value of [low, low + span / 2, high]) {
    drawing.append(s("line", { class: "grid", x1: left, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      s("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  for (const rank of [1, 2, 5, 10, 20, 50, 100, 200, 500].filter((one) => one <= longest)) {
    drawing.append(s("text", { class: "tick", x: x(rank), y: HEIGHT - 16, "text-anchor": rank === longest ? "end" : "middle" }, rank));
  }
  drawing.append(s("text", { class: "tick", x: (left + width) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "rank of the training pattern in its group"));
  const ordered = [...series].sort((a, b) => (a.role ? 1 : 0) - (b.role ? 1 : 0));
  for (const one of ordered) {
    if (!one.values.length) continue;
    const points = one.values.map((value, i) => `${x(i + 1).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    drawing.append(s("g", { "data-group": one.group, class: `line ${one.role ?? ""} ${one.second ? "second" : ""}` },
      s("title", {}, one.label), s("polyline", { class: "hit-line", points }), s("polyline", { points }),
      one.role ? s("text", { x: x(1) + 5, y: y(one.values[0]) + (one.role === "target" ? -5 : 14), class: "line-label" }, one.label) : null));
  }
  return { drawing, rankAt: (px) => Math.round(10 ** (Math.min(Math.max((px - left) / (width - left - RIGHT), 0), 1) * last)), x, left, width, top: TOP, bottom: HEIGHT - BOTTOM };
}
