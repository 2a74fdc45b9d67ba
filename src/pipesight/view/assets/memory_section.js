// Memory at the ends of tasks, in a step where it was counted: the parts of each partition, one on top of the other.

import { byId, make, makeSvg, put } from "./dom.js";
import { formatBytes, formatTime, listed } from "./format.js";
import { listen, shownStep, state } from "./state.js";

const LEAST = 320; // pixels that a drawing needs
const GAP = 20;
const HEIGHT = 96;

export function startMemory() {
  new ResizeObserver(showMemory).observe(byId("memory"));
  listen("run step theme", showMemory);
}

function showMemory() {
  const memory = state.run?.payload.memory;
  byId("memory-section").hidden = !memory;
  const room = byId("memory").clientWidth;
  if (!memory || !room) return;
  const number = shownStep()?.number;
  const step = memory.steps.find((one) => one.number === number) ?? memory.steps.at(-1);
  const columns = Math.max(Math.min(Math.floor((room + GAP) / (LEAST + GAP)), step.curves.length, 3), 1);
  const width = Math.max(Math.floor((room - (columns - 1) * GAP) / columns), 200);
  const most = Math.max(...step.curves.map((curve) => curve.peak));
  const end = Math.max(...step.curves.map((curve) => curve.times.at(-1)), 1);
  byId("memory-facts").textContent = listed(
    `step ${step.number}, ${formatTime(end)}`,
    step.number !== number && number !== undefined && "the last of those in which it was counted",
  );
  const many = new Set(step.curves.map((curve) => curve.rank)).size > 1;
  const legend = memory.parts.map((part) => make("span", { class: `key ${part}` }, part.replace("_", " ")));
  put(
    byId("memory"),
    make("p", { class: "keys" }, legend),
    step.curves.map((curve) => figure(curve, memory.parts, { most, end, width, many })),
  );
}

function figure(curve, parts, { most, end, width, many }) {
  const name = many ? `${curve.name}, rank ${curve.rank}` : curve.name;
  const title = `${name}: at most ${formatBytes(curve.peak)}`;
  const drawing = makeSvg("svg", { width, height: HEIGHT, role: "img", "aria-label": title });
  const x = (time) => (time / end) * width;
  const y = (bytes) => HEIGHT - (bytes / Math.max(most, 1)) * (HEIGHT - 2);
  let below = curve.times.map(() => 0);
  for (const [k, part] of parts.entries()) {
    const above = below.map((bytes, at) => bytes + curve.values[k][at]);
    drawing.append(makeSvg("path", { class: part, d: area(curve.times, below, above, x, y, end) }));
    below = above;
  }
  return make("figure", { class: "curve" }, make("figcaption", {}, make("h3", {}, title)), drawing);
}

/** Memory stays as it is until the next task ends: the outline is made of steps. */
function area(times, below, above, x, y, end) {
  const forth = times.map((time, at) => `${x(time)},${y(above[at])} ${x(times[at + 1] ?? end)},${y(above[at])}`);
  const back = times.map((time, at) => `${x(times[at + 1] ?? end)},${y(below[at])} ${x(time)},${y(below[at])}`);
  return `M${forth.join(" ")} ${back.reverse().join(" ")}Z`;
}
