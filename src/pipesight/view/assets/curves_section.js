// Curves of counters over steps: the loss, the learning rate, and the user's own.

import { byId, make, put } from "./dom.js";
import { listed, plural } from "./format.js";
import { lineChart } from "./line_chart.js";
import { listen, state } from "./state.js";

const LEAST = 320; // pixels that a chart needs
const GAP = 20;

export function startCurves() {
  new ResizeObserver(showCurves).observe(byId("curves"));
  listen("run step theme", showCurves);
}

function showCurves() {
  const curves = state.run?.payload.curves ?? [];
  byId("curves-section").hidden = !curves.length;
  const room = byId("curves").clientWidth;
  if (!curves.length || !room) return;
  const columns = Math.max(Math.min(Math.floor((room + GAP) / (LEAST + GAP)), curves.length, 3), 1);
  const width = Math.max(Math.floor((room - (columns - 1) * GAP) / columns), 200);
  const every = Math.max(...curves.map((curve) => curve.every));
  byId("curves-facts").textContent = listed(
    "mean of each step",
    every > 1 && `about one of ${every} steps is in the page`,
  );
  put(byId("curves"), ...curves.map((curve) => chart(curve, width)));
}

function chart({ name, steps, values }, width) {
  const series = { steps, values, layers: [0], tensor: name, statistic: "" };
  const { drawing, crosses } = lineChart(series, 0, name, width);
  return make(
    "figure",
    { class: "curve" },
    make(
      "figcaption",
      {},
      make("h3", {}, name),
      crosses > 0 && make("span", { class: "alarm" }, `${plural(crosses, "step")} not finite`),
    ),
    drawing,
  );
}
