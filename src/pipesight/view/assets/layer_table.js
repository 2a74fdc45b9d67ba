// A table of all layers that sorts by any column and filters as the reader types.

import { byId, make, marked, put } from "./dom.js";
import { formatBytes, formatShare, formatTime, listed, plural } from "./format.js";
import { listen, state, tell } from "./state.js";

const COLUMNS = [
  { key: "name", text: (row) => row.name },
  { key: "class", title: "class", text: (row) => row.class ?? "" },
  {
    key: "partition",
    title: "partition",
    number: true,
    text: (row) => (row.partition === null ? "" : `${row.partition}`),
  },
  { key: "calls", title: "calls", number: true, text: (row) => `${row.calls}` },
  { key: "forward", title: "forward", number: true, text: (row) => formatTime(row.forward) },
  { key: "recompute", title: "recompute", number: true, text: (row) => formatTime(row.recompute) },
  { key: "backward", title: "backward", number: true, text: (row) => formatTime(row.backward) },
  { key: "longest", title: "longest", number: true, text: (row) => formatTime(row.longest) },
  { key: "share", title: "of all computing", number: true, text: (row) => formatShare(row.share), bar: true },
  { key: "parameter_bytes", title: "parameters", number: true, text: (row) => formatBytes(row.parameter_bytes) },
];
const MOST_ROWS = 500;

const order = { key: null, falling: false };

export function startLayers() {
  byId("layers-search").addEventListener("input", showLayers);
  listen("run search series", showLayers);
}

function showLayers() {
  const { layers } = state.run;
  byId("layers-section").hidden = !layers.length;
  byId("layers-title").textContent = state.run.payload.layers_title ?? "Layers";
  const noun = (state.run.payload.layers_title ?? "Layers").toLowerCase().slice(0, -1);
  const wanted = byId("layers-search").value.trim().toLowerCase();
  const rows = layers
    .map((row, index) => ({ ...row, index }))
    .filter(
      (row) => !wanted || `${row.name} ${row.class ?? ""} partition ${row.partition}`.toLowerCase().includes(wanted),
    );
  if (order.key) rows.sort(compare);
  const most = Math.max(...layers.map((row) => row.share ?? 0), 1e-9);
  const columns = COLUMNS.filter(
    ({ key }) => key === "name" || layers.some((row) => row[key] !== null && row[key] !== undefined),
  );
  byId("layers-facts").textContent = listed(
    plural(layers.length, noun),
    state.run.payload.layers_note ?? "mean time of a micro-batch",
    rows.length < layers.length && `${rows.length} shown`,
  );
  put(
    byId("layers"),
    make(
      "thead",
      {},
      make(
        "tr",
        {},
        columns.map((column) => head(column, noun)),
      ),
    ),
    make(
      "tbody",
      {},
      rows.slice(0, MOST_ROWS).map((row) => line(row, columns, most)),
    ),
  );
}

function compare(a, b) {
  const [x, y] = order.falling ? [b[order.key], a[order.key]] : [a[order.key], b[order.key]];
  if (typeof x === "string" && typeof y === "string") return x.localeCompare(y, "en", { numeric: true });
  return (x ?? -Infinity) - (y ?? -Infinity);
}

function head({ key, title, number }, noun) {
  const sorted = order.key === key ? (order.falling ? "descending" : "ascending") : "none";
  const sort = () => {
    Object.assign(order, { key, falling: order.key === key ? !order.falling : Boolean(number) });
    showLayers();
    byId("layers").querySelector(`[data-key="${key}"]`).focus();
  };
  return make(
    "th",
    { scope: "col", "aria-sort": sorted, class: number ? "number" : null },
    make("button", { type: "button", "data-key": key, onclick: sort }, title ?? noun),
  );
}

function line(row, columns, most) {
  const found = state.query?.layers.has(row.index);
  const charted = state.run.statistics?.names.includes(row.name);
  return make(
    "tr",
    { class: found ? "found" : null },
    columns.map(({ key, number, text, bar }) => {
      if (key === "name")
        return make(
          "th",
          { scope: "row" },
          charted
            ? make(
                "button",
                { type: "button", class: "link", title: "show its statistics", onclick: () => chart(row.name) },
                marked(row.name, state.query?.pattern),
              )
            : marked(row.name, state.query?.pattern),
        );
      return make(
        "td",
        { class: bar ? "number share" : number ? "number" : null, vars: bar ? { share: (row.share ?? 0) / most } : {} },
        text(row),
      );
    }),
  );
}

function chart(name) {
  state.layer = name;
  tell("series");
  byId("statistics-section").scrollIntoView({ block: "nearest" });
}
