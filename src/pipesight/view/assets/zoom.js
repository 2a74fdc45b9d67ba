// Zooming and panning: which part of the step is visible.

import { byId } from "./dom.js";
import { shownStep, state, tell } from "./state.js";

const CLOSEST = 2; // microseconds across the timeline
const MARGIN = 0.01; // on both sides of the whole step, so that its edges are visible

export function startZooming() {
  byId("zoom-in").addEventListener("click", () => zoom(1.6));
  byId("zoom-out").addEventListener("click", () => zoom(1 / 1.6));
  byId("zoom-whole").addEventListener("click", lookAtAll);
}

/** All of a step. */
export function wholeView(step) {
  const room = step.end * MARGIN;
  return { from: -room, to: step.end + room };
}

export function isWhole() {
  const step = shownStep();
  if (!step) return true;
  const whole = wholeView(step);
  return state.view.from <= whole.from && state.view.to >= whole.to;
}

/** Show a span of time, clipped to the step. */
export function lookAt(from, to) {
  const step = shownStep();
  if (!step) return;
  const whole = wholeView(step);
  const length = Math.min(Math.max(to - from, CLOSEST), whole.to - whole.from);
  const middle = (from + to) / 2;
  const begin = Math.min(Math.max(middle - length / 2, whole.from), whole.to - length);
  state.view = { from: begin, to: begin + length };
  tell("view");
}

export function lookAtAll() {
  const step = shownStep();
  if (!step) return;
  state.view = wholeView(step);
  tell("view");
}

/** Zoom by a factor, so that the time at `place`, from 0 to 1 across the timeline, stays where it is. */
export function zoom(factor, place = 0.5) {
  const { from, to } = state.view;
  const still = from + (to - from) * place;
  const length = Math.max((to - from) / factor, CLOSEST);
  lookAt(still - length * place, still + length * (1 - place));
}

/** Pan by a share of what is visible. */
export function pan(share) {
  const { from, to } = state.view;
  const shift = (to - from) * share;
  lookAt(from + shift, to + shift);
}

/** Pan just far enough that a block is visible. */
export function reveal(block) {
  const step = shownStep();
  const { from, to } = state.view;
  const [begin, end] = [step.from[block], step.to[block]];
  if (begin >= from && end <= to) return;
  const middle = (begin + end) / 2;
  const length = Math.max(to - from, (end - begin) * 1.2);
  lookAt(middle - length / 2, middle + length / 2);
}
