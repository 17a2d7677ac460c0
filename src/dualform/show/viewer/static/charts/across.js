// How wide a drawing is in its own units: fewer on a narrow screen, so that its text stays as large.

const NARROW = 600; // pixels of the window

export function across(wide, narrow) {
  return innerWidth < NARROW ? narrow : wide;
}
