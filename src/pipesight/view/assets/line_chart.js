// A statistic of one layer over the steps, as a line, with a cross where a value is not finite.

import { makeSvg } from "./dom.js";
import { formatValue, listed, plural } from "./format.js";
import { shownStep } from "./state.js";
import { isFiniteValue, isNonfinite, valueAt } from "./statistic_series.js";

const HEIGHT = 200;
const LEFT = 56;
const BOTTOM = 22;
const TOP = 14;
const RIGHT = 10;

/** Draw the line of a row; return the drawing, and how many points and crosses it has. */
export function lineChart(series, row, name, width) {
  const values = series.steps.map((_, column) => valueAt(series, row, column));
  const finite = values.filter(isFiniteValue);
  const low = finite.length ? finite.reduce((a, b) => Math.min(a, b)) : 0;
  const high = finite.length ? finite.reduce((a, b) => Math.max(a, b)) : 1;
  const room = high > low ? (high - low) * 0.06 : Math.abs(high) * 0.1 || 1;
  const [first, last] = [series.steps[0], series.steps.at(-1)];
  const x = (step) => LEFT + (width - LEFT - RIGHT) * (last > first ? (step - first) / (last - first) : 0.5);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (value - low + room) / (high - low + 2 * room));
  const crosses = values
    .map((value, column) =>
      isNonfinite(value)
        ? cross(x(series.steps[column]), TOP, `step ${series.steps[column]}: ${formatValue(value)}`)
        : null,
    )
    .filter(Boolean);
  const drawing = makeSvg(
    "svg",
    {
      class: "line-chart",
      viewBox: `0 0 ${width} ${HEIGHT}`,
      width,
      height: HEIGHT,
      role: "img",
      "aria-label": listed(
        name,
        `${series.tensor} ${series.statistic}: ${plural(finite.length, "value")}`,
        `from ${formatValue(low)} to ${formatValue(high)}`,
        `${crosses.length} not finite`,
      ),
    },
    levels(low, high).map((level) => [
      makeSvg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(level), y2: y(level) }),
      makeSvg(
        "text",
        { x: LEFT - 8, y: y(level), "text-anchor": "end", "dominant-baseline": "middle" },
        formatValue(level),
      ),
    ]),
    [...new Set([first, series.steps[Math.floor(series.steps.length / 2)], last])].map((step, index, all) =>
      makeSvg(
        "text",
        {
          x: x(step),
          y: HEIGHT - 5,
          "text-anchor":
            all.length > 1 && index === 0 ? "start" : index === all.length - 1 && all.length > 1 ? "end" : "middle",
        },
        `step ${step}`,
      ),
    ),
    here(series, x),
    makeSvg("path", { class: "line", d: path(values, series.steps, x, y) }),
    values.length <= 60 &&
      values.map(
        (value, column) =>
          isFiniteValue(value) &&
          makeSvg(
            "circle",
            { class: "point", cx: x(series.steps[column]), cy: y(value), r: 2.5 },
            makeSvg("title", {}, `step ${series.steps[column]}: ${formatValue(value)}`),
          ),
      ),
    crosses,
  );
  return { drawing, points: finite.length, crosses: crosses.length };
}

/** Steps without a value, and values that are not finite, interrupt the line. */
function path(values, steps, x, y) {
  let pen = "M";
  let text = "";
  values.forEach((value, column) => {
    if (isFiniteValue(value)) {
      text += `${pen}${x(steps[column]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    } else if (value !== null) pen = "M";
  });
  return text;
}

function here(series, x) {
  const number = shownStep()?.number;
  if (number === undefined || number < series.steps[0] || number > series.steps.at(-1)) return null;
  return makeSvg("line", { class: "here", x1: x(number), x2: x(number), y1: TOP, y2: HEIGHT - BOTTOM });
}

function levels(low, high) {
  if (!(high > low)) return [low];
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const distance = [1, 2, 5, 10].map((digit) => digit * power).find((round) => (high - low) / round <= 4) ?? power * 10;
  const found = [];
  for (let level = Math.ceil(low / distance) * distance; level <= high; level += distance)
    found.push(Math.abs(level) < distance / 1e6 ? 0 : level);
  return found;
}

function cross(x, y, title) {
  return makeSvg(
    "g",
    { class: "cross" },
    makeSvg("path", { d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }),
    makeSvg("title", {}, title),
  );
}
