// Sets up the page, and shows a run in it, or a longer payload of the same run.

import { startBlock } from "./block_panel.js";
import { startBlockTable } from "./block_table.js";
import { startPath } from "./critical_path.js";
import { startCurves } from "./curves_section.js";
import { byId } from "./dom.js";
import { startFindings } from "./findings.js";
import { startKeys } from "./keyboard_input.js";
import { startLabels } from "./lane_labels.js";
import { startLayers } from "./layer_table.js";
import { showLive, startLive } from "./live_updates.js";
import { startLog } from "./log_lines.js";
import { startLosses } from "./lost_time.js";
import { startMemory } from "./memory_section.js";
import { startNames, startTimers } from "./span_table.js";
import "./palette.js";
import { unpackPayload } from "./payload.js";
import { startPerfetto } from "./perfetto.js";
import { startPointing } from "./pointer_input.js";
import { startRange } from "./range_panel.js";
import { startRankTables } from "./rank_tables.js";
import { Run } from "./run_model.js";
import { startSearching } from "./search.js";
import { shownStep, state, tell } from "./state.js";
import { startStatistics, statisticsDrawn } from "./statistics_section.js";
import { openLink, startLinks } from "./step_links.js";
import { startStepping } from "./step_slider.js";
import { startStrip } from "./step_strip.js";
import { startTheme } from "./theme.js";
import { isFolded, startTimeline, timeline } from "./timeline.js";
import { startSummary } from "./verdict.js";
import { startWhatIf } from "./what_if.js";
import { isWhole, startZooming, wholeView } from "./zoom.js";

byId("incomplete").remove(); // the page loaded completely

/** Show a payload; keep the step, zoom and selection of the reader if they still exist. */
function update(payload) {
  const before = state.run;
  const step = before ? shownStep() : null;
  const atEnd = step !== null && state.step === before.shown.length - 1 && before.shown.length > 1;
  const whole = isWhole();
  const selected = step !== null && state.selected !== null ? step.keyOf(state.selected) : null;
  state.run = new Run(payload);
  state.hovered = state.focused = null;
  if (!step) state.step = payload.start;
  else state.step = atEnd ? payload.shown.length - 1 : state.run.placeOf(step.number);
  const now = shownStep();
  if (before && before.lanes.length !== state.run.lanes.length) state.fold = null;
  state.selected = now?.blockOf(selected) ?? null;
  if (now?.number !== step?.number) state.range = null;
  if (now && (whole || !step)) state.view = wholeView(now);
  const nothing = payload.live ? "Waiting for the first step." : "This run has no pipeline tasks to draw.";
  notify(payload.shown.length || payload.what_if ? "" : nothing);
  showLive(payload.live);
  tell("run");
  tell("selection");
  if (!before) openLink();
}

/** Say what is missing, if anything, and show the page. */
function notify(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
  byId("main").classList.remove("waiting");
}

/** Facts about what is shown, for tests and the curious. */
function inspect() {
  const step = shownStep();
  return {
    revision: state.run?.payload.revision ?? null,
    live: byId("live").hidden ? null : byId("live").textContent,
    steps: state.run?.shown.map(({ number }) => number) ?? [],
    step: step?.number ?? null,
    blocks: step?.count ?? 0,
    spans: step?.spans.rank.map((_, place) => step.spanName(place)) ?? [],
    bubble: step?.bubble ?? null,
    lanes:
      step?.lanes.map(({ blocks }, lane) => ({
        name: state.run.laneName(lane),
        blocks: blocks.length,
        bubble: step.laneBubbles[lane],
        idle: step.idle[lane],
      })) ?? [],
    view: { ...state.view, end: step?.end ?? null },
    drawn: { ...timeline.drawn },
    folded: state.run ? isFolded() : false,
    rows: timeline.rows.map((row) => ({ ...row })),
    selected:
      step && state.selected !== null
        ? { key: step.keyOf(state.selected), layers: step.layersOf(state.selected) }
        : null,
    range: state.range,
    path: state.path && step?.path ? step.path : null,
    focused: step && state.focused !== null ? step.keyOf(state.focused) : null,
    found: state.query
      ? {
          blocks: state.query.blocks.size,
          spans: state.query.spans.size,
          layers: state.query.layers.size,
          lines: state.query.lines.size,
        }
      : null,
    statistics: { ...statisticsDrawn },
  };
}

for (const start of [
  startTimeline,
  startLabels,
  startStepping,
  startStrip,
  startSummary,
  startFindings,
  startWhatIf,
  startRankTables,
  startNames,
  startTimers,
  startSearching,
  startPath,
  startRange,
  startBlock,
  startBlockTable,
  startLosses,
  startLayers,
  startCurves,
  startMemory,
  startStatistics,
  startLog,
  startLinks,
  startPointing,
  startKeys,
  startZooming,
  startPerfetto,
  startTheme,
])
  start();
window.pipesight = Object.freeze({ update, inspect });
const payload = await unpackPayload();
if (payload) update(payload);
else notify("Waiting for the run.");
startLive((fresh) => fresh.revision !== state.run?.payload.revision && update(fresh));
