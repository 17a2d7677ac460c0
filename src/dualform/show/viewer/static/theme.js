// Light or dark: as the system says until somebody chooses.

const KEY = "dualform-theme";

export function theme() {
  return localStorage.getItem(KEY) ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

export function apply() {
  document.documentElement.dataset.theme = theme();
}

export function switchTheme() {
  localStorage.setItem(KEY, theme() === "dark" ? "light" : "dark");
  apply();
}
