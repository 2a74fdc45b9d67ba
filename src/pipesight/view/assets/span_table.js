// Where the time went in a trace without a pipeline, by name of span.

import { byId, make, put, tableHead } from "./dom.js";
import { formatCount, formatTime } from "./format.js";
import { listen, state } from "./state.js";

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
