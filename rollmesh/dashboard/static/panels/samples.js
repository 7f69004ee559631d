// Kept samples with their rewards.

import { details, h } from "rollmesh/dom.js";
import { short } from "rollmesh/format.js";

export const title = "Samples";
export const link = "Samples";

const SHOWN = 6;

export function render(root, { samples }) {
  const cards = samples.map(card);
  root.replaceChildren(
    h("div", { class: "samples" }, ...cards.slice(0, SHOWN)),
    ...(cards.length > SHOWN
      ? [details("samples", `${cards.length - SHOWN} more`, false, h("div", { class: "samples" }, ...cards.slice(SHOWN)))]
      : []),
  );
}

function card(sample) {
  const components = Object.entries(sample.components);
  return h(
    "article",
    { class: "card sample" },
    h(
      "p",
      { class: "sample-head" },
      h("span", {}, sample.step === null ? sample.group : `step ${sample.step}`),
      h("b", {}, `reward ${short(sample.reward)}`),
      components.length > 1 ? h("span", {}, components.map(([name, value]) => `${name} ${short(value)}`).join(" · ")) : null,
      sample.finish_reason ? h("span", {}, `ended by ${sample.finish_reason}`) : null,
    ),
    text("prompt", sample.prompt),
    text("response", sample.response),
    sample.ground_truth ? text("truth", sample.ground_truth) : null,
  );
}

function text(name, value) {
  return h("div", { class: "text" }, h("span", { class: "text-name" }, name), h("pre", {}, value));
}
