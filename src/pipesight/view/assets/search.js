// One box that finds blocks, spans, layers and log lines, and marks them everywhere.

import { byId } from "./dom.js";
import { plural } from "./format.js";
import { whereOf } from "./log_lines.js";
import { choose, focusBlock } from "./selection.js";
import { listen, shownStep, state, tell } from "./state.js";
import { lookAt, reveal } from "./zoom.js";

export function startSearching() {
  const box = byId("search");
  box.addEventListener("input", search);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !box.value) return;
    event.preventDefault();
    box.value = "";
    search();
  });
  byId("search-form").addEventListener("submit", (event) => {
    event.preventDefault();
    nextFound();
  });
  listen("run step", () => state.query && search());
}

function search() {
  const words = wordsOf(byId("search").value);
  state.query = words.length && state.run ? find(words) : null;
  byId("search-found").textContent = state.query ? summary(state.query) : "";
  tell("search");
}

/** "partition 2" is one search term: words of the pipeline keep their number. */
export const wordsOf = (text) => text.toLowerCase().match(/(?:micro-?batch|partition|rank|step|layer) \d+|\S+/g) ?? [];

function find(words) {
  const patterns = words.map((word) => new RegExp(bounded(word), "iu"));
  const matches = (text) => patterns.every((pattern) => pattern.test(text));
  const { run } = state;
  const layers = new Set(
    run.layers
      .map((layer, index) => (matches(`${layer.name} ${layer.class ?? ""}`) ? index : -1))
      .filter((index) => index >= 0),
  );
  const step = shownStep();
  const spanNames = run.spanNames.map(matches);
  const spans = new Set(
    (step?.spans.name ?? []).map((name, place) => (spanNames[name] ? place : -1)).filter((place) => place >= 0),
  );
  const moments = (step?.moments ?? []).filter(([, , name, values]) => matches(`${name} ${values}`)).length;
  const lines = new Set(
    run.logs.lines
      .map((line, index) => (matches(`${whereOf(line)}${line.text}`) ? index : -1))
      .filter((index) => index >= 0),
  );
  return {
    layers,
    lines,
    spans,
    moments,
    blocks: findBlocks(step, matches, layers),
    pattern: new RegExp(words.map(bounded).join("|"), "giu"),
  };
}

/** Blocks whose name matches, or that run a layer whose name does. */
function findBlocks(step, matches, layers) {
  const blocks = new Set();
  if (!step) return blocks;
  const known = new Map(); // blocks with the same lane, micro-batch and phase have the same name
  for (let block = 0; block < step.count; block += 1) {
    const key = `${step.lane[block]}/${step.microbatch[block]}/${step.phase[block]}`;
    if (!known.has(key)) known.set(key, matches(`${step.nameOf(block)} microbatch ${step.microbatch[block]}`));
    if (known.get(key) || runsOneOf(step, block, layers)) blocks.add(block);
  }
  return blocks;
}

function runsOneOf(step, block, layers) {
  if (!layers.size) return false;
  const { layer } = step.layerRuns;
  const [first, last] = [step.firstLayer[block], step.firstLayer[block + 1]];
  if (first === last) return state.run.lanes[step.lane[block]].layers.some((of) => layers.has(of));
  for (let place = first; place < last; place += 1) if (layers.has(layer[place])) return true;
  return false;
}

/** "micro-batch 1" must not find micro-batch 12: a number at either end of a term must match whole. */
export function bounded(word) {
  const escaped = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return `${/^\d/.test(word) ? "(?<!\\d)" : ""}${escaped}${/\d$/.test(word) ? "(?!\\d)" : ""}`;
}

function summary({ blocks, layers, lines, spans, moments }) {
  const found = [
    [blocks.size, "block"],
    [spans.size, "span"],
    [moments, "instant"],
    [layers.size, "layer"],
    [lines.size, "log line"],
  ].filter(([count]) => count);
  return found.length ? found.map(([count, what]) => plural(count, what)).join(" \u00b7 ") : "nothing found";
}

/** Enter opens the next block found after the open one or, if there is none, shows the next span. */
function nextFound() {
  const step = shownStep();
  if (step && state.query && !state.query.blocks.size && state.query.spans.size) return nextSpan(step);
  if (!step || !state.query?.blocks.size) return;
  const found = [...state.query.blocks].sort((a, b) => step.from[a] - step.from[b]);
  const next = found[(found.indexOf(state.selected) + 1) % found.length];
  choose(next);
  reveal(next);
  focusBlock(next);
}

/** Fill the timeline with the next span found, and what is around it. */
function nextSpan(step) {
  const { begin, time } = step.spans;
  const found = [...state.query.spans].sort((a, b) => begin[a] - begin[b]);
  const next = found[(found.indexOf(state.query.at) + 1) % found.length];
  state.query.at = next;
  lookAt(begin[next] - time[next], begin[next] + 2 * time[next]);
}
