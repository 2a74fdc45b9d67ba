// One step: its blocks by lane, sorted by time, and the gaps between them.

import { PHASES } from "./phases.js";

export class Step {
  constructor(run, packed) {
    this.run = run;
    this.number = packed.number;
    this.name = packed.name ?? `${packed.number}`;
    this.end = Math.max(packed.end, 1);
    this.windows = packed.windows; // [replica, begin, end], one for each mini-batch
    this.bubble = packed.bubble;
    this.laneBubbles = packed.lane_bubbles;
    this.transfers = packed.transfers;
    this.spans = packed.spans;
    this.path = packed.path ?? null; // {lane, kind, begin, time, totals}; each part begins where the one before ends
    this.moments = packed.moments ?? []; // [rank, time, name, arguments]
    this.spanRows = new Map();
    this.marks = packed.nonfinite; // [layer's name, lane, phase, micro-batch, text]; null is not known
    this.unpackTasks(packed.tasks);
    this.unpackLayers(packed.layers);
    this.lanes = this.sortIntoLanes();
    this.ranks = new Map(); // the blocks of ranks whose lanes take turns
    this.idle = this.lanes.map((_, lane) => this.gapsOf(lane));
  }

  unpackTasks({ lane, microbatch, phase, begin, time }) {
    this.count = lane.length;
    this.lane = Uint16Array.from(lane);
    this.microbatch = Uint32Array.from(microbatch);
    this.phase = Uint8Array.from(phase);
    this.from = new Float64Array(this.count);
    this.to = new Float64Array(this.count);
    let at = 0; // begins are differences
    for (let block = 0; block < this.count; block += 1) {
      at += begin[block];
      this.from[block] = at;
      this.to[block] = at + time[block];
    }
  }

  /** The spans of a rank that are nested so deep: their places, by begin, and how far those up to each reach. */
  spansOf(rank, level) {
    const key = `${rank}/${level}`;
    if (!this.spanRows.has(key)) {
      const { rank: ranks, level: levels, begin, time } = this.spans;
      const all = Array.from(ranks.keys());
      const places = all.filter((place) => ranks[place] === rank && (levels?.[place] ?? 0) === level);
      places.sort((a, b) => begin[a] - begin[b]);
      let furthest = -Infinity;
      const reach = places.map((place) => (furthest = Math.max(furthest, begin[place] + time[place])));
      this.spanRows.set(key, { places, reach });
    }
    return this.spanRows.get(key);
  }

  spanName(place) {
    return this.run.spanNames[this.spans.name?.[place]] ?? "?";
  }

  unpackLayers(layers) {
    this.hasLayers = layers !== null;
    this.layerRuns = layers ?? { count: [], layer: [], begin: [], time: [] };
    this.firstLayer = new Uint32Array(this.count + 1);
    for (let block = 0; block < this.count; block += 1) {
      this.firstLayer[block + 1] = this.firstLayer[block] + (this.layerRuns.count[block] ?? 0);
    }
  }

  sortIntoLanes() {
    const rows = this.run.lanes.map(() => []);
    for (let block = 0; block < this.count; block += 1) rows[this.lane[block]].push(block);
    return rows.map((row) => this.columnsOf(row));
  }

  columnsOf(row) {
    let furthest = -Infinity;
    const reach = row.map((block) => (furthest = Math.max(furthest, this.to[block]))); // sorted, as `to` need not be
    return {
      blocks: Uint32Array.from(row),
      from: Float64Array.from(row, (block) => this.from[block]),
      to: Float64Array.from(row, (block) => this.to[block]),
      reach: Float64Array.from(reach),
    };
  }

  /** The blocks that keep a lane from being idle: its own, or those of its rank, if that computes for one at a time. */
  workOf(lane) {
    const { rank, takes_turns } = this.run.lanes[lane];
    if (!takes_turns) return this.lanes[lane];
    if (!this.ranks.has(rank)) {
      const own = this.lane.map((of) => this.run.lanes[of].rank === rank);
      const all = Array.from({ length: this.count }, (_, block) => block);
      this.ranks.set(rank, this.columnsOf(all.filter((block) => own[block])));
    }
    return this.ranks.get(rank);
  }

  /** Where a lane waits within the windows of its rank: [from, to, share of the window]. */
  gapsOf(lane) {
    const { from, to, reach } = this.workOf(lane);
    const gaps = [];
    for (const [replica, begin, end] of this.windows) {
      if (replica !== this.run.lanes[lane].replica) continue;
      let at = begin;
      for (let place = firstAtOrAfter(reach, begin); place <= from.length; place += 1) {
        const next = place < from.length ? Math.min(from[place], end) : end;
        if (next > at) gaps.push([at, next, (next - at) / (end - begin)]);
        if (place === from.length || from[place] >= end) break;
        at = Math.max(at, to[place]);
      }
    }
    return gaps;
  }

  /** The layers of a block: [{layer, name, from, to}], in their order. */
  layersOf(block) {
    const { layer, begin, time } = this.layerRuns;
    const found = [];
    for (let place = this.firstLayer[block]; place < this.firstLayer[block + 1]; place += 1) {
      const from = this.from[block] + begin[place];
      found.push({ layer: layer[place], name: this.run.layerName(layer[place]), from, to: from + time[place] });
    }
    return found;
  }

  /** A key for a block that stays the same in a longer payload of the same run. */
  keyOf(block) {
    const { rank, partition } = this.run.lanes[this.lane[block]];
    let same = 0; // of gradient accumulation: the same block of an earlier mini-batch
    for (const other of this.lanes[this.lane[block]].blocks) {
      if (other === block) break;
      if (this.microbatch[other] === this.microbatch[block] && this.phase[other] === this.phase[block]) same += 1;
    }
    return [this.number, rank, partition, this.microbatch[block], this.phase[block], same].join("/");
  }

  blockOf(key) {
    if (key === null) return null;
    const [number, rank, partition] = key.split("/").map(Number);
    const lane = this.run.laneOfPartition.get(`${rank}/${partition}`);
    if (number !== this.number || lane === undefined) return null;
    return this.lanes[lane].blocks.find((block) => this.keyOf(block) === key) ?? null;
  }

  nameOf(block) {
    const where = this.run.laneName(this.lane[block]);
    return `${PHASES[this.phase[block]]} of micro-batch ${this.microbatch[block]} in ${where}`;
  }

  /** The window in which a block lies: its length in microseconds. */
  windowOf(block) {
    const { replica } = this.run.lanes[this.lane[block]];
    const window = this.windows.find(
      ([of, begin, end]) => of === replica && begin <= this.from[block] && this.to[block] <= end,
    );
    return window ? window[2] - window[1] : this.end;
  }
}

/** The first place of a sorted column whose value is at least `value`. */
export function firstAtOrAfter(column, value) {
  let low = 0;
  let high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}
