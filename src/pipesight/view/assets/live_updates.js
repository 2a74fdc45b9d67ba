// Updates of a page that `pipesight view` serves: fetches a new payload whenever the server announces one.

import { byId } from "./dom.js";
import { state } from "./state.js";

let latest = -1; // the revision that was last requested
let fetching = false;

/** An address of `pipesight view`: events, payload or trace; null if the page is a file. */
export function address(what) {
  const served = location.protocol === "http:" || location.protocol === "https:";
  return (served && document.querySelector(`meta[name="pipesight-${what}"]`)?.content) || null;
}

/** Call `update` with every new payload. */
export function startLive(update) {
  if (!address("payload")) return;
  if (!state.run) refresh(update);
  if (!address("events") || !window.EventSource) return;
  const source = new EventSource(address("events"));
  const heard = (event) => {
    const { revision } = JSON.parse(event.data);
    say("live");
    if (event.type === "ended") {
      source.close();
      say("ended");
    }
    if (revision !== latest) {
      latest = revision;
      refresh(update);
    }
  };
  source.addEventListener("changed", heard);
  source.addEventListener("ended", heard);
  source.addEventListener("error", () => source.readyState !== EventSource.CLOSED && say("connection lost, retrying"));
}

/** Fetch the payload, and again if there is a newer one by then. */
async function refresh(update) {
  if (fetching) return;
  fetching = true;
  const wanted = latest;
  let again = 0; // milliseconds
  try {
    const response = await fetch(address("payload"), { cache: "no-store" });
    again = 1000 * Number(response.headers.get("Retry-After")); // no complete step yet, or too many viewers
    if (response.ok && !again) update(await response.json());
    else if (!again) say(`no report: ${response.status}`);
  } catch {
    say("connection lost, retrying");
    again = 2000;
  }
  fetching = false;
  if (latest !== wanted) refresh(update);
  else if (again) setTimeout(() => refresh(update), again);
}

/** Show that the run is live. A page that is a file, or of a run that has ended, shows nothing. */
export function showLive(live) {
  if (live) say("live");
  else if (byId("live").textContent === "live") say("ended");
}

function say(text) {
  const badge = byId("live");
  badge.hidden = !text;
  badge.textContent = text;
  badge.classList.toggle("on", text === "live");
}
