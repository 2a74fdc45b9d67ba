// The range that is selected on the timeline: its edges, and a table of what happened in it.

import { byId, make, put, tableHead } from "./dom.js";
import { dotted, formatCount, formatShare, formatTime, plural } from "./format.js";
import { palette } from "./palette.js";
import { PHASES } from "./phases.js";
import { rangeTotals } from "./range_totals.js";
import { listen, shownStep, state, tell } from "./state.js";
import { KIND_NAMES } from "./timeline_overlays.js";
import { lookAt } from "./zoom.js";

const MOST_ROWS = 256;
const LEAST = 0.5; // microseconds: less is no range

export function startRange() {
  listen("run step range", showRange);
}

/** Select a range of the step, or none. */
export function selectRange(from, to) {
  const step = shownStep();
  const inside = (time) => Math.min(Math.max(time, 0), step.end);
  const [begin, end] = step ? [inside(Math.min(from, to)), inside(Math.max(from, to))] : [0, 0];
  state.range = end - begin >= LEAST ? [begin, end] : null;
  tell("range");
}

export function clearRange() {
  if (state.range === null) return;
  state.range = null;
  tell("range");
}

/** Shade what lies outside the range. */
export function drawRange(pen) {
  if (!state.range) return;
  const { context } = pen;
  const [left, right] = state.range.map((time) => pen.x(time));
  context.fillStyle = palette.dark ? "rgba(0, 0, 0, 0.5)" : "rgba(255, 255, 255, 0.6)";
  context.fillRect(0, 0, Math.max(left, 0), pen.height);
  context.fillRect(right, 0, Math.max(pen.width - right, 0), pen.height);
  context.fillStyle = palette.colours.accent;
  for (const x of [left, right - 1.5]) context.fillRect(x, 0, 1.5, pen.height);
}

function showRange() {
  const step = shownStep();
  const panel = byId("range");
  panel.hidden = !step || !state.range;
  if (panel.hidden) return put(panel);
  const [from, to] = state.range;
  const { lanes, spans } = rangeTotals(step, from, to);
  put(
    panel,
    make(
      "div",
      { class: "bar" },
      make("h3", {}, `Range of ${formatTime(to - from)}`),
      make(
        "p",
        { class: "facts" },
        dotted(`${formatTime(from)} to ${formatTime(to)}`, `${formatShare((to - from) / step.end)} of the step`),
      ),
      make("button", { type: "button", onclick: () => lookAt(from, to) }, "Zoom to it"),
      make(
        "button",
        { type: "button", class: "square", "aria-label": "Close the range", onclick: clearRange },
        "\u2715",
      ),
    ),
    make(
      "div",
      { class: "totals" },
      lanes.length > 0 && laneTable(lanes, to - from),
      spanTable(step, spans, to - from),
    ),
  );
}

function laneTable(lanes, length) {
  const phases = PHASES.map((_, phase) => phase).filter((phase) => lanes.some((row) => row.phases[phase] > 0));
  const turns = lanes.some((row) => row.turns > 0);
  const outside = lanes.some((row) => row.outside > 0);
  const columns = [
    ...phases.map((phase) => [PHASES[phase], (row) => row.phases[phase]]),
    ["busy", (row) => row.busy],
    turns && ["its rank busy elsewhere", (row) => row.turns],
    ["idle", (row) => row.idle],
    outside && ["outside the window", (row) => row.outside],
  ].filter(Boolean);
  const cells = (of, whole) =>
    columns.map(([name, value]) =>
      make(
        "td",
        { class: name === "busy" || name === "idle" ? "number strong" : "number" },
        formatTime(value(of)),
        make("span", { class: "of" }, ` ${formatShare(value(of) / whole)}`),
      ),
    );
  const all = columns.map(([, value]) => lanes.reduce((sum, row) => sum + value(row), 0));
  return table(
    "Partitions, with the share of the range",
    ["partition", ...columns.map(([name]) => name)],
    1,
    lanes.length > 1 &&
      row(
        "all",
        columns.map((_, k) => [all[k], all[k] / (length * lanes.length)]),
      ),
    lanes
      .slice(0, MOST_ROWS)
      .map((of) => make("tr", {}, make("th", { scope: "row" }, state.run.laneName(of.lane)), cells(of, length))),
  );
}

function row(name, values) {
  return make(
    "tr",
    { class: "all" },
    make("th", { scope: "row" }, name),
    values.map(([time, share]) =>
      make("td", { class: "number" }, formatTime(time), make("span", { class: "of" }, ` ${formatShare(share)}`)),
    ),
  );
}

function spanTable(step, spans, length) {
  if (!spans.length) return null;
  const ranks = state.run.payload.ranks > 1;
  return table(
    "Spans, with what is inside them, and the share of the range",
    [...(ranks ? ["rank"] : []), "span", "kind", "spans", "time", "share"],
    ranks ? 3 : 2,
    spans
      .slice(0, MOST_ROWS)
      .map(({ rank, kind, place, count, time }) =>
        make(
          "tr",
          {},
          ranks && make("td", {}, `${rank}`),
          make("th", { scope: "row" }, step.spanName(place)),
          make("td", {}, KIND_NAMES[kind]),
          make("td", { class: "number" }, formatCount(count)),
          make("td", { class: "number" }, formatTime(time)),
          make("td", { class: "number" }, formatShare(time / length)),
        ),
      ),
    spans.length > MOST_ROWS && make("tr", {}, make("td", {}, `and ${plural(spans.length - MOST_ROWS, "more row")}`)),
  );
}

const table = (caption, titles, firstNumber, ...rows) =>
  make(
    "div",
    { class: "scroller" },
    make("table", {}, make("caption", {}, caption), tableHead(titles, firstNumber), make("tbody", {}, rows)),
  );
