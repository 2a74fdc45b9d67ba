// Send the trace to ui.perfetto.dev: open it, ping until it answers, then post the file. Only on a click.

import { byId, make, put } from "./dom.js";
import { address } from "./live_updates.js";
import { state } from "./state.js";

const ORIGIN = "https://ui.perfetto.dev";
const PATIENCE = 60000; // milliseconds

export function startPerfetto() {
  byId("perfetto").addEventListener("click", () => (address("trace") ? handOver(address("trace")) : explain()));
}

async function handOver(trace) {
  const other = window.open(ORIGIN); // at once: later, the browser would block it as a pop-up
  if (!other) return explain("The browser did not let this page open a window.");
  try {
    const response = await fetch(trace);
    if (!response.ok) throw new Error(`the trace could not be read: ${response.status} ${response.statusText}`);
    const buffer = await response.arrayBuffer();
    await answered(other);
    other.postMessage({ perfetto: { buffer, title: state.run.payload.title, keepApiOpen: false } }, ORIGIN);
  } catch (error) {
    explain(error.message);
  }
}

/** Perfetto answers PING with PONG once it can take a trace. */
function answered(other) {
  return new Promise((resolve, reject) => {
    const finish = (settle, value) => {
      clearInterval(asking);
      clearTimeout(waiting);
      window.removeEventListener("message", hear);
      settle(value);
    };
    const hear = (event) => event.origin === ORIGIN && event.data === "PONG" && finish(resolve);
    const asking = setInterval(() => other.postMessage("PING", ORIGIN), 100);
    const waiting = setTimeout(() => finish(reject, new Error("ui.perfetto.dev does not answer")), PATIENCE);
    window.addEventListener("message", hear);
  });
}

function explain(problem = null) {
  const dialog = byId("perfetto-help");
  const traces = state.run?.payload.traces ?? [];
  put(
    dialog,
    make("h2", { id: "perfetto-title" }, "Open in Perfetto"),
    problem && make("p", { class: "alarm" }, problem),
    make("p", {}, "A page opened as a file cannot read the files beside it. Two ways:"),
    make(
      "ol",
      {},
      make(
        "li",
        {},
        "Open ",
        make("a", { href: ORIGIN, target: "_blank", rel: "noreferrer noopener" }, "ui.perfetto.dev"),
        " and drop onto it:",
        make(
          "ul",
          {},
          traces.slice(0, 8).map((trace) => make("li", {}, make("code", {}, trace))),
          traces.length > 8 && make("li", {}, `or one of ${traces.length - 8} more`),
        ),
      ),
      make(
        "li",
        {},
        "Serve this page with ",
        make("code", {}, `pipesight view ${state.run?.payload.path ?? "RUN"}`),
        ": there, the button opens the trace.",
      ),
    ),
    make("form", { method: "dialog" }, make("button", {}, "Close")),
  );
  dialog.showModal();
}
