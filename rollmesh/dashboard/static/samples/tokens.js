// The tokens of a kept sample: their texts and values. docs/tracking.md names the fields of the file.

/** A list with one value per token; an entry `[n, x]` stands for n tokens of the value x. */
export function expand(entries) {
  const values = [];
  for (const entry of entries ?? []) {
    if (Array.isArray(entry)) for (let i = 0; i < entry[0]; i += 1) values.push(entry[1]);
    else values.push(entry);
  }
  return values;
}

const known = new WeakMap();

/** The tokens of a sample, made once: `texts`, `rest` (text after them), and values by name; null without any. */
export function tokensOf(sample) {
  if (!sample.tokens) return null;
  if (!known.has(sample)) known.set(sample, read(sample));
  return known.get(sample);
}

function read(sample) {
  const { count, characters, ...fields } = sample.tokens;
  const letters = Array.from(sample.response); // code points, as the file counts them
  let end = 0;
  const texts = expand(characters).map((length) => letters.slice(end, (end += length)).join(""));
  const values = Object.fromEntries(Object.entries(fields).map(([name, entries]) => [name, expand(entries)]));
  values.gap = difference(values.policy_log_probs, values.log_probs);
  values.kl = difference(values.policy_log_probs, values.reference_log_probs);
  values.version = (sample.versions ?? []).flatMap(([length, incarnation, version]) =>
    Array(Math.max(0, Math.min(length, texts.length))).fill(`${incarnation}:${version}`),
  );
  return { count, texts, rest: letters.slice(end).join(""), values };
}

function difference(first, second) {
  if (!first || !second) return undefined;
  return first.map((value, place) => (value === null || second[place] === null ? null : value - second[place]));
}

/** Numbers of a list without the unknown ones. */
export const numbers = (values) => (values ?? []).filter((value) => typeof value === "number");

/** Mean of a field over the tokens of a sample; null where it is not known. */
export function mean(sample, field, of = (value) => value) {
  const values = numbers(tokensOf(sample)?.values[field]);
  return values.length ? values.reduce((sum, value) => sum + of(value), 0) / values.length : null;
}
