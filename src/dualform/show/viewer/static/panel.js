// The shell of a panel: heading, body, and what it shows while it waits, when it is stale, and when something failed.

import { ask } from "./api.js";
import { button, h, unique } from "./dom.js";
import * as replay from "./replay.js";

const SKELETON = 150;

export class Panel {
  /**
   * @param {string} id      of the element
   * @param {string} title   the heading
   * @param {Node[]} tools   controls beside the heading
   */
  constructor(id, title, tools = []) {
    const heading = unique("heading");
    this.tools = h("div", { class: "panel-tools" }, tools);
    this.body = h("div", { class: "panel-body" });
    this.wait = h("div", { class: "panel-wait", hidden: true });
    this.title = h("h2", { id: heading }, title);
    this.element = h("section", { id, class: "panel", "aria-labelledby": heading },
      h("div", { class: "panel-head" }, this.title, this.tools), this.wait, this.body);
    this.loaded = false;
  }

  /** Ask a question and show its answer; a newer question of the same panel cancels the older one. */
  async load(path, parameters, render) {
    this.controller?.abort();
    replay.withdraw(this);
    const controller = this.controller = new AbortController();
    const skeleton = setTimeout(() => this.#waiting(), SKELETON);
    try {
      const answer = await ask(path, parameters, {
        signal: controller.signal,
        onProgress: (progress) => this.#progress(progress, controller),
      });
      if (this.controller !== controller) return null;
      this.#done(skeleton);
      render(answer);
      this.loaded = true;
      return answer;
    } catch (error) {
      clearTimeout(skeleton);
      if (error.name === "AbortError") {
        if (this.controller === controller) this.#cancelled(() => this.load(path, parameters, render));
        return null;
      }
      this.#done(skeleton);
      const retry = () => this.load(path, parameters, render);
      if (error.seconds === null || error.seconds === undefined) this.fail(error, retry);
      else {
        this.loaded = false;
        replay.offer(this, error, path, parameters, retry);
      }
      return null;
    }
  }

  /** Say below the panel what this run lacks for it, and what to record. */
  hint(found) {
    if (!found) return;
    this.element.append(h("div", { class: "hint", role: "note" }, h("p", { class: "muted" }, found.text), h("pre", {}, found.code)));
  }

  /** Show what failed, what may be the cause, and a way to try again; or say that the run keeps no patterns for this. */
  fail(error, retry) {
    this.loaded = false;
    if (error.needs) {
      this.body.replaceChildren(h("p", { class: "muted needs-patterns", role: "note" }, error.message));
      return;
    }
    this.body.replaceChildren(h("div", { class: "failure" },
      h("p", {}, h("strong", {}, "This could not be shown. "), error.message),
      h("p", { class: "muted" }, error.status >= 500 ? "Likely cause: a fault in the viewer, or a damaged run; `dualform verify` checks the files."
        : error.status ? "Likely cause: the address asks for something that this run does not have." : "Likely cause: the server was stopped."),
      button("Try again", retry)));
  }

  #waiting() {
    this.element.setAttribute("aria-busy", "true");
    this.body.classList.toggle("stale", this.loaded);
    if (!this.loaded) this.body.replaceChildren(h("div", { class: "skeleton", "aria-hidden": "true" }));
  }

  #progress(progress, controller) {
    const known = progress?.total;
    this.wait.hidden = false;
    this.wait.replaceChildren(
      h("span", {}, progress ? `${progress.title || "working"} …` : "working …"),
      h("progress", known ? { max: progress.total, value: progress.done, "aria-label": "progress" } : { "aria-label": "progress" }),
      button("Cancel", () => controller.abort(), { class: "small" }));
  }

  #done(skeleton) {
    clearTimeout(skeleton);
    this.wait.hidden = true;
    this.element.removeAttribute("aria-busy");
    this.body.classList.remove("stale");
  }

  #cancelled(retry) {
    this.#done();
    this.body.replaceChildren(h("p", { class: "muted" }, "Cancelled. ", button("Ask again", retry, { class: "small" })));
    this.loaded = false;
  }
}
