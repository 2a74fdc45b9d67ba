// Values of one statistic of one tensor: one row per layer, one column per step.

import { state } from "./state.js";

/** The chosen series, or null. */
export function chosenSeries() {
  const groups = state.run?.statistics?.groups ?? [];
  return (
    groups.find(({ tensor, statistic }) => tensor === state.tensor && statistic === state.statistic) ??
    groups[0] ??
    null
  );
}

export const valueAt = (series, row, column) => series.values[row * series.steps.length + column];

export const isFiniteValue = (value) => typeof value === "number";

export const isNonfinite = (value) => typeof value === "string";

export const nameOfRow = (series, row) => state.run.statistics.names[series.layers[row]];

/**
 * How values become places from 0 to 1, or from -1 to 1 where there are both signs; by powers of ten where they span
 * many. A few values far out have the colour of the scale's end, or else all others would look alike.
 */
export function scaleOf(values) {
  const finite = Float64Array.from(values.filter(isFiniteValue)).sort();
  if (!finite.length) return { low: 0, high: 1, kind: "linear", place: () => 0 };
  const [low, high] = [finite[0], finite.at(-1)];
  if (low < 0 && high > 0) {
    const most = quantile(finite.map(Math.abs).sort(), 0.98) || Math.max(-low, high);
    return { low: -most, high: most, kind: "diverging", place: (value) => Math.min(Math.max(value / most, -1), 1) };
  }
  const sizes = finite.map(Math.abs).filter((size) => size > 0);
  sizes.sort();
  const [least, most] = [sizes[0] ?? 0, sizes.at(-1) ?? 0];
  if (least > 0 && most / least > 200) {
    const [from, to] = [Math.log10(least), Math.log10(most)];
    const place = (value) => (value === 0 ? 0 : clamp((Math.log10(Math.abs(value)) - from) / (to - from)));
    return { low: least, high: most, kind: "logarithmic", place };
  }
  const place = (value) => (high > low ? clamp((value - low) / (high - low)) : 0.5);
  return { low, high, kind: "linear", place };
}

const quantile = (sorted, share) => sorted[Math.floor((sorted.length - 1) * share)];
const clamp = (value) => Math.min(Math.max(value, 0), 1);
