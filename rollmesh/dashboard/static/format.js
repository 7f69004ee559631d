// Numbers, durations and moments in words.

const COUNT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const SHORT = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 4 });
const ROUGH = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 2 });
const MOMENT = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

export const count = (value) => COUNT.format(value);

/** A number with as many digits as its form asks for: `int`, `%`, or digits after the point. */
export function number(value, form) {
  if (value === null || value === undefined) return "–";
  if (form === "int") return COUNT.format(value);
  if (form === "%") return `${(100 * value).toFixed(1)} %`;
  return value.toFixed(Number(form));
}

/** A value of a curve: four significant digits, very small and large ones with an exponent. */
export function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-4 || size >= 1e6) ? value.toExponential(2) : SHORT.format(value);
}

/** A value to compare at a glance: two significant digits. */
export const rough = (value) => ROUGH.format(value);

/** Seconds in two units. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return seconds < 600 ? `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** A moment of Unix time in this reader's zone. */
export const moment = (seconds) => MOMENT.format(new Date(1000 * seconds));

export const plural = (value, word) => `${COUNT.format(value)} ${word}${value === 1 ? "" : "s"}`;
