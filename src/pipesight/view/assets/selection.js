// Which block has the keyboard's focus, and which is open.

import { byId } from "./dom.js";
import { formatShare, formatTime, listed } from "./format.js";
import { shownStep, state, tell } from "./state.js";
import { reveal } from "./zoom.js";

/** Open a block, or close the one that is open. */
export function choose(block) {
  if (state.selected === block) return;
  state.selected = block;
  tell("selection");
}

export function hover(block) {
  if (state.hovered === block) return;
  state.hovered = block;
  tell("hover");
}

/** Move the keyboard's focus to a block, scroll it into view, and announce it. */
export function focusBlock(block) {
  state.focused = block;
  if (block !== null) {
    reveal(block);
    byId("announce").textContent = describe(shownStep(), block);
  }
  tell("hover");
}

/** A block as a sentence, for screen readers. */
function describe(step, block) {
  const time = step.to[block] - step.from[block];
  const layers = step.layersOf(block).map(({ name }) => name);
  const share = formatShare(time / step.windowOf(block));
  const inside = layers.length > 0 && `layers ${layers.join(", ")}`;
  return listed(
    step.nameOf(block),
    formatTime(time),
    `${share} of the window`,
    `begins at ${formatTime(step.from[block])}`,
    inside,
  );
}
