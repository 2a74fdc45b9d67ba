// The blocks of a step as a table, for screen readers and for copying.

import { byId, make, put, tableHead } from "./dom.js";
import { formatCount, formatShare, formatTime } from "./format.js";
import { PHASES } from "./phases.js";
import { listen, shownStep, state } from "./state.js";
import { KIND_NAMES } from "./timeline_overlays.js";

const MOST = 1000;

export function startBlockTable() {
  byId("step-table").addEventListener("toggle", showTable);
  listen("run step", showTable);
}

function showTable() {
  const step = shownStep();
  if (!byId("step-table").open || !step) return; // built when opened: it may be long
  if (!state.run.lanes.length) return put(byId("step-table-body"), spanTable(step));
  const lanes = make(
    "table",
    {},
    make("caption", {}, `Partitions in step ${step.number}`),
    tableHead(["partition", "blocks", "computing", "bubble"]),
    make(
      "tbody",
      {},
      step.lanes.map(({ blocks, from, to }, lane) =>
        row(
          state.run.laneName(lane),
          formatCount(blocks.length),
          formatTime(from.reduce((sum, begin, place) => sum + to[place] - begin, 0)),
          formatShare(step.laneBubbles[lane]),
        ),
      ),
    ),
  );
  const order = Array.from({ length: Math.min(step.count, MOST) }, (_, block) => block);
  const blocks = make(
    "table",
    {},
    make(
      "caption",
      {},
      step.count > MOST ? `Its first ${formatCount(MOST)} blocks of ${formatCount(step.count)}` : "Its blocks",
    ),
    tableHead(["partition", "micro-batch", "phase", "begin", "time"]),
    make(
      "tbody",
      {},
      order.map((block) =>
        row(
          state.run.laneName(step.lane[block]),
          `${step.microbatch[block]}`,
          PHASES[step.phase[block]],
          formatTime(step.from[block]),
          formatTime(step.to[block] - step.from[block]),
        ),
      ),
    ),
  );
  put(byId("step-table-body"), lanes, blocks);
}

/** The spans of a program without a pipeline, an inner one after that around it. */
function spanTable(step) {
  const { rank, kind, begin, time, level } = step.spans;
  const places = Array.from(rank.keys()).slice(0, MOST);
  const count = formatCount(rank.length);
  return make(
    "table",
    {},
    make("caption", {}, rank.length > MOST ? `The first ${formatCount(MOST)} spans of ${count}` : "Spans of the step"),
    tableHead(["span", "kind", "rank", "nested", "begin", "time"], 2),
    make(
      "tbody",
      {},
      places.map((place) =>
        row(
          step.spanName(place),
          KIND_NAMES[kind[place]],
          `${rank[place]}`,
          `${level[place]}`,
          formatTime(begin[place]),
          formatTime(time[place]),
        ),
      ),
    ),
  );
}

const row = (name, ...cells) =>
  make(
    "tr",
    {},
    make("th", { scope: "row" }, name),
    cells.map((cell) => make("td", {}, cell)),
  );
