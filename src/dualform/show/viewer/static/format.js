// Numbers and groups as people read them.

/** A measured number, with four digits that matter at most. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const sign = value < 0 ? "−" : "";
  for (const [least, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"]]) {
    if (size >= least) return `${sign}${(size / least).toPrecision(4)} ${letter}`;
  }
  if (size < 1e-3 && size > 0) return `${sign}${size.toExponential(2)}`;
  return sign + size.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** How many there are, to the last one. */
export function count(value) {
  return value.toLocaleString("en");
}

export function percent(share, digits = 1) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  const least = 10 ** -digits;
  return value > 0 && value < least / 2 ? `< ${least} %` : `${value.toFixed(digits)} %`;
}

const names = new Map();

/** Remember what the groups of an answer are called. */
export function learnNames(by, groups, called) {
  groups.forEach((group, i) => names.set(`${by}\n${JSON.stringify(group)}`, called[i]));
}

/** A group as people read it: as an answer called it, or as it is. */
export function groupName(group, by) {
  return names.get(`${by}\n${JSON.stringify(group)}`) ?? (Array.isArray(group) ? group.join(" · ") : String(group));
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
