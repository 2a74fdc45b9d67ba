// The step slider and its buttons.

import { byId } from "./dom.js";
import { formatShare, formatTime, plural } from "./format.js";
import { listen, shownStep, state, tell } from "./state.js";
import { wholeView } from "./zoom.js";

export function startStepping() {
  byId("step").addEventListener("input", (event) => goToStep(Number(event.target.value)));
  byId("step-previous").addEventListener("click", () => goToStep(state.step - 1));
  byId("step-next").addEventListener("click", () => goToStep(state.step + 1));
  listen("run step", showStep);
}

/** Show another step: all of it if all of the last one was visible, else the same part. */
export function goToStep(place) {
  const to = Math.min(Math.max(place, 0), state.run.shown.length - 1);
  if (to === state.step || !state.run.shown.length) return;
  const before = wholeView(shownStep());
  const whole = state.view.from <= before.from && state.view.to >= before.to;
  const selected = state.selected === null ? null : shownStep().keyOf(state.selected);
  state.step = to;
  const step = shownStep();
  state.hovered = state.focused = state.range = null;
  state.selected = selected === null ? null : step.blockOf(selected.replace(/^[^/]*/, step.number));
  const room = wholeView(step);
  if (whole || state.view.from >= room.to) state.view = room;
  tell("step");
  tell("selection");
}

function showStep() {
  const slider = byId("step");
  const step = shownStep();
  slider.max = Math.max(state.run.shown.length - 1, 0);
  slider.value = state.step;
  slider.disabled = state.run.shown.length < 2;
  byId("step-previous").disabled = state.step === 0;
  byId("step-next").disabled = state.step >= state.run.shown.length - 1;
  byId("step-number").textContent = step?.name ?? "\u2013";
  byId("step-facts").textContent = step ? facts(step) : "";
  slider.setAttribute("aria-valuetext", step ? `step ${step.number}, ${facts(step)}` : "no step");
  byId("timeline").setAttribute(
    "aria-label",
    step ? `Timeline of step ${step.number}: ${contents(step)}, ${facts(step)}` : "Timeline, empty",
  );
}

function contents(step) {
  if (!step.lanes.length) return plural(step.spans.rank.length, "span");
  return `${plural(step.count, "block")} in ${plural(step.lanes.length, "partition")}`;
}

function facts(step) {
  if (!state.run.lanes.length) return formatTime(step.end);
  const bubble = step.bubble === null ? "no backward" : `bubble ${formatShare(step.bubble)}`;
  return `${formatTime(step.end)} \u00b7 ${bubble}`;
}
