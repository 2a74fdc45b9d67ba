// What if there were no stragglers: the replays in figures, and the slowdown of each worker as a heat map.

import { byId, make, put, tableHead } from "./dom.js";
import { formatTime, listed } from "./format.js";
import { listen, state } from "./state.js";

const WORTH = 1.05; // the slowdown from which it is worth saying whose it is
const STRONGEST = 55; // percent of the colour, so that numbers on it can be read

export function startWhatIf() {
  listen("run", () => {
    const found = state.run.payload.what_if;
    byId("what-if-section").hidden = !found;
    if (!found) return;
    byId("what-if-facts").textContent = listed(
      `replayed step ${formatTime(found.replayed)}`,
      `ideal ${formatTime(found.ideal)}`,
      found.reordered !== null && `with the longest micro-batches in the middle ${formatTime(found.reordered)}`,
      found.exchanged !== null && `and exchanged among replicas ${formatTime(found.exchanged)}`,
      `slowdown ${found.slowdown.toFixed(2)}`,
    );
    byId("what-if-verdict").textContent = state.run.payload.verdict.text === found.verdict ? "" : found.verdict;
    const without = [
      ["M_W", found.m_w, "slowest 3% of workers are"],
      ["M_S", found.m_s, "last stage is"],
    ];
    const shares = without
      .filter(([, share]) => share !== null && found.slowdown >= WORTH)
      .map(([name, share, who]) => {
        const figure = share.toFixed(2).replace("-0.00", "0.00").replace("-", "\u2212");
        return `${name} ${figure}: share of the slowdown that goes if the ${who} ideal`;
      });
    put(
      byId("what-if-remarks"),
      [...shares, ...found.remarks].map((remark) => make("li", {}, `${remark[0].toUpperCase()}${remark.slice(1)}.`)),
    );
    put(byId("what-if"), map(found));
  });
}

/** A row per data-parallel rank, a column per stage. */
function map({ dp_ranks, stages, slowdowns, ranks, left }) {
  const most = Math.max(...slowdowns.flat().filter((slowdown) => slowdown !== null), 1.05);
  const caption = left ? `Slowdown by worker; ${left}` : "Slowdown by worker";
  return make(
    "table",
    { class: "workers" },
    make("caption", {}, caption),
    tableHead(["replica", ...stages.map((stage) => `stage ${stage}`)], 1),
    make(
      "tbody",
      {},
      dp_ranks.map((replica, row) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, `${replica}`),
          slowdowns[row].map((slowdown, column) =>
            slowdown === null
              ? make("td", { class: "number" }, "")
              : make(
                  "td",
                  {
                    class: "number",
                    title: `rank ${ranks[row][column]}: ${slowdown.toFixed(3)} times`,
                    vars: { heat: `${Math.round((STRONGEST * Math.max(slowdown - 1, 0)) / (most - 1))}%` },
                  },
                  slowdown.toFixed(2),
                ),
          ),
        ),
      ),
    ),
  );
}
