// What happened in a range of a step: how long each lane was busy and idle, in which phases, and each kind of span.

/** How long some times, which may overlap, cover a range. */
export function covered(times, from, to) {
  let total = 0;
  let reached = from;
  for (const [begin, end] of [...times].sort((a, b) => a[0] - b[0])) {
    const upTo = Math.min(end, to);
    total += Math.max(upTo - Math.max(begin, reached), 0);
    reached = Math.max(reached, upTo);
  }
  return total;
}

/**
 * Return {lanes, spans}. A lane is {lane, phases, busy, idle, outside}: idle is what the timeline hatches, outside lies
 * outside the windows. Where the partitions of a rank take turns, `turns` is the time that others of them computed.
 * A span is {rank, name, kind, count, time}, the longest first; those of one name that overlap count once.
 */
export function rangeTotals(step, from, to) {
  const length = to - from;
  const lanes = step.lanes.map(({ blocks }, lane) => {
    const phases = [0, 0, 0, 0];
    const times = [];
    for (const block of blocks) {
      const time = Math.min(step.to[block], to) - Math.max(step.from[block], from);
      if (time <= 0) continue;
      phases[step.phase[block]] += time;
      times.push([step.from[block], step.to[block]]);
    }
    const busy = covered(times, from, to);
    const { replica, takes_turns } = step.run.lanes[lane];
    const windows = step.windows.filter(([of]) => of === replica).map(([, begin, end]) => [begin, end]);
    const outside = Math.max(length - covered([...windows, ...times], from, to), 0);
    const idle = covered(step.idle[lane], from, to);
    return { lane, phases, busy, idle, outside, turns: takes_turns ? Math.max(length - busy - idle - outside, 0) : 0 };
  });
  return { lanes, spans: spanTotals(step, from, to) };
}

function spanTotals({ spans }, from, to) {
  const found = new Map();
  spans.rank.forEach((rank, place) => {
    const [begin, end] = [spans.begin[place], spans.begin[place] + spans.time[place]];
    if (end <= from || begin >= to) return;
    const key = `${rank}/${spans.kind[place]}/${spans.name?.[place]}`;
    if (!found.has(key)) found.set(key, { rank, kind: spans.kind[place], place, times: [] });
    found.get(key).times.push([begin, end]);
  });
  return [...found.values()]
    .map(({ times, ...rest }) => ({ ...rest, count: times.length, time: covered(times, from, to) }))
    .sort((a, b) => b.time - a.time);
}
