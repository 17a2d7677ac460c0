// The page: opens the run, makes the panels, and tells each of them when what it shows has changed.
// A new panel is a module in panels/ with create(app) -> {panel, keys, load}, and a line below.

import { ask, onServer, ping } from "./api.js";
import { button, h } from "./dom.js";
import { learnNames } from "./format.js";
import * as header from "./header.js";
import * as keys from "./keys.js";
import * as link from "./link.js";
import * as curves from "./panels/curves.js";
import * as free from "./panels/free.js";
import * as history from "./panels/history.js";
import * as layers from "./panels/layers.js";
import * as mask from "./panels/mask.js";
import * as path from "./panels/path.js";
import * as pins from "./panels/pins.js";
import * as prediction from "./panels/prediction.js";
import * as tests from "./panels/tests.js";
import * as time from "./panels/time.js";
import * as top from "./panels/top.js";
import * as tour from "./tour.js";
import * as replay from "./replay.js";
import * as state from "./state.js";
import * as theme from "./theme.js";

theme.apply();
const place = (id) => document.getElementById(id);

async function open() {
  let run;
  try {
    run = await ask("/api/run");
  } catch (error) {
    nothing(error);
    return;
  }
  tour.prepare();
  const now = state.get();
  const by = run.groupings.some((one) => one.by === now.by) ? now.by : run.groupings[0]?.by ?? `step:${Math.max(Math.ceil(run.steps / 10), 1)}`;
  const layer = run.layers.some((one) => one.name === now.layer) ? now.layer : run.output_layer ?? run.layers.at(-1).name;
  if (!run.groupings.length) run.groupings = [{ by, groups: 10 }];
  state.set({ by, layer, ...(now.by && now.by !== by ? { g: [] } : {}) }, { replace: true });
  document.title = `${run.name} · dualform`;
  start(run);
}

function start(run) {
  const app = {
    run, note: "removes recorded updates; the model is not retrained", prediction: null, badge: null, groups: [], pins: new Set(), past: [],
    names: {}, label: (unit) => run.labels?.[unit] ?? app.names[unit] ?? String(unit),
    choose: (test) => state.set({ test: String(test), drawn: "", prompt: "", row: "", than: "" }),
    step: (turn) => parts.tests.move(turn),
    predicted: (answer) => { app.prediction = answer; parts.layers.redraw(); },
    changeMask: (changes) => { app.past.push(state.maskOf(state.get())); state.set(changes); },
    undo: () => { const before = app.past.pop(); if (before) state.set(before); },
    toggleGroup: (group) => {
      const name = link.key(group);
      const { g } = state.get();
      app.changeMask({ g: g.includes(name) ? g.filter((one) => one !== name) : [...g, name] });
    },
    regroup: (by) => { app.past.length = 0; state.set({ by, g: [] }); },
    takeUp: (entry) => app.changeMask(entry.by === state.get().by ? entry.mask : { by: entry.by, ...entry.mask }),
    remember: (entry) => parts.history.remember(entry),
    pin: (sample) => {
      if (!app.pins.delete(sample)) {
        if (app.pins.size >= 2) app.pins.delete([...app.pins][0]);
        app.pins.add(sample);
      }
      parts.pins.load(state.get());
      parts.top.load(state.get());
    },
    badgeChanged: () => parts.mask.redraw(),
  };
  const parts = {
    tests: tests.create(app), prediction: prediction.create(app), layers: layers.create(app), top: top.create(app),
    curves: curves.create(app), time: time.create(app), path: path.create(app), mask: mask.create(app), pins: pins.create(app), history: history.create(app),
  };
  for (const [name, part] of Object.entries(parts)) part.panel.hint(run.hints[name]);
  if (run.draw || run.prompt) parts.free = free.create(app);
  const head = header.create(app, place("header"));

  place("tests").append(parts.tests.panel.element, ...(parts.free ? [parts.free.panel.element] : []));
  place("content").append(parts.prediction.panel.element, parts.path.panel.element, parts.layers.panel.element,
    h("div", { class: "pair" }, parts.curves.panel.element, parts.time.panel.element), parts.top.panel.element);
  place("side").append(parts.mask.panel.element, parts.pins.panel.element, parts.history.panel.element);

  const paint = new MutationObserver(() => document.querySelectorAll("canvas[data-drawn]").forEach((canvas) => { free.paintDrawn(canvas); }));
  paint.observe(parts.prediction.panel.body, { childList: true });

  state.subscribe((now, changed) => {
    head.draw();
    if (changed.has("by")) head.watch(now.by);
    if (changed.has("by") || changed.has("test") || changed.has("drawn") || changed.has("prompt")) document.body.classList.remove("drawer");
    refresh(parts, now, changed, app);
  });
  listen(app, parts, head);
  head.draw();
  first(parts, app, head);
}

/** Load what can be seen at once, then the rest, then what takes longest. */
async function first(parts, app, head) {
  const now = state.get();
  const all = Object.values(parts);
  const early = all.filter((part) => !part.late).map((part) => part.load(now));
  await groupsOf(app, now.by, parts);
  await Promise.allSettled(early);
  await Promise.allSettled(all.filter((part) => part.late).map((part) => part.load(now)));
  document.body.dataset.ready = "all";
  tour.start();
  head.watch(now.by);
  replay.whenDone(() => head.watch(state.get().by));
  if (app.run.replays) replay.resume();
}

async function refresh(parts, now, changed, app) {
  if (changed.has("by")) await groupsOf(app, now.by, parts);
  const loads = [];
  const late = [];
  for (const part of Object.values(parts)) {
    const concerned = part.keys.some((name) => changed.has(name)) && (!part.onlyWhen || part.onlyWhen(now, changed));
    if (concerned) (part.late ? late : loads).push(part);
    else if (part.redrawOn?.some((name) => changed.has(name))) part.redraw();
  }
  await Promise.allSettled(loads.map((part) => part.load(now)));
  for (const part of late) part.load(state.get());
}

/** The groups in the order of the charts, for the chips of the mask. */
async function groupsOf(app, by, parts) {
  try {
    const answer = await ask("/api/layers", { ...state.subject(state.get()), by }).catch(() => ask("/api/groups", { by }));
    app.groups = answer.groups;
    learnNames(by, answer.groups, answer.names);
  } catch {
    app.groups = [];
  }
  parts.mask.redraw();
}

function listen(app, parts, head) {
  link.start();
  keys.on("j", () => parts.tests.move(1));
  keys.on("k", () => parts.tests.move(-1));
  const turn = (by) => {
    const names = app.run.layers.map((one) => one.name);
    state.set({ layer: names[Math.min(Math.max(names.indexOf(state.get().layer) + by, 0), names.length - 1)] });
  };
  keys.on("[", () => turn(-1));
  keys.on("]", () => turn(1));
  for (let i = 1; i <= 9; i += 1) keys.on(String(i), () => { if (app.groups[i - 1] !== undefined && app.run.exact) app.toggleGroup(app.groups[i - 1]); });
  keys.on("0", () => app.changeMask(state.noMask()));
  keys.on("u", () => app.undo());
  keys.on("/", () => { document.body.classList.add("drawer"); parts.tests.focusSearch(); });
  keys.on("?", () => head.help());
  keys.on("Escape", () => document.body.classList.remove("drawer"));
  keys.start();
}

onServer((gone) => {
  const banner = place("banner");
  banner.hidden = !gone;
  if (gone) {
    banner.replaceChildren("The server has gone. What you see is what it last said. ",
      button("Try again", async () => { if (await ping()) location.reload(); }));
  }
});

function nothing(error) {
  place("layout").hidden = true;
  place("header").replaceChildren(h("div", { class: "brand" }, h("h1", {}, "dualform")));
  place("empty").hidden = false;
  place("empty").replaceChildren(h("main", { id: "content" },
    h("h2", {}, error.empty ? "There is no run here yet" : "The run cannot be opened"), h("p", {}, error.message),
    error.empty ? [h("p", {}, "This records one on digits in under a minute:"), h("pre", {}, "dualform demo"),
      h("p", {}, "And this one of your own:"), h("pre", {}, "with dualform.record(model, optimizer, \"runs/mine\") as recorder:\n    ...  # your training loop")] : "",
    button("Try again", () => location.reload())));
}

open();
