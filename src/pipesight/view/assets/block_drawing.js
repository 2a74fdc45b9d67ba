// Blocks of a lane, with their letters, and their layers where there is room.

import { hatching } from "./hatch_pattern.js";
import { HEIGHTS, isDimmed } from "./lane_layout.js";
import { blockColours, palette } from "./palette.js";
import { BACKWARD, LETTERS, RECOMPUTE } from "./phases.js";
import { state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";

/** Draw a lane, narrow blocks into `columns`; return the number of visible blocks, and of shapes drawn. */
export function drawLane(pen, step, row, columns, place) {
  const lane = step.lanes[row.lane];
  const last = firstAtOrAfter(lane.from, pen.to);
  let next = firstAtOrAfter(lane.reach, pen.from);
  const counts = { blocks: last > next ? last - next : 0, shapes: 0 };
  while (next < last) {
    counts.shapes += 1;
    const from = lane.from[next];
    let longest = lane.to[next] - from;
    if (longest >= columns.time) {
      drawBlock(pen, step, row, lane.blocks[next], pen.x(from), longest * pen.scale);
      next += 1;
      continue;
    }
    const column = columns.at(from);
    const end = (column + 1) * columns.time;
    let block = lane.blocks[next];
    for (next += 1; next < last && lane.from[next] < end; next += 1) {
      const time = lane.to[next] - lane.from[next];
      if (time >= columns.time) break;
      if (time > longest) [longest, block] = [time, lane.blocks[next]];
    }
    columns.set(place, column, step, block);
  }
  return counts;
}

function drawBlock(pen, step, row, block, x, width) {
  const { context } = pen;
  const phase = step.phase[block];
  const colours = blockColours(step.microbatch[block], phase);
  const height = Math.round(row.height * HEIGHTS[phase]);
  const top = row.top + row.height - height;
  const left = Math.max(x, -8);
  const right = Math.min(x + width, pen.width + 8);
  const gap = right - left > 6 ? 1 : 0; // keeps neighbours apart
  const dimmed = isDimmed(block);
  if (dimmed) context.globalAlpha = 0.14;
  context.fillStyle = colours.fill;
  context.fillRect(left, top, right - left - gap, height);
  if (right - left >= 5) drawTexture(pen, phase, colours, left, top, right - left - gap, height);
  if (right - left >= 9) drawLabel(pen, step, block, colours, left, top, right - left - gap, height);
  if (dimmed) context.globalAlpha = 1;
  else if (state.query !== null) outline(pen, left, top, right - left - gap, height, palette.colours.accent, 1.5);
}

function drawTexture(pen, phase, colours, left, top, width, height) {
  const { context } = pen;
  if (phase === RECOMPUTE) {
    context.fillStyle = hatching(pen, colours.edge, 6, 1.2);
    context.fillRect(left, top, width, height);
  }
  if (phase !== BACKWARD) {
    context.fillStyle = colours.edge;
    context.fillRect(left, top, width, 2);
  }
}

function drawLabel(pen, step, block, colours, left, top, width, height) {
  const { context } = pen;
  const phase = step.phase[block];
  const number = `${step.microbatch[block]}`;
  const size = height >= 24 ? 13 : Math.max(Math.min(height - 3, 11), 8);
  const open = width >= 150 && height >= 20 && step.firstLayer[block + 1] > step.firstLayer[block];
  if (open && height < 34) return drawLowLayers(pen, step, block, colours, top, height);
  pen.font(size, 600);
  const long = `${LETTERS[phase]}${number}`;
  const label = pen.widthOf(long) + 6 <= width ? long : number;
  if (pen.widthOf(label) + 3 > width || height < 9) return;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const x = Math.min(Math.max(left + width / 2, 14), Math.max(pen.width - 14, 14));
  const y = open ? top + 10 : top + height / 2 + 1;
  if (phase === RECOMPUTE) backLabel(pen, label, x, y, size, colours.fill);
  context.fillStyle = colours.ink;
  context.fillText(label, x, y);
  if (open) drawLayers(pen, step, block, colours, top, height);
}

/** A plain background for letters on hatching. */
function backLabel(pen, label, x, y, size, fill) {
  const width = pen.widthOf(label) + 6;
  pen.context.fillStyle = fill;
  pen.context.fillRect(x - width / 2, y - size / 2 - 2, width, size + 3);
}

/** Draw the layers inside their block, where there is room. */
function drawLayers(pen, step, block, colours, top, height) {
  const { context } = pen;
  const below = top + 20;
  pen.font(10.5, 400);
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const { name, from, to } of step.layersOf(block)) {
    const left = Math.max(pen.x(from), 0);
    const right = Math.min(pen.x(to), pen.width);
    if (right - left < 2) continue;
    context.fillStyle = palette.dark ? "rgba(0, 0, 0, 0.28)" : "rgba(255, 255, 255, 0.34)";
    context.fillRect(left + 1, below, right - left - 2, height - 23);
    if (right - left < 24 || height < 34) continue;
    context.fillStyle = colours.ink;
    pen.write(name, left + 5, below + (height - 23) / 2 + 1, right - left - 9);
  }
}

/** In a low block, names of layers are in one row, without a line above. */
function drawLowLayers(pen, step, block, colours, top, height) {
  const { context } = pen;
  const middle = top + height / 2 + 1;
  context.textBaseline = "middle";
  context.textAlign = "left";
  let first = `${LETTERS[step.phase[block]]}${step.microbatch[block]} `;
  for (const { name, from, to } of step.layersOf(block)) {
    const left = Math.max(pen.x(from), 0);
    const right = Math.min(pen.x(to), pen.width);
    context.fillStyle = colours.edge;
    context.fillRect(left, top, 1.5, height);
    if (right - left < 24) continue;
    pen.font(10.5, 400);
    const shown = pen.fitted(`${first}${name}`, right - left - 12);
    if (!shown) continue;
    context.fillStyle = colours.fill;
    context.fillRect(left + 4, middle - 8, pen.widthOf(shown) + 4, 15);
    context.fillStyle = colours.ink;
    context.fillText(shown, left + 6, middle);
    first = "";
  }
}

/** Draw a frame around a block that is open, focused or under the mouse. */
export function drawFrame(pen, step, row, block, colour, weight) {
  const left = pen.x(step.from[block]);
  const width = Math.max(pen.x(step.to[block]) - left, 3);
  const height = Math.round(row.height * HEIGHTS[step.phase[block]]);
  outline(pen, left, row.top + row.height - height, width, height, colour, weight);
}

function outline(pen, left, top, width, height, colour, weight) {
  const { context } = pen;
  context.strokeStyle = colour;
  context.lineWidth = weight;
  context.strokeRect(left - weight / 2 + 1, top - weight / 2 + 1, Math.max(width + weight - 2, 2), height + weight - 2);
}
