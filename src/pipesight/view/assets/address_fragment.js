// What the fragment of an address says: "#step=12&block=backward.1.3" is the backward of micro-batch 1 in partition 3.

import { PHASES } from "./phases.js";

/** Return {step, block: {phase, microbatch, partition, rank, again}, range: [from, to]}; null for what is not there. */
export function readFragment(text) {
  const entries = new URLSearchParams(text.replace(/^#/, ""));
  const step = whole(entries.get("step"));
  if (step === null) return null;
  const [, name, microbatch, partition] = /^([a-z]+)\.(\d+)\.(\d+)$/.exec(entries.get("block") ?? "") ?? [];
  const phase = PHASES.indexOf(name);
  const [, from, to] = /^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/.exec(entries.get("range") ?? "") ?? [];
  const [rank, again] = [whole(entries.get("rank")), whole(entries.get("again")) ?? 0];
  return {
    step,
    block: phase < 0 ? null : { phase, microbatch: Number(microbatch), partition: Number(partition), rank, again },
    range: Number(from) < Number(to) ? [Number(from), Number(to)] : null,
  };
}

const whole = (text) => (/^\d+$/.test(text ?? "") ? Number(text) : null);

/** The opposite of `readFragment`; a rank that is null is left out. */
export function writeFragment({ step, block, range }) {
  const entries = [`step=${step}`];
  if (block) {
    entries.push(`block=${PHASES[block.phase]}.${block.microbatch}.${block.partition}`);
    if (block.rank !== null) entries.push(`rank=${block.rank}`);
    if (block.again) entries.push(`again=${block.again}`);
  }
  if (range) entries.push(`range=${range.map((time) => Number(time.toFixed(1))).join("-")}`);
  return `#${entries.join("&")}`;
}
