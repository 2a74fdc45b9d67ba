// Runs side by side: the headline, quantities, parts of a step, curves, layers that changed, and what each run is.

import { showComparedCurves } from "./compared_curves.js";
import { byId, make, put, tableHead } from "./dom.js";
import { formatShare, formatTime } from "./format.js";
import "./palette.js";
import { unpackPayload } from "./payload.js";
import { startTheme } from "./theme.js";

let marks = []; // what the runs are called: A, B and so on

byId("incomplete").remove(); // the page loaded completely

function show(payload) {
  document.title = `${payload.title} \u2013 pipesight`;
  marks = payload.marks;
  const alone = payload.text.length === 1; // two runs
  const [first, ...rest] = payload.text[0].split(/(?<=[.!?]) /);
  byId("headline").textContent = alone ? first : payload.title;
  byId("headline-more").textContent = alone ? rest.join(" ") : "";
  const said = (index) => `${payload.text[index]} ${payload.settings[index]}.`;
  put(
    byId("settings"),
    alone ? payload.settings[0] : payload.text.map((_, index) => make("span", { class: "of-run" }, said(index))),
  );
  table("quantities", "", payload.quantities);
  showParts(payload.parts);
  showComparedCurves(payload.curves, marks);
  showLayers(payload.layers);
  put(byId("runs"), ...payload.runs.map(runCard));
  byId("main").classList.remove("waiting");
}

/** A table of names, the values of all runs, and the difference if there are two. */
function table(id, name, rows) {
  put(
    byId(id),
    tableHead([name, ...marks, ...(marks.length === 2 ? ["difference"] : [])], 1),
    make(
      "tbody",
      {},
      rows.map(([title, ...cells]) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, title),
          cells.map((cell) => make("td", { class: "number" }, cell)),
        ),
      ),
    ),
  );
}

function showParts({ keys, times, rows }) {
  const totals = marks.map((_, side) => times.reduce((sum, both) => sum + both[side], 0));
  const most = Math.max(...totals, 1);
  put(
    byId("bars"),
    marks.map((mark, side) =>
      make(
        "div",
        { class: "stack all" },
        make("span", { class: "stack-name" }, `${mark}, ${formatTime(totals[side])}`),
        make(
          "div",
          {
            class: "stack-bar",
            role: "img",
            "aria-label": `${mark}: ${formatTime(totals[side])}; the table has the parts`,
          },
          keys.map(({ key, name, text }, index) => {
            const time = times[index][side];
            if (!(time > 0)) return null;
            const title = `${name}: ${formatTime(time)}, ${formatShare(time / totals[side])}. ${text}`;
            return make("span", { class: `part ${key}`, vars: { share: time / most }, title });
          }),
        ),
      ),
    ),
  );
  table("parts", "", rows);
  const keyOf = new Map(keys.map(({ key, name }) => [name, key]));
  for (const title of byId("parts").querySelectorAll("tbody th")) {
    const key = keyOf.get(title.textContent);
    title.prepend(make("span", { class: key ? `part key ${key}` : "part key none", "aria-hidden": "true" }));
  }
}

function showLayers({ rows, changed, all }) {
  byId("layers-section").hidden = !all;
  const same = all - changed;
  byId("layers-facts").textContent =
    `${changed} of ${all}, with their time in the mean step` +
    (same ? `; ${same} ${same === 1 ? "takes" : "take"} the same time, to within 5%` : "") +
    (rows.length < changed ? `; the first ${rows.length} are shown` : "");
  if (rows.length) table("layers", "layer", rows);
}

function runCard({ title, path, alarm, verdict, findings, facts }, side) {
  return make(
    "section",
    { class: "card", "aria-label": `Run ${marks[side]}` },
    make("div", { class: "bar" }, make("h2", {}, `${marks[side]}  ${title}`), make("p", { class: "facts" }, path)),
    alarm && make("p", { class: "alarm" }, alarm),
    make("p", {}, verdict),
    findings.map((group) => [
      make("h3", {}, group.title),
      make(
        "ul",
        { class: "entries" },
        group.entries.map(([text]) => make("li", {}, text)),
      ),
    ]),
    make(
      "dl",
      { class: "run-facts" },
      facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    ),
  );
}

startTheme();
show(await unpackPayload());
