// Where the time went in a trace without a pipeline, by name of span, and in a training log, by timer.

import { byId, make, put, tableHead } from "./dom.js";
import { formatCount, formatShare, formatTime } from "./format.js";
import { listen, state } from "./state.js";

/** Show the timers of a training log. */
export function startTimers() {
  listen("run", () => {
    const { timers } = state.run.payload;
    byId("timers-section").hidden = !timers.length;
    put(
      byId("timers"),
      tableHead(["timer", "fastest rank", "slowest", "share", "lines"], 1),
      make(
        "tbody",
        {},
        timers.map(([name, least, most, share, count]) =>
          make(
            "tr",
            {},
            make("th", { scope: "row" }, name),
            make("td", { class: "number" }, least === null ? "\u2013" : formatTime(least)),
            make("td", { class: "number" }, formatTime(most)),
            make("td", { class: "number" }, share === null ? "outside" : formatShare(share)),
            make("td", { class: "number" }, formatCount(count)),
          ),
        ),
      ),
    );
  });
}

export function startNames() {
  listen("run", () => {
    const { names, shown } = state.run.payload;
    byId("names-section").hidden = !names.length;
    byId("timeline-section").hidden = !shown.length;
    put(
      byId("names"),
      tableHead(["category", "name", "spans", "time"], 2),
      make(
        "tbody",
        {},
        names.map(([category, name, count, total]) =>
          make(
            "tr",
            {},
            make("td", {}, category),
            make("th", { scope: "row" }, name),
            make("td", { class: "number" }, formatCount(count)),
            make("td", { class: "number" }, formatTime(total)),
          ),
        ),
      ),
    );
  });
}
