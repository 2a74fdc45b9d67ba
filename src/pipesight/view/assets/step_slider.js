// The step slider, its buttons, and a strip of all steps above it: the height of a bar is the step's time, its dark part the bubble.

import { Pen } from "./canvas_pen.js";
import { byId } from "./dom.js";
import { formatShare, formatTime, plural } from "./format.js";
import { palette } from "./palette.js";
import { listen, shownStep, state, tell } from "./state.js";
import { wholeView } from "./zoom.js";

const HEIGHT = 26;
const THUMB = 16; // of the slider: the strip is inset by half of it

let pen = null;

export function startStepping() {
  pen = new Pen(byId("steps"));
  byId("step").addEventListener("input", (event) => goToStep(Number(event.target.value)));
  byId("step-previous").addEventListener("click", () => goToStep(state.step - 1));
  byId("step-next").addEventListener("click", () => goToStep(state.step + 1));
  new ResizeObserver(drawStrip).observe(byId("steps"));
  listen("run step", showStep);
  listen("run step theme", drawStrip);
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
    step
      ? `Timeline of step ${step.number}: ${contents(step)}, ${facts(step)}`
      : "Timeline, empty",
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

function drawStrip() {
  const width = byId("steps").clientWidth;
  if (!state.run || !width) return;
  pen.begin(width, HEIGHT);
  const { number, time, bubble, nonfinite } = state.run.steps;
  const { context } = pen;
  const room = width - THUMB;
  const sorted = [...time].sort((a, b) => a - b);
  // One slow step must not hide the others.
  const most = Math.max(sorted[Math.floor(sorted.length * 0.98)] ?? 1, 1) * 1.1;
  const current = shownStep();
  const places = state.run.shown.map((step) => step.number);
  number.forEach((of, index) => {
    const x = THUMB / 2 + room * placeBetween(places, of);
    const bar = Math.min(Math.max((room / Math.max(number.length, 1)) * 0.7, 1), 12);
    const height = Math.max(Math.min(time[index] / most, 1) * (HEIGHT - 6), 1);
    const chosen = current && of === current.number;
    context.fillStyle = chosen ? palette.colours.accent : palette.colours.line;
    context.fillRect(x - bar / 2, HEIGHT - height, bar, height);
    context.fillStyle = chosen ? palette.colours.ink : palette.colours.soft;
    const idle = height * Math.min(bubble[index] ?? 0, 1);
    context.fillRect(x - bar / 2, HEIGHT - idle, bar, idle);
    if (nonfinite.includes(of)) {
      context.fillStyle = palette.colours.alarm;
      context.fillRect(x - 2, 0, 4, 4);
    }
  });
}

/** Where a step is on the slider, from 0 to 1: steps between two shown ones lie between them. */
function placeBetween(places, number) {
  if (places.length < 2) return 0.5;
  let after = places.findIndex((place) => place >= number);
  if (after < 0) after = places.length - 1;
  if (after === 0) return 0;
  const [low, high] = [places[after - 1], places[after]];
  return (after - 1 + Math.min((number - low) / (high - low), 1)) / (places.length - 1);
}
