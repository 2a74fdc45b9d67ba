// Links to what is shown: the address's fragment says which step, block and range, and changes with them.

import { readFragment, writeFragment } from "./address_fragment.js";
import { byId } from "./dom.js";
import { selectRange } from "./range_panel.js";
import { choose } from "./selection.js";
import { listen, shownStep, state } from "./state.js";
import { goToStep } from "./step_slider.js";
import { lookAtAll, reveal } from "./zoom.js";

let written = ""; // the fragment of what is shown, even where the address has none
let opened = false; // whether the link by which the page was opened has been followed

export function startLinks() {
  listen("step selection range", () => {
    if (writtenNow() === written) return;
    written = writtenNow();
    replaceFragment(written);
  });
  listen("run", () => {
    written = writtenNow(); // a page that follows a run goes on without the reader
    if (opened && readFragment(location.hash)) replaceFragment(written);
  });
  window.addEventListener("hashchange", openLink);
}

function writtenNow() {
  const step = shownStep();
  if (!step) return "";
  const block = state.selected === null ? null : placeOfBlock(step, state.selected);
  return writeFragment({ step: step.number, block, range: state.range });
}

function replaceFragment(fragment) {
  try {
    history.replaceState(null, "", fragment || location.pathname);
  } catch {
    // A page inside another document may not change its address.
  }
}

function placeOfBlock(step, block) {
  const [, rank, partition, microbatch, phase, again] = step.keyOf(block).split("/").map(Number);
  return { phase, microbatch, partition, rank: state.run.payload.ranks > 1 ? rank : null, again };
}

/** Show what the address names; say so if it is not on the page. */
export function openLink() {
  opened = true;
  const wanted = readFragment(location.hash);
  if (!wanted || !state.run?.shown.length) return;
  goToStep(state.run.placeOf(wanted.step));
  const step = shownStep();
  const missing = [];
  if (step.number !== wanted.step)
    missing.push(`Step ${wanted.step} of this link is not on the page; step ${step.number} is the nearest that is.`);
  const block = wanted.block && step.number === wanted.step ? blockAt(step, wanted.block) : null;
  if (wanted.block && block === null) missing.push("The block of this link is not on the page.");
  byId("link-notice").textContent = missing.join(" ");
  byId("link-notice").hidden = !missing.length;
  const [from, to] = (step.number === wanted.step && wanted.range) || [0, 0];
  selectRange(from, to);
  lookAtAll();
  choose(block);
  if (block !== null) reveal(block);
  byId("timeline-section").scrollIntoView({ block: "nearest" });
}

function blockAt(step, { phase, microbatch, partition, rank, again }) {
  const known = state.run.lanes.find((lane) => lane.partition === partition && (rank === null || lane.rank === rank));
  return known ? step.blockOf([step.number, known.rank, partition, microbatch, phase, again].join("/")) : null;
}
