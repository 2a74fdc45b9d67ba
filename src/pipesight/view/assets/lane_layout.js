// Where the lanes lie: a row for each partition, grouped by rank, and one above them for the rank and its program.
//
// Folded, only lanes are left, low enough that all of them are in view.

import { state } from "./state.js";

const GAP = 4;
const PROGRAM = 16;
const ALONE = 20; // of programs without a pipeline
const MOST_LEVELS = 24;
const BETWEEN_RANKS = 10;
const MEMORY = 22;

const MANY = 40; // lanes, from which they are folded at first
const LOWEST = 4; // a folded lane, in pixels, with the gap below it

export const foldsAtFirst = (run) => run.lanes.length > MANY;

/**
 * Rows from top to bottom: {kind, rank, lane, top, height}; and how high they are together. `room`: to fold into.
 * `curves` of memory have rows below the lanes of their partitions, or below the program.
 */
export function layOut(run, room = null, curves = []) {
  if (room !== null && run.lanes.length) return foldInto(run, room);
  const height = laneHeight(run.lanes.length);
  const rows = [];
  let top = GAP;
  let rank = null;
  run.lanes.forEach((lane, index) => {
    if (lane.rank !== rank) {
      if (rank !== null) top += BETWEEN_RANKS;
      rank = lane.rank;
      if (run.payload.ranks > 1 || lane.takes_turns || run.payload.programs.includes(rank))
        top = addProgram(rows, run, rank, top, PROGRAM);
    }
    rows.push({ kind: "lane", rank, lane: index, top, height });
    top += height + GAP;
    top = addMemory(rows, curves, (curve) => curve.rank === rank && curve.partition === lane.partition, index, top);
  });
  if (!run.lanes.length)
    for (const of of run.payload.programs) {
      if (rows.length) top += BETWEEN_RANKS;
      top = addProgram(rows, run, of, top, ALONE);
      top = addMemory(rows, curves, (curve) => curve.rank === of, null, top);
    }
  return { rows, height: top };
}

function foldInto(run, room) {
  const pitch = Math.min(Math.max(Math.floor((room - 2 * GAP) / run.lanes.length), LOWEST), 16);
  const rows = run.lanes.map(({ rank }, lane) => ({
    kind: "lane",
    rank,
    lane,
    top: GAP + lane * pitch,
    height: pitch - (pitch > 6 ? 2 : 1),
  }));
  return { rows, height: 2 * GAP + run.lanes.length * pitch };
}

/** Add the rows of a rank's program, one below the other, as deep as its spans are nested. */
function addProgram(rows, run, rank, top, height) {
  const levels = Math.min(run.payload.levels?.[rank] ?? 1, MOST_LEVELS);
  for (let level = 0; level < levels; level += 1) {
    rows.push({ kind: "program", rank, level, lane: null, top, height });
    top += height + (level === levels - 1 ? GAP : 1);
  }
  return top;
}

function addMemory(rows, curves, belongs, lane, top) {
  curves.forEach((curve, index) => {
    if (!belongs(curve)) return;
    rows.push({ kind: "memory", rank: curve.rank, lane, curve: index, top, height: MEMORY });
    top += MEMORY + GAP;
  });
  return top;
}

function laneHeight(lanes) {
  if (lanes <= 6) return 46;
  if (lanes <= 10) return 36;
  if (lanes <= 20) return 26;
  return lanes <= 40 ? 20 : 14;
}

/** The row at a height, or null. */
export function rowAt(rows, y) {
  return rows.find((row) => row.top <= y && y < row.top + row.height) ?? null;
}

/** The height of blocks by phase, as a share of the row: phases differ by height, too, not only by letter and lines. */
export const HEIGHTS = [0.8, 0.56, 1, 0.4];

export const isDimmed = (block) => state.query !== null && !state.query.blocks.has(block);
