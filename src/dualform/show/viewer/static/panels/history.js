// The masks that were tried in this visit, with what came of them; each can be taken up again.

import { button, h } from "../dom.js";
import { count, percent } from "../format.js";
import { Panel } from "../panel.js";

const LONGEST = 20;

export function create(app) {
  const panel = new Panel("history", "History");
  const entries = [];

  function draw() {
    panel.body.replaceChildren(entries.length
      ? h("ol", { class: "history" }, entries.map((entry) => h("li", {},
        button(entry.words, () => app.takeUp(entry), { class: "link" }),
        h("div", { class: "muted" }, `${count(entry.answer.changed)} change`,
          entry.answer.accuracy_after === null ? "" : `, accuracy ${percent(entry.answer.accuracy_after)}`))))
      : h("p", { class: "muted" }, "Masks that you try are listed here."));
  }

  function remember(entry) {
    const at = entries.findIndex((one) => one.words === entry.words && one.by === entry.by);
    if (at >= 0) entries.splice(at, 1);
    entries.unshift(entry);
    entries.length = Math.min(entries.length, LONGEST);
    draw();
  }

  draw();
  return { panel, keys: [], load: () => null, remember };
}
