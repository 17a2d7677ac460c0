// Ask the server. Slow answers report their progress; an aborted one is cancelled over there too.

export class Failure extends Error {
  constructor(message, { status = 0, empty = false, needs = false, seconds = null } = {}) {
    super(message);
    this.seconds = seconds; // of a replay that the answer needs, or null
    this.needs = needs; // what was asked for needs patterns, and the run keeps shares
    this.status = status;
    this.empty = empty;
  }
}

const SLOW = 1000;
const POLL = 400;
const watchers = [];
let gone = false;

/** Be told when the server cannot be reached, and when it can again. */
export function onServer(watcher) {
  watchers.push(watcher);
}

function setGone(value) {
  if (gone !== value) for (const watcher of watchers) watcher(value);
  gone = value;
}

/** The parameters of a question as the address has them. */
export function asQuery(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (Array.isArray(value)) for (const one of value) query.append(name, one);
    else if (value !== "" && value !== null && value !== undefined) query.set(name, value);
  }
  return query;
}

/** Begin or end something: the page shows that it is the viewer's own. */
export async function post(path, query = new URLSearchParams()) {
  const { token } = await ask("/api/page");
  const response = await fetch(`${path}?${query}`, { method: "POST", headers: { "x-dualform-page": token } });
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Failure(body.error ?? `the server answered ${response.status}`, { status: response.status });
  return body;
}

export async function ask(path, parameters = {}, { signal, onProgress } = {}) {
  const query = asQuery(parameters);
  const job = Math.random().toString(36).slice(2);
  query.set("job", job);
  const timer = onProgress ? follow(job, onProgress, signal) : null;
  try {
    const response = await fetch(`${path}?${query}`, { signal });
    setGone(false);
    const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
    if (!response.ok) throw new Failure(body.error ?? `the server answered ${response.status}`, { status: response.status, empty: body.empty });
    if (body.needs_replay) throw new Failure(body.needs_replay, { status: response.status, seconds: body.seconds });
    if (body.needs_patterns) throw new Failure(body.needs_patterns, { status: response.status, needs: true });
    return body;
  } catch (error) {
    if (error instanceof TypeError) {
      setGone(true);
      throw new Failure("The viewer's server does not answer. Is `dualform view` still running?");
    }
    throw error;
  } finally {
    timer?.stop();
  }
}

function follow(job, onProgress, signal) {
  let stopped = false;
  const stop = () => { stopped = true; };
  signal?.addEventListener("abort", stop);
  const poll = async () => {
    if (stopped) return;
    try {
      const response = await fetch(`/api/progress?job=${job}`, { signal });
      const found = await response.json();
      if (!stopped) onProgress(found.running ? found : null);
    } catch { /* the question itself reports that the server has gone */ }
    if (!stopped) setTimeout(poll, POLL);
  };
  setTimeout(poll, SLOW);
  return { stop };
}

/** Try whether the server is back. */
export async function ping() {
  return ask("/api/run").then(() => true, (error) => error.status > 0);
}
