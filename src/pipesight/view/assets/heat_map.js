// A statistic as a heat map: one row per layer, one column per step, a cross where a value is not finite.

import { Pen } from "./canvas_pen.js";
import { make, put } from "./dom.js";
import { formatValue, listed, plural } from "./format.js";
import { divergingColour, heatColour, palette } from "./palette.js";
import { shownStep, state } from "./state.js";
import { isFiniteValue, isNonfinite, nameOfRow, scaleOf, valueAt } from "./statistic_series.js";
import { drawCross } from "./timeline_overlays.js";

const ROOMY = 320; // pixels: the height if there are few layers
const MOST_NAMES = 1000; // with more layers, rows are too low for names

/** A canvas for the map; `choose(row, column)` is called for the cell that is clicked or reached by keys. */
export class HeatMap {
  constructor(choose) {
    this.canvas = make("canvas", { tabindex: 0, role: "img", class: "heatmap" });
    this.names = make("div", { class: "heatmap-names", "aria-hidden": "true" });
    this.pen = new Pen(this.canvas);
    this.choose = choose;
    this.drawn = { cells: 0, crosses: 0 };
    this.canvas.addEventListener("click", (event) => this.pick(event.offsetX, event.offsetY));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
  }

  show(series) {
    this.series = series;
    const least = series.layers.length > MOST_NAMES ? 3 : 14;
    this.rowHeight = Math.min(Math.max(Math.floor(ROOMY / series.layers.length), least), 22);
    this.height = this.rowHeight * series.layers.length;
    const labelled = this.rowHeight >= 10;
    this.names.classList.toggle("few", !labelled);
    put(
      this.names,
      ...series.layers.map((_, row) =>
        make(
          "button",
          {
            type: "button",
            tabindex: -1,
            class: nameOfRow(series, row) === state.layer ? "chosen" : null,
            vars: { height: `${this.rowHeight}px` },
            onclick: () => this.choose(row, null),
            title: nameOfRow(series, row),
          },
          labelled ? nameOfRow(series, row) : "",
        ),
      ),
    );
    this.canvas.style.height = `${this.height}px`;
    this.scale = scaleOf(series.values);
    this.draw();
  }

  draw() {
    const width = this.canvas.clientWidth;
    if (!width || !this.series) return;
    const { series, pen, scale } = this;
    const { context } = pen;
    pen.begin(width, this.height);
    this.drawn = { cells: 0, crosses: 0 };
    const columns = series.steps.length;
    const cell = width / columns;
    const crosses = [];
    for (let row = 0; row < series.layers.length; row += 1) {
      for (let column = 0; column < columns; column += 1) {
        const value = valueAt(series, row, column);
        if (value === null) continue;
        const left = Math.floor(column * cell);
        context.fillStyle = isFiniteValue(value) ? this.colour(value) : palette.colours.alarm;
        const right = Math.floor((column + 1) * cell);
        const wide = Math.max(right - left - (cell > 6 ? 1 : 0), 1);
        context.fillRect(left, row * this.rowHeight, wide, this.rowHeight - (this.rowHeight > 6 ? 1 : 0));
        this.drawn.cells += 1;
        if (isNonfinite(value)) crosses.push([(column + 0.5) * cell, (row + 0.5) * this.rowHeight]);
      }
    }
    for (const [x, y] of crosses) drawCross(pen, x, y, Math.min(this.rowHeight / 2 - 1, 4));
    this.drawn.crosses = crosses.length;
    this.drawChosen(cell);
    this.canvas.setAttribute(
      "aria-label",
      listed(
        `Heat map of ${series.tensor} ${series.statistic}: ${plural(series.layers.length, "layer")} by ${plural(columns, "step")}`,
        `from ${formatValue(scale.low)} to ${formatValue(scale.high)}`,
        `${plural(crosses.length, "value")} not finite`,
      ),
    );
  }

  colour(value) {
    const place = this.scale.place(value);
    return this.scale.kind === "diverging" ? divergingColour(place) : heatColour(place);
  }

  drawChosen(cell) {
    const { context } = this.pen;
    context.strokeStyle = palette.colours.ink;
    context.lineWidth = 1.5;
    const row = this.series.layers.findIndex((_, index) => nameOfRow(this.series, index) === state.layer);
    if (row >= 0) context.strokeRect(0.75, row * this.rowHeight + 0.25, this.pen.width - 1.5, this.rowHeight - 1.5);
    const column = this.series.steps.indexOf(shownStep()?.number);
    if (column >= 0) context.strokeRect(column * cell, 0.75, Math.max(cell, 2), this.height - 1.5);
  }

  cellAt(x, y) {
    const { series } = this;
    const row = Math.min(Math.max(Math.floor(y / this.rowHeight), 0), series.layers.length - 1);
    const column = Math.min(
      Math.max(Math.floor((x / this.pen.width) * series.steps.length), 0),
      series.steps.length - 1,
    );
    return { row, column };
  }

  pick(x, y) {
    const { row, column } = this.cellAt(x, y);
    this.choose(row, column);
  }

  move(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    const row = this.series.layers.findIndex((_, index) => nameOfRow(this.series, index) === state.layer);
    const column = this.series.steps.indexOf(shownStep()?.number);
    const clamp = (value, count) => Math.min(Math.max(value, 0), count - 1);
    this.choose(
      clamp(row + by[0], this.series.layers.length),
      by[1] ? clamp(column + by[1], this.series.steps.length) : null,
    );
  }
}
