// The tooltip of what is under the mouse or has the focus: where, how long, which layers.

import { byId, make, put } from "./dom.js";
import { dotted, formatBytes, formatShare, formatTime } from "./format.js";
import { PHASES } from "./phases.js";
import { shownStep, state } from "./state.js";
import { KIND_NAMES } from "./timeline_overlays.js";

const MOST_LAYERS = 8;

export function showTooltip(block, place, x, y) {
  const step = shownStep();
  if (!step || (block === null && place === null)) return hideTooltip();
  showTooltipWith(block === null ? ofPlace(place) : ofBlock(step, block), x, y);
}

/** Show content near a point of the window, where there is room. */
export function showTooltipWith(children, x, y) {
  const tooltip = byId("tooltip");
  put(tooltip, children);
  tooltip.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const left = Math.min(Math.max(x + 14, 8), window.innerWidth - width - 8);
  const below = y + 18 + height < window.innerHeight;
  tooltip.style.left = `${Math.max(left, 8)}px`;
  tooltip.style.top = `${below ? y + 18 : Math.max(y - height - 12, 8)}px`;
}

export function hideTooltip() {
  byId("tooltip").hidden = true;
}

function ofBlock(step, block) {
  const time = step.to[block] - step.from[block];
  const layers = step.layersOf(block);
  const bad = step.marks.filter(
    ([, lane, phase, microbatch]) =>
      lane === step.lane[block] && phase === step.phase[block] && microbatch === step.microbatch[block],
  );
  return [
    make("strong", {}, `${capital(PHASES[step.phase[block]])} of micro-batch ${step.microbatch[block]}`),
    make("p", {}, `${state.run.laneName(step.lane[block])} \u00b7 step ${step.number}`),
    make(
      "p",
      { class: "number" },
      dotted(
        formatTime(time),
        `${formatShare(time / step.windowOf(block))} of the window`,
        `at ${formatTime(step.from[block])}`,
      ),
    ),
    ...bad.map(([name, , , , text]) => make("p", { class: "alarm" }, `\u2715 ${name}: ${text}`)),
    layers.length ? layerList(layers, time) : make("p", { class: "soft" }, namesOnly(step, block)),
  ];
}

function layerList(layers, time) {
  const longest = [...layers].sort((a, b) => b.to - b.from - (a.to - a.from));
  const kept = new Set(longest.slice(0, MOST_LAYERS));
  const rest = layers.length - kept.size;
  return make(
    "ul",
    {},
    layers
      .filter((layer) => kept.has(layer))
      .map(({ name, from, to }) =>
        make(
          "li",
          { vars: { share: `${(100 * (to - from)) / Math.max(time, 1)}%` } },
          make("span", {}, name),
          make("span", { class: "number" }, formatTime(to - from)),
        ),
      ),
    rest > 0 && make("li", {}, `and ${rest} more`),
  );
}

function namesOnly(step, block) {
  const names = state.run.lanes[step.lane[block]].layers.map((layer) => state.run.layerName(layer));
  if (!names.length) return "";
  const seen = names.slice(0, MOST_LAYERS).join(", ");
  return names.length > MOST_LAYERS ? `${seen} and ${names.length - MOST_LAYERS} more` : seen;
}

function ofPlace(place) {
  if (place.what === "moment")
    return [
      make("strong", {}, place.name),
      make("p", {}, place.values),
      make("p", { class: "number" }, `instant at ${formatTime(place.from)}`),
    ];
  if (place.what === "memory")
    return [
      make("strong", {}, `Memory of ${place.name}`),
      ...place.parts
        .filter(([, bytes]) => bytes)
        .map(([part, bytes]) => make("p", {}, `${part} ${formatBytes(bytes)}`)),
      make("p", { class: "number" }, `from ${formatTime(place.from)} on`),
    ];
  if (place.what === "span") {
    const kind = capital(KIND_NAMES[place.kind]);
    const named = capital(place.name) !== kind;
    return [
      make("strong", {}, named ? place.name : kind),
      named && make("p", {}, kind),
      state.run.payload.ranks > 1 && make("p", {}, state.run.rankName(place.rank)),
      make("p", { class: "number" }, `${formatTime(place.to - place.from)} \u00b7 at ${formatTime(place.from)}`),
    ];
  }
  return [
    make("strong", {}, "Idle"),
    make("p", {}, state.run.idleName(place.lane)),
    make(
      "p",
      { class: "number" },
      `${formatTime(place.to - place.from)} \u00b7 ${formatShare(place.share)} of the window`,
    ),
  ];
}

export const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
