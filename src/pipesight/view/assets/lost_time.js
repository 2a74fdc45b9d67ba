// Where the time went: a bar for each partition and one for all, and what each part of it means.

import { byId, choices, make, put } from "./dom.js";
import { formatShare, formatTime, plural } from "./format.js";
import { listen, shownStep, state } from "./state.js";

const MOST_BARS = 32;
let scope = "run";

export function startLosses() {
  listen("run", showLosses);
  listen("step", () => scope === "step" && showLosses());
}

function showLosses() {
  const { parts, run } = state.run.payload.losses;
  const step = shownStep();
  const ofStep = scope === "step" && step ? state.run.shown[state.step].losses : null;
  const chosen = ofStep ? { all: ofStep, lanes: [] } : run;
  byId("time-section").hidden = !run.all.some((time) => time > 0);
  const period = state.run.payload.losses.period ?? "from its first forward to the next step's";
  const lanes = chosen.lanes.slice(0, MOST_BARS);
  const total = Math.max(sum(chosen.all), ...lanes.map(({ times }) => sum(times)), 1);
  byId("time-facts").textContent = ofStep
    ? `step ${step.number}, ${formatTime(sum(chosen.all))} ${period}; shares of that`
    : `mean of ${plural(state.run.payload.losses.steps, "training step")}${inReplicas()}, ` +
      `${formatTime(sum(chosen.all))} each; shares of the step`;
  put(
    byId("time"),
    make("div", { class: "choice", role: "group", "aria-label": "Which steps" }, scopes()),
    make(
      "div",
      { class: "bars" },
      bar("all", chosen.all, total, parts),
      lanes.map(({ partition, times }) => bar(`partition ${partition}`, times, total, parts)),
      chosen.lanes.length > MOST_BARS &&
        make("p", { class: "soft" }, `and ${plural(chosen.lanes.length - MOST_BARS, "more partition")}`),
      lanes.length > 0 &&
        state.run.lanes.some(({ takes_turns }) => takes_turns) &&
        make("p", { class: "soft" }, "Partitions on one rank take turns: each is idle longer than its rank."),
    ),
    explanations(parts, chosen.all),
  );
}

function inReplicas() {
  const { replicas } = state.run.payload;
  return replicas > 1 ? ` in ${replicas} replicas` : "";
}

function scopes() {
  const names = [
    ["run", state.run.payload.scope ?? "whole run"],
    ["step", "this step"],
  ];
  return choices("time", names, scope, (name) => {
    scope = name;
    showLosses();
  });
}

function bar(name, times, total, parts) {
  const said = parts
    .map(({ name: part }, index) => (times[index] > 0 ? `${part} ${formatTime(times[index])}` : null))
    .filter(Boolean)
    .join(", ");
  return make(
    "div",
    { class: name === "all" ? "stack all" : "stack" },
    make("span", { class: "stack-name" }, name),
    make(
      "div",
      { class: "stack-bar", role: "img", "aria-label": `${name}: ${said}` },
      parts.map(
        ({ key, name: part }, index) =>
          times[index] > 0 &&
          make("span", {
            class: `part ${key}`,
            vars: { share: times[index] / total },
            title: `${part}: ${formatTime(times[index])}, ${formatShare(times[index] / sum(times))}`,
          }),
      ),
    ),
  );
}

function explanations(parts, all) {
  const whole = Math.max(sum(all), 1);
  const groups = state.run.payload.losses.groups ?? [
    ["busy", "Computing"],
    ["loss", "Lost inside the window"],
    ["outside", "Outside the window"],
  ];
  return make(
    "div",
    { class: "explanations" },
    groups.map(([kind, title]) => {
      const members = parts
        .map((part, index) => ({ ...part, time: all[index] }))
        .filter((part) => part.kind === kind && (part.time > 0 || kind === "loss"));
      if (!members.length) return null;
      return make(
        "div",
        {},
        make(
          "h3",
          {},
          title,
          make("span", { class: "number" }, formatShare(sum(members.map(({ time }) => time)) / whole)),
        ),
        make(
          "dl",
          {},
          members.map(({ key, name, text, time }) =>
            make(
              "div",
              { class: time > 0 ? null : "nothing" },
              make(
                "dt",
                {},
                make("span", { class: `part key ${key}`, "aria-hidden": "true" }),
                name,
                make("span", { class: "number" }, `${formatTime(time)} \u00b7 ${formatShare(time / whole)}`),
              ),
              make("dd", {}, text),
            ),
          ),
        ),
      );
    }),
  );
}

const sum = (times) => times.reduce((total, time) => total + time, 0);
