// D TOP-K: the training patterns that the input attends to most, as cards.

import { button, h, toggle } from "../dom.js";
import { ask } from "../api.js";
import { count, number, percent } from "../format.js";
import { key } from "../link.js";
import { Panel } from "../panel.js";
import * as state from "../state.js";

const TABS = [["positive", "most positive"], ["negative", "most negative"], ["group", "by group"]];

export function create(app) {
  const panel = new Panel("top", "D · Training patterns");

  function tools() {
    const now = state.get();
    const per = app.run.columns.includes("sample") ? toggle("occurrences", [["sample", "summed"], ["pattern", "each"]], now.per, (one) => state.set({ per: one })) : "";
    panel.tools.replaceChildren(tabs(now.tab), per);
  }

  function render(answer) {
    const now = state.get();
    tools();
    const filters = [];
    if (now.steps.length) filters.push(`steps ${now.steps.join(", ")}`);
    if (now.first !== "1") filters.push(`from rank ${now.first}`);
    const cards = answer.cards.map((one) => card(app, answer, one, now));
    const list = answer.tab === "group" ? grouped(answer, cards) : h("ol", { class: "cards", start: now.first }, cards);
    const measured = answer.of === "contribution" ? "contribution to the predicted output" : answer.of === "effect" ? "effect on the margin of the predicted output (a prediction of retraining, not a share of the output)" : answer.of;
    panel.body.replaceChildren(
      h("p", { class: "muted" }, `${answer.layer}, ${count(answer.patterns)} patterns, ranked by ${measured}${answer.per === "sample" ? ", summed over the occurrences of a sample" : ""}.`,
        now.of === "contribution" && answer.of !== "contribution" ? " Single contributions are to outputs of the layer itself, so only the last layer can be ranked by them." : "",
        now.of === "effect" && answer.of !== "effect" ? " This layer, or a range of steps, cannot be ranked by effects." : ""),
      filters.length ? h("p", { class: "filters" }, `Only ${filters.join(" and ")}. `, button("Clear filters", () => state.set({ steps: [], first: "1", k: "12" }), { class: "small" })) : "",
      answer.cards.length ? list : h("p", {}, "No pattern fits. ", button("Clear filters", () => state.set({ steps: [], first: "1", k: "12" }), { class: "small" })),
      answer.tab !== "group" && answer.cards.length === Number(now.k) && Number(now.k) < 60 ? button("Show more", () => state.set({ k: String(Math.min(Number(now.k) + 12, 60)) }, { replace: true })) : "");
    panel.element.dataset.shown = JSON.stringify([state.subject(now), now.layer]);
  }

  return {
    panel,
    keys: [...state.SUBJECT, "by", "layer", "of", "tab", "per", "k", "first", "steps"],
    onlyWhen: (now, changed) => !(changed.size === 1 && changed.has("by") && now.tab !== "group"),
    load: (now) => {
      tools();
      return panel.load("/api/top", { ...state.subject(now), by: now.by, layer: now.layer, of: now.of, tab: now.tab,
        per: app.run.columns.includes("sample") ? now.per : "pattern", k: now.k, first: now.first, steps: now.steps }, render);
    },
  };
}

function tabs(chosen) {
  const list = h("div", { class: "toggle", role: "tablist", "aria-label": "which patterns" }, TABS.map(([value, text]) =>
    button(text, () => state.set({ tab: value }), { role: "tab", "aria-selected": String(value === chosen), tabindex: value === chosen ? "0" : "-1" })));
  list.addEventListener("keydown", (event) => {
    const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!turn) return;
    const at = TABS.findIndex(([value]) => value === state.get().tab);
    state.set({ tab: TABS[(at + turn + TABS.length) % TABS.length][0] });
    requestAnimationFrame(() => document.querySelector("#top [role=tab][aria-selected=true]")?.focus());
  });
  return list;
}

function grouped(answer, cards) {
  const rows = new Map();
  answer.cards.forEach((one, i) => {
    const name = key(one.group);
    if (!rows.has(name)) rows.set(name, { group: one.group, name: one.group_name, cards: [] });
    rows.get(name).cards.push(cards[i]);
  });
  return h("div", { class: "card-groups" }, [...rows.values()].map((row) => h("section", { "data-group": key(row.group), "aria-label": row.name },
    h("h3", {}, row.name), h("ol", { class: "cards" }, row.cards))));
}

function card(app, answer, one, now) {
  const group = groupOf(one, now.by);
  const pinned = app.pins.has(one.sample);
  const label = one.label_name ?? "";
  return h("li", { class: "card", "data-group": group === undefined ? null : key(group) },
    one.passage ? passage(one) : one.image ? h("img", { src: `/media/sample/${one.sample}.png`, alt: `training sample ${one.sample}, label ${label}`, loading: "lazy" })
      : h("div", { class: "no-image" }, one.sample !== null && one.sample !== undefined ? `#${one.sample}` : `pattern ${one.pattern}`),
    h("div", { class: "card-facts" },
      h("div", {}, label !== "" ? h("strong", {}, label) : "", h("span", { class: one.value < 0 ? "value negative-text" : "value positive-text", title: String(one.value) }, number(one.value))),
      h("div", { class: "muted" }, one.share === null ? "" : `${percent(one.share, 2)} of all`),
      h("div", { class: "muted" }, one.occurrences ? `${one.occurrences}×` : `step ${count(one.step)}`, one.sample !== null && one.sample !== undefined ? ` · #${one.sample}` : ""),
      one.sample !== null && one.sample !== undefined ? button(pinned ? "Unpin" : "Pin", () => app.pin(one.sample), { class: "small", "aria-pressed": String(pinned), "aria-label": `${pinned ? "unpin" : "pin"} sample ${one.sample}` }) : ""));
}

function groupOf(one, by) {
  const columns = by.split(",");
  if (columns.some((column) => !(column in one.columns))) return undefined;
  const values = columns.map((column) => one.columns[column]);
  return values.length > 1 ? values : values[0];
}

function passage(one) {
  const text = h("p", { class: "passage" });
  const show = (found) => text.replaceChildren(found.before, h("mark", {}, found.token), found.after);
  show(one.passage);
  let context = 20;
  const more = button("More context", async () => {
    context = Math.min(context * 3, 400);
    show(await ask("/api/passage", { place: one.passage.place, context }));
    if (context === 400) more.remove();
  }, { class: "small" });
  return h("div", { class: "passage-box" }, one.passage.title ? h("div", { class: "muted" }, one.passage.title) : "", text, more);
}
