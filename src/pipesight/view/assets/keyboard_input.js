// The keyboard on the timeline: moves from block to block, zooms and pans as the mouse does.

import { togglePath } from "./critical_path.js";
import { byId } from "./dom.js";
import { formatTime } from "./format.js";
import { clearRange, selectRange } from "./range_panel.js";
import { choose, focusBlock } from "./selection.js";
import { shownStep, state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";
import { goToStep } from "./step_slider.js";
import { middleOf, timeline } from "./timeline.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { isWhole, lookAtAll, pan, zoom } from "./zoom.js";

const MOVES = {
  ArrowLeft: () => beside(-1),
  ArrowRight: () => beside(1),
  ArrowUp: () => above(-1),
  ArrowDown: () => above(1),
  "+": () => zoom(1.5, focusPlace()),
  "=": () => zoom(1.5, focusPlace()),
  "-": () => zoom(1 / 1.5, focusPlace()),
  w: () => zoom(1.5, focusPlace()),
  s: () => zoom(1 / 1.5, focusPlace()),
  a: () => pan(-0.2),
  d: () => pan(0.2),
  Home: lookAtAll,
  PageUp: () => goToStep(state.step - 1),
  PageDown: () => goToStep(state.step + 1),
  Enter: () => choose(state.selected === state.focused ? null : state.focused),
  " ": () => choose(state.selected === state.focused ? null : state.focused),
  c: togglePath,
  "[": () => markRange("from"),
  "]": () => markRange("to"),
  Escape: leave,
};
const SHIFTED = {
  ArrowLeft: () => pan(-0.2),
  ArrowRight: () => pan(0.2),
  ArrowUp: () => zoom(1.5, focusPlace()),
  ArrowDown: () => zoom(1 / 1.5, focusPlace()),
};

export function startKeys() {
  const canvas = byId("timeline");
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const move = (event.shiftKey && SHIFTED[event.key]) || MOVES[event.key];
    if (!move || !shownStep()) return;
    event.preventDefault();
    move();
    showFocused();
  });
  canvas.addEventListener("blur", () => {
    focusBlock(null);
    hideTooltip();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || /INPUT|SELECT|TEXTAREA/.test(document.activeElement?.tagName ?? "")) return;
    event.preventDefault();
    byId("search").focus();
  });
}

/** The block before or after in the lane; at first, the first visible one. */
function beside(direction) {
  const step = shownStep();
  if (state.focused === null) return focusBlock(state.selected ?? firstSeen(step));
  const { blocks } = step.lanes[step.lane[state.focused]];
  const next = blocks[blocks.indexOf(state.focused) + direction];
  if (next !== undefined) focusBlock(next);
}

/** The block of a lane above or below that runs at the time, or the nearest. */
function above(direction) {
  const step = shownStep();
  if (state.focused === null) return focusBlock(state.selected ?? firstSeen(step));
  const middle = (step.from[state.focused] + step.to[state.focused]) / 2;
  for (let lane = step.lane[state.focused] + direction; lane >= 0 && lane < step.lanes.length; lane += direction) {
    const { blocks, from, to, reach } = step.lanes[lane];
    if (!blocks.length) continue;
    const place = Math.min(firstAtOrAfter(reach, middle), blocks.length - 1);
    const earlier = Math.max(place - 1, 0);
    const nearer = from[place] > middle && middle - to[earlier] < from[place] - middle ? earlier : place;
    return focusBlock(blocks[nearer]);
  }
}

function firstSeen(step) {
  for (const { blocks, reach } of step.lanes) {
    const place = firstAtOrAfter(reach, state.view.from);
    if (place < blocks.length) return blocks[place];
  }
  return null;
}

/** Begin or end a range at the focused block; the other edge stays or is that of the step. */
function markRange(edge) {
  if (state.focused === null) return;
  const step = shownStep();
  const [from, to] = state.range ?? [0, step.end];
  if (edge === "from") selectRange(step.from[state.focused], Math.max(to, step.to[state.focused]));
  else selectRange(Math.min(from, step.from[state.focused]), step.to[state.focused]);
  if (state.range)
    byId("announce").textContent = `range from ${formatTime(state.range[0])} to ${formatTime(state.range[1])}`;
}

function leave() {
  if (state.selected !== null) choose(null);
  else if (state.range !== null) clearRange();
  else if (!isWhole()) lookAtAll();
  else focusBlock(null);
}

/** Keys zoom where the focus is. */
function focusPlace() {
  if (state.focused === null) return 0.5;
  const step = shownStep();
  const middle = (step.from[state.focused] + step.to[state.focused]) / 2;
  const place = (middle - state.view.from) / (state.view.to - state.view.from);
  return place >= 0 && place <= 1 ? place : 0.5;
}

function showFocused() {
  if (state.focused === null || !timeline.rows.length) return hideTooltip();
  requestAnimationFrame(() => {
    if (state.focused === null) return;
    const canvas = byId("timeline").getBoundingClientRect();
    const { x, y } = middleOf(state.focused);
    showTooltip(state.focused, null, canvas.left + x, canvas.top + y);
  });
}
