// Of a trace without a pipeline: where the time went, name by name.

import { byId, make, put } from "./dom.js";
import { formatCount, formatTime } from "./format.js";
import { listen, state } from "./state.js";

export function startNames() {
  listen("run", () => {
    const { names, shown } = state.run.payload;
    byId("names-section").hidden = !names.length;
    byId("timeline-section").hidden = !shown.length;
    put(
      byId("names"),
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          ["category", "name", "spans", "time"].map((title, column) =>
            make("th", { scope: "col", class: column > 1 ? "number" : null }, title),
          ),
        ),
      ),
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
