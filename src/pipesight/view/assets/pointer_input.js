// The mouse and fingers on the timeline: hover, click, drag, wheel, pinch.

import { byId } from "./dom.js";
import { selectRange } from "./range_panel.js";
import { choose, hover } from "./selection.js";
import { state } from "./state.js";
import { blockAt, placeAt, timeAt } from "./timeline.js";
import { hideTooltip, showTooltip } from "./tooltip.js";
import { isWhole, lookAt, zoom } from "./zoom.js";

const CLICK = 4; // pixels: a longer move is a drag
const pointers = new Map(); // pointers that are down, by id
let grip = null; // the view and the pointers when the drag began
let anchor = null; // the time at which a range began

export function startPointing() {
  const canvas = byId("timeline");
  canvas.addEventListener("wheel", wheel, { passive: false });
  canvas.addEventListener("pointerdown", down);
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", up);
  canvas.addEventListener("pointercancel", drop);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("dblclick", closer);
}

function wheel(event) {
  const sideways = event.shiftKey
    ? event.deltaX || event.deltaY
    : Math.abs(event.deltaX) > Math.abs(event.deltaY)
      ? event.deltaX
      : 0;
  const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 : 1;
  if (sideways) {
    event.preventDefault();
    const { from, to } = state.view;
    const shift = ((to - from) * sideways * lines) / canvasWidth();
    lookAt(from + shift, to + shift);
    return;
  }
  if (event.deltaY > 0 && isWhole()) return; // already zoomed out: let the page scroll
  event.preventDefault();
  zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.002)), event.offsetX / canvasWidth());
}

function down(event) {
  if (event.button !== 0) return;
  byId("timeline").setPointerCapture(event.pointerId);
  pointers.set(event.pointerId, event);
  anchor = event.shiftKey ? timeAt(event.offsetX) : null;
  hold();
  hideTooltip();
}

/** Remember what lies under the fingers, so that it stays there. */
function hold() {
  const places = [...pointers.values()].map((event) => event.offsetX);
  grip = places.length ? { view: { ...state.view }, places, moved: grip?.moved ?? false } : null;
}

function move(event) {
  if (!pointers.has(event.pointerId) || !grip) {
    point(event);
    return;
  }
  pointers.set(event.pointerId, event);
  const places = [...pointers.values()].map((pointer) => pointer.offsetX);
  if (!grip.moved && places.length === 1 && Math.abs(places[0] - grip.places[0]) < CLICK) return;
  grip.moved = true;
  if (anchor !== null) return selectRange(anchor, timeAt(places[0]));
  byId("timeline").classList.add("dragging");
  const { from, to } = grip.view;
  const scale = (to - from) / canvasWidth();
  if (places.length === 1) {
    const shift = (grip.places[0] - places[0]) * scale;
    lookAt(from + shift, to + shift);
    return;
  }
  const [a, b] = grip.places.map((x) => from + x * scale); // the times under two fingers
  const length = ((b - a) / nonzero(places[1] - places[0])) * canvasWidth();
  if (!(length > 0)) return;
  const begin = a - (places[0] / canvasWidth()) * length;
  lookAt(begin, begin + length);
}

function up(event) {
  const clicked = grip && !grip.moved && pointers.size === 1;
  drop(event);
  if (!clicked) return;
  const block = blockAt(event.offsetX, event.offsetY);
  choose(block === state.selected ? null : block);
}

function drop(event) {
  pointers.delete(event.pointerId);
  if (pointers.size) hold();
  else {
    grip = null;
    byId("timeline").classList.remove("dragging");
  }
}

function leave(event) {
  if (event.pointerType !== "mouse" || pointers.size) return;
  hover(null);
  hideTooltip();
}

function point(event) {
  if (event.pointerType === "touch") return;
  const block = blockAt(event.offsetX, event.offsetY);
  byId("timeline").classList.toggle("over-block", block !== null);
  hover(block);
  showTooltip(block, block === null ? placeAt(event.offsetX, event.offsetY) : null, event.clientX, event.clientY);
}

/** A double click fills the timeline with a block and its neighbours. */
function closer(event) {
  const block = blockAt(event.offsetX, event.offsetY);
  if (block === null) return;
  const step = state.run.stepAt(state.step);
  const [from, to] = [step.from[block], step.to[block]];
  lookAt(from - (to - from) * 0.25, to + (to - from) * 0.25);
  choose(block);
}

const canvasWidth = () => Math.max(byId("timeline").clientWidth, 1);
const nonzero = (value) => (Math.abs(value) < 1 ? Math.sign(value) || 1 : value);
