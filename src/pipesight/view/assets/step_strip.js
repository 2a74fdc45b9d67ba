// All steps on one axis, above the slider: the height of a bar is the step's time, its dark part the bubble.
//
// Where several steps share a bar, it is that of the slowest. The slowest of all do not make the others flat: a bar that
// would be higher than the strip ends in a cap.

import { Pen } from "./canvas_pen.js";
import { byId, make } from "./dom.js";
import { dotted, formatShare, formatTime, plural } from "./format.js";
import { palette } from "./palette.js";
import { listen, shownStep, state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";
import { hideTooltip, showTooltipWith } from "./tooltip.js";

const HEIGHT = 38;
const HEADROOM = 5; // for caps and dots
const THUMB = 16; // of the slider: the strip is inset by half of it

let pen = null;
let known = { run: null, width: 0, bars: [], most: 1 };

export function startStrip() {
  pen = new Pen(byId("steps"));
  new ResizeObserver(drawStrip).observe(byId("steps"));
  listen("run step theme", drawStrip);
  byId("step").addEventListener("pointermove", point);
  byId("step").addEventListener("pointerleave", hideTooltip);
}

/** Where a step is on the slider, from 0 to 1: steps between two shown ones lie between them. */
export function placeBetween(shown, number) {
  if (shown.length < 2) return 0.5;
  const after = Math.min(firstAtOrAfter(shown, number), shown.length - 1);
  if (after === 0) return 0;
  const [low, high] = [shown[after - 1], shown[after]];
  return (after - 1 + Math.min((number - low) / (high - low), 1)) / (shown.length - 1);
}

/** Put steps into bars: {x, width, step, steps, bad}, where `step` is the place of the slowest in the columns. */
export function barsOf({ number, time, nonfinite }, shown, room) {
  const width = Math.min(Math.max((room / Math.max(number.length, 1)) * 0.7, 1), 12);
  const bad = new Set(nonfinite);
  const bars = [];
  number.forEach((of, step) => {
    const x = placeBetween(shown, of) * room;
    const last = bars.at(-1);
    if (last && x - last.x < 1) {
      if (time[step] > time[last.step]) last.step = step;
      last.steps += 1;
      last.bad ||= bad.has(of);
    } else bars.push({ x, width, step, steps: 1, bad: bad.has(of) });
  });
  return bars;
}

/** The time at which a bar reaches the top: that of nearly all steps fits. */
export function mostOf(time) {
  const sorted = [...time].sort((a, b) => a - b);
  const middle = sorted[sorted.length >> 1] ?? 1;
  return Math.max(Math.min(sorted.at(-1) ?? 1, 3 * middle), 1);
}

function drawStrip() {
  const width = byId("steps").clientWidth;
  if (!state.run || !width) return;
  const { steps, shown } = state.run;
  if (known.run !== state.run || known.width !== width) {
    const numbers = shown.map((step) => step.number);
    known = { run: state.run, width, bars: barsOf(steps, numbers, width - THUMB), most: mostOf(steps.time) };
  }
  pen.begin(width, HEIGHT);
  const { context } = pen;
  const current = steps.number.indexOf(shownStep()?.number);
  for (const { x: at, width: bar, step, bad } of known.bars) {
    const x = THUMB / 2 + at;
    const share = steps.time[step] / known.most;
    const height = Math.max(Math.min(share, 1) * (HEIGHT - HEADROOM), 1);
    context.fillStyle = step === current ? palette.colours.accent : palette.colours.line;
    context.fillRect(x - bar / 2, HEIGHT - height, bar, height);
    context.fillStyle = step === current ? palette.colours.ink : palette.colours.soft;
    const idle = height * Math.min(steps.bubble[step] ?? 0, 1);
    context.fillRect(x - bar / 2, HEIGHT - idle, bar, idle);
    if (share > 1.001) {
      context.fillStyle = palette.colours.accent;
      context.fillRect(x - Math.max(bar, 2) / 2, HEADROOM - 4, Math.max(bar, 2), 3);
    }
    if (bad) {
      context.fillStyle = palette.colours.alarm;
      context.fillRect(x - 2, 0, 4, 4);
    }
  }
}

/** What a click at a place of the strip opens, in a tooltip. */
function point(event) {
  if (event.pointerType === "touch" || event.buttons || !known.bars.length) return hideTooltip();
  const at = event.offsetX - THUMB / 2;
  const bar = known.bars.reduce((best, other) => (Math.abs(other.x - at) < Math.abs(best.x - at) ? other : best));
  const { number, time, bubble } = state.run.steps;
  const there = state.run.shown.some((step) => step.number === number[bar.step]);
  showTooltipWith(
    [
      make("strong", {}, `Step ${number[bar.step]}`),
      bar.steps > 1 && make("p", {}, `the slowest of ${plural(bar.steps, "step")} here`),
      make(
        "p",
        { class: "number" },
        dotted(formatTime(time[bar.step]), bubble[bar.step] !== null && `bubble ${formatShare(bubble[bar.step])}`),
      ),
      !there && make("p", {}, "not on the timeline: a click opens the nearest that is"),
    ],
    event.clientX,
    event.clientY,
  );
}
