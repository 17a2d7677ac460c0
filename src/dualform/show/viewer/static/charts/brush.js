// Drag over a chart to choose a range; the two numbers beside it do the same from the keyboard.

import { button, h, s } from "../dom.js";

/**
 * @param {SVGElement} drawing
 * @param {{top: number, bottom: number, width: number}} frame
 * @param {(px: number) => number} valueAt  from drawing units to the chart's own
 * @param {(value: number) => number} x     and back
 * @param {(range: [number, number]) => void} onbrush
 */
export function brush(drawing, frame, valueAt, x, onbrush) {
  const band = s("rect", { class: "brush", y: frame.top, height: frame.bottom - frame.top, width: 0 });
  drawing.append(band);
  let from = null;
  const unit = (event) => {
    const box = drawing.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * frame.width;
  };
  const show = (a, b) => {
    band.setAttribute("x", Math.min(x(a), x(b)));
    band.setAttribute("width", Math.abs(x(b) - x(a)));
  };
  drawing.addEventListener("pointerdown", (event) => {
    from = valueAt(unit(event));
    drawing.setPointerCapture(event.pointerId);
  });
  drawing.addEventListener("pointermove", (event) => {
    if (from !== null) show(from, valueAt(unit(event)));
  });
  drawing.addEventListener("pointerup", (event) => {
    const to = valueAt(unit(event));
    if (from !== null && to !== from) onbrush([Math.min(from, to), Math.max(from, to)]);
    from = null;
  });
  return show;
}

/** Two numbers and what can be done with the range between them. */
export function rangeForm(label, [low, high], [least, greatest], actions) {
  const first = h("input", { type: "number", min: least, max: greatest, value: low, "aria-label": `${label}, from` });
  const second = h("input", { type: "number", min: least, max: greatest, value: high, "aria-label": `${label}, to` });
  const range = () => {
    const a = Number(first.value);
    const b = Number(second.value);
    return a < b ? [Math.max(a, least), Math.min(b, greatest)] : null;
  };
  return {
    element: h("div", { class: "range" }, h("span", { class: "muted" }, label), first, "to", second,
      actions.map(([text, action]) => button(text, () => { const found = range(); if (found) action(found); }, { class: "small" }))),
    put: ([a, b]) => { first.value = a; second.value = b; },
  };
}
