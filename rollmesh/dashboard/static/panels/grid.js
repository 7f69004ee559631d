// Panels that are one table: `head`, `rows` and `notes`.

import { h, table } from "rollmesh/dom.js";

export const grid = (title, link) => ({
  title,
  link,
  render(root, data) {
    root.replaceChildren(
      table(title, data.head, data.rows),
      ...(data.notes ?? []).map((note) => h("p", { class: "note" }, note)),
    );
  },
});
