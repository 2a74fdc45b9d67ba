// What the page shows now, and who is notified when that changes.

export const state = {
  run: null, // what `readRun` made of the payload
  step: 0, // an index into run.shown
  view: { from: 0, to: 1 }, // microseconds of the step that the timeline shows
  selected: null, // a block of the step that is open, or null
  focused: null, // the block with the keyboard's focus, or null
  hovered: null,
  fold: null, // whether rows are folded; null is what the run has at first
  path: false, // whether the critical path is drawn
  range: null, // what is selected of the step, [from, to] in microseconds, or null
  query: null, // the search, or null
  tensor: null,
  statistic: null,
  layer: null, // of the line chart
};

const listeners = new Map();

/** Call `listener` whenever one of `topics` changes: run, step, view, selection, range, path, fold, hover, search, theme, series. */
export function listen(topics, listener) {
  for (const topic of topics.split(" ")) listeners.set(topic, [...(listeners.get(topic) ?? []), listener]);
}

export function tell(topic) {
  for (const listener of listeners.get(topic) ?? []) {
    try {
      listener();
    } catch (error) {
      console.error(error); // a failure in one part of the page does not stop the others
    }
  }
}

/** The step that is shown, or null. */
export const shownStep = () => state.run?.stepAt(state.step) ?? null;
