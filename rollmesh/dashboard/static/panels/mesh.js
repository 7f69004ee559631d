// The mesh as it is now: generators, reward services, buffer, learner, and what moves between them.

import { details, h, svg, table } from "rollmesh/dom.js";
import { count, plural } from "rollmesh/format.js";

export const title = "Mesh";
export const link = "Mesh";

const STATES = ["working", "waits", "outdated", "starts", "asleep", "silent"];
const WORDS = {
  working: "working",
  waits: "waiting",
  outdated: "weights too old",
  starts: "starting",
  asleep: "asleep",
  silent: "no heartbeat",
};
const GLYPHS = { working: "●", waits: "◐", outdated: "◔", starts: "○", asleep: "☾", silent: "✕" };

export function render(root, mesh) {
  root.replaceChildren(
    h("p", { class: "waits" }, h("b", {}, mesh.trouble ? "No answer: " : "Now: "), mesh.trouble || mesh.waits || "nothing waits"),
    ...(mesh.turns ? [h("p", { class: "note" }, mesh.turns)] : []),
    h(
      "div",
      { class: "mesh" },
      h("div", { class: "node-group" }, generators(mesh.generators), rewards(mesh.rewards)),
      arrow("responses", mesh.generators.tokens_per_s > 0),
      mesh.buffer ? buffer(mesh.buffer, mesh.fronts) : node("Buffer", "does not answer", "silent"),
      arrow("groups", mesh.learner?.phase === "training"),
      h("div", { class: "node-group" }, learner(mesh.learner, mesh.version), ...mesh.models.map((model) => node(model.id, WORDS[model.state], model.state))),
      h("div", { class: "weights-arrow" }, back(), h("span", {}, mesh.version ? `weights of version ${mesh.version}` : "no weights yet")),
    ),
    details("members", "All members and the buffer in words", false, members(mesh), inWords(mesh.buffer)),
  );
}

function generators({ count: number, states, cells, tokens_per_s: speed, members: shown }) {
  const all = shown.length === number;
  return node(
    plural(number, "generator"),
    number ? `${count(speed)} tokens/s` : "none has joined",
    number ? null : "waits",
    h("ul", { class: "states" }, ...states.map(({ state, count: of }) => h("li", {}, glyph(state), ` ${of} ${WORDS[state]}`))),
    all ? null : picture(cells),
    h("ul", { class: "members" }, ...shown.map(generator)),
    all ? null : h("p", { class: "note" }, `${shown.length} of ${number}, those that do not work first`),
  );
}

function generator({ id, state, version, tokens_per_s: speed, waits }) {
  const facts = [version && `version ${version}`, speed !== null && speed !== undefined && `${count(speed)} tokens/s`];
  return h(
    "li",
    {},
    h("span", { class: "member" }, glyph(state), ` ${id}`),
    h("small", {}, [...facts, waits].filter(Boolean).join(" · ") || WORDS[state]),
  );
}

/** Each generator as a cell, in the order of their names. */
function picture(cells) {
  const width = Math.min(40, Math.max(10, Math.ceil(Math.sqrt(cells.length * 2))));
  const rows = Math.ceil(cells.length / width);
  const squares = cells.map((state, place) =>
    svg("rect", { x: (place % width) * 8, y: Math.floor(place / width) * 8, width: 6, height: 6, rx: 1, class: `cell-${STATES[state]}` }),
  );
  return svg("svg", { viewBox: `0 0 ${width * 8} ${rows * 8}`, class: "cells", "aria-hidden": "true" }, ...squares);
}

function rewards({ count: number, states }) {
  if (!number) return null;
  return node(
    plural(number, "reward service"),
    "",
    null,
    h("ul", { class: "states" }, ...states.map(({ state, count: of }) => h("li", {}, glyph(state), ` ${of} ${WORDS[state]}`))),
  );
}

function buffer(found, fronts) {
  const rows = [
    ["prompts waiting", found.pending],
    ["being generated", found.generating],
    ["ready", found.ready],
    ["with the learner", found.leased],
    ["trained, not committed", found.consumed],
  ];
  return node(
    "Buffer",
    `${found.bytes} of responses · ${plural(Math.max(1, fronts.length), "front")}`,
    null,
    h("table", { class: "counts" }, h("tbody", {}, ...rows.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, count(value)))))),
    h("p", { class: "note" }, `${found.groups_per_step} groups to a step, at most ${plural(found.bound, "version")} old`),
  );
}

function learner(found, version) {
  if (!found) return node("Learner", "has not joined", "waits");
  return node(
    "Learner",
    found.phase || WORDS[found.state],
    found.state === "working" ? null : found.state,
    h("p", {}, version ? `version ${version}` : "no version yet", found.tokens_per_s ? ` · ${count(found.tokens_per_s)} tokens/s` : ""),
    found.waits ? h("p", { class: "note" }, found.waits) : null,
  );
}

function node(name, text, state, ...content) {
  return h("div", { class: `card node${state ? ` node-${state}` : ""}` }, h("h3", {}, name), text ? h("p", { class: "node-text" }, text) : null, ...content);
}

function glyph(state) {
  return h("span", { class: `glyph glyph-${state}`, title: WORDS[state], "aria-hidden": "true" }, GLYPHS[state]);
}

function arrow(text, flows) {
  return h(
    "div",
    { class: `arrow${flows ? " flows" : ""}` },
    h("span", {}, text),
    svg("svg", { viewBox: "0 0 60 12", "aria-hidden": "true" }, svg("path", { d: "M0 6H52" }), svg("path", { class: "tip", d: "M50 1 59 6 50 11" })),
  );
}

function back() {
  return svg(
    "svg",
    { viewBox: "0 0 600 26", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { d: "M592 0V18H8V4", "vector-effect": "non-scaling-stroke" }),
    svg("path", { class: "tip", d: "M3 9 8 1 13 9", "vector-effect": "non-scaling-stroke" }),
  );
}

function members(mesh) {
  const every = [...(mesh.learner ? [mesh.learner] : []), ...mesh.generators.members, ...mesh.rewards.members, ...mesh.models, ...mesh.fronts];
  const rows = every.map((member) => [
    member.id,
    WORDS[member.state],
    member.version ?? "",
    member.address,
    `${member.heartbeat_s} s`,
    member.memory,
    member.waits,
  ]);
  return table("Members of the mesh", ["member", "state", "version", "address", "heartbeat", "memory", "waits for"], rows);
}

function inWords(found) {
  return found ? table("The buffer in words", ["buffer", "now"], found.lines.map(({ name, text }) => [name, text])) : null;
}
