// The timeline: one canvas with a lane for each partition, redrawn whenever something about it changes.

import { AXIS_HEIGHT, drawAxis, drawGrid } from "./axis.js";
import { drawFrame, drawLane } from "./block_drawing.js";
import { Pen } from "./canvas_pen.js";
import { drawPath } from "./critical_path.js";
import { byId } from "./dom.js";
import { foldsAtFirst, layOut, rowAt } from "./lane_layout.js";
import { curvesOf, drawMemory, memoryAt } from "./memory_section.js";
import { Columns } from "./narrow_blocks.js";
import { palette } from "./palette.js";
import { drawRange } from "./range_panel.js";
import { listen, shownStep, state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";
import { drawIdle, drawNonfinite, drawProgram, drawTransfers, drawWindows } from "./timeline_overlays.js";

export const timeline = {
  rows: [], // all of them, from top to bottom
  byLane: [], // those of partitions
  height: 0,
  drawn: { blocks: 0, shapes: 0, crosses: 0, milliseconds: 0, frames: 0 },
};

let lanesPen = null;
let axisPen = null;
let columns = null;
let due = false;

export function startTimeline() {
  lanesPen = new Pen(byId("timeline"));
  axisPen = new Pen(byId("axis"));
  columns = new Columns();
  new ResizeObserver(drawSoon).observe(byId("timeline").parentElement);
  byId("stage").addEventListener("scroll", drawSoon, { passive: true });
  listen("run step fold", () => {
    const { rows, height } = layOut(state.run, isFolded() ? stageRoom() : null, curvesOf(shownStep()));
    timeline.rows = rows;
    timeline.byLane = rows.filter((row) => row.kind === "lane");
    timeline.height = height;
    byId("timeline").style.height = `${height}px`;
  });
  listen("run step view selection range path fold hover search theme", drawSoon);
}

export const isFolded = () => state.fold ?? foldsAtFirst(state.run);

/** The height that rows may have without scrolling: that of the stage at most, as the style sheet has it. */
const stageRoom = () => Math.min(window.innerHeight * 0.62, 720) - AXIS_HEIGHT - 2;

/** Draw at the next frame, once, however often it is requested. */
function drawSoon() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    draw();
  });
}

function draw() {
  const step = shownStep();
  const width = lanesPen.canvas.clientWidth;
  if (!step || !width) return;
  const started = performance.now();
  axisPen.begin(width, AXIS_HEIGHT);
  drawAxis(axisPen, state.view);
  lanesPen.begin(width, timeline.height);
  lanesPen.look(state.view);
  drawGrid(lanesPen, state.view);
  const seen = visibleRows();
  for (const row of seen) if (row.kind === "lane") drawIdle(lanesPen, step, row);
  drawWindows(lanesPen, step, seen);
  for (const row of seen) if (row.kind === "program") drawProgram(lanesPen, step, row);
  for (const row of seen) if (row.kind === "memory") drawMemory(lanesPen, step, row);
  const counts = drawLanes(
    step,
    seen.filter((row) => row.kind === "lane"),
  );
  drawTransfers(lanesPen, step, timeline.byLane);
  const crosses = drawNonfinite(lanesPen, step, timeline.byLane);
  const path = drawPath(lanesPen, step, timeline.byLane);
  drawRange(lanesPen);
  drawFrames(step);
  const milliseconds = performance.now() - started;
  timeline.drawn = { ...counts, crosses, path, milliseconds, frames: timeline.drawn.frames + 1 };
}

function drawLanes(step, rows) {
  columns.begin(lanesPen, rows.length);
  const counts = { blocks: 0, shapes: 0 };
  rows.forEach((row, place) => {
    const { blocks, shapes } = drawLane(lanesPen, step, row, columns, place);
    counts.blocks += blocks;
    counts.shapes += shapes;
  });
  columns.paint(lanesPen, rows);
  return counts;
}

/** The rows in view; others are not drawn. */
function visibleRows() {
  const stage = byId("stage");
  const top = stage.scrollTop - 60;
  const bottom = stage.scrollTop + stage.clientHeight + 60;
  return timeline.rows.filter((row) => row.top + row.height >= top && row.top <= bottom);
}

function drawFrames(step) {
  const { accent, ink } = palette.colours;
  for (const [block, colour, weight] of [
    [state.hovered, ink, 1.5],
    [state.selected, accent, 3],
    [state.focused, ink, 3],
  ]) {
    if (block !== null) drawFrame(lanesPen, step, timeline.byLane[step.lane[block]], block, colour, weight);
  }
}

/** The block at a point of the canvas, or null. */
export function blockAt(x, y) {
  const step = shownStep();
  const row = rowAt(timeline.rows, y);
  if (!step || row?.kind !== "lane") return null;
  const lane = step.lanes[row.lane];
  const time = timeAt(x);
  const slack = 2 / lanesPen.scale;
  let best = null;
  let distance = slack;
  for (
    let place = firstAtOrAfter(lane.reach, time - slack);
    place < lane.from.length && lane.from[place] <= time + slack;
    place += 1
  ) {
    const away = Math.max(lane.from[place] - time, time - lane.to[place], 0);
    if (best === null ? away <= distance : away < distance) [best, distance] = [lane.blocks[place], away];
  }
  return best;
}

/** What else lies at a point: {what: "idle" | "span" | "moment" | "memory", ...}, or null. */
export function placeAt(x, y) {
  const step = shownStep();
  const row = rowAt(timeline.rows, y);
  if (!step || !row) return null;
  const time = timeAt(x);
  const slack = 2 / lanesPen.scale;
  if (row.kind === "program") {
    const { kind, begin, time: lasts } = step.spans;
    const moment =
      row.level === 0 && step.moments.find(([of, at]) => of === row.rank && Math.abs(at - time) <= 2 * slack);
    if (moment) return { what: "moment", rank: row.rank, name: moment[2], values: moment[3], from: moment[1] };
    const place = step
      .spansOf(row.rank, row.level)
      .places.find((at) => begin[at] - slack <= time && time <= begin[at] + lasts[at] + slack);
    if (place === undefined) return null;
    const [from, to] = [begin[place], begin[place] + lasts[place]];
    return { what: "span", rank: row.rank, kind: kind[place], name: step.spanName(place), from, to };
  }
  if (row.kind === "memory") return memoryAt(step, row, time);
  const gap = step.idle[row.lane].find(([from, to]) => from <= time && time <= to);
  return gap ? { what: "idle", lane: row.lane, from: gap[0], to: gap[1], share: gap[2] } : null;
}

export const timeAt = (x) => state.view.from + (x / Math.max(lanesPen.width, 1)) * (state.view.to - state.view.from);

/** The middle of a block on the canvas. */
export function middleOf(block) {
  const step = shownStep();
  const row = timeline.byLane[step.lane[block]];
  const left = Math.max(lanesPen.x(step.from[block]), 0);
  const right = Math.min(lanesPen.x(step.to[block]), lanesPen.width);
  return { x: (left + right) / 2, y: row.top + row.height * 0.7 };
}
