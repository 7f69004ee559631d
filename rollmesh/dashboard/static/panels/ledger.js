// Groups by state and fate, the reasons of those that were not trained, and the causes of failures.

import { h, table } from "rollmesh/dom.js";
import { count } from "rollmesh/format.js";

export const title = "Ledger";
export const link = "Ledger";

const TABLES = { train: "Training groups", eval: "Evaluation groups" };

export function render(root, { tables }) {
  root.replaceChildren(...tables.map(one));
}

function one(ledger) {
  const parts = [...ledger.fates, ...ledger.states].filter((part) => part.count);
  return h(
    "div",
    { class: "card" },
    h("h3", {}, TABLES[ledger.name] ?? ledger.name, h("small", {}, ` ${count(ledger.admitted)} admitted`)),
    h("div", { class: "stack", "aria-hidden": "true" }, ...parts.map((part) => share(part, ledger.admitted))),
    h("ul", { class: "legend" }, ...parts.map(entry)),
    ledger.discrepancies.length
      ? h("p", { class: "error" }, `The ledger does not balance: ${ledger.discrepancies.join("; ")}`)
      : h("p", { class: "note" }, "The ledger balances: every admitted group has one state or one fate."),
    ledger.drops.length
      ? table("Groups that were not trained", ["dropped as", "reason", "groups"], ledger.drops.map((drop) => [drop.fate, drop.reason, count(drop.count)]))
      : null,
    ledger.causes.length
      ? table("Causes of the latest failures", ["cause of the latest failures", "groups"], ledger.causes.map((cause) => [cause.cause, count(cause.count)]))
      : null,
  );
}

function share({ kind, count: groups }, all) {
  const part = h("span", { class: `part part-${kind}` });
  part.style.flexGrow = String(groups / all);
  return part;
}

function entry({ kind, name, count: groups }) {
  return h("li", {}, h("span", { class: `key part-${kind}`, "aria-hidden": "true" }), h("span", {}, name), h("b", {}, count(groups)));
}
