// A LAYERS: one small chart per layer, the same groups in the same order.

import { button, choice, h, toggle } from "../dom.js";
import { figure } from "../charts/figure.js";
import { bars } from "../charts/bars.js";
import { count, groupClass, groupName, learnNames, number } from "../format.js";
import { key } from "../link.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

const MEASURES = [["attention", "attention"], ["magnitude", "magnitude"], ["contribution", "contribution"], ["effect", "effect"]];
const FEW = 6; // the last layers, which are drawn of a deep network

export function create(app) {
  const panel = new Panel("layers", "A · Layers");
  let last = null;
  let all = false; // whether every layer of a deep network is drawn

  function tools() {
    const now = state.get();
    panel.tools.replaceChildren(
      toggle("measure", MEASURES, now.of, (of) => state.set({ of })),
      toggle("scale", [["own", "own scale"], ["shared", "shared"]], now.scale, (scale) => state.set({ scale }, { replace: true })));
  }

  function render(answer) {
    last = answer;
    learnNames(state.get().by, answer.groups, answer.names);
    draw();
  }

  function draw() {
    tools();
    if (!last) return;
    const now = state.get();
    const names = last.groups.map((group) => groupName(group, now.by));
    const known = last.layers.filter((layer) => layer.totals);
    const shared = Math.max(...known.flatMap((layer) => layer.totals.map(Math.abs)), 0);
    const said = app.prediction?.before ?? null;
    const target = app.prediction?.target ?? null;
    const some = all ? last.layers : last.layers.filter((layer, i) => i >= last.layers.length - FEW || layer.layer === now.layer);
    const boxes = some.map((layer) => {
      const active = layer.layer === now.layer;
      const pick = h("button", { type: "button", class: "layer-pick", "aria-pressed": String(active), onclick: () => state.set({ layer: layer.layer }) },
        layer.layer, layer.rows > 1 ? ` (query ${layer.row + 1} of ${layer.rows})` : "");
      if (!layer.totals) return h("div", { class: "layer" }, pick, h("p", { class: "muted" }, layer.reason));
      const rows = last.groups.map((group, i) => ({
        label: names[i], value: layer.totals[i], group: key(group), masked: now.g.includes(key(group)),
        mark: mark(groupClass(group, now.by), target, said),
      }));
      const extent = now.scale === "shared" ? shared : Math.max(...layer.totals.map(Math.abs), 0);
      const best = rows.reduce((a, b) => (b.value > a.value ? b : a), rows[0]);
      const summary = best ? `Largest total ${best.label} (${number(best.value)}).` : "No groups.";
      const chart = figure(bars(rows, extent), `${layer.layer}: total ${last.of}`, summary,
        () => ({ head: ["group", `total ${last.of}`], rows: rows.map((row) => [row.label, row.value]) }));
      chart.addEventListener("click", (event) => { if (!event.target.closest("details")) state.set({ layer: layer.layer }); });
      return h("div", { class: `layer${active ? " active" : ""}` }, pick, chart);
    });
    const wide = last.layers.some((layer) => layer.rows > 1);
    panel.body.replaceChildren(
      h("p", { class: "muted" }, explain(last, now)),
      h("div", { class: "layer-grid" }, boxes),
      last.layers.length > FEW ? button(all ? "Show fewer layers" : `Show all ${last.layers.length} layers`, () => { all = !all; draw(); }) : "",
      last.left_out ? h("p", { class: "muted" }, `${count(last.left_out)} more groups have smaller totals.`) : "",
      wide ? choice("query row", [["", "default"], ...[...Array(Math.min(Math.max(...last.layers.map((layer) => layer.rows)), 400)).keys()].map((row) => [String(row), String(row)])], now.row, (row) => state.set({ row })) : "",
    );
  }

  return {
    panel,
    keys: [...state.SUBJECT, "by", "of"],
    load: (now) => panel.load("/api/layers", { ...state.subject(now), by: now.by, of: now.of }, render),
    redraw: draw,
    redrawOn: ["layer", "scale", "g"],
  };
}

function mark(group, target, said) {
  if (group === null) return "";
  return `${group === target ? "◆" : ""}${group === said ? "▸" : ""}`;
}

function explain(answer, now) {
  const signs = "◆ target, ▸ output; to the right of the axis positive, to the left negative.";
  if (answer.of === "contribution") {
    return `What each ${now.by} adds to the output “${answer.unit_name}”: exact in the last layer; in the others along the gradient of that output, exact while no unit switches. ${signs}`;
  }
  if (answer.of === "effect") {
    return `What training on each ${now.by} brought to the margin of “${answer.unit_name}”: a prediction of retraining, not a share of the output; effects do not sum to the weight. ${signs}`;
  }
  return `Sum of ${answer.of} over all training patterns, by ${now.by}. ${signs}`;
}
