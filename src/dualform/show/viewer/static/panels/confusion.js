// The confusion matrix; its cells filter the tests.

import { button, h } from "../dom.js";
import { plural } from "../format.js";

const MOST = 20; // classes

export function confusion(app, data, filter, choose) {
  if (!data.targets) return h("span");
  const classes = [...new Set([...data.targets, ...data.predictions])].sort((a, b) => a - b);
  if (classes.length < 2 || classes.length > MOST) return h("span");
  const counts = new Map();
  data.targets.forEach((target, test) => {
    const cell = `${target},${data.predictions[test]}`;
    counts.set(cell, (counts.get(cell) ?? 0) + 1);
  });
  const worst = Math.max(1, ...[...counts].filter(([cell]) => cell.split(",")[0] !== cell.split(",")[1]).map(([, count]) => count));
  return h("details", { class: "confusion", open: innerWidth >= 800 }, h("summary", {}, "Confusion matrix"),
    h("p", { class: "muted" }, "Rows are targets, columns what the model says. A cell lists its tests."),
    h("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "confusion matrix" }, h("table", {},
      h("caption", { class: "visually-hidden" }, "Number of tests by target and output"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, h("span", { class: "visually-hidden" }, "target")), classes.map((one) => h("th", { scope: "col" }, short(app.label(one)))))),
      h("tbody", {}, classes.map((target) => h("tr", {}, h("th", { scope: "row" }, short(app.label(target))), classes.map((output) => {
        const count = counts.get(`${target},${output}`) ?? 0;
        const chosen = filter.target === String(target) && filter.output === String(output);
        return h("td", {}, count ? button(String(count), () => choose(target, output), {
          class: `cell ${target === output ? "right" : "wrong"}`, "aria-pressed": String(chosen),
          "aria-label": `${plural(count, "test")}: target ${app.label(target)}, output ${app.label(output)}`,
          style: target === output ? {} : { "--strength": (0.12 + 0.5 * (count / worst)).toFixed(2) },
        }) : "");
      })))))));
}

function short(text) {
  return text.length > 4 ? `${text.slice(0, 3)}…` : text;
}
