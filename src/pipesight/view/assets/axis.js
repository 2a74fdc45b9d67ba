// The time axis: as many round numbers as fit.

import { formatTime } from "./format.js";
import { palette } from "./palette.js";

export const AXIS_HEIGHT = 26;

/** Round times in a span, at least `room` pixels apart. */
export function ticks(from, to, width, room = 84) {
  const least = ((to - from) * room) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-3)));
  const distance = [1, 2, 5, 10].map((digit) => digit * power).find((round) => round >= least) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(from / distance) * distance; at <= to; at += distance) found.push(at);
  return { found, distance };
}

export function drawAxis(pen, view) {
  pen.look(view);
  const { context } = pen;
  const { found, distance } = ticks(view.from, view.to, pen.width);
  pen.font(11);
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const at of found) {
    const x = pen.x(at);
    context.fillStyle = palette.colours.line;
    context.fillRect(Math.round(x), AXIS_HEIGHT - 5, 1, 5);
    context.fillStyle = palette.colours.soft;
    const text = at === 0 ? "0" : tickText(at, distance);
    const half = pen.widthOf(text) / 2;
    context.fillText(text, Math.min(Math.max(x, half + 1), pen.width - half - 1), AXIS_HEIGHT / 2 - 2);
  }
}

export function drawGrid(pen, view) {
  pen.context.fillStyle = palette.colours.faint;
  for (const at of ticks(view.from, view.to, pen.width).found) {
    pen.context.fillRect(Math.round(pen.x(at)), 0, 1, pen.height);
  }
}

export function tickText(at, distance) {
  if (distance < 1) return `${at.toFixed(2)} \u00b5s`;
  if (distance < 1000 && at < 10000) return `${Math.round(at)} \u00b5s`;
  if (distance < 1e6 && at < 1e7)
    return `${Number((at / 1e3).toFixed(Math.max(0, 3 - Math.floor(Math.log10(distance)))))} ms`;
  return formatTime(at);
}
