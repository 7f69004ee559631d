// Kept samples: a list to choose from, and the chosen one with its group and its tokens in colors.

import { h } from "rollmesh/dom.js";
import { count, rough, short } from "rollmesh/format.js";
import { legend, response } from "rollmesh/samples/response.js";
import { COLORINGS, available, scaleOf } from "rollmesh/samples/scales.js";
import { mean, tokensOf } from "rollmesh/samples/tokens.js";

export const title = "Samples";
export const link = "Samples";

const ORDERS = {
  latest: { label: "latest first", of: null },
  worst: { label: "lowest reward", of: (sample) => sample.reward },
  best: { label: "highest reward", of: (sample) => -sample.reward },
  advantage: { label: "lowest advantage", of: (sample) => mean(sample, "advantages") },
  gap: { label: "largest log-prob gap", of: (sample) => negated(mean(sample, "gap", Math.abs)) },
};
const ALL = "all";
// The reader's choices stay when the data change.
const choice = { run: 0, step: ALL, order: "latest", coloring: "version", sample: null };

export function render(root, data, page) {
  if (choice.run !== page.selected) Object.assign(choice, { run: page.selected, step: ALL, sample: null });
  const { samples } = data;
  // A sample that is being read stays, also when it is no longer among the latest.
  const present = samples.find((sample) => nameOf(sample) === nameOf(choice.sample));
  const all = choice.sample && !present ? [choice.sample, ...samples] : samples;
  const steps = [...new Set(all.map((sample) => sample.step))].filter((step) => step !== null).sort((a, b) => b - a);
  if (!steps.map(String).includes(choice.step)) choice.step = ALL;
  const shown = ordered(all.filter((sample) => choice.step === ALL || String(sample.step) === choice.step));
  const chosen = shown.find((sample) => nameOf(sample) === nameOf(choice.sample)) ?? shown[0];
  const again = (focus) => {
    render(root, data, page);
    root.querySelector(focus)?.focus();
  };
  const pick = (sample, focus) => {
    choice.sample = sample;
    again(focus);
  };
  const select = (id, label, options) => {
    const change = (event) => {
      choice[id] = event.target.value;
      again(`#sample-${id}`);
    };
    const entries = options.map(([value, text]) => h("option", { value, selected: value === choice[id] }, text));
    return h("label", {}, `${label} `, h("select", { id: `sample-${id}`, change }, ...entries));
  };
  const orders = Object.entries(ORDERS).filter(([, { of }]) => !of || all.some((sample) => of(sample) !== null));
  root.replaceChildren(
    h(
      "div",
      { class: "sample-controls" },
      steps.length > 1 && select("step", "Step", [[ALL, "all that are shown"], ...steps.map((step) => [String(step), count(step)])]),
      select("order", "Order", orders.map(([name, { label }]) => [name, label])),
      ...colorings(all, select),
    ),
    h(
      "div",
      { class: "sample-browser" },
      h("ol", { class: "sample-list", "aria-label": "Samples" }, ...shown.map((sample, place) => entry(sample, place, sample === chosen, pick))),
      detail(chosen, all, pick),
    ),
  );
}

function colorings(samples, select) {
  const names = available(samples);
  if (!names.length) return [];
  if (!names.includes(choice.coloring)) [choice.coloring] = names;
  return [select("coloring", "Color tokens by", names.map((name) => [name, COLORINGS[name].label]))];
}

function entry(sample, place, chosen, pick) {
  const gap = mean(sample, "gap", Math.abs);
  const advantage = mean(sample, "advantages");
  const parts = [
    sample.step === null || sample.step === undefined ? sample.group : `step ${count(sample.step)}`,
    sample.tokens && `${count(sample.tokens.count)} tokens`,
    advantage !== null && `advantage ${rough(advantage)}`,
    gap !== null && `gap ${rough(gap)}`,
  ];
  return h(
    "li",
    {},
    h(
      "button",
      { type: "button", class: "sample-entry", "aria-pressed": String(chosen), "data-entry": place, click: () => pick(sample, `[data-entry="${place}"]`) },
      h("span", { class: "sample-score" }, h("b", {}, short(sample.reward)), h("small", {}, "reward")),
      h("span", { class: "sample-first" }, sample.response.trim().slice(0, 80) || "(empty)"),
      h("small", {}, parts.filter(Boolean).join(" · ")),
    ),
  );
}

function detail(sample, all, pick) {
  const components = Object.entries(sample.components);
  const tokens = tokensOf(sample);
  const scale = tokens && scaleOf(choice.coloring, choice.coloring === "version" ? [sample] : all);
  const facts = [
    sample.finish_reason && `ended by ${sample.finish_reason}`,
    sample.data_source,
    sample.generator,
    sample.temperature !== undefined && `temperature ${short(sample.temperature)}`,
    sample.cost && `score cost ${short(sample.cost)}`,
    sample.cached && "score found earlier",
  ];
  return h(
    "article",
    { class: "card sample", "aria-label": `Sample of ${sample.group}` },
    h(
      "div",
      { class: "sample-head" },
      h("b", { class: "sample-reward" }, `reward ${short(sample.reward)}`),
      components.length > 1 && h("ul", { class: "chips", "aria-label": "Reward components" }, ...components.map(([name, value]) => h("li", {}, name, h("b", {}, short(value))))),
      h("span", {}, facts.filter(Boolean).join(" · ")),
    ),
    sample.members?.length > 1 && group(sample, all, pick),
    text("prompt", sample.prompt),
    tokens?.texts.length
      ? h("div", { class: "text" }, h("span", { class: "text-name" }, "response"), h("div", {}, legend(choice.coloring, scale), response(sample, choice.coloring, scale)))
      : text("response", sample.response),
    sample.ground_truth && text("truth", sample.ground_truth),
    sample.evidence && text("evidence", sample.evidence),
  );
}

/** The rewards of all members of the prompt; those that are kept can be looked at. */
function group(sample, all, pick) {
  const kept = new Map(all.filter((other) => other.step === sample.step && other.group === sample.group).map((other) => [other.member, other]));
  const cell = ([member, reward]) => {
    const words = [h("span", {}, `#${member}`), h("b", {}, reward === null ? "none" : short(reward))];
    if (member === sample.member) return h("li", { class: "member-shown", "aria-current": "true" }, ...words);
    const other = kept.get(member);
    return h("li", {}, other ? h("button", { type: "button", class: "plain", click: () => pick(other, ".sample-reward") }, ...words) : words);
  };
  return h(
    "div",
    { class: "text" },
    h("span", { class: "text-name" }, "group"),
    h("ul", { class: "chips", "aria-label": `Rewards of the ${sample.members.length} responses to this prompt` }, ...sample.members.map(cell)),
  );
}

function ordered(samples) {
  const { of } = ORDERS[choice.order];
  if (!of) return samples;
  const known = new Map(samples.map((sample) => [sample, of(sample) ?? Infinity]));
  return [...samples].sort((one, other) => known.get(one) - known.get(other));
}

function text(name, value) {
  return h("div", { class: "text" }, h("span", { class: "text-name" }, name), h("pre", { tabindex: "0", role: "region", "aria-label": name }, value));
}

const nameOf = (sample) => sample && JSON.stringify([sample.step, sample.group, sample.member]);
const negated = (value) => (value === null ? null : -value);
