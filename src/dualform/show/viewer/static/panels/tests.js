// LEFT: the test examples, as many as there are; only those in sight are in the page.

import { ask } from "../api.js";
import { button, choice, h } from "../dom.js";
import { count, percent } from "../format.js";
import { Panel } from "../panel.js";
import { confusion } from "./confusion.js";
import * as state from "../state.js";

const THUMB = 60;
const LINE = 52;
const MARGIN = 4; // rows kept above and below

export function create(app) {
  const panel = new Panel("browser", "Tests");
  let data = null;
  let shown = [];
  let filter = { text: "", target: "", output: "", verdict: "" };
  let found = null; // tests whose text matches, from the server
  const texts = new Map();
  const image = app.run.kind === "image";
  const search = h("input", { type: "search", id: "search", placeholder: app.run.kind === "text" ? "number or text" : "number", "aria-label": "search the tests", oninput: () => narrow({ text: search.value }) });
  const list = h("div", { class: `tests ${image ? "tests-grid" : "tests-lines"}`, role: "listbox", tabindex: "0", "aria-label": "test examples" });
  const inner = h("div", { class: "tests-inner", role: "presentation" });
  list.append(inner);
  const summary = h("p", { class: "muted", role: "presentation" });
  const filters = h("div", { class: "filters-box" });
  const matrix = h("div", {});

  function narrow(change) {
    filter = { ...filter, ...change };
    const text = filter.text.trim();
    if (app.run.kind === "text" && text && !/^\d+$/.test(text)) {
      ask("/api/search", { text }).then((answer) => { found = new Set(answer.tests); apply(); }, () => { found = new Set(); apply(); });
    } else {
      found = null;
      apply();
    }
  }

  function apply() {
    const { targets, predictions } = data;
    const text = filter.text.trim();
    shown = [];
    for (let test = 0; test < data.count; test += 1) {
      if (found ? !found.has(test) : text && !String(test).startsWith(text)) continue;
      if (filter.target !== "" && String(targets?.[test]) !== filter.target) continue;
      if (filter.output !== "" && String(predictions[test]) !== filter.output) continue;
      if (filter.verdict && targets && (targets[test] === predictions[test]) !== (filter.verdict === "right")) continue;
      shown.push(test);
    }
    drawFilters();
    list.scrollTop = 0;
    draw();
  }

  function columns() {
    return image ? Math.max(Math.floor((list.clientWidth - 4) / THUMB), 1) : 1;
  }

  function draw() {
    const wide = columns();
    const tall = image ? THUMB + 14 : LINE;
    const rows = Math.ceil(shown.length / wide);
    inner.style.setProperty("height", `${rows * tall}px`);
    const first = Math.max(Math.floor(list.scrollTop / tall) - MARGIN, 0);
    const last = Math.min(Math.ceil((list.scrollTop + list.clientHeight) / tall) + MARGIN, rows);
    const now = state.get();
    const chosen = now.drawn || now.prompt ? -1 : Number(now.test);
    const items = [];
    for (let at = first * wide; at < Math.min(last * wide, shown.length); at += 1) items.push(item(at, wide, tall, chosen));
    inner.replaceChildren(...items);
    const active = shown.indexOf(chosen);
    if (active >= first * wide && active < last * wide) list.setAttribute("aria-activedescendant", `test-${chosen}`);
    else list.removeAttribute("aria-activedescendant");
    if (!image && app.run.kind === "text") fetchTexts(shown.slice(first, last));
  }

  function item(at, wide, tall, chosen) {
    const test = shown[at];
    const target = data.targets?.[test];
    const said = data.predictions[test];
    const wrong = target !== undefined && target !== said;
    const words = target === undefined ? app.label(said) : wrong ? `${app.label(target)}→${app.label(said)}` : app.label(target);
    return h("div", {
      id: `test-${test}`, role: "option", class: `test${wrong ? " wrong" : ""}`, "aria-selected": String(test === chosen), "aria-setsize": shown.length, "aria-posinset": at + 1,
      // What is to be read stands in the name as it is; a text names itself.
      ...(image ? { "aria-label": `${words}: test ${test}, ${target === undefined ? "" : `target ${app.label(target)}, `}output ${app.label(said)}${wrong ? ", wrong" : ""}` } : {}),
      style: { top: `${Math.floor(at / wide) * tall}px`, left: image ? `${(at % wide) * THUMB}px` : "0" },
      onclick: () => app.choose(test),
    }, image ? h("img", { src: `/media/test/${test}.png`, alt: "", loading: "lazy" }) : h("div", { class: "snippet" }, texts.get(test) ?? `test ${test}`),
    h("div", { class: "test-words" }, words));
  }

  function fetchTexts(tests) {
    const missing = tests.filter((test) => !texts.has(test));
    if (!missing.length) return;
    for (const test of missing) texts.set(test, "…");
    const first = Math.min(...missing);
    ask("/api/snippets", { first, count: Math.min(Math.max(...missing) - first + 1, 200) }).then((answer) => {
      answer.texts.forEach((text, i) => texts.set(answer.first + i, text));
      draw();
    }, () => { for (const test of missing) texts.delete(test); });
  }

  function drawFilters() {
    const classes = data.targets ? [...new Set(data.targets)].sort((a, b) => a - b) : [];
    const narrowed = filter.target !== "" || filter.output !== "" || filter.verdict || filter.text;
    filters.replaceChildren(
      ...(classes.length > 1 && classes.length <= 200 ? [choice("target", [["", "any"], ...classes.map((one) => [String(one), app.label(one)])], filter.target, (target) => narrow({ target, output: "" }))] : []),
      ...(data.targets ? [choice("verdict", [["", "any"], ["right", "right"], ["wrong", "wrong"]], filter.verdict, (verdict) => narrow({ verdict }))] : []));
    summary.replaceChildren(`${count(shown.length)} of ${count(data.count)}`, data.targets ? `, accuracy ${percent(accuracy(data))}` : "",
      data.left_out ? `; ${count(data.left_out)} more are left out` : "", " ",
      narrowed ? button("Clear filters", () => { search.value = ""; filter = { text: "", target: "", output: "", verdict: "" }; found = null; apply(); }, { class: "small" }) : "");
    matrix.replaceChildren(confusion(app, data, filter, (target, output) => narrow({ target: String(target), output: String(output), verdict: "" })));
  }

  list.addEventListener("scroll", () => requestAnimationFrame(draw));
  list.addEventListener("keydown", (event) => {
    const turn = { ArrowDown: columns(), ArrowUp: -columns(), ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (turn === undefined) return;
    event.preventDefault();
    move(turn);
  });

  /** Go to a neighbour among the tests that are listed. */
  function move(turn) {
    if (!shown.length) return;
    const now = state.get();
    const at = now.drawn || now.prompt ? -1 : shown.indexOf(Number(now.test));
    const next = at < 0 ? 0 : Math.min(Math.max(at + turn, 0), shown.length - 1);
    app.choose(shown[next]);
    reveal(next);
  }

  function reveal(at) {
    const wide = columns();
    const tall = image ? THUMB + 14 : LINE;
    const y = Math.floor(at / wide) * tall;
    if (y < list.scrollTop) list.scrollTop = y;
    else if (y + tall > list.scrollTop + list.clientHeight) list.scrollTop = y + tall - list.clientHeight;
  }

  new ResizeObserver(() => { if (data) draw(); }).observe(list);

  return {
    panel,
    keys: [],
    move,
    focusSearch: () => search.focus(),
    load: () => app.run.tests
      ? panel.load("/api/tests", {}, (answer) => {
        data = answer;
        app.names = answer.names;
        panel.body.replaceChildren(search, filters, summary, list, matrix);
        apply();
        reveal(shown.indexOf(Number(state.get().test)));
      })
      : panel.body.replaceChildren(h("p", {}, "This run keeps no test examples."), h("p", { class: "muted" }, "Add some: ", h("code", {}, `dualform.open(${JSON.stringify(app.run.path)}).add_tests(inputs, targets, images=pixels)`))),
    redraw: () => { if (data) draw(); },
    redrawOn: state.SUBJECT,
  };
}

function accuracy(data) {
  let hits = 0;
  for (let test = 0; test < data.count; test += 1) if (data.targets[test] === data.predictions[test]) hits += 1;
  return data.count ? hits / data.count : null;
}
