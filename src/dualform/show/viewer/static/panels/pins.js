// Pins: up to two training samples side by side, as this input sees them in every layer; they can be masked too.

import { button, h } from "../dom.js";
import { makeTable } from "../charts/figure.js";
import { count, number } from "../format.js";
import { ask } from "../api.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

export function create(app) {
  const panel = new Panel("pins", "Pins");

  async function load(now) {
    const samples = [...app.pins];
    if (!samples.length) {
      panel.body.replaceChildren(h("p", { class: "muted" }, app.run.columns.includes("sample") ? "Pin one or two training samples in D to compare them here."
        : ["Pins are training samples, which this run does not number: ", h("code", {}, "recorder.annotate(sample=ids)")]));
      return;
    }
    try {
      const found = await Promise.all(samples.map((sample) => ask("/api/sample", { ...state.subject(now), sample })));
      render(found, now);
    } catch (error) {
      panel.fail(error, () => load(now));
    }
  }

  function render(found, now) {
    panel.body.replaceChildren(
      h("div", { class: "pins" }, found.map((one) => h("div", { class: "pin" },
        one.image ? h("img", { src: `/media/sample/${one.sample}.png`, alt: `training sample ${one.sample}, label ${one.label_name ?? "unknown"}` }) : h("div", { class: "no-image" }, `#${one.sample}`),
        h("div", {}, h("strong", {}, one.label_name ?? ""), ` #${one.sample}`),
        h("div", { class: "muted" }, `${one.steps.length}×, steps ${count(one.steps[0])} to ${count(one.steps.at(-1))}`),
        button(now.p.includes(String(one.sample)) ? "Unmask" : "Mask it", () => toggleMask(one.sample), { class: "small", disabled: !app.run.exact }),
        button("Unpin", () => app.pin(one.sample), { class: "small" })))),
      makeTable("Attention to the pinned samples", {
        head: ["total attention", ...found.map((one) => `#${one.sample}`)],
        rows: found[0].layers.map((layer, i) => [layer.layer, ...found.map((one) => number(one.layers[i].total))]),
      }));
  }

  function toggleMask(sample) {
    const now = state.get();
    const name = String(sample);
    app.changeMask({ p: now.p.includes(name) ? now.p.filter((one) => one !== name) : [...now.p, name] });
  }

  return { panel, keys: [...state.SUBJECT, "p"], late: true, load };
}
