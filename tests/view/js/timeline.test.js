// A step as the timeline draws it: blocks, gaps, rows, zoom, search.

import assert from "node:assert/strict";
import { test } from "node:test";
import { layOut, rowAt } from "./lane_layout.js";
import { Run } from "./run_model.js";
import { bounded, wordsOf } from "./search.js";
import { state } from "./state.js";
import { firstAtOrAfter } from "./step_model.js";
import { barsOf, mostOf, placeBetween } from "./step_strip.js";
import { isWhole, lookAt, lookAtAll, pan, reveal, wholeView, zoom } from "./zoom.js";

const lane = (rank, partition, more = {}) => ({ rank, partition, replica: 0, takes_turns: false, layers: [], ...more });

/** Two partitions, two micro-batches: forward 0 and 1 of both, then the backward of micro-batch 1 in partition 1. */
function run(lanes = [lane(0, 0), lane(0, 1)]) {
  const tasks = {
    lane: [0, 0, 1, 1, 1],
    microbatch: [0, 1, 0, 1, 1],
    phase: [0, 0, 0, 0, 2],
    begin: [0, 10, 0, 10, 15], // differences: 0, 10, 10, 20, 35
    time: [10, 10, 10, 10, 20],
  };
  const step = {
    number: 7,
    end: 60,
    windows: [[0, 0, 60]],
    bubble: 0.5,
    lane_bubbles: [0.6, 0.4],
    transfers: { lane: [], begin: [], time: [] },
    spans: { rank: [], kind: [], begin: [], time: [] },
    nonfinite: [],
    tasks,
    layers: { count: [2, 0, 0, 0, 0], layer: [0, 1], begin: [0, 4], time: [4, 6] },
  };
  return new Run({
    lanes,
    layers: [{ name: "embed" }, { name: "block" }],
    shown: [step, { ...step, number: 12 }],
    steps: [],
    chunks: 2,
    ranks: 1 + Math.max(...lanes.map(({ rank }) => rank)),
    replicas: 1,
    programs: [],
  });
}

test("tasks become blocks of their lanes, and gaps become shares of the window", () => {
  const step = run().stepAt(0);
  assert.deepEqual([...step.from], [0, 10, 10, 20, 35]);
  assert.deepEqual([...step.lanes[1].blocks], [2, 3, 4]);
  assert.deepEqual(step.idle[0], [[20, 60, 40 / 60]]);
  assert.deepEqual(
    step.idle[1].map(([from, to]) => [from, to]),
    [
      [0, 10],
      [30, 35],
      [55, 60],
    ],
  );
});

test("partitions that take turns on a rank are idle together", () => {
  const step = run([lane(0, 0, { takes_turns: true }), lane(0, 1, { takes_turns: true })]).stepAt(0);
  assert.deepEqual(step.idle[0], step.idle[1]);
  assert.deepEqual(
    step.idle[0].map(([from, to]) => [from, to]),
    [
      [30, 35],
      [55, 60],
    ],
  );
});

test("a block is found again by its key, its name says where it ran", () => {
  const step = run().stepAt(0);
  for (let block = 0; block < step.count; block += 1) assert.equal(step.blockOf(step.keyOf(block)), block);
  assert.equal(step.blockOf("8/0/0/0/0/0"), null); // another step
  assert.equal(step.blockOf(null), null);
  assert.equal(step.nameOf(4), "backward of micro-batch 1 in partition 1");
  assert.equal(step.windowOf(4), 60);
  assert.deepEqual(step.layersOf(0), [
    { layer: 0, name: "embed", from: 0, to: 4 },
    { layer: 1, name: "block", from: 4, to: 10 },
  ]);
});

test("the nearest step of the slider", () => {
  assert.deepEqual(
    [0, 9, 10, 99].map((number) => run().placeOf(number)),
    [0, 0, 1, 1],
  );
});

test("names of lanes say rank and host where there are several", () => {
  assert.equal(run().laneName(1), "partition 1");
  const two = run([lane(0, 0, { host: "a" }), lane(1, 1, { host: "b" })]);
  assert.equal(two.laneName(1), "rank 1 on b, partition 1");
  assert.equal(two.rankName(1), "rank 1 · b");
});

test("rows do not overlap, and are found by their height", () => {
  for (const lanes of [[lane(0, 0), lane(0, 1)], Array.from({ length: 50 }, (_, rank) => lane(rank, rank))]) {
    const { rows, height } = layOut(run(lanes));
    assert.equal(rows.filter(({ kind }) => kind === "lane").length, lanes.length);
    rows.forEach((row, place) => {
      assert.ok(place === 0 || rows[place - 1].top + rows[place - 1].height <= row.top);
      assert.equal(rowAt(rows, row.top + 1), row);
    });
    assert.ok(rows.at(-1).top + rows.at(-1).height <= height);
    assert.equal(rowAt(rows, height + 1), null);
  }
});

test("folded, all lanes are in view, as far as they can be seen", () => {
  const many = Array.from({ length: 64 }, (_, rank) => lane(rank, rank));
  const { rows, height } = layOut(run(many), 400);
  assert.equal(rows.length, 64);
  assert.ok(height <= 400);
  for (const [place, row] of rows.entries())
    assert.ok(!place || rows[place - 1].top + rows[place - 1].height < row.top);
  assert.ok(layOut(run(many.concat(many)), 100).rows.every((row) => row.height >= 3));
});

test("all steps are on the strip: those that share a bar have the slowest, and none is lost", () => {
  const number = Array.from({ length: 10000 }, (_, step) => step + 5);
  const time = number.map((step) => (step % 997 === 0 ? 900 : 100 + (step % 7)));
  const shown = number.filter((step) => step % 100 === 5);
  const bars = barsOf({ number, time, nonfinite: [4242] }, shown, 600);
  assert.ok(bars.length <= 601);
  assert.equal(
    bars.reduce((sum, bar) => sum + bar.steps, 0),
    10000,
  );
  assert.equal(bars.filter((bar) => time[bar.step] === 900).length, 10);
  assert.equal(bars.filter(({ bad }) => bad).length, 1);
  assert.deepEqual(
    [5, 55, 105, 9905, 10004].map((step) => placeBetween(shown, step) * 99),
    [0, 0.5, 1, 99, 99],
  );
  assert.equal(mostOf([10, 10, 10, 500]), 30);
  assert.equal(mostOf([10, 12]), 12);
});

test("firstAtOrAfter is a binary search", () => {
  assert.deepEqual(
    [0, 1, 2, 5, 6].map((value) => firstAtOrAfter([1, 2, 2, 5], value)),
    [0, 0, 1, 3, 4],
  );
});

test("zoom and pan stay inside the step, and the point under the mouse stays where it is", () => {
  state.run = run();
  lookAtAll();
  assert.ok(isWhole());
  const whole = wholeView(state.run.stepAt(0));
  zoom(2, 0.25);
  assert.ok(!isWhole());
  const length = whole.to - whole.from;
  assert.ok(Math.abs(state.view.to - state.view.from - length / 2) < 1e-9);
  const still = whole.from + length * 0.25;
  assert.ok(Math.abs(state.view.from + (state.view.to - state.view.from) * 0.25 - still) < 1e-9);
  pan(-100);
  assert.equal(state.view.from, whole.from);
  pan(100);
  assert.ok(Math.abs(state.view.to - whole.to) < 1e-9);
  zoom(1e9);
  assert.ok(Math.abs(state.view.to - state.view.from - 2) < 1e-9); // no closer than two microseconds
  zoom(1e-9);
  assert.ok(isWhole());
  lookAt(0, 8);
  reveal(4);
  assert.ok(state.view.from <= 35 && state.view.to >= 55);
  state.run = null;
});

test("a search keeps numbers whole, and words of the pipeline with their number", () => {
  assert.deepEqual(wordsOf("Micro-batch 1  forward partition 2"), ["micro-batch 1", "forward", "partition 2"]);
  assert.deepEqual(wordsOf("  "), []);
  const finds = (word, text) => new RegExp(bounded(word), "iu").test(text);
  assert.ok(finds("micro-batch 1", "forward of micro-batch 1 in partition 0"));
  assert.ok(!finds("micro-batch 1", "forward of micro-batch 12 in partition 0"));
  assert.ok(!finds("2", "partition 12"));
  assert.ok(finds("a.b(*", "x a.b(* y")); // not a pattern
});
