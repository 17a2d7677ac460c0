// Replays: panels whose answer needs the training to be run again offer that, and share one replay.

import { ask, asQuery, post } from "./api.js";
import { announce, button, h } from "./dom.js";
import { count } from "./format.js";
import * as state from "./state.js";

const POLL = 500;
const offers = new Map(); // panel -> {path, parameters, retry, box}
const watchers = [];
let running = false;

/** Be told when a replay has brought its answers. */
export function whenDone(watcher) {
  watchers.push(watcher);
}

/** A time as people say it. */
export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  return seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

/** Offer to replay the training for what a panel asked. */
export function offer(panel, failure, path, parameters, retry) {
  const box = h("div", { class: "replay-box" });
  offers.set(panel, { path, parameters, retry, box, failure });
  panel.body.replaceChildren(box);
  if (running) waiting(box, null);
  else invite(panel);
}

/** Forget what a panel asked before: it asks something else now. */
export function withdraw(panel) {
  offers.delete(panel);
}

function invite(panel, problem = "") {
  const { box, failure } = offers.get(panel);
  box.replaceChildren(
    problem ? h("p", { class: "amber-box undecided", role: "note" }, problem) : "",
    h("p", { class: "muted" }, "This run keeps the steps of its training and no patterns; they come back when the training is run again."),
    button(`Replay the training for this test (about ${duration(failure.seconds)})`, start, { class: "start" }));
}

async function start() {
  const asked = [...offers.values()];
  const query = new URLSearchParams();
  for (const { path, parameters } of asked) query.append("q", `${path}?${asQuery(parameters)}`);
  query.append("q", `/api/badge?${asQuery({ by: state.get().by, wait: "1" })}`); // live masks, by the same replay
  running = true;
  for (const { box } of asked) waiting(box, null);
  announce("The training is run again.");
  try {
    follow(await post("/api/replay", query));
  } catch (error) {
    end(error.message);
  }
}

function follow(found) {
  if (found.state === "running") {
    for (const { box } of offers.values()) waiting(box, found);
    setTimeout(() => ask("/api/replay").then(follow, (error) => end(error.message)), POLL);
    return;
  }
  end(found.state === "done" ? "" : found.state === "cancelled" ? "Cancelled." : `The replay failed. ${found.error}`);
}

function end(problem) {
  running = false;
  announce(problem || "The training was run again.");
  for (const [panel, { retry }] of [...offers]) {
    if (problem) invite(panel, problem);
    else {
      offers.delete(panel);
      retry();
    }
  }
  if (!problem) for (const watcher of watchers) watcher();
}

function waiting(box, found) {
  const left = found?.left === null || found?.left === undefined ? "" : `, about ${duration(found.left)} to go`;
  box.replaceChildren(h("div", { class: "panel-wait" },
    h("span", {}, found?.total ? `replaying, step ${count(found.done)} of ${count(found.total)}${left}` : "replaying …"),
    h("progress", found?.total ? { max: found.total, value: found.done, "aria-label": "progress of the replay" } : { "aria-label": "progress of the replay" }),
    button("Cancel", () => post("/api/replay/cancel"), { class: "small" })));
}

/** Take up a replay that was running when the page was opened. */
export async function resume() {
  const found = await ask("/api/replay").catch(() => null);
  if (found?.state === "running") {
    running = true;
    follow(found);
  }
}
