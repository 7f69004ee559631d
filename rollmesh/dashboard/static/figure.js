// One chart of the page: caption, legend with the latest values, plot. Those in sight are drawn first.

import { layout, lineStyle, traces } from "rollmesh/curves.js";
import { h, svg } from "rollmesh/dom.js";
import { short } from "rollmesh/format.js";
import { plotly } from "rollmesh/plotly.js";

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };
const SVG_DASHES = { solid: "", dash: "5 3", dot: "1.5 2.5", dashdot: "6 2 1.5 2", longdash: "9 3", longdashdot: "9 2 1.5 2" };

const seen = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => entry.target.figure?.drawIfDue()),
  { rootMargin: "600px" },
);

export class Figure {
  constructor() {
    this.legend = h("ul", { class: "legend" });
    this.caption = h("figcaption");
    this.plot = h("div", { class: "plot", role: "img" });
    this.note = h("p", { class: "note" });
    this.about = h("details", { class: "about" }, h("summary", {}, "?"), this.note);
    this.root = h("figure", { class: "chart" }, this.caption, this.legend, this.plot);
    this.root.figure = this;
    this.due = null;
    seen.observe(this.root);
  }

  /** Shows a chart of one or several runs; see `traces`. */
  show(runs, options) {
    const { chart } = runs[0];
    this.note.textContent = chart.note ?? "";
    this.about.firstChild.setAttribute("aria-label", `About ${chart.title}`);
    this.about.hidden = !chart.note;
    this.caption.replaceChildren(h("span", { class: "chart-title" }, chart.title), h("span", { class: "unit" }, chart.unit), this.about);
    const entries = legend(runs);
    this.legend.replaceChildren(...entries.map((entry) => entry.element));
    this.plot.setAttribute("aria-label", `${chart.title}. Latest: ${entries.map((entry) => entry.text).join("; ")}`);
    this.due = { runs, options };
    const box = this.root.getBoundingClientRect();
    if (box.bottom > -600 && box.top < innerHeight + 600) this.drawIfDue();
  }

  async drawIfDue() {
    if (!this.due || !this.root.isConnected) return;
    const { runs, options } = this.due;
    this.due = null;
    const library = await plotly();
    const fine = matchMedia("(pointer: fine)").matches;
    await library.react(this.plot, traces(runs, options), layout(runs, options, fine), CONFIG);
    this.plot.dataset.drawn = "yes";
  }
}

function legend(runs) {
  const many = runs.length > 1;
  return runs.flatMap((run, place) =>
    run.chart.curves.map((curve, order) => {
      const label = many ? `${run.name}: ${curve.label}` : curve.label;
      const last = run.chart.share ? `${(100 * curve.last).toFixed(1)} %` : short(curve.last);
      const key = swatch(curve, lineStyle(many ? place : order, order));
      return { text: `${label} ${last}`, element: h("li", {}, key, h("span", {}, label), h("b", {}, last)) };
    }),
  );
}

function swatch(curve, { color, dash }) {
  const drawn =
    curve.form === "area"
      ? svg("rect", { x: 2, y: 1, width: 16, height: 8, rx: 2, fill: color, "fill-opacity": 0.6 })
      : svg("line", { x1: 0, y1: 5, x2: 20, y2: 5, stroke: color, "stroke-width": 2, "stroke-dasharray": SVG_DASHES[dash] });
  const point = curve.form === "points" ? svg("circle", { cx: 10, cy: 5, r: 3.2, fill: color }) : null;
  return svg("svg", { viewBox: "0 0 20 10", width: 20, height: 10, "aria-hidden": "true" }, drawn, point);
}
