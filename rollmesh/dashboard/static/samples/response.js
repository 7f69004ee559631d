// The response of a sample, token by token. One token is chosen at a time, with the mouse or with a slider.

import { h } from "rollmesh/dom.js";
import { count, short } from "rollmesh/format.js";
import { COLORINGS } from "rollmesh/samples/scales.js";
import { tokensOf } from "rollmesh/samples/tokens.js";

// More tokens than this are drawn when asked for.
const AT_FIRST = 2000;
const FACTS = [
  ["version", "version"],
  ["staleness", "staleness"],
  ["log_probs", "log-prob"],
  ["policy_log_probs", "under the trained policy"],
  ["gap", "gap"],
  ["reference_log_probs", "under the reference"],
  ["advantages", "advantage"],
  ["values", "value"],
];

/** The tokens in colors, and the numbers of the chosen one. */
export function response(sample, coloring, scale) {
  const tokens = tokensOf(sample);
  const text = h("pre", { class: "tokens", tabindex: "0", role: "region", "aria-label": "Response by tokens" });
  const facts = h("dl", { class: "token-facts" });
  const slider = h("input", { type: "range", min: 1, max: tokens.texts.length, value: 1, "aria-label": "Token" });
  const notes = h("p", { class: "note" });
  let spans = [];
  let chosen = null;

  const choose = (place, { scroll = false } = {}) => {
    chosen?.classList.remove("token-chosen");
    if (place >= spans.length) draw(tokens.texts.length);
    chosen = spans[place];
    chosen.classList.add("token-chosen");
    if (scroll) chosen.scrollIntoView({ block: "nearest" });
    slider.value = place + 1;
    const words = factsOf(tokens, place);
    slider.setAttribute("aria-valuetext", words.map(([name, value]) => `${name} ${value}`).join(", "));
    facts.replaceChildren(...words.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  };

  const draw = (number) => {
    spans = tokens.texts.slice(0, number).map((part, place) => span(tokens, part, place, coloring, scale));
    const left = tokens.texts.length - spans.length;
    const rest = left ? tokens.texts.slice(spans.length).join("") + tokens.rest : tokens.rest;
    text.replaceChildren(...spans, left ? "" : h("span", { class: "token-unknown" }, rest));
    notes.replaceChildren(...notesOf(sample, tokens, left, () => choose(Number(slider.value) - 1, draw(tokens.texts.length))));
    notes.hidden = !notes.childNodes.length;
  };

  const under = (event) => {
    const place = event.target.dataset?.place;
    if (place !== undefined) choose(Number(place));
  };
  text.addEventListener("pointerover", under);
  text.addEventListener("click", under);
  slider.addEventListener("input", () => choose(Number(slider.value) - 1, { scroll: true }));
  draw(AT_FIRST);
  const first = tokens.values.mask?.slice(0, spans.length).indexOf(1) ?? 0;
  if (spans.length) choose(Math.max(0, first));
  return h("div", { class: "response" }, text, h("div", { class: "token-box" }, slider, facts), notes);
}

function span(tokens, part, place, coloring, scale) {
  const { values } = tokens;
  const trained = values.mask?.[place] !== 0 && values.keep?.[place] !== 0;
  const { hue, strength, negative } = scale.paint(values[coloring]?.[place] ?? null);
  const begins = coloring === "version" && place > 0 && values.version[place] !== values.version[place - 1];
  const classes = ["token"];
  if (!part) classes.push("token-empty");
  else if (/^\n+$/.test(part)) classes.push("token-newline");
  if (!trained) classes.push("token-untrained");
  if (negative) classes.push("token-negative");
  if (begins) classes.push("token-begins");
  const style = strength ? `--hue: var(--series-${hue}); --strength: ${strength}%` : null;
  return h("span", { class: classes.join(" "), style, "data-place": place, "data-mark": begins ? values.version[place] : null }, part);
}

function factsOf(tokens, place) {
  const { values } = tokens;
  const said = tokens.texts[place] && JSON.stringify(tokens.texts[place]);
  const facts = [["token", `${count(place + 1)} of ${count(tokens.count)}`], ["text", said || "none"]];
  if (values.mask?.[place] === 0) facts.push(["not sampled", "a tool's, not trained"]);
  else if (values.keep?.[place] === 0) facts.push(["left out", "by a correction or a filter"]);
  for (const [name, label] of FACTS) {
    const value = values[name]?.[place];
    if (value !== null && value !== undefined) facts.push([label, typeof value === "number" ? short(value) : value]);
  }
  return facts;
}

function notesOf(sample, tokens, left, showAll) {
  const notes = [];
  if (left) {
    const text = `Show all ${count(tokens.texts.length)} tokens`;
    notes.push(h("button", { class: "plain", type: "button", click: showAll }, text), ` ${count(left)} more. `);
  }
  if (tokens.count > tokens.texts.length)
    notes.push(`Values are kept of the first ${count(tokens.texts.length)} of ${count(tokens.count)} tokens (logging.tokens_per_sample). `);
  if (sample.characters > sample.response.length) notes.push(`The text is cut: it has ${count(sample.characters)} characters.`);
  return notes;
}

/** The legend of a coloring. */
export function legend(coloring, scale) {
  const { label, unit } = COLORINGS[coloring];
  const most = 12;
  const keys = scale.keys.slice(-most).map(([{ hue, strength, negative }, text]) =>
    h(
      "li",
      {},
      h("span", { class: `token-key${negative ? " token-negative" : ""}`, style: `--hue: var(--series-${hue}); --strength: ${strength}%`, "aria-hidden": "true" }, "ab"),
      text,
    ),
  );
  return h("ul", { class: "token-legend", "aria-label": `Colors: ${label}` }, h("li", {}, h("b", {}, label), unit && h("span", {}, unit)), ...keys);
}
