// Things that a reader should look at, each with its remedy.

import { h } from "rollmesh/dom.js";

export const title = "";

const NAMES = { error: "✕ Error", warning: "▲ Look at this", note: "• Note" };

export function render(root, { items }) {
  root.replaceChildren(
    items.length
      ? h("ul", { class: "attention" }, ...items.map(item))
      : h("p", { class: "all-well" }, h("span", { "aria-hidden": "true" }, "✓ "), "Nothing needs attention."),
  );
}

function item({ level, text, remedy }) {
  return h(
    "li",
    { class: level },
    h("span", { class: "level" }, NAMES[level]),
    h("span", {}, text, remedy ? h("small", {}, ` ${remedy}`) : null),
  );
}
