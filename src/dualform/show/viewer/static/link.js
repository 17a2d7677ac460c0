// Linked highlighting: whatever shows a group carries data-group, and hovering or focusing one marks all of them.

let marked = null;

export function key(group) {
  return JSON.stringify(group);
}

function mark(group) {
  if (group === marked) return;
  marked = group;
  for (const element of document.querySelectorAll("[data-group]")) {
    element.classList.toggle("linked", element.dataset.group === group);
  }
  document.body.classList.toggle("linking", group !== null);
}

export function start() {
  const over = (event) => mark(event.target.closest?.("[data-group]")?.dataset.group ?? null);
  document.addEventListener("pointerover", over);
  document.addEventListener("focusin", over);
}
