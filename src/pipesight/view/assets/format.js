// Numbers as people read them.

const MINUS = "\u2212";

/** `formatTime(1234)` is "1.23 ms"; times are microseconds. */
export function formatTime(us) {
  if (us === null || us === undefined || !Number.isFinite(us)) return "\u2013";
  const size = Math.abs(us);
  if (us === 0) return "0";
  if (size < 999.5) return `${significant(us)} \u00b5s`;
  if (size < 999500) return `${significant(us / 1e3)} ms`;
  return `${significant(us / 1e6)} s`;
}

/** `formatShare(0.123)` is "12.3%". */
export function formatShare(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return "\u2013";
  return `${(share * 100).toFixed(1)}%`;
}

/** `formatRoughShare(0.123)` is "12%", and never "0%" unless it is 0. */
export function formatRoughShare(share) {
  if (share > 0 && share < 0.005) return "<1%";
  return `${Math.round(share * 100)}%`;
}

export function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "\u2013";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit ? significant(bytes) : bytes} ${units[unit]}`;
}

/** `formatRate(2370.4)` is "2,370", `formatRate(0.1234)` is "0.123". */
export const formatRate = (rate) => (rate >= 100 ? formatCount(Math.round(rate)) : String(Number(rate.toPrecision(3))));

export const formatCount = (count) => count.toLocaleString("en-US");

/** Parts of a sentence, without the missing ones. */
export const listed = (...parts) => parts.filter(Boolean).join(", ");

export const dotted = (...parts) => parts.filter(Boolean).join(" \u00b7 ");

export const plural = (count, what) => `${formatCount(count)} ${what}${count === 1 ? "" : "s"}`;

/** A value of a statistic: "0.0123", "1.2e-7", "NaN". */
export function formatValue(value) {
  if (value === null || value === undefined) return "\u2013";
  if (typeof value === "string") return { nan: "NaN", inf: "+\u221e", "-inf": `${MINUS}\u221e` }[value] ?? value;
  const size = Math.abs(value);
  if (value === 0) return "0";
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace(/^-/, MINUS);
}

function significant(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2).replace(/^-/, MINUS);
}
