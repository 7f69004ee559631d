// The curves of all runs, by section.

import { h } from "rollmesh/dom.js";
import { Figure } from "rollmesh/figure.js";

export const title = "";
export const everyRun = true;
export const links = [
  ["learning", "Learning"],
  ["staleness", "Staleness"],
  ["time", "Time"],
];

const SECTIONS = {
  learning: "Learning",
  staleness: "Staleness and its correction",
  time: "Time",
};
const options = { x: "step", smooth: true };
const figures = new Map();
let sections = null;

export function render(root, _data, page) {
  sections ??= begin(root, page);
  const shown = new Set();
  for (const chart of merged(page)) {
    const name = chart[0].chart.name;
    if (!figures.has(name)) {
      figures.set(name, new Figure());
      sections[chart[0].chart.section].append(figures.get(name).root);
    }
    figures.get(name).show(chart, options);
    shown.add(name);
  }
  for (const [name, figure] of figures) figure.root.hidden = !shown.has(name);
  for (const grid of Object.values(sections)) grid.parentElement.hidden = !grid.querySelector("figure:not([hidden])");
}

/** The charts of all runs, each with the runs that have it; shares that add up are shown of one run alone. */
function merged(page) {
  const found = new Map();
  const selected = page.selectedRun;
  for (const run of [selected, ...page.runs.filter((other) => other !== selected)]) {
    const { axes, charts } = run.panels.charts ?? { charts: [] };
    for (const chart of charts) {
      const alone = chart.curves.some((curve) => curve.form === "area");
      if (alone && run !== selected) continue;
      const entry = { name: run.name, axes, chart };
      found.set(chart.name, [...(found.get(chart.name) ?? []), entry]);
    }
  }
  const order = (entry) => page.runs.findIndex((run) => run.name === entry.name);
  return [...found.values()].map((entries) => entries.sort((one, other) => order(one) - order(other)));
}

function begin(root, page) {
  const again = () => render(root, null, page);
  const axis = (value, label) =>
    h(
      "label",
      {},
      h("input", { type: "radio", name: "axis", checked: options.x === value, change: () => ((options.x = value), again()) }),
      label,
    );
  const smooth = h("input", { type: "checkbox", checked: options.smooth, change: () => ((options.smooth = smooth.checked), again()) });
  const grids = Object.fromEntries(Object.keys(SECTIONS).map((name) => [name, h("div", { class: "grid" })]));
  root.replaceChildren(
    h(
      "div",
      { class: "controls" },
      h("fieldset", {}, h("legend", {}, "Curves over"), axis("step", "steps"), axis("seconds", "time")),
      h("label", {}, smooth, "smoothed"),
    ),
    ...Object.entries(SECTIONS).map(([name, heading]) =>
      h("div", { class: "chart-section", id: name }, h("h2", {}, heading), grids[name]),
    ),
  );
  return grids;
}
