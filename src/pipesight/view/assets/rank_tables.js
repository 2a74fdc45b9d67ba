// What ranks send each other: collectives, with the rank that came last, and the messages of each link.

import { byId, make, put, tableHead } from "./dom.js";
import { formatBytes, formatCount, formatShare, formatTime, plural } from "./format.js";
import { listen, state } from "./state.js";

export function startRankTables() {
  listen("run", () => {
    const found = state.run.payload.traffic;
    byId("traffic-section").hidden = !found;
    if (!found) return;
    put(
      byId("traffic"),
      found.collectives.length > 0 && collectives(found.collectives, found.more_collectives),
      found.links.length > 0 && links(found.links, found.more_links),
    );
  });
}

const rate = (bandwidth) => (bandwidth === null ? "\u2013" : `${formatBytes(Math.round(bandwidth))}/s`);
const cell = (text, more = {}) => make("td", { class: "number", ...more }, text);

function collectives(rows, more) {
  return table(
    "Collectives: the mean call, from when the last rank came",
    ["name", "ranks", "calls", "size", "time", "bandwidth", "in the background", "waits for the last", "came last"],
    2,
    rows.map((row) =>
      make(
        "tr",
        {},
        make("th", { scope: "row" }, row.name),
        make("td", { title: row.ranks }, row.ranks),
        cell(formatCount(row.calls)),
        cell(formatBytes(row.bytes)),
        cell(formatTime(row.time)),
        cell(rate(row.bandwidth)),
        cell(formatShare(row.overlap)),
        cell(formatTime(row.wait)),
        cell(
          row.last === null ? "clocks cannot tell" : `rank ${row.last} in ${formatShare(row.last_share)}`,
          row.last === null ? { class: "number soft" } : {},
        ),
      ),
    ),
    more,
    "collective",
  );
}

function links(rows, more) {
  const end = (rank, host) => (host ? `${rank} on ${host}` : `${rank}`);
  return table(
    "Messages: of those that the receiver was waiting for, the median",
    [
      "from rank",
      "to rank",
      "partitions",
      "messages",
      "size",
      "time",
      "bandwidth",
      "overlapped",
      "waits a step",
      "of the step",
    ],
    3,
    rows.map((row) =>
      make(
        "tr",
        { class: row.notable ? "found" : null },
        make("th", { scope: "row" }, end(row.way[0], row.hosts[0])),
        make("td", {}, end(row.way[1], row.hosts[1])),
        make("td", {}, row.partitions.join(", ")),
        cell(formatCount(row.messages)),
        cell(formatBytes(Math.round(row.bytes))),
        cell(formatTime(row.time), {
          title: row.error === null ? "the clocks of these ranks were not compared" : `\u00b1 ${formatTime(row.error)}`,
        }),
        cell(rate(row.bandwidth)),
        cell(formatShare(row.overlap)),
        cell(formatTime(row.wait)),
        cell(formatShare(row.share)),
      ),
    ),
    more,
    "link",
  );
}

const table = (caption, titles, firstNumber, rows, more, what) =>
  make(
    "div",
    {},
    make(
      "div",
      { class: "scroller", tabindex: "0", role: "region", "aria-label": caption },
      make("table", {}, make("caption", {}, caption), tableHead(titles, firstNumber), make("tbody", {}, rows)),
    ),
    more > 0 && make("p", { class: "soft" }, `and ${plural(more, `more ${what}`)} that cost less`),
  );
