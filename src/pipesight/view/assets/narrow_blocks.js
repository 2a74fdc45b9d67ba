// Blocks too narrow to draw one by one: columns of pixels for all lanes at once, in one picture that is stretched.
//
// A lane has four rows in the picture, one for each height that blocks have, so that phases differ here too:
//
//     backward    ██
//     forward     ██  ██
//     recompute   ██  ██  ██
//     weight      ██  ██  ██  ██

import { HEIGHTS, isDimmed } from "./lane_layout.js";
import { blockColours } from "./palette.js";

const NARROW = 1.5; // pixels: narrower blocks share a column of this width

const LEVELS = [...HEIGHTS].sort((a, b) => b - a);
const BANDS = HEIGHTS.map((height) => LEVELS.indexOf(height)); // the topmost row that a phase fills
const FAINT = 0x24ffffff;

export class Columns {
  constructor() {
    this.canvas = new OffscreenCanvas(1, 1);
    this.context = this.canvas.getContext("2d");
    this.image = null;
  }

  /** Make room for lanes in the part of the step that is shown. */
  begin(pen, lanes) {
    this.time = NARROW / pen.scale; // of a column, in microseconds
    this.first = Math.floor(pen.from / this.time);
    this.width = Math.ceil(pen.width / NARROW) + 2;
    this.used = new Set();
    if (this.canvas.width !== this.width || this.canvas.height !== lanes * LEVELS.length) {
      this.canvas.width = this.width;
      this.canvas.height = Math.max(lanes * LEVELS.length, 1);
      this.image = this.context.createImageData(this.canvas.width, this.canvas.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
    } else this.pixels.fill(0);
  }

  /** The column that a time lies in. Columns lie at fixed times, so that panning does not make them flicker. */
  at(time) {
    return Math.floor(time / this.time);
  }

  /** Let one block represent all others in a column of a lane. */
  set(place, column, step, block) {
    const x = column - this.first;
    if (x < 0 || x >= this.width) return;
    const phase = step.phase[block];
    const { bits } = blockColours(step.microbatch[block], phase);
    const colour = isDimmed(block) ? (bits & FAINT) >>> 0 : bits;
    for (let level = BANDS[phase]; level < LEVELS.length; level += 1) {
      this.pixels[(place * LEVELS.length + level) * this.width + x] = colour;
    }
    this.used.add(place);
  }

  /** Paint the columns of all lanes into their rows. */
  paint(pen, rows) {
    if (!this.used.size) return;
    this.context.putImageData(this.image, 0, 0);
    const { context } = pen;
    context.imageSmoothingEnabled = false;
    const left = pen.x(this.first * this.time);
    for (const place of this.used) {
      const { top, height } = rows[place];
      LEVELS.forEach((level, number) => {
        const upper = top + height - Math.round(height * level);
        const lower = top + height - Math.round(height * (LEVELS[number + 1] ?? 0));
        context.drawImage(
          this.canvas,
          0,
          place * LEVELS.length + number,
          this.width,
          1,
          left,
          upper,
          this.width * NARROW,
          lower - upper,
        );
      });
    }
    context.imageSmoothingEnabled = true;
  }
}
