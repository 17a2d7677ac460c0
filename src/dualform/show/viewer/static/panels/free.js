// Free input: draw or drop an image, or type a text, and ask about that.

import { button, h } from "../dom.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

export function create(app) {
  const panel = new Panel("free", app.run.draw ? "Draw your own" : "Ask about a text");
  const box = h("details", { open: innerWidth >= 800 || Boolean(state.get().drawn || state.get().prompt) }, h("summary", {}, app.run.draw ? "Canvas" : "Text"));
  const body = h("div", { class: "free" });
  panel.body.append(box);
  box.append(body);
  if (app.run.draw) drawing(body, app.run.shape);
  else typing(body);
  return { panel, keys: [], load: () => null };
}

function drawing(body, [rows, columns]) {
  const pixels = new Uint8Array(rows * columns);
  const scale = Math.max(Math.floor(224 / Math.max(rows, columns)), 1);
  const canvas = h("canvas", { class: "draw", width: columns * scale, height: rows * scale, role: "img", "aria-label": "drawing area; drop an image here, or choose a file below" });
  const paint = () => {
    const context = canvas.getContext("2d");
    pixels.forEach((value, i) => {
      context.fillStyle = `rgb(${value},${value},${value})`;
      context.fillRect((i % columns) * scale, Math.floor(i / columns) * scale, scale, scale);
    });
  };
  const dab = (event) => {
    const box = canvas.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * columns;
    const y = ((event.clientY - box.top) / box.height) * rows;
    const radius = Math.max(rows, columns) / 20;
    for (let row = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const distance = Math.hypot(column + 0.5 - x, row + 0.5 - y);
        const ink = Math.max(0, Math.min(1, 1.4 - distance / radius));
        pixels[row * columns + column] = Math.max(pixels[row * columns + column], Math.round(255 * ink));
      }
    }
    paint();
  };
  let down = false;
  canvas.addEventListener("pointerdown", (event) => { down = true; canvas.setPointerCapture(event.pointerId); dab(event); });
  canvas.addEventListener("pointermove", (event) => { if (down) dab(event); });
  canvas.addEventListener("pointerup", () => { down = false; put(); });
  canvas.addEventListener("dragover", (event) => event.preventDefault());
  canvas.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });

  async function take(file) {
    if (!file) return;
    const bitmap = await createImageBitmap(file).catch(() => null);
    if (!bitmap) { note.textContent = "That file is not an image."; return; }
    const small = h("canvas", { width: columns, height: rows }).getContext("2d", { willReadFrequently: true });
    small.drawImage(bitmap, 0, 0, columns, rows);
    const { data } = small.getImageData(0, 0, columns, rows);
    let sum = 0;
    for (let i = 0; i < pixels.length; i += 1) {
      pixels[i] = Math.round(0.299 * data[4 * i] + 0.587 * data[4 * i + 1] + 0.114 * data[4 * i + 2]);
      sum += pixels[i];
    }
    // Most photographs of a digit are dark on light; the training images are light on dark.
    if (sum / pixels.length > 127) for (let i = 0; i < pixels.length; i += 1) pixels[i] = 255 - pixels[i];
    paint();
    put();
  }

  const put = () => state.set({ drawn: encode(pixels), prompt: "" });
  const file = h("input", { type: "file", accept: "image/*", "aria-label": "choose an image file", onchange: (event) => take(event.target.files[0]) });
  const note = h("p", { class: "muted" }, `${columns} × ${rows} pixels, light on dark. Draw, drop an image, or choose a file.`);
  body.append(canvas, h("div", { class: "row" }, button("Ask", put), button("Clear", () => { pixels.fill(0); paint(); state.set({ drawn: "" }); })), file, note);
  paint();
}

function typing(body) {
  const area = h("textarea", { rows: 3, "aria-label": "a text to ask about", placeholder: "Type a text; its last token asks." });
  area.value = state.get().prompt;
  body.append(area, h("div", { class: "row" }, button("Ask", () => state.set({ prompt: area.value.slice(-4000), drawn: "" })), button("Clear", () => { area.value = ""; state.set({ prompt: "" }); })));
}

function encode(pixels) {
  return btoa(String.fromCharCode(...pixels)).replaceAll("+", "-").replaceAll("/", "_");
}

/** Paint what the address holds onto a canvas of its own size. */
export function paintDrawn(canvas) {
  const text = atob(canvas.dataset.drawn.replaceAll("-", "+").replaceAll("_", "/"));
  const context = canvas.getContext("2d");
  const data = context.createImageData(canvas.width, canvas.height);
  for (let i = 0; i < text.length; i += 1) {
    const value = text.charCodeAt(i);
    data.data.set([value, value, value, 255], 4 * i);
  }
  context.putImageData(data, 0, 0);
}
