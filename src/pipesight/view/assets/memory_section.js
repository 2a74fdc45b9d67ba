// Memory at the ends of tasks: the parts of each partition, one on top of the other, in a row of the timeline below its
// lane; and the peaks, with the steps in which it was counted.

import { byId, make, put } from "./dom.js";
import { formatBytes } from "./format.js";
import { palette } from "./palette.js";
import { listen, shownStep, state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";
import { goToStep } from "./step_slider.js";

export function startMemory() {
  listen("run step", showMemory);
}

/** The curves of a step, or none. */
export const curvesOf = (step) => stepOf(step)?.curves ?? [];

const stepOf = (step) => state.run?.payload.memory?.steps.find((one) => one.number === step?.number);

function showMemory() {
  const memory = state.run?.payload.memory;
  byId("memory-section").hidden = !memory;
  if (!memory) return;
  const step = stepOf(shownStep());
  const { curves, number } = step ?? memory.steps.at(-1);
  const many = new Set(curves.map((curve) => curve.rank)).size > 1;
  byId("memory-facts").textContent = `peaks of step ${number}, at the ends of tasks`;
  const most = Math.max(...curves.map((curve) => curve.peak), 1);
  const others = memory.steps.filter((one) => one !== step);
  put(
    byId("memory"),
    make(
      "p",
      { class: "keys" },
      memory.parts.map((part) => make("span", { class: `key ${part}` }, named(part))),
    ),
    make(
      "div",
      { class: "bars" },
      curves.map((curve) => bar(curve, memory.parts, most, many)),
    ),
    others.length > 0 &&
      make(
        "p",
        { class: "keys" },
        step ? "Counted in other steps, too: " : "On the timeline of: ",
        others.map((one) =>
          make(
            "button",
            { type: "button", onclick: () => goToStep(state.run.placeOf(one.number)) },
            `step ${one.number}`,
          ),
        ),
      ),
  );
}

/** What a partition held at its peak. */
function bar(curve, parts, most, many) {
  const totals = curve.times.map((_, at) => curve.values.reduce((sum, values) => sum + values[at], 0));
  const at = totals.indexOf(Math.max(...totals));
  const held = parts.map((part, k) => ({ part, bytes: curve.values[k][at] })).filter(({ bytes }) => bytes > 0);
  const words = held.map(({ part, bytes }) => `${named(part)} ${formatBytes(bytes)}`);
  return make(
    "div",
    { class: "stack" },
    make("span", { class: "stack-name" }, `${nameOf(curve, many)}: ${formatBytes(curve.peak)}`),
    make(
      "div",
      { class: "stack-bar", role: "img", "aria-label": words.join(", ") },
      held.map(({ part, bytes }, k) =>
        make("span", { class: `part ${part}`, vars: { share: bytes / most }, title: words[k] }),
      ),
    ),
  );
}

const named = (part) => part.replace("_", " ");
const nameOf = (curve, many) => (many ? `${curve.name}, rank ${curve.rank}` : curve.name);

/** Memory stays as it is until the next task ends: the outline is made of steps. */
export function drawMemory(pen, step, row) {
  const { context } = pen;
  const curves = curvesOf(step);
  const most = Math.max(...curves.map((curve) => curve.peak), 1);
  const { times, values } = curves[row.curve];
  const first = Math.max(firstAtOrAfter(times, pen.from) - 1, 0);
  const y = (bytes) => row.top + row.height * (1 - bytes / most);
  let below = times.map(() => 0);
  context.fillStyle = palette.colours.faint;
  context.fillRect(0, row.top, pen.width, row.height);
  state.run.payload.memory.parts.forEach((part, k) => {
    const above = below.map((bytes, at) => bytes + values[k][at]);
    context.fillStyle = palette.colours[part];
    for (let at = first; at < times.length && pen.x(times[at]) < pen.width; at += 1) {
      const left = Math.round(Math.max(pen.x(times[at]), 0));
      const right = Math.round(Math.min(pen.x(times[at + 1] ?? step.end), pen.width));
      if (right > left) context.fillRect(left, y(above[at]), right - left, y(below[at]) - y(above[at]));
    }
    below = above;
  });
}

/** What a row of memory holds at a time, or null before anything was counted. */
export function memoryAt(step, row, time) {
  const curve = curvesOf(step)[row.curve];
  const at = firstAtOrAfter(curve.times, time + 1e-9) - 1;
  if (at < 0) return null;
  const parts = state.run.payload.memory.parts.map((part, k) => [named(part), curve.values[k][at]]);
  return { what: "memory", name: nameOf(curve, state.run.payload.ranks > 1), parts, from: curve.times[at] };
}
