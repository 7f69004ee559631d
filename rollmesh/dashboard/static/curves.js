// From the data of a chart to the traces and the layout that plotly draws.

import { DASHES, faded, theme } from "rollmesh/theme.js";

const FEW = 24;
const BAND = 0.14;
// A curve with values in fewer of its rows is drawn as points.
const SPARSE = 0.5;
// So many times the largest of the others is an outlier.
const OUTLIER = 5;

/**
 * Traces of one chart.
 *
 * @param runs `{ name, axes, chart }` of each run that has the chart; several are told apart by colour.
 * @param options `{ x: "step" | "seconds", smooth }`.
 */
export function traces(runs, options) {
  const many = runs.length > 1;
  return runs.flatMap((run, place) =>
    run.chart.curves.flatMap((curve, order) => {
      const style = lineStyle(many ? place : order, order);
      const x = run.axes[curve.rows][run.chart.by_time ? "seconds" : options.x];
      return curveTraces(x, curve, style, many ? `${run.name}: ${curve.label}` : curve.label, { ...options, alone: !many });
    }),
  );
}

/** Colour and dash of a curve. */
export function lineStyle(color, dash) {
  const colors = theme().series;
  return { color: colors[color % colors.length], dash: DASHES[dash % DASHES.length] };
}

function curveTraces(x, curve, style, label, options) {
  const name = escaped(label);
  const base = { x, type: "scatter", name, legendgroup: name, hovertemplate: "%{y:.4~g}" };
  if (curve.form === "area") {
    const line = { width: 0.5, color: style.color };
    return [{ ...base, y: curve.y, mode: "lines", stackgroup: "all", line, fillcolor: faded(style.color, 0.55) }];
  }
  if (curve.form === "points") {
    const marker = { size: 7, color: style.color, symbol: "circle" };
    return [{ ...base, y: curve.y, mode: "lines+markers", line: { ...style, width: 1.6 }, marker }];
  }
  const known = curve.y.filter((value) => value !== null).length;
  if (known < SPARSE * x.length) return [sparse(base, curve, style)];
  const smooth = options.smooth && curve.noisy && x.length > FEW;
  const line = { ...style, width: 1.8, shape: curve.form === "step" ? "hv" : "linear" };
  const mode = x.length > FEW ? "lines" : "lines+markers";
  const main = { ...base, y: smooth ? smoothed(curve.y) : curve.y, mode, line, marker: { size: 4, color: style.color } };
  // With the curves of several runs they would hide one another.
  const background = !options.alone ? [] : curve.low ? [band(x, curve, style)] : smooth ? [raw(base, curve, style)] : [];
  return [...background, main];
}

/** A curve that few rows have a value of. */
function sparse(base, curve, style) {
  const known = base.x.map((_, index) => index).filter((index) => curve.y[index] !== null);
  const marker = { size: 5, color: style.color };
  const line = { ...style, width: 1 };
  return { ...base, x: known.map((index) => base.x[index]), y: known.map((index) => curve.y[index]), mode: "lines+markers", line, marker };
}

/** The values themselves, fainter than their moving average. */
function raw(base, curve, style) {
  return { ...base, y: curve.y, mode: "lines", line: { color: faded(style.color, 0.28), width: 1 }, hoverinfo: "skip", hovertemplate: null };
}

/** The range of the values of which each point is the mean. */
function band(x, curve, style) {
  const known = x.map((_, index) => index).filter((index) => curve.low[index] !== null);
  const back = [...known].reverse();
  return {
    x: [...known.map((index) => x[index]), ...back.map((index) => x[index])],
    y: [...known.map((index) => curve.low[index]), ...back.map((index) => curve.high[index])],
    type: "scatter",
    mode: "lines",
    fill: "toself",
    fillcolor: faded(style.color, BAND),
    line: { width: 0 },
    hoverinfo: "skip",
  };
}

/** A centred moving average over a thirtieth of the curve; unknown values stay unknown. */
export function smoothed(values) {
  const half = Math.max(1, Math.round(values.length / 60));
  return values.map((value, index) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, index - half), index + half + 1).filter((other) => other !== null);
    return near.reduce((sum, other) => sum + other, 0) / near.length;
  });
}

/** The layout of a chart in the reader's colours. */
export function layout(runs, options, pointer) {
  const { chart } = runs[0];
  const { text, muted, grid, card, series } = theme();
  const seconds = chart.by_time || options.x === "seconds";
  const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { color: muted, size: 11 }, automargin: true };
  const range = withoutOutliers(runs);
  const share = chart.share ? { rangemode: "tozero", tickformat: "~%" } : { tickformat: "~g" };
  return {
    height: 230,
    margin: { l: 46, r: 10, t: 6, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: text },
    showlegend: false,
    hovermode: "x unified",
    hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: text, size: 12 } },
    dragmode: pointer ? "zoom" : false,
    xaxis: { ...axis, showgrid: false, title: { text: seconds ? "seconds" : "step", font: { size: 11, color: muted }, standoff: 4 } },
    yaxis: { ...axis, ...share, ...(range ? { range } : {}), nticks: 6 },
    shapes: [...chart.spans.map((span) => shade(span, series)), ...chart.bounds.map((bound) => bar(bound, muted))],
    annotations: chart.bounds.map((bound) => ({
      xref: "paper", x: 1, xanchor: "right", y: bound.value, yanchor: "bottom", showarrow: false,
      text: escaped(bound.label), font: { size: 11, color: muted },
    })),
  };
}

function bar(bound, color) {
  const line = { color, width: 1, dash: "dash" };
  return { type: "line", xref: "paper", x0: 0, x1: 1, y0: bound.value, y1: bound.value, line };
}

/** A turn of the learner, or a swap, in the background. */
function shade(span, series) {
  const fillcolor = span.side === "swap" ? faded(series[4], 0.3) : faded(series[0], 0.14);
  return { type: "rect", yref: "paper", x0: span.from, x1: span.to, y0: 0, y1: 1, line: { width: 0 }, fillcolor, layer: "below" };
}

/** The range of the values where a few are many times as large as all others; else null: that of all. */
export function withoutOutliers(runs) {
  const curves = runs.flatMap((run) => run.chart.curves);
  const stacked = curves[0].form === "area";
  const rows = stacked ? [sum(curves)] : curves.map((curve) => curve.y);
  const values = rows.flat().filter((value) => value !== null).sort((one, other) => one - other);
  if (values.length < FEW) return null;
  const high = values[Math.floor(0.98 * (values.length - 1))];
  const low = Math.min(0, values[0]);
  return high > 0 && values.at(-1) > OUTLIER * high ? [low, 1.6 * high] : null;
}

const sum = (curves) => curves[0].y.map((_, index) => curves.reduce((total, curve) => total + (curve.y[index] ?? 0), 0));

/** Plotly reads some tags in its texts: none of ours has any. */
function escaped(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
