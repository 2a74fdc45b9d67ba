// What is drawn around the blocks: idle time, transfers, the rest of the program, marks for values that are not finite.

import { formatRoughShare } from "./format.js";
import { hatching } from "./hatch_pattern.js";
import { palette } from "./palette.js";
import { state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";

/** What a span can be: its colour, and its name. */
export const KINDS = [
  "data",
  "optimizer",
  "checkpoint",
  "communication",
  "own",
  "forward",
  "loss",
  "recompute",
  "backward",
  "communication",
  "evaluation",
  "line",
];
export const KIND_NAMES = [
  "data loading",
  "optimizer",
  "checkpoint",
  "communication",
  "your span",
  "forward",
  "loss",
  "recompute",
  "backward",
  "copy between devices",
  "evaluation",
  "other",
];

/** Hatch the bubble of a lane, with its share of the window where there is room. */
export function drawIdle(pen, step, row) {
  const { context } = pen;
  const lines = hatching(pen, palette.colours.hatch, -7);
  const roomy = row.height >= 18;
  pen.font(11);
  context.textAlign = "center";
  context.textBaseline = "middle";
  for (const [from, to, share] of step.idle[row.lane]) {
    if (to < pen.from || from > pen.to) continue;
    const left = Math.max(pen.x(from), 0);
    const right = Math.min(pen.x(to), pen.width);
    if (right - left < 2) continue;
    context.fillStyle = lines;
    context.fillRect(left, row.top, right - left, row.height);
    const text = formatRoughShare(share);
    const width = pen.widthOf(text) + 8;
    if (!roomy || right - left < width + 8) continue;
    const middle = (left + right) / 2;
    context.fillStyle = palette.colours.paper;
    context.fillRect(middle - width / 2, row.top + row.height / 2 - 8, width, 16);
    context.fillStyle = palette.colours.soft;
    context.fillText(text, middle, row.top + row.height / 2 + 0.5);
  }
}

/** Transfers to a lane: thin bars at its top. */
export function drawTransfers(pen, step, rows) {
  const { lane, begin, time } = step.transfers;
  pen.context.fillStyle = palette.colours.accent;
  lane.forEach((to, place) => {
    const left = pen.x(begin[place]);
    const width = Math.max(time[place] * pen.scale, 1.5);
    if (left + width < 0 || left > pen.width || !rows[to]) return;
    pen.context.fillRect(left, rows[to].top - 3, width, 3);
  });
}

/** Spans of the main thread in a row of the program: the first for the outermost, the next for those inside. */
export function drawProgram(pen, step, row) {
  const { context } = pen;
  const { kind, begin, time } = step.spans;
  const { places, reach } = step.spansOf(row.rank, row.level);
  context.fillStyle = palette.colours.faint;
  context.fillRect(0, row.top, pen.width, row.height);
  pen.font(10.5, 600);
  context.textAlign = "left";
  context.textBaseline = "middle";
  let drawn = -Infinity; // the last pixel that has something: of many spans in one, the first is drawn
  for (let index = firstAtOrAfter(reach, pen.from); index < places.length; index += 1) {
    const place = places[index];
    const left = Math.max(pen.x(begin[place]), -4);
    if (left > pen.width) break;
    const right = Math.min(Math.max(pen.x(begin[place] + time[place]), left + 1.5), pen.width + 4);
    if (right < 0 || right < drawn + 0.5) continue;
    drawn = right;
    const found = state.query?.spans.has(place);
    if (state.query && !found) context.globalAlpha = 0.25;
    context.fillStyle = palette.colours[KINDS[kind[place]]];
    context.fillRect(left, row.top, right - left - (right - left > 4 ? 1 : 0), row.height);
    context.fillStyle = palette.colours.paper;
    pen.write(step.spanName(place), left + 5, row.top + row.height / 2, right - left - 8);
    context.globalAlpha = 1;
    if (found) drawOutline(pen, left, row.top, right - left, row.height);
  }
  if (row.level === 0) drawMoments(pen, step, row);
}

function drawOutline(pen, left, top, width, height) {
  pen.context.strokeStyle = palette.colours.accent;
  pen.context.lineWidth = 1.5;
  pen.context.strokeRect(left, top, Math.max(width - 1, 2), height);
}

/** Instants: small triangles that point down at their time. */
function drawMoments(pen, step, row) {
  const { context } = pen;
  for (const [rank, time] of step.moments) {
    const x = pen.x(time);
    if (rank !== row.rank || x < -5 || x > pen.width + 5) continue;
    context.fillStyle = palette.colours.accent;
    context.beginPath();
    context.moveTo(x - 4, row.top - 3);
    context.lineTo(x + 4, row.top - 3);
    context.lineTo(x, row.top + 5);
    context.fill();
  }
}

/** A line where the window of a mini-batch ends, in its lanes: the optimizer and the rest come after it. */
export function drawWindows(pen, step, rows) {
  const { context } = pen;
  context.strokeStyle = palette.colours.soft;
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  context.beginPath();
  for (const [replica, , end] of step.windows) {
    const x = Math.round(pen.x(end)) + 0.5;
    if (x < 0 || x > pen.width) continue;
    for (const row of rows) {
      if (row.kind !== "lane" || step.run.lanes[row.lane].replica !== replica) continue;
      context.moveTo(x, row.top - 4);
      context.lineTo(x, row.top + row.height + 1);
    }
  }
  context.stroke();
  context.setLineDash([]);
}

/** A cross on the block in which a tensor was not finite first, if it is known; return how many. */
export function drawNonfinite(pen, step, rows) {
  const bad = new Set(step.marks.map(([, lane, phase, microbatch]) => `${lane} ${phase} ${microbatch}`));
  let crosses = 0;
  for (const lane of new Set(step.marks.map(([, of]) => of))) {
    const row = rows[lane];
    if (!row) continue;
    const { from, to, reach, blocks } = step.lanes[lane];
    const last = firstAtOrAfter(from, pen.to);
    let free = -Infinity; // crosses must not overlap
    for (let place = firstAtOrAfter(reach, pen.from); place < last; place += 1) {
      const block = blocks[place];
      if (!bad.has(`${lane} ${step.phase[block]} ${step.microbatch[block]}`)) continue;
      const right = Math.min(pen.x(to[place]), pen.width);
      if (right - 12 < free) continue;
      drawCross(pen, right - 8, row.top + Math.min(row.height / 2, 8) - (row.height < 16 ? 0 : -1));
      free = right;
      crosses += 1;
    }
  }
  return crosses;
}

export function drawCross(pen, x, y, size = 4) {
  const { context } = pen;
  context.fillStyle = palette.colours.paper;
  context.beginPath();
  context.arc(x, y, size + 2.5, 0, 7);
  context.fill();
  context.strokeStyle = palette.colours.alarm;
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x - size + 1, y - size + 1);
  context.lineTo(x + size - 1, y + size - 1);
  context.moveTo(x + size - 1, y - size + 1);
  context.lineTo(x - size + 1, y + size - 1);
  context.stroke();
}
