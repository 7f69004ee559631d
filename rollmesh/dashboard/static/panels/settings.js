// The configuration: what was set, and all of it.

import { details, h } from "rollmesh/dom.js";

export const title = "Configuration";
export const link = "Configuration";

export function render(root, { chosen, whole }) {
  root.replaceChildren(
    h("p", { class: "note" }, "Settings that differ from the defaults:"),
    h("pre", { class: "code", tabindex: "0" }, chosen),
    details("settings", "All settings, defaults included", false, h("pre", { class: "code", tabindex: "0" }, whole)),
  );
}
