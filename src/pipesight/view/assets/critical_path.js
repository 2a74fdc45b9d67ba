// The critical path: the chain of tasks, transfers and gaps that ends the step, on the timeline and summed up.

import { byId, make, put } from "./dom.js";
import { formatShare, formatTime } from "./format.js";
import { palette } from "./palette.js";
import { listen, shownStep, state, tell } from "./state.js";

const KEYS = {
  transfer: "transfers",
  weight: "weight",
  "data loading": "data_loading",
  checkpoint: "checkpoints",
  gap: "between",
};
const WEIGHT = 3; // pixels

export function startPath() {
  byId("path-toggle").addEventListener("click", togglePath);
  listen("run step path", showPath);
}

/** Show the path, or hide it. */
export function togglePath() {
  state.path = !state.path;
  tell("path");
}

function showPath() {
  const path = shownStep()?.path;
  const button = byId("path-toggle");
  button.hidden = !(state.run?.shown ?? []).some((step) => step.path);
  button.disabled = !path;
  button.title = path ? "" : "The critical path of this step is not on the page.";
  button.setAttribute("aria-pressed", `${state.path && Boolean(path)}`);
  byId("path").hidden = !path || !state.path;
  if (!path || !state.path) return put(byId("path"));
  const whole = path.totals.reduce((sum, [, time]) => sum + time, 0);
  const sorted = [...path.totals].sort((a, b) => b[1] - a[1]);
  const share = (time) => formatShare(time / Math.max(whole, 1));
  put(
    byId("path"),
    make("h3", {}, `Critical path of ${formatTime(whole)}`),
    make(
      "div",
      {
        class: "stack-bar",
        role: "img",
        "aria-label": sorted.map(([kind, time]) => `${kind} ${share(time)}`).join(", "),
      },
      sorted.map(([kind, time]) =>
        make("span", { class: `part ${classOf(kind)}`, vars: { share: time / Math.max(whole, 1) } }),
      ),
    ),
    make(
      "ul",
      { class: "path-totals" },
      sorted.map(([kind, time]) =>
        make(
          "li",
          {},
          make("span", { class: `part key ${classOf(kind)}`, "aria-hidden": "true" }),
          kind,
          make("span", { class: "number" }, `${formatTime(time)} \u00b7 ${share(time)}`),
        ),
      ),
    ),
  );
}

const classOf = (kind) => KEYS[kind] ?? kind;

/** Draw a line along the path: at the foot of the lane in which each part is, and from lane to lane between them. */
export function drawPath(pen, step, rows) {
  if (!state.path || !step.path) return 0;
  const { lane, time } = step.path;
  const { context } = pen;
  const foot = (row) => row.top + row.height - 1;
  let drawn = 0;
  context.beginPath();
  let before = null;
  let now = step.path.begin;
  for (const [place, of] of lane.entries()) {
    const row = rows[of];
    const [left, right] = [now, now + time[place]].map((at) => Math.min(Math.max(pen.x(at), -9), pen.width + 9));
    now += time[place];
    if (row) {
      if (before) context.lineTo(left, foot(row));
      else context.moveTo(left, foot(row));
      context.lineTo(right, foot(row));
      drawn += 1;
    }
    before = row;
  }
  for (const [colour, weight] of [
    [palette.colours.paper, WEIGHT + 2.5],
    [palette.colours.alarm, WEIGHT],
  ]) {
    context.strokeStyle = colour;
    context.lineWidth = weight;
    context.lineJoin = "round";
    context.stroke();
  }
  return drawn;
}
