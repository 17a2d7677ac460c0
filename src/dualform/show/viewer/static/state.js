// The state of the page, which is the address: shareable, and Back works.

const DEFAULTS = {
  test: "0", layer: "", by: "", of: "attention", scale: "own", tab: "positive", per: "sample", k: "12", first: "1",
  drawn: "", prompt: "", row: "", than: "", references: "16", steps: [], g: [], s: [], p: [], r: "0", seed: "0", only: "0", in: "all", start: "kept",
};
const MASK = ["g", "s", "p", "r", "seed", "only", "in", "start"];

let current = read();
const listeners = [];

function read() {
  const parameters = new URLSearchParams(location.search);
  const state = {};
  for (const [name, value] of Object.entries(DEFAULTS)) {
    state[name] = Array.isArray(value) ? parameters.getAll(name) : parameters.get(name) ?? value;
  }
  return state;
}

function address(state) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (Array.isArray(value)) for (const one of state[name]) parameters.append(name, one);
    else if (state[name] !== value) parameters.set(name, state[name]);
  }
  const text = parameters.toString();
  return text ? `?${text}` : location.pathname;
}

function same(a, b) {
  return Array.isArray(a) ? a.length === b.length && a.every((one, i) => one === b[i]) : a === b;
}

function become(next) {
  const changed = new Set(Object.keys(DEFAULTS).filter((name) => !same(current[name], next[name])));
  if (!changed.size) return;
  current = next;
  for (const listener of listeners) listener(current, changed);
}

export function get() {
  return current;
}

/** Change some of the state; `replace` leaves no trace in the history of the browser. */
export function set(changes, { replace = false } = {}) {
  const next = { ...current, ...changes };
  if (Object.keys(changes).every((name) => same(current[name], next[name]))) return;
  history[replace ? "replaceState" : "pushState"](null, "", address(next));
  become(next);
}

export function subscribe(listener) {
  listeners.push(listener);
}

window.addEventListener("popstate", () => become(read()));

/** What is asked about, as parameters of a question. */
export function subject(state) {
  const found = state.drawn ? { drawn: state.drawn } : state.prompt ? { prompt: state.prompt } : { test: state.test };
  return state.row ? { ...found, row: state.row } : found;
}

/** The mask, as parameters of a question. */
export function mask(state) {
  const found = { by: state.by, layer: state.layer };
  for (const name of MASK) if (!same(state[name], DEFAULTS[name])) found[name] = state[name];
  return found;
}

export function isMasked(state) {
  return state.g.length > 0 || state.s.length > 0 || state.p.length > 0 || state.r !== "0" || state.only === "1" || state.start === "dropped";
}

export function maskOf(state) {
  return Object.fromEntries(MASK.map((name) => [name, state[name]]));
}

export function noMask() {
  return Object.fromEntries(MASK.map((name) => [name, DEFAULTS[name]]));
}

export const SUBJECT = ["test", "drawn", "prompt", "row"];
export const MASKING = MASK;
