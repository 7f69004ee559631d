// Colors of tokens by one of their values. A color never stands alone: marks, the legend and the details have words.

import { rough } from "rollmesh/format.js";
import { numbers, tokensOf } from "rollmesh/samples/tokens.js";

const SERIES = 8;
const STEPS = 8;
const STRONGEST = 46; // per cent of the hue; text stays readable on it

export const COLORINGS = {
  version: { label: "policy version", unit: "incarnation:version", of: versions },
  staleness: { label: "staleness", unit: "versions", of: (samples) => sequential(samples, "staleness", 2, 1) },
  gap: { label: "log-prob gap", unit: "nats, trained policy minus generator", of: (samples) => diverging(samples, "gap", 1, 5) },
  advantages: { label: "advantage", unit: "", of: (samples) => diverging(samples, "advantages", 3, 5) },
  log_probs: { label: "log-prob", unit: "nats, where it was sampled", of: (samples) => sequential(samples, "log_probs", 4, -1) },
  kl: { label: "log-ratio to the reference", unit: "nats", of: (samples) => diverging(samples, "kl", 6, 2) },
  values: { label: "value", unit: "the critic's estimate", of: (samples) => diverging(samples, "values", 3, 5) },
};

/** The names of the colorings that some sample has values for. */
export const available = (samples) =>
  Object.keys(COLORINGS).filter((name) => samples.some((sample) => tokensOf(sample)?.values[name]?.some((value) => value !== null)));

/** A scale of a sample, or of several that are to be compared: `paint(value)` and `keys`, `[paint, text]` of the legend. */
export const scaleOf = (name, samples) => COLORINGS[name].of(samples);

const paint = (hue, share) => ({ hue, strength: Math.round((STRONGEST * Math.round(share * STEPS)) / STEPS) });
const NOTHING = { hue: 8, strength: 0 };

function versions(samples) {
  const found = [...new Set(samples.flatMap((sample) => tokensOf(sample)?.values.version ?? []))];
  found.sort((one, other) => one.localeCompare(other, undefined, { numeric: true }));
  const of = new Map(found.map((version, place) => [version, { hue: (place % SERIES) + 1, strength: 26 }]));
  return { paint: (value) => of.get(value) ?? NOTHING, keys: found.map((version) => [of.get(version), version]) };
}

/** From 0 on in one direction. */
function sequential(samples, name, hue, sign) {
  const most = bound(samples, name);
  const of = (value) => (value === null ? NOTHING : paint(hue, Math.min(1, Math.max(0, (sign * value) / most))));
  const keys = [0, 0.25, 0.5, 0.75, 1].map((share) => [of(sign * share * most), rough(sign * share * most)]);
  return { paint: of, keys };
}

/** In both directions from 0; negative values that are colored are underlined too. */
function diverging(samples, name, positive, negative) {
  const most = bound(samples, name);
  const of = (value) => {
    if (value === null || value === undefined) return NOTHING;
    const painted = paint(value < 0 ? negative : positive, Math.min(1, Math.abs(value) / most));
    return { ...painted, negative: value < 0 && painted.strength > 0 };
  };
  return { paint: of, keys: [-1, -0.5, 0, 0.5, 1].map((share) => [of(share * most), rough(share * most)]) };
}

/** The size that only one token of a hundred passes: a single odd token does not make all others pale. */
function bound(samples, name) {
  const sizes = samples.flatMap((sample) => numbers(tokensOf(sample)?.values[name]).map(Math.abs)).sort((a, b) => a - b);
  return sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1) || 1;
}
