// HEADER: the run, its badge, what to group by, theme, help, export.

import { ask } from "./api.js";
import { button, choice, h } from "./dom.js";
import { count } from "./format.js";
import { HELP } from "./keys.js";
import * as state from "./state.js";
import { switchTheme } from "./theme.js";
import * as tour from "./tour.js";

const POLL = 700;

export function create(app, element) {
  const badge = h("span", { class: "badge", role: "note" }, "rebuild error …");
  const box = h("dialog", { class: "help", "aria-labelledby": "help-title" },
    h("h2", { id: "help-title" }, "Help"),
    h("p", {}, "A test example is a query. Each layer compares it with every training pattern it ever saw: the products are its attention, and the layer's output is the start plus the sum of attention × what was learnt there. That is exact, not an estimate."),
    h("p", {}, h("strong", {}, app.note), " It says what the recorded updates did, not what a retraining without them would give."),
    h("h3", {}, "Keys"),
    h("table", {}, h("tbody", {}, HELP.map(([keys, what]) => h("tr", {}, h("th", { scope: "row" }, h("kbd", {}, keys)), h("td", {}, what))))),
    h("div", { class: "row" }, button("Close", () => box.close()), button("Show the tour", () => { box.close(); tour.show(); })));

  function draw() {
    const now = state.get();
    const run = app.run;
    const model = run.model ? run.model.split(":").at(-1) : "model";
    const widths = run.arguments?.widths ? ` ${run.arguments.widths.join("-")}` : "";
    element.replaceChildren(
      h("div", { class: "brand" }, h("h1", {}, "dualform"), h("span", { class: "run-name", title: run.path }, run.name)),
      h("div", { class: "muted facts" }, `${model}${widths} · ${count(run.patterns)} patterns · ${count(run.steps)} steps of ${run.optimizers.join(", ")}`,
        run.closed ? "" : h("strong", { class: "amber" }, " · still being recorded, or cut off: shown up to its last published step ", button("Look again", () => location.reload(), { class: "small" }))),
      badge,
      ...(run.warnings ?? []).map((text) => h("p", { class: "warning amber-box", role: "note" }, text)),
      h("div", { class: "header-tools" },
        choice("group by", run.groupings.map(({ by, groups }) => [by, `${by} (${count(groups)})`]), now.by, (by) => app.regroup(by)),
        button("Tests", () => document.body.classList.toggle("drawer"), { class: "drawer-button", "aria-controls": "tests" }),
        button("Theme", switchTheme),
        button("Help", () => box.showModal(), { "aria-keyshortcuts": "?" }),
        run.tests && !run.replays ? h("a", { class: "button", href: `/report.html?test=${now.test}`, download: "" }, "Export report") : ""),
      box);
  }

  function show(found) {
    app.badge = found;
    const worst = Math.max(0, ...found.layers.map((layer) => layer.relative_error ?? 0));
    const shares = found.layers.filter((layer) => layer.unexplained !== null);
    const rest = shares.length ? `, unexplained ${Math.max(...shares.map((layer) => layer.unexplained)).toExponential(1)}` : "";
    const words = {
      passed: `${found.not_recorded ? found.verdict : "exact"}: rebuild error ${worst.toExponential(1)}${rest}`,
      explains: `${found.verdict}${rest}`,
      high: `rebuild error ${worst.toExponential(1)}: higher than rounding explains`,
      "keys only": "keys only: attention, no reconstruction",
      "not measured": "rebuild error not measured: the run is not closed, or its weights do not fit into memory",
      "needs replay": "steps are kept: the rebuild error and masks take a replay of the training",
      preparing: `preparing masks${found.progress?.total ? ` ${Math.round((100 * found.progress.done) / found.progress.total)} % of ${found.progress.title}` : ""} …`,
      failed: `could not be measured: ${found.error ?? ""}`,
    }[found.state];
    const mixed = found.keys_only.length && found.state !== "keys only" ? `; keys only in ${found.keys_only.join(", ")}` : "";
    badge.textContent = words + mixed;
    badge.className = `badge ${found.state === "passed" && !found.not_recorded ? "good" : found.state === "preparing" ? "" : "amber-box"}`;
    const rows = found.layers.map((layer) => `${layer.layer}: ${layer.relative_error === null ? "keys only" : `${layer.relative_error.toExponential(2)}, at most ${layer.bound?.toExponential(2) ?? "–"} is rounding`}${layer.unexplained === null ? "" : `; unexplained ${layer.unexplained.toExponential(2)}, rounding ${layer.rounding.toExponential(2)}`}`);
    badge.title = [...rows, ...(found.not_recorded ? [found.not_recorded] : [])].join("\n");
  }

  async function watch(by) {
    try {
      const found = await ask("/api/badge", { by });
      if (state.get().by !== by) return;
      show(found);
      app.badgeChanged();
      if (found.state === "preparing") setTimeout(() => watch(by), POLL);
    } catch (error) {
      badge.textContent = `rebuild error: ${error.message}`;
    }
  }

  return { draw, watch, help: () => (box.open ? box.close() : box.showModal()) };
}
