// What every chart has: a title, a one-sentence summary, and the same numbers as a table.

import { h, unique } from "../dom.js";

/**
 * @param {Element} drawing
 * @param {string} title
 * @param {string} summary
 * @param {() => {head: string[], rows: (string|number)[][]}} table  made when it is opened
 */
export function figure(drawing, title, summary, table) {
  const titled = unique("title");
  const described = unique("summary");
  drawing.setAttribute("role", "img");
  drawing.setAttribute("aria-labelledby", `${titled} ${described}`);
  const details = h("details", { class: "as-table", ontoggle: (event) => {
    const box = event.target;
    if (box.open && box.children.length === 1) box.append(makeTable(title, table()));
  } }, h("summary", {}, "View as table"));
  return h("figure", { class: "chart" },
    h("div", { id: titled, class: "chart-title" }, title), drawing,
    h("figcaption", { id: described, class: "muted" }, summary), details);
}

export function makeTable(title, { head, rows }) {
  return h("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": `${title}, table` },
    h("table", {},
      h("caption", { class: "visually-hidden" }, title),
      h("thead", {}, h("tr", {}, head.map((cell) => h("th", { scope: "col" }, cell)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, i) => i === 0 ? h("th", { scope: "row" }, cell) : h("td", {}, cell)))))));
}
