// The verdict, what to change and the figures, at the top; facts about the run and notes, at the bottom.

import { byId, make, put } from "./dom.js";
import { formatCount, formatRate, formatShare, formatTime, listed, plural } from "./format.js";
import { listen, state } from "./state.js";

export function startSummary() {
  listen("run", () => {
    const { payload } = state.run;
    document.title = `${listed(payload.title, payload.scope)} \u2013 pipesight`;
    byId("title").textContent = payload.title;
    byId("scope").textContent = payload.scope ?? "";
    byId("scope").hidden = !payload.scope;
    const [first, ...rest] = payload.verdict.text.split(/(?<=[.!?]) /);
    byId("verdict").textContent = first;
    byId("verdict-more").textContent = rest.join(" ");
    showChanges(payload.verdict.changes);
    showFigures(payload.figures);
    put(
      byId("facts"),
      ...payload.facts.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
    );
    put(byId("notes"), ...payload.notes.map((note) => make("li", {}, note)));
  });
}

const LIMITS = { "at most": "upper limit", "at least": "lower limit" };

function showChanges(changes) {
  const list = byId("changes");
  list.hidden = !changes.length;
  put(
    list,
    ...changes.map(({ what, why, gain, promise }) =>
      make(
        "li",
        {},
        make(
          "span",
          { class: "gain number" },
          `saves ${promise === "simulated" ? "" : `${promise} `}${formatShare(gain)}`,
        ),
        make(
          "span",
          {},
          make("strong", {}, what),
          make("span", { class: "why" }, ` \u00b7 ${LIMITS[promise] ?? promise} \u00b7 ${why}`),
        ),
      ),
    ),
  );
}

function showFigures(known) {
  if (!known) return put(byId("figures"));
  const { bubble, bound, recompute } = known;
  const figures = [
    bubble !== null && [
      "bubble of the window",
      formatShare(bubble),
      bound === null ? "" : `schedule alone ${formatShare(bound)}`,
      "The share of the window (from the first forward to the last backward) in which partitions are idle, over " +
        "all windows. Schedule alone: the bubble that the schedule would have without other losses.",
    ],
    [
      `median ${known.unit ?? "step"}`,
      formatTime(known.median_step),
      `mean ${formatTime(known.mean_step)}`,
      bubble === null
        ? `Over ${formatCount(known.steps)}, each from its begin to that of the next.`
        : `Over ${plural(known.steps, "training step")}, each from its first forward to the next step's.`,
    ],
    [
      "throughput",
      ...(known.samples_per_second === null
        ? [formatRate(known.steps_per_second), "steps/s including pauses"]
        : [formatRate(known.samples_per_second), "samples/s including pauses"]),
      `What ${plural(known.steps, "step")} did in ${formatTime(known.elapsed)}, including pauses between them.`,
    ],
    recompute > 0 && [
      "recompute",
      formatShare(recompute),
      "of computing",
      "The time that checkpointing costs to save memory.",
    ],
  ].filter(Boolean);
  put(
    byId("figures"),
    ...figures.map(([name, value, more, title]) =>
      make(
        "div",
        { title },
        make("dt", {}, name),
        make("dd", { class: "number" }, value),
        make("dd", { class: "more" }, more),
      ),
    ),
  );
}
