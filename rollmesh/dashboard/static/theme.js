// Colours of curves by the reader's scheme, from the style sheet. Dashes tell curves apart without colour.

export const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SERIES = 8;
const dark = matchMedia("(prefers-color-scheme: dark)");

/** Calls back when the reader's scheme changes. */
export const onScheme = (changed) => dark.addEventListener("change", changed);

/** The colours of the present scheme. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    text: read("text"),
    muted: read("muted"),
    grid: read("grid"),
    card: read("card"),
    series: Array.from({ length: SERIES }, (_, index) => read(`series-${index + 1}`)),
  };
}

/** A colour `#rrggbb` with an opacity. */
export function faded(color, opacity) {
  const parts = [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
  return `rgba(${parts.join(",")},${opacity})`;
}
