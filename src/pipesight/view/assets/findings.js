// The alarm, which names the first tensor that is not finite and links to it, and the other findings.

import { byId, make, put } from "./dom.js";
import { plural } from "./format.js";
import { PHASES } from "./phases.js";
import { choose, focusBlock } from "./selection.js";
import { listen, shownStep, state, tell } from "./state.js";
import { goToStep } from "./step_slider.js";
import { reveal } from "./zoom.js";

export function startFindings() {
  listen("run", () => {
    const { alarm, findings } = state.run.payload;
    byId("alarm").hidden = !alarm;
    put(byId("alarm"), ...(alarm ? sentenceOf(alarm) : []));
    byId("findings-section").hidden = !findings.length;
    put(byId("findings"), ...findings.map(group));
  });
}

function sentenceOf(alarm) {
  const ways = [
    alarm.step !== null && link(`step ${alarm.step}`, () => showStep(alarm.step)),
    link(`layer ${alarm.layer}`, () => showLayer(alarm)),
    alarm.step !== null &&
      alarm.lane !== null &&
      alarm.microbatch !== null &&
      link(nameOfBlock(alarm), () => showBlock(alarm)),
  ].filter(Boolean);
  const between = ways.flatMap((way, place) => (place ? [" \u00b7 ", way] : [way]));
  return [alarm.text, make("span", { class: "ways" }, "Show ", between)];
}

const link = (text, onclick) => make("button", { type: "button", class: "link", onclick }, text);

function showStep(number) {
  goToStep(state.run.placeOf(number));
  byId("timeline-section").scrollIntoView({ block: "nearest" });
}

/** Show its statistics in the line chart or, if the page does not have them, its row in the table. */
function showLayer({ layer, tensor }) {
  const { names, groups } = state.run.statistics ?? { names: [], groups: [] };
  const own = groups.filter((group) => group.tensor === tensor && group.layers.includes(names.indexOf(layer)));
  if (own.length) {
    const bad = own.find(({ layers, steps, values }) => {
      const row = layers.indexOf(names.indexOf(layer));
      return values.slice(row * steps.length, (row + 1) * steps.length).some((value) => typeof value === "string");
    });
    Object.assign(state, { tensor, statistic: (bad ?? own[0]).statistic, layer });
    tell("series");
    byId("statistics-section").scrollIntoView({ block: "nearest" });
    return;
  }
  byId("layers-search").value = layer;
  byId("layers-search").dispatchEvent(new Event("input", { bubbles: true }));
  byId("layers-section").scrollIntoView({ block: "nearest" });
}

function nameOfBlock({ phase, lane, microbatch }) {
  return `${PHASES[phase]} of micro-batch ${microbatch} in ${state.run.laneName(lane)}`;
}

/** The first block that computed it. */
function showBlock({ step: number, lane, phase, microbatch }) {
  showStep(number);
  const step = shownStep();
  const block = step.lanes[lane].blocks.find((of) => step.phase[of] === phase && step.microbatch[of] === microbatch);
  if (block === undefined) return;
  choose(block);
  reveal(block);
  focusBlock(block);
}

function group({ title, entries, more }) {
  return make(
    "div",
    {},
    make("h3", {}, title),
    make(
      "ul",
      {},
      entries.map(([text, steps]) => make("li", {}, withWays(text, steps))),
      more > 0 && make("li", { class: "soft" }, `and ${plural(more, "other")}`),
    ),
  );
}

/** A sentence in which the numbers of shown steps are links. */
function withWays(text, steps) {
  const there = new Set(state.run.shown.map(({ number }) => number));
  const [named] = (steps.length && text.match(/\bsteps? \d+(?:, \d+)*/)) || [""];
  if (!named) return [text];
  const at = text.indexOf(named);
  const words = named.split(/(\d+)/).map((word) => {
    const number = Number(word);
    return /^\d+$/.test(word) && there.has(number) ? link(word, () => showStep(number)) : word;
  });
  return [text.slice(0, at), ...words, text.slice(at + named.length)];
}
