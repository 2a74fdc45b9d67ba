// Links and ranges: fragments of addresses, and what happened between two times.

import assert from "node:assert/strict";
import { test } from "node:test";
import { readFragment, writeFragment } from "./address_fragment.js";
import { covered, rangeTotals } from "./range_totals.js";
import { Run } from "./run_model.js";

test("a fragment is read as it was written, and anything else is no link", () => {
  const block = { phase: 2, microbatch: 1, partition: 3, rank: null, again: 0 };
  for (const place of [
    { step: 12, block: null, range: null },
    { step: 0, block, range: null },
    { step: 7, block: { ...block, rank: 5, again: 2, phase: 0 }, range: [12.5, 3400] },
  ])
    assert.deepEqual(readFragment(writeFragment(place)), place);
  assert.equal(writeFragment({ step: 12, block, range: null }), "#step=12&block=backward.1.3");
  for (const other of ["", "#timeline", "#step=", "#step=-1", "#block=forward.1.2"])
    assert.equal(readFragment(other), null);
  const broken = { step: 1, block: null, range: null };
  for (const rest of ["block=sideways.1.2", "block=forward.1", "range=9-3", "range=a-b"])
    assert.deepEqual(readFragment(`#step=1&${rest}`), broken);
});

test("what overlaps is covered once", () => {
  assert.equal(
    covered(
      [
        [5, 9],
        [0, 4],
        [3, 6],
        [3, 4],
      ],
      1,
      8,
    ),
    7,
  );
  assert.equal(
    covered(
      [
        [0, 1],
        [9, 12],
      ],
      2,
      8,
    ),
    0,
  );
});

/** Random blocks, none of which overlaps another of its lane, in a window that ends before the step. */
function randomStep(takes_turns) {
  let seed = 7;
  const random = (most) => {
    seed = (seed * 48271) % 2147483647;
    return seed % most;
  };
  const blocks = [];
  for (const lane of [0, 1, 2])
    for (let at = random(40); at < 900; at += random(60)) {
      const time = 1 + random(50);
      blocks.push({ lane, begin: at, time, phase: random(4) });
      at += time;
    }
  blocks.sort((a, b) => a.begin - b.begin);
  const run = new Run({
    lanes: [0, 1, 2].map((partition) => ({ rank: 0, partition, replica: 0, takes_turns, layers: [] })),
    layers: [],
    shown: [
      {
        number: 0,
        end: 1200,
        windows: [[0, 0, Math.max(...blocks.map(({ begin, time }) => begin + time))]],
        transfers: { lane: [], begin: [], time: [] },
        spans: { rank: [0, 0, 0], kind: [1, 1, 4], begin: [0, 50, 990], time: [80, 90, 100], name: [0, 0, 1] },
        nonfinite: [],
        tasks: {
          lane: blocks.map(({ lane }) => lane),
          microbatch: blocks.map(() => 0),
          phase: blocks.map(({ phase }) => phase),
          begin: blocks.map(({ begin }, place) => begin - (blocks[place - 1]?.begin ?? 0)),
          time: blocks.map(({ time }) => time),
        },
        layers: null,
      },
    ],
    span_names: ["optimizer", "mine"],
    steps: [],
    chunks: 1,
    ranks: 1,
    replicas: 1,
    programs: [],
  });
  return { step: run.stepAt(0), blocks, random };
}

test("the totals of any range add up to its length, and are those counted microsecond by microsecond", () => {
  const { step, blocks, random } = randomStep(false);
  for (let turn = 0; turn < 40; turn += 1) {
    const [from, to] = [random(600), 600 + random(600)];
    for (const row of rangeTotals(step, from, to).lanes) {
      const own = blocks.filter(({ lane }) => lane === row.lane);
      let busy = 0;
      for (let at = from; at < to; at += 1) busy += own.some(({ begin, time }) => begin <= at && at < begin + time);
      assert.equal(row.busy, busy);
      assert.equal(
        row.phases.reduce((sum, time) => sum + time),
        busy,
      );
      assert.equal(row.busy + row.idle + row.outside, to - from);
      assert.equal(row.turns, 0);
    }
  }
  const { spans } = rangeTotals(step, 0, 1000);
  assert.deepEqual(
    spans.map(({ kind, count, time }) => [kind, count, time]),
    [
      [1, 2, 140], // both, what overlaps once
      [4, 1, 10],
    ],
  );
});

test("where partitions take turns, a lane is idle only while its rank is", () => {
  const { step } = randomStep(true);
  const { lanes } = rangeTotals(step, 100, 800);
  for (const { busy, turns, idle, outside } of lanes) assert.equal(busy + turns + idle + outside, 700);
  assert.ok(lanes.every(({ turns }) => turns > 0));
  assert.equal(new Set(lanes.map(({ idle }) => idle)).size, 1);
});
