// Statistics of tensors: which one, the heat map of all layers, and the line of one.

import { byId, make, put } from "./dom.js";
import { formatValue, listed, plural } from "./format.js";
import { HeatMap } from "./heat_map.js";
import { lineChart } from "./line_chart.js";
import { divergingColour, heatColour } from "./palette.js";
import { listen, shownStep, state, tell } from "./state.js";
import { chosenSeries, isNonfinite, nameOfRow, valueAt } from "./statistic_series.js";
import { goToStep } from "./step_slider.js";
import { hideTooltip, showTooltipWith } from "./tooltip.js";

export const statisticsDrawn = { cells: 0, crosses: 0, points: 0, lineCrosses: 0, layer: null };

let map = null;
let figure = null;

export function startStatistics() {
  map = new HeatMap(choose);
  map.canvas.addEventListener("pointermove", point);
  map.canvas.addEventListener("pointerleave", hideTooltip);
  figure = {
    scale: make("div", { class: "scale" }),
    line: make("div", { class: "line-frame" }),
    title: make("h3", {}),
  };
  byId("statistics").append(
    make("div", { class: "heatmap-frame" }, map.names, map.canvas),
    figure.scale,
    figure.title,
    figure.line,
  );
  byId("tensor").addEventListener("change", (event) => pick(event.target.value, state.statistic));
  byId("statistic").addEventListener("change", (event) => pick(state.tensor, event.target.value));
  new ResizeObserver(showStatistics).observe(byId("statistics"));
  listen("run series step theme", showStatistics);
}

function pick(tensor, statistic) {
  const { groups } = state.run.statistics;
  state.tensor = tensor;
  state.statistic = groups.some((group) => group.tensor === tensor && group.statistic === statistic)
    ? statistic
    : groups.find((group) => group.tensor === tensor).statistic;
  tell("series");
}

function showStatistics() {
  const series = chosenSeries();
  byId("statistics-section").hidden = !series;
  if (!series || !byId("statistics").clientWidth) return;
  Object.assign(state, { tensor: series.tensor, statistic: series.statistic });
  const { groups, names, left_out } = state.run.statistics;
  const rows = series.layers.map((layer) => names[layer]);
  if (!rows.includes(state.layer)) state.layer = rows[firstNonfinite(series) ?? 0];
  options(byId("tensor"), [...new Set(groups.map(({ tensor }) => tensor))], series.tensor);
  options(
    byId("statistic"),
    groups.filter(({ tensor }) => tensor === series.tensor).map(({ statistic }) => statistic),
    series.statistic,
  );
  const bad = series.values.filter(isNonfinite).length;
  byId("statistics-facts").textContent = listed(
    plural(series.layers.length, "layer"),
    plural(series.steps.length, "step"),
    bad > 0 && `${plural(bad, "value")} not finite`,
    left_out > 0 && `one of ${left_out} steps is in the page`,
  );
  map.show(series);
  showScale();
  showLine(series, rows.indexOf(state.layer));
}

function showScale() {
  const { low, high, kind } = map.scale;
  const colours = Array.from({ length: 24 }, (_, index) =>
    kind === "diverging" ? divergingColour((index / 23) * 2 - 1) : heatColour(index / 23),
  );
  put(
    figure.scale,
    make("span", { class: "number" }, formatValue(low)),
    make(
      "span",
      { class: "colours", "aria-hidden": "true" },
      colours.map((colour) => make("i", { vars: { fill: colour } })),
    ),
    make("span", { class: "number" }, formatValue(high)),
    make("span", { class: "soft" }, kind === "logarithmic" ? "logarithmic" : ""),
    make(
      "span",
      { class: "not-finite" },
      make("span", { class: "alarm", "aria-hidden": "true" }, "\u2715"),
      " not finite",
    ),
  );
}

function showLine(series, row) {
  const name = nameOfRow(series, row);
  figure.title.textContent = `${name} \u00b7 ${series.tensor} ${series.statistic}`;
  const { drawing, points, crosses } = lineChart(series, row, name, Math.max(figure.line.clientWidth, 200));
  put(figure.line, drawing);
  Object.assign(statisticsDrawn, { ...map.drawn, points, lineCrosses: crosses, layer: name });
}

/** The chosen cell's layer goes into the line chart, its step onto the timeline. */
function choose(row, column) {
  const series = chosenSeries();
  state.layer = nameOfRow(series, row);
  tell("series");
  if (column === null) return;
  const place = state.run.shown.findIndex(({ number }) => number === series.steps[column]);
  if (place >= 0) goToStep(place);
}

function point(event) {
  const series = chosenSeries();
  const { row, column } = map.cellAt(event.offsetX, event.offsetY);
  const said = [
    make("strong", {}, nameOfRow(series, row)),
    make("p", {}, `step ${series.steps[column]} \u00b7 ${series.tensor} ${series.statistic}`),
    make("p", { class: "number" }, formatValue(valueAt(series, row, column))),
  ];
  showTooltipWith(said, event.clientX, event.clientY);
}

/** The row shown first: the first layer that is not finite, or one that the step's marks name. */
function firstNonfinite(series) {
  const marked = new Set((shownStep()?.marks ?? []).map(([name]) => name));
  const byMark = series.layers.findIndex((_, row) => marked.has(nameOfRow(series, row)));
  if (byMark >= 0) return byMark;
  const place = series.values.findIndex(isNonfinite);
  return place < 0 ? null : Math.floor(place / series.steps.length);
}

function options(select, names, chosen) {
  put(select, ...names.map((name) => make("option", { value: name, selected: name === chosen }, name || "\u2013")));
}
