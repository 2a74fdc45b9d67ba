// Numbers as the page writes them, the marks of its axis, and the scale of its heat map.

import assert from "node:assert/strict";
import { test } from "node:test";
import { ticks, tickText } from "./axis.js";
import {
  dotted,
  formatBytes,
  formatRate,
  formatRoughShare,
  formatShare,
  formatTime,
  formatValue,
  listed,
  plural,
} from "./format.js";
import { scaleOf, valueAt } from "./statistic_series.js";

const table = (format, rows) =>
  test(format.name, () => {
    for (const [value, expected] of rows) assert.equal(format(value), expected, `${format.name}(${value})`);
  });

table(formatTime, [
  [0, "0"],
  [1.234, "1.23 µs"],
  [999.4, "999 µs"],
  [999.6, "1.00 ms"], // not "1000 µs"
  [12345, "12.3 ms"],
  [999499, "999 ms"],
  [999500, "1.00 s"],
  [-2500, "−2.50 ms"],
  [null, "–"],
  [undefined, "–"],
  [Number.NaN, "–"],
  [Number.POSITIVE_INFINITY, "–"],
]);

table(formatShare, [
  [0.1234, "12.3%"],
  [0, "0.0%"],
  [1, "100.0%"],
  [null, "–"],
  [Number.NaN, "–"],
]);

table(formatRoughShare, [
  [0.123, "12%"],
  [0.004, "<1%"], // what is there is never "0%"
  [0, "0%"],
]);

table(formatBytes, [
  [0, "0 B"],
  [1023, "1023 B"],
  [1024, "1.00 KiB"],
  [1536 * 1024, "1.50 MiB"],
  [2 ** 40 * 2000, "2000 TiB"], // the largest unit
  [null, "–"],
]);

table(formatRate, [
  [2370.4, "2,370"],
  [99.94, "99.9"],
  [0.1234, "0.123"],
]);

table(formatValue, [
  [0, "0"],
  [0.012345, "0.01235"],
  [1.2e-7, "1.20e-7"],
  [-123456, "−1.23e+5"],
  ["nan", "NaN"],
  ["inf", "+∞"],
  ["-inf", "−∞"],
  [null, "–"],
]);

test("lists and plurals", () => {
  assert.equal(listed("a", null, "", "b"), "a, b");
  assert.equal(dotted("a", false, "b"), "a · b");
  assert.equal(plural(1, "step"), "1 step");
  assert.equal(plural(1200, "step"), "1,200 steps");
});

test("ticks are round, in order, inside, and far enough apart", () => {
  for (const [from, to, width] of [
    [0, 1000, 900],
    [-13, 1287, 700],
    [0, 3.7e6, 320],
    [123456, 123466, 1200],
    [0, 1, 500],
  ]) {
    const { found, distance } = ticks(from, to, width);
    const digit = distance / 10 ** Math.floor(Math.log10(distance) + 1e-9);
    assert.ok(
      [1, 2, 5].some((round) => Math.abs(digit - round) < 1e-6),
      `${distance}`,
    );
    assert.ok((distance / (to - from)) * width >= 84 - 1e-6);
    assert.ok(found.every((at) => from <= at && at <= to));
    assert.ok(found.every((at) => Math.abs(at / distance - Math.round(at / distance)) < 1e-6));
  }
  assert.deepEqual(ticks(0, 1000, 0).found, [0]); // a page without room
});

test("texts of neighbouring ticks differ", () => {
  for (const [from, to, width] of [
    [0, 1000, 900],
    [9800, 10400, 900],
    [0, 3.7e6, 900],
    [5e6, 5.002e6, 900],
    [0, 4, 600],
  ]) {
    const { found, distance } = ticks(from, to, width);
    const texts = found.map((at) => tickText(at, distance));
    assert.equal(new Set(texts).size, texts.length, texts.join(" "));
  }
});

test("a scale puts values from 0 to 1, or from -1 to 1", () => {
  const linear = scaleOf([1, 2, 3, "nan", null]);
  assert.deepEqual([linear.kind, linear.low, linear.high], ["linear", 1, 3]);
  assert.deepEqual([1, 2, 3, 99].map(linear.place), [0, 0.5, 1, 1]);
  const powers = scaleOf([0, 1e-6, 1e-3, 1]);
  assert.equal(powers.kind, "logarithmic");
  assert.deepEqual(
    [0, 1e-6, 1e-3, 1].map((value) => Number(powers.place(value).toFixed(6))),
    [0, 0, 0.5, 1],
  );
  const both = scaleOf([-4, -1, 2]);
  assert.equal(both.kind, "diverging");
  assert.deepEqual([both.low, both.place(0)], [-both.high, 0]);
  assert.ok(both.place(-4) >= -1 && both.place(-4) < both.place(2));
  assert.equal(scaleOf(["nan", "inf"]).place(3), 0); // nothing finite
  assert.equal(scaleOf([7, 7]).place(7), 0.5); // all the same
});

test("values of a series lie row by row", () => {
  assert.equal(valueAt({ steps: [0, 1, 2], values: [1, 2, 3, 4, 5, 6] }, 1, 2), 6);
});
