// A run, read from the columns of the payload.

import { dotted } from "./format.js";
import { Step } from "./step_model.js";

export class Run {
  constructor(payload) {
    this.payload = payload;
    this.lanes = payload.lanes;
    this.layers = payload.layers;
    this.shown = payload.shown;
    this.steps = payload.steps;
    this.statistics = payload.statistics;
    this.logs = payload.logs;
    this.chunks = payload.chunks;
    this.spanNames = payload.span_names ?? [];
    this.made = new Map();
    this.laneOfPartition = new Map(this.lanes.map((lane, index) => [`${lane.rank}/${lane.partition}`, index]));
  }

  /** The step at a position of the slider, made when first shown. */
  stepAt(place) {
    if (!this.shown.length) return null;
    if (!this.made.has(place)) this.made.set(place, new Step(this, this.shown[place]));
    return this.made.get(place);
  }

  /** The place of the shown step with a number, or of the one nearest to it. */
  placeOf(number) {
    let best = 0;
    this.shown.forEach((step, place) => {
      if (Math.abs(step.number - number) < Math.abs(this.shown[best].number - number)) best = place;
    });
    return best;
  }

  layerName(layer) {
    return this.layers[layer]?.name ?? "?";
  }

  laneName(lane) {
    const { rank, partition, host } = this.lanes[lane];
    if (this.payload.ranks === 1) return `partition ${partition}`;
    return `rank ${rank}${host ? ` on ${host}` : ""}, partition ${partition}`;
  }

  /** Who is idle where a lane is hatched. */
  idleName(lane) {
    const { rank, takes_turns } = this.lanes[lane];
    return takes_turns ? `${this.rankName(rank)}, all its partitions` : this.laneName(lane);
  }

  /** The facts about a rank: {host, replica, takes_turns, ...}; all its lanes have the same. */
  rankFacts(rank) {
    return this.lanes.find((lane) => lane.rank === rank);
  }

  rankName(rank) {
    const { host, replica } = this.rankFacts(rank) ?? {};
    return dotted(`rank ${rank}`, this.payload.replicas > 1 && `replica ${replica}`, host);
  }
}
