// The blocks of a step as a table, for screen readers and for copying.

import { byId, make, put, tableHead } from "./dom.js";
import { formatCount, formatShare, formatTime } from "./format.js";
import { PHASES } from "./phases.js";
import { listen, shownStep, state } from "./state.js";

const MOST = 1000;

export function startBlockTable() {
  byId("step-table").addEventListener("toggle", showTable);
  listen("run step", showTable);
}

function showTable() {
  const step = shownStep();
  if (!byId("step-table").open || !step) return; // built when opened: it may be long
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

const row = (name, ...cells) =>
  make(
    "tr",
    {},
    make("th", { scope: "row" }, name),
    cells.map((cell) => make("td", {}, cell)),
  );
