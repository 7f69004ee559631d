// Elements of the page. Texts become text nodes: nothing that a run says is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

// Details that a reader has opened or closed stay so when their panel is drawn again.
const opened = new Map();

/** An HTML element with attributes and children; null children are left out. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of an SVG element. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A part that opens; `key` tells it from others. */
export function details(key, summary, open, ...children) {
  const element = h("details", { class: "more", open: opened.get(key) ?? open }, h("summary", {}, summary), ...children);
  element.addEventListener("toggle", () => opened.set(key, element.open));
  return element;
}

/** A table with a caption for screen readers; it scrolls by itself where it is wide. */
export function table(caption, head, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ...head.map((cell) => (cell ? h("th", { scope: "col" }, cell) : h("td", {}))))),
      h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((cell) => h("td", { class: kind(cell) }, cell))))),
    ),
  );
}

function kind(cell) {
  return typeof cell === "string" && /^-?[\d.,]+( ?[a-zA-Z%/]{1,4})?$/.test(cell) ? "number" : null;
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
