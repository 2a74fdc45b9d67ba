// Curves of several runs over the same steps, a line for each run.

import { byId, make, makeSvg, put } from "./dom.js";
import { formatTime, formatValue } from "./format.js";

const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [420, 200, 64, 10, 14, 22];

export function showComparedCurves(curves, marks) {
  byId("curves-section").hidden = !curves.length;
  put(
    byId("curves-runs"),
    marks.map((mark, run) => make("span", { class: `run-line run-${run % 6}` }, mark)),
  );
  put(byId("curves"), ...curves.map((curve) => chart(curve, marks)));
}

function chart({ name, steps, values, time }, marks) {
  const known = values.flat().filter((value) => value !== null);
  const low = known.reduce((a, b) => Math.min(a, b), Infinity);
  const high = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const write = time ? formatTime : formatValue;
  const [first, last] = [steps[0], steps.at(-1)];
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (last > first ? (step - first) / (last - first) : 0.5);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (high > low ? (high - value) / (high - low) : 0.5);
  const ends = (run) => values[run].filter((value) => value !== null);
  const label = marks.map((mark, run) => {
    const own = ends(run);
    return own.length ? `${mark} from ${write(own[0])} to ${write(own.at(-1))}` : `${mark} has none`;
  });
  const levels = known.length ? [...new Set([low, high])] : [];
  return make(
    "figure",
    { class: "curve compared" },
    make("figcaption", {}, make("h3", {}, name)),
    makeSvg(
      "svg",
      {
        class: "line-chart",
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        role: "img",
        "aria-label": `${name}: ${label.join(", ")}`,
      },
      levels.map((level) => [
        makeSvg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(level), y2: y(level) }),
        makeSvg(
          "text",
          { x: LEFT - 8, y: y(level), "text-anchor": "end", "dominant-baseline": "middle" },
          write(level),
        ),
      ]),
      [...new Set([first, last])].map((step, index) =>
        makeSvg("text", { x: x(step), y: HEIGHT - 5, "text-anchor": index ? "end" : "start" }, `step ${step}`),
      ),
      values.map((own, run) => makeSvg("path", { class: `line run-${run % 6}`, d: line(steps, own, x, y) })),
    ),
  );
}

/** Steps that a run does not have do not interrupt its line; it ends where its last step is. */
function line(steps, values, x, y) {
  const points = steps.map((step, k) =>
    values[k] === null ? null : `${x(step).toFixed(1)} ${y(values[k]).toFixed(1)}`,
  );
  const there = points.filter(Boolean);
  return there.length === 1 ? `M${there[0]}h0.1` : there.map((point, k) => `${k ? "L" : "M"}${point}`).join("");
}
