// What the reader looks at, and who wants to know when that changes.

export const state = {
  run: null, // what `readRun` made of the payload
  step: 0, // a place in run.shown
  view: { from: 0, to: 1 }, // microseconds of the step that the timeline shows
  selected: null, // a block of the step that is open, or null
  focused: null, // a block that the keyboard is at, or null
  hovered: null,
  query: null, // what is searched for, or null
  tensor: null,
  statistic: null,
  layer: null, // of the line chart
};

const listeners = new Map();

/** Call `listener` whenever one of `topics` changes: run, step, view, selection, hover, search, theme, series. */
export function listen(topics, listener) {
  for (const topic of topics.split(" ")) listeners.set(topic, [...(listeners.get(topic) ?? []), listener]);
}

export function tell(topic) {
  for (const listener of listeners.get(topic) ?? []) {
    try {
      listener();
    } catch (error) {
      console.error(error); // one part of the page that fails leaves the others as they are
    }
  }
}

/** The step that is shown, or null. */
export const shownStep = () => state.run?.stepAt(state.step) ?? null;
