// Scales of charts, and what makes many values few: pure, without a document.

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800];
const DAY_S = 86400;

export function linear([low, high], [start, end]) {
  const span = high - low || 1;
  const scale = (value) => start + ((value - low) / span) * (end - start);
  scale.invert = (place) => low + ((place - start) / (end - start || 1)) * span;
  return scale;
}

// The step of 1, 2 or 5 times a power of ten that cuts `span` into no more than `count` parts.
export function niceStep(span, count) {
  if (!(span > 0)) return 1;
  const rough = span / count,
    power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * (1 - 1e-9));
}

export function ticks(low, high, count) {
  const step = niceStep(high - low, count),
    made = [];
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++)
    made.push(Number((n * step).toFixed(digits)));
  return made;
}

// Whole moments of the local clock between two times (seconds of the epoch), and the step between them.
export function timeTicks(from, to, count) {
  const step = TIME_STEPS.find((each) => (to - from) / each <= count) ?? Math.ceil((to - from) / count / DAY_S) * DAY_S;
  const offset = -60 * new Date(from * 1000).getTimezoneOffset(),
    made = [];
  for (let at = Math.ceil((from + offset) / step) * step - offset; at <= to; at += step) made.push(at);
  return {step, at: made};
}

export function timeLabel(at, step) {
  const date = new Date(at * 1000),
    two = (number) => String(number).padStart(2, "0");
  if (step >= DAY_S) return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const minutes = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return step >= 60 ? minutes : `${minutes}:${two(date.getSeconds())}`;
}

const REDUCE = {
  min: (values) => Math.min(...values.map((each) => each.value)),
  max: (values) => Math.max(...values.map((each) => each.value)),
  mean: (values) => {
    const seconds = values.reduce((sum, each) => sum + each.to - each.from, 0);
    const whole = values.reduce((sum, each) => sum + each.value * (each.to - each.from), 0);
    return seconds > 0 ? whole / seconds : values.at(-1).value;
  },
};

// What one number says of runs: the least (`min`), the most (`max`) or the mean over time; null where nothing is known.
export function reduce(runs, how) {
  const known = runs.filter((run) => run.value !== null);
  return known.length ? REDUCE[how](known) : null;
}

// Runs that lie between two times, no more than `columns`: those of a column become one, by `how`.
export function thin(runs, from, to, columns, how) {
  const inside = runs.filter((run) => run.to > from && run.from < to);
  if (inside.length <= columns) return inside;
  const width = (to - from) / columns,
    made = [];
  let group = [];
  const close = () => {
    if (group.length) made.push({from: group[0].from, to: group.at(-1).to, value: reduce(group, how), gap: false});
    group = [];
  };
  let column = -1;
  for (const run of inside) {
    const mine = Math.min(columns, Math.max(1, Math.ceil((run.to - from) / width - 1e-9)));
    if (mine !== column || run.gap) close();
    column = mine;
    if (run.gap) made.push(run);
    else group.push(run);
  }
  close();
  return made;
}

// The run in which a time lies; null where there is none.
export function runAt(runs, at) {
  let low = 0,
    high = runs.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (at > runs[middle].to) low = middle + 1;
    else if (at < runs[middle].from) high = middle - 1;
    else return runs[middle];
  }
  return null;
}
