// Numbers and groups as people read them.

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2).replace("-", "−").replace("e+", "e").replace("e−", "e-");
  return value.toLocaleString("en", { maximumSignificantDigits: 4 }).replace("-", "−");
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  const least = 10 ** -digits;
  return value > 0 && value < least / 2 ? `< ${least} %` : `${value.toFixed(digits)} %`;
}

/** A group as a name: [“mnist”, 3] becomes “mnist · 3”; numbers of classes get their names. */
export function groupName(group, by, run) {
  const columns = by.split(",");
  const parts = Array.isArray(group) ? group : [group];
  return parts.map((part, i) => partName(part, columns[i] ?? "", run)).join(" · ");
}

function partName(part, column, run) {
  if (part === null) return "(none)";
  if (column === "label" && run.labels && Number.isInteger(part) && run.labels[part] !== undefined) return run.labels[part];
  return String(part);
}

/** The class that a group stands for, where it stands for one. */
export function groupClass(group, by) {
  const columns = by.split(",");
  const at = columns.indexOf("label");
  if (at < 0) return null;
  return Array.isArray(group) ? group[at] : group;
}

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}
