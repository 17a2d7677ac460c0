// The keyboard. Every action is also a button; nothing is caught while somebody types.

const actions = new Map();

export const HELP = [
  ["j / k", "next / previous test example"],
  ["[ / ]", "previous / next layer"],
  ["1 – 9", "mask the first, second, … group, or unmask it"],
  ["0", "reset the mask"],
  ["u", "undo the last change of the mask"],
  ["/", "search"],
  ["?", "this help"],
  ["Esc", "close what is open"],
];

export function on(key, action) {
  actions.set(key, action);
}

export function start() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest("input, textarea, select, [contenteditable]");
    if (typing && event.key !== "Escape") return;
    const action = actions.get(event.key);
    if (!action) return;
    if (event.key !== "Escape") event.preventDefault(); // it also closes dialogs
    action(event);
  });
}
