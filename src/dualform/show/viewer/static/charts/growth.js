// Sums that grow along the steps of training: a line for each group, and a bold one for all together.

import { s } from "../dom.js";
import { count, number } from "../format.js";
import { across } from "./across.js";

const HEIGHT = 220;
const TOP = 14;
const BOTTOM = 26;

/**
 * @param {{label: string, group?: string, values: number[], role?: string}[]} series  what each bin of steps added
 * @param {number[]} steps  the first step of each bin, and the step after the last
 */
export function growth(series, steps) {
  const width = across(620, 330);
  const left = across(64, 52);
  const right = across(96, 70);
  const sums = series.map((one) => one.values.reduce((found, value) => [...found, found.at(-1) + value], [0]));
  const low = Math.min(0, ...sums.flat());
  const high = Math.max(0, ...sums.flat());
  const last = steps.at(-1) || 1;
  const x = (step) => left + (step / last) * (width - left - right);
  const y = (value) => TOP + ((high - value) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const drawing = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, class: "lines growth" });
  for (const value of new Set([low, 0, high])) {
    drawing.append(s("line", { class: "grid", x1: left, x2: width - right, y1: y(value), y2: y(value) }),
      s("text", { class: "tick", x: left - 6, y: y(value) + 4, "text-anchor": "end" }, number(value)));
  }
  const places = labelPlaces(sums.map((values) => y(values.at(-1))));
  series.forEach((one, i) => {
    const points = sums[i].map((value, b) => `${x(steps[b]).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    drawing.append(s("g", { "data-group": one.group, class: `line ${one.role ?? ""}` },
      s("title", {}, `${one.label}: ${number(sums[i].at(-1))}`), s("polyline", { class: "hit-line", points }), s("polyline", { points }),
      s("text", { class: "tick", x: width - right + 5, y: places[i] + 4 }, one.label.length > 12 ? `${one.label.slice(0, 11)}…` : one.label)));
  });
  for (const part of [0, 0.5, 1]) {
    const step = Math.round(part * last);
    drawing.append(s("text", { class: "tick", x: x(step), y: HEIGHT - 8, "text-anchor": part === 1 ? "end" : part ? "middle" : "start" }, part ? count(step) : "step 0"));
  }
  return { drawing, x, stepAt: (px) => Math.round(Math.min(Math.max((px - left) / (width - left - right), 0), 1) * last), top: TOP, bottom: HEIGHT - BOTTOM, width };
}

/** Heights for labels near these heights that do not cover each other. */
function labelPlaces(wanted) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const places = [];
  let free = TOP;
  for (const i of order) {
    places[i] = Math.max(wanted[i], free);
    free = places[i] + 12;
  }
  const over = free - 12 - (HEIGHT - BOTTOM);
  if (over > 0) for (const i of order) places[i] -= over;
  return places;
}
