// The names of the lanes beside the timeline, and the legend below it.

import { byId, make, put } from "./dom.js";
import { formatBytes, formatRoughShare, formatShare } from "./format.js";
import { curvesOf } from "./memory_section.js";
import { blockColours, palette } from "./palette.js";
import { LETTERS, PHASES } from "./phases.js";
import { listen, shownStep, state, tell } from "./state.js";
import { isFolded, timeline } from "./timeline.js";
import { KIND_NAMES, KINDS } from "./timeline_overlays.js";

const LINE = 12; // pixels that a label needs

export function startLabels() {
  listen("run step fold", showLabels);
  byId("fold-toggle").addEventListener("click", () => {
    state.fold = !isFolded();
    tell("fold");
  });
  listen("run step theme", showLegend);
}

function showLabels() {
  const step = shownStep();
  const labels = byId("lane-labels");
  labels.style.height = `${timeline.height}px`;
  const { lanes } = state.run;
  byId("corner").textContent = step?.laneBubbles.some((bubble) => bubble !== null) ? "bubble" : "";
  byId("fold-toggle").hidden = lanes.length < 8;
  byId("fold-toggle").textContent = isFolded() ? "All rows" : "Fold rows";
  put(
    labels,
    ...labelled(timeline.rows).map((row) => {
      const place = { vars: { top: `${row.top}px`, height: `${row.height}px` } };
      if (row.kind === "memory") return memoryLabel(step, row, place);
      return row.kind === "program" ? rankLabel(step, row, place) : laneLabel(step, row, place);
    }),
  );
  const names = [...labels.querySelectorAll(".rank, .layers")].map((name) => name.scrollWidth);
  byId("timeline-section").style.setProperty("--names", `${Math.max(0, ...names) + 14}px`);
}

/** The rows that have room for a label: of low ones, every second or third. */
function labelled(rows) {
  let free = -Infinity;
  return rows.filter((row) => {
    const middle = row.top + row.height / 2;
    if (row.height < LINE && middle - LINE / 2 < free) return false;
    free = middle + LINE / 2;
    return true;
  });
}

/** The name of a rank, and its bubble, where its partitions take turns. */
function rankLabel(step, row, place) {
  const { run } = state;
  if (row.level > 0 && row.level === state.run.payload.background?.[row.rank])
    return make("div", { ...place, class: "lane program" }, make("span", { class: "detail" }, "in the background"));
  if (row.level > 0) return make("div", { ...place, class: "lane program", "aria-hidden": "true" });
  const shared = run.lanes.findIndex((lane) => lane.rank === row.rank && lane.takes_turns);
  if (run.payload.ranks === 1 && shared < 0)
    return make("div", { ...place, class: "lane program" }, make("span", {}, "program"));
  const name = run.rankName(row.rank);
  const [, ...details] = name.split(" \u00b7 ");
  return make(
    "div",
    { ...place, class: "lane program", title: name },
    make(
      "span",
      { class: "rank" },
      make("span", { class: "word" }, "rank "),
      `${row.rank}`,
      details.map((detail) => make("span", { class: "detail" }, ` \u00b7 ${detail}`)),
    ),
    shared >= 0 && bubbleLabel(step, shared),
  );
}

function memoryLabel(step, row, place) {
  const { name, peak } = curvesOf(step)[row.curve];
  const title = `memory of ${name}: at most ${formatBytes(peak)}`;
  const text = `${row.lane === null ? name : "memory"} ${formatBytes(peak)}`;
  return make("div", { ...place, class: "lane program", title }, make("span", { class: "detail" }, text));
}

function bubbleLabel(step, lane) {
  const bubble = step?.laneBubbles[lane] ?? null;
  return make(
    "span",
    { class: "idle number", title: "bubble of this step" },
    bubble === null ? "" : formatRoughShare(bubble),
    make("span", { class: "offscreen" }, bubble === null ? "" : ` bubble, exactly ${formatShare(bubble)}`),
  );
}

function laneLabel(step, row, place) {
  const { partition, device, layers, takes_turns } = state.run.lanes[row.lane];
  const names = layers.map((layer) => state.run.layerName(layer));
  const bad = (step?.marks ?? []).filter(([, lane]) => lane === row.lane);
  return make(
    "div",
    {
      ...place,
      class: row.height >= 34 ? "lane" : "lane low",
      title: [state.run.laneName(row.lane), device, names.join(", ")].filter(Boolean).join("\n"),
    },
    make(
      "span",
      { class: "which" },
      isFolded() && state.run.payload.ranks > 1 && make("span", { class: "word" }, `rank ${row.rank}, `),
      make("span", { class: "word" }, "partition "),
      `${partition}`,
      bad.length > 0 &&
        make(
          "span",
          { class: "alarm", title: bad.map(([name, , , , text]) => `${name}: ${text}`).join("\n") },
          " \u2715",
        ),
    ),
    !takes_turns && bubbleLabel(step, row.lane),
    row.height >= 34 && make("span", { class: "layers" }, [device, span(names)].filter(Boolean).join(" \u00b7 ")),
  );
}

/** `span(["h.0", "h.1", "h.2"])` is "h.0 … 2": the last name without what it shares with the first. */
function span(names) {
  if (names.length < 2) return names.join("");
  const [first, last] = [names[0].split("."), names.at(-1).split(".")];
  let shared = 0;
  while (shared < last.length - 1 && first[shared] === last[shared]) shared += 1;
  return `${names[0]}${names.length > 2 ? " \u2026" : ","} ${last.slice(shared).join(".")}`;
}

function showLegend() {
  const step = shownStep();
  if (!step || !palette.blocks.length) return;
  const phases = [...new Set(step.phase)].sort();
  const kinds = [...new Set(step.spans.kind)].sort((a, b) => a - b);
  const middle = Math.floor((state.run.chunks - 1) / 2);
  const blocks = step.count > 0;
  put(
    byId("legend"),
    ...phases.map((phase) => {
      const { fill, edge, ink } = blockColours(middle, phase);
      return make(
        "li",
        {},
        make(
          "span",
          { class: `swatch ${PHASES[phase]}`, "aria-hidden": "true", vars: { fill, edge, ink } },
          LETTERS[phase],
        ),
        PHASES[phase],
      );
    }),
    blocks &&
      make(
        "li",
        {},
        make("span", {
          class: "ramp",
          "aria-hidden": "true",
          vars: {
            from: blockColours(0, 2).fill,
            middle: blockColours(middle, 2).fill,
            to: blockColours(state.run.chunks - 1, 2).fill,
          },
        }),
        state.run.chunks > 1 ? `micro-batches 0\u2013${state.run.chunks - 1}` : "micro-batch 0",
      ),
    blocks &&
      make(
        "li",
        {},
        make("span", { class: "swatch idle", "aria-hidden": "true" }),
        "idle, with its share of the window",
      ),
    step.transfers.lane.length > 0 &&
      make("li", {}, make("span", { class: "swatch transfer", "aria-hidden": "true" }), "transfer"),
    ...kinds.map((kind) =>
      make("li", {}, make("span", { class: `swatch span ${KINDS[kind]}`, "aria-hidden": "true" }), KIND_NAMES[kind]),
    ),
    step.moments.length > 0 &&
      make("li", {}, make("span", { class: "swatch moment", "aria-hidden": "true" }, "\u25be"), "instant"),
    step.marks.length > 0 &&
      make("li", {}, make("span", { class: "alarm", "aria-hidden": "true" }, "\u2715"), "not finite"),
  );
}
