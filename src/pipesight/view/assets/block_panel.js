// The panel of the open block: its layers side by side, as wide as they took, and the facts about it.

import { byId, make, put } from "./dom.js";
import { dotted, formatShare, formatTime } from "./format.js";
import { blockColours } from "./palette.js";
import { LETTERS, PHASES } from "./phases.js";
import { choose } from "./selection.js";
import { listen, shownStep, state } from "./state.js";
import { capital } from "./tooltip.js";

export function startBlock() {
  listen("run step selection theme search", showBlock);
}

function showBlock() {
  const step = shownStep();
  const panel = byId("block");
  panel.hidden = !step || state.selected === null;
  if (panel.hidden) return put(panel);
  const block = state.selected;
  const time = step.to[block] - step.from[block];
  const { fill, edge, ink } = blockColours(step.microbatch[block], step.phase[block]);
  const phase = PHASES[step.phase[block]];
  put(
    panel,
    make(
      "div",
      { class: "bar" },
      make(
        "span",
        { class: `swatch ${phase}`, "aria-hidden": "true", vars: { fill, edge, ink } },
        `${LETTERS[step.phase[block]]}${step.microbatch[block]}`,
      ),
      make(
        "h3",
        {},
        `${capital(phase)} of micro-batch ${step.microbatch[block]} in ${state.run.laneName(step.lane[block])}`,
      ),
      make(
        "p",
        { class: "facts" },
        dotted(
          formatTime(time),
          `${formatShare(time / step.windowOf(block))} of the window`,
          `${formatTime(step.from[block])} to ${formatTime(step.to[block])}`,
        ),
      ),
      make(
        "button",
        { type: "button", class: "square", "aria-label": "Close the block", onclick: () => choose(null) },
        "\u2715",
      ),
    ),
    layerStrip(step, block, time),
  );
}

function layerStrip(step, block, time) {
  const layers = step.layersOf(block);
  if (!layers.length)
    return make(
      "p",
      { class: "soft" },
      step.hasLayers
        ? "No layers were recorded in this block."
        : "The layers of this step are not in the page: there was no room for those of all steps.",
    );
  const inside = layers.reduce((sum, { from, to }) => sum + to - from, 0);
  return make(
    "ol",
    { class: "layer-strip" },
    layers.map(({ layer, name, from, to }) => {
      const found = state.query?.layers.has(layer);
      return make(
        "li",
        {
          class: found ? "found" : null,
          vars: { share: (to - from) / Math.max(time, 1) },
          title: `${name}: ${formatTime(to - from)}`,
        },
        make("span", { class: "layer-name" }, name),
        make(
          "span",
          { class: "number" },
          `${formatTime(to - from)} \u00b7 ${formatShare((to - from) / Math.max(time, 1))}`,
        ),
      );
    }),
    time - inside > time * 0.01 &&
      make(
        "li",
        { class: "rest", vars: { share: (time - inside) / time }, title: "between the layers" },
        make("span", { class: "layer-name" }, "between layers"),
        make("span", { class: "number" }, formatTime(time - inside)),
      ),
  );
}
