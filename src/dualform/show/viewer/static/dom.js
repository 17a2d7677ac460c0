// Small helpers to make elements. Text always goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) element.style.setProperty(key, to);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name === "checked" || name === "value" || name === "open" || name === "disabled" || name === "selected") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function h(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function s(tag, properties, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

export function button(text, onclick, properties = {}) {
  return h("button", { type: "button", onclick, ...properties }, text);
}

/** A labelled choice of a few words; `options` are [value, text] pairs. */
export function choice(label, options, value, onchange) {
  const select = h("select", { onchange: (event) => onchange(event.target.value) },
    options.map(([key, text]) => h("option", { value: key, selected: key === value }, text)));
  return h("label", { class: "choice" }, h("span", {}, label), select);
}

/** Buttons of which one is pressed. */
export function toggle(label, options, value, onchange) {
  return h("div", { class: "toggle", role: "group", "aria-label": label }, options.map(([key, text]) =>
    button(text, () => onchange(key), { "aria-pressed": String(key === value) })));
}

let counter = 0;
export function unique(prefix) {
  counter += 1;
  return `${prefix}-${counter}`;
}

/** Say something to a screen reader. */
export function announce(text) {
  document.getElementById("status").textContent = text;
}
