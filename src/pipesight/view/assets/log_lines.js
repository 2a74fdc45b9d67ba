// Log lines: of the open block, of the step, or all.

import { byId, choices, make, marked, put } from "./dom.js";
import { formatCount, listed, plural } from "./format.js";
import { PHASES } from "./phases.js";
import { listen, shownStep, state } from "./state.js";

const MOST = 500;
const LOUD = new Set(["WARNING", "ERROR", "CRITICAL"]);
let scope = null; // at first: the lines of the step that is shown, or all if it has none
let withTasks = false; // whether to show pipesight's own line for each task, too

export function startLog() {
  listen("selection", () => {
    if (state.selected !== null) scope = "block";
    else if (scope === "block") scope = "step";
  });
  listen("run step selection search", showLog);
}

function showLog() {
  const { lines, left_out } = state.run.logs;
  byId("log-section").hidden = !lines.length;
  if (!lines.length) return;
  if (scope === "block" && state.selected === null) scope = "step";
  const kept = lines.map((line, index) => ({ ...line, index })).filter((line) => withTasks || isOwn(line));
  const step = shownStep();
  scope ??= kept.length > 0 && !kept.some((line) => line.step === step?.number) ? "all" : "step";
  const chosen = kept.filter(belongs);
  const seen = state.query ? chosen.filter(({ index }) => state.query.lines.has(index)) : chosen;
  put(byId("log-scope"), ...scopes());
  put(byId("log-tasks"), taskSwitch(lines));
  byId("log-facts").textContent = listed(
    kept.length === 0
      ? "none of the program"
      : `${seen.length < kept.length ? `${formatCount(seen.length)} of ` : ""}${plural(kept.length, "line")}`,
    seen.length > MOST && `the first ${MOST} shown`,
    left_out > 0 && `${plural(left_out, "line")} of the run not in the page`,
  );
  put(
    byId("log"),
    ...(seen.length
      ? seen.slice(0, MOST).map(entry)
      : [
          make(
            "p",
            { class: "soft" },
            kept.length === 0
              ? "No line of the program is in the page."
              : `No line ${state.query ? "matches " : ""}here${scope === "all" ? "." : "; choose \u201call\u201d for those of other steps."}`,
          ),
        ]),
  );
}

/** Whether the program wrote a line; the others are pipesight's, one for each task. */
const isOwn = (line) => line.own !== false || LOUD.has(line.level);

function taskSwitch(lines) {
  if (lines.every(isOwn)) return null;
  return make(
    "button",
    {
      type: "button",
      "aria-pressed": `${withTasks}`,
      title: "a line for each task that a partition starts, written by pipesight",
      onclick: () => {
        withTasks = !withTasks;
        showLog();
        byId("log-tasks").querySelector("button").focus();
      },
    },
    "lines of tasks",
  );
}

function belongs(line) {
  const step = shownStep();
  if (scope === "all" || !step) return true;
  if (line.step !== step.number) return false;
  if (scope === "step") return true;
  const block = state.selected;
  const { rank, partition } = state.run.lanes[step.lane[block]];
  return (
    line.rank === rank &&
    line.partition === partition &&
    line.microbatch === step.microbatch[block] &&
    (line.phase === null || line.phase === PHASES[step.phase[block]])
  );
}

function scopes() {
  const step = shownStep();
  const names = [
    ["all", "all"],
    ["step", step ? `step ${step.number}` : "step"],
    ...(state.selected === null ? [] : [["block", "this block"]]),
  ];
  return choices("log-scope", names, scope, (name) => {
    scope = name;
    showLog();
  });
}

/** Where in the pipeline a line was written. */
export function whereOf({ step, partition, microbatch, phase, layer }) {
  const known = [
    ["step", step],
    ["partition", partition],
    ["micro-batch", microbatch],
    ["", phase],
    ["layer", layer],
  ].filter(([, value]) => value !== null);
  return known.length ? `[${known.map(([name, value]) => `${name} ${value}`.trim()).join(" ")}] ` : "";
}

function entry(line) {
  return make(
    "p",
    { class: `entry ${line.level.toLowerCase()}` },
    make("span", { class: "when" }, line.time === null ? "" : `${(line.time / 1e6).toFixed(3)} s `),
    make("span", { class: "level" }, `${line.level} `),
    make("span", { class: "where" }, marked(whereOf(line), state.query?.pattern)),
    marked(line.text, state.query?.pattern),
  );
}
