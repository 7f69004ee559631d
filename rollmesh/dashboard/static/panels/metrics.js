// Every metric of the run, for a reader who looks for one.

import { h } from "rollmesh/dom.js";
import { Figure } from "rollmesh/figure.js";

export const title = "All metrics";
export const link = "Metrics";

let chosen = "";
const figure = new Figure();

export function render(root, { axis, metrics }) {
  if (!metrics.some((metric) => metric.metric === chosen)) chosen = metrics[0]?.metric ?? "";
  const select = h(
    "select",
    {
      id: "metric",
      change: () => {
        chosen = select.value;
        show(axis, metrics, meaning);
      },
    },
    ...metrics.map(({ metric }) => h("option", { value: metric, selected: metric === chosen }, metric)),
  );
  const meaning = h("p", { class: "note" });
  root.replaceChildren(h("p", {}, h("label", { for: "metric" }, "Metric "), select), meaning, figure.root);
  show(axis, metrics, meaning);
}

function show(axis, metrics, meaning) {
  const found = metrics.find(({ metric }) => metric === chosen);
  if (!found) return;
  meaning.textContent = found.meaning;
  const curve = { ...found, label: found.metric, rows: "steps", form: "line", noisy: true };
  const chart = { name: "metric", title: found.metric, unit: found.unit, bounds: [], spans: [], curves: [curve] };
  figure.show([{ name: "", axes: { steps: axis }, chart }], { x: "step", smooth: true });
}
