// What is trained, how far it is, and its key values.

import { h } from "rollmesh/dom.js";
import { count, duration, moment, number } from "rollmesh/format.js";

export const title = "";
export const everyRun = true;

const GLYPHS = { running: "●", finished: "✓", stopped: "■", failed: "✕" };

export function render(root, data, page) {
  const parts = [
    page.runs.length > 1 ? choice(page) : null,
    h("div", { class: "headline" }, h("h1", {}, data.name), state(data.state)),
    data.progress ? progress(data.progress, data.state) : null,
    h("dl", { class: "values" }, ...data.values.map(value)),
    facts(data, page),
  ];
  root.replaceChildren(...parts.filter(Boolean));
}

function state({ kind, text }) {
  const long = text.length > 40;
  return h(
    "div",
    { class: `state state-${kind}${long ? " state-long" : ""}` },
    h("span", { "aria-hidden": "true" }, GLYPHS[kind]),
    ` ${text}`,
  );
}

function progress({ done, planned, began, last, left_s, ended_early }, { kind }) {
  const most = ended_early ? "at most " : "";
  const parts = [planned ? `step ${count(done)} of ${most}${count(planned)}` : `step ${count(done)}`];
  if (ended_early) parts[0] += `, ${ended_early}`;
  if (left_s !== null) parts.push(`about ${duration(left_s)} left`);
  if (began && last) parts.push(`${duration(last - began)} so far`);
  if (kind !== "running" && began && last) parts[parts.length - 1] = `took ${duration(last - began)}`;
  if (began) parts.push(`began ${moment(began)}`);
  const bar = planned
    ? h("progress", { max: planned, value: ended_early ? planned : Math.min(done, planned), "aria-label": "steps trained" })
    : null;
  return h("div", { class: "progress" }, bar, h("p", {}, parts.join(" · ")));
}

function value({ name, value, form, note }) {
  return h("div", { class: "value" }, h("dt", {}, name), h("dd", {}, h("b", {}, number(value, form)), h("small", {}, note)));
}

function facts({ facts, checkpoints }, page) {
  const paths = Object.entries(checkpoints).map(([name, path]) => [
    `${name} checkpoint`,
    page.inFile ? h("a", { href: `${path}/` }, path) : h("code", {}, path),
  ]);
  const all = [...facts.map(({ name, text }) => [name, text]), ...paths];
  return h("dl", { class: "facts" }, ...all.map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", {}, text))));
}

/** Several runs: one is looked at, and their settings differ. */
function choice(page) {
  const options = page.runs.map((run, place) => h("option", { value: place, selected: place === page.selected }, run.name));
  const select = h("select", { id: "run", change: () => page.select(Number(select.value)) }, ...options);
  const differences = page.source.index.differences.map((lines, place) =>
    h(
      "div",
      {},
      h("h3", {}, `${page.runs[place + 1].name} compared with ${page.runs[0].name}`),
      lines.length
        ? h("ul", { class: "differences" }, ...lines.map((line) => h("li", {}, h("code", {}, line))))
        : h("p", {}, "The settings that affect learning are the same."),
    ),
  );
  return h(
    "div",
    { class: "choice" },
    h("p", {}, h("label", { for: "run" }, "Curves are those of all runs. Everything else is of "), select),
    ...differences,
  );
}
