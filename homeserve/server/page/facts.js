// What the box view shows, derived from what the server's routes told: pure, without a document.
//
//   Ring          the last statuses of a server, and of counters what they grew by between two of them
//   barsOf        the budget as bars and rows of a table, one figure for each device
//   layoutSpans   which layout was in force when, from flips and events
//   phaseBands    times of the corridor in which something else than serving went on
//
// Unknown is null on the way in and on the way out, and the word "unknown" where it is shown; it is never 0.

export const UNKNOWN = "unknown";
const RING_MAX = 3600; // an hour of looks at one second
const GAP_S = 6; // between two looks that are further apart nobody was looking
const COARSE_S = 10; // a sample of the corridor that stands for more tells no phase
const THIN = "\u202f";

// --------------------------------------------------------------------------------------------------------------- words

// A number with its thousands apart: 22 736.1
export function number(value, digits = 0) {
  if (value === null || value === undefined) return UNKNOWN;
  const text = Number(value).toFixed(digits);
  const [whole, rest] = (Number(text) === 0 ? text.replace("-", "") : text).split(".");
  return whole.replace(/\B(?=(\d{3})+$)/g, THIN) + (rest ? `.${rest}` : "");
}

export function mib(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return number(value, Math.abs(value) < 1000 ? 1 : 0);
}

export function countOf(lines) {
  return `${lines} ${lines === 1 ? "line" : "lines"}`;
}

export function signed(value, digits = 1) {
  if (value === null || value === undefined) return UNKNOWN;
  return (value > 0 ? "+" : value < 0 ? "−" : "±") + number(Math.abs(value), digits);
}

export function rate(value) {
  if (value === null || value === undefined) return UNKNOWN;
  return number(value, value < 10 && value % 1 ? 1 : 0);
}

export function milliseconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value >= 10_000) return `${number(value / 1000, 1)} s`;
  return `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export function share(part, whole) {
  return part === null || part === undefined || !whole ? UNKNOWN : `${number((100 * part) / whole)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min`;
  if (whole < 172_800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86_400)} days`;
}

// ---------------------------------------------------------------------------------------------------------------- ring

// What is kept of a status: little enough that an hour of them is nothing.
export function sampleOf(status) {
  return {
    at: status.at,
    started: status.started,
    model: status.model.id,
    prompt: status.tokens.prompt,
    generated: status.tokens.generated,
    running: status.requests.running,
    waiting: status.requests.waiting,
    used: status.kv.used_tokens,
    cached: status.kv.cached_tokens,
    lag: status.engine.loop_lag_ms.p99,
    overhead: status.engine.step_overhead_ms.p99,
  };
}

export class Ring {
  constructor(most = RING_MAX) {
    this.most = most;
    this.samples = [];
  }

  get last() {
    return this.samples.at(-1) ?? null;
  }

  // Another process, or another model, has counters of its own: what was kept is told, not compared.
  push(status) {
    const sample = sampleOf(status);
    if (this.last && sample.at <= this.last.at) return;
    this.samples.push(sample);
    if (this.samples.length > this.most) this.samples.splice(0, this.samples.length - this.most);
  }

  // Runs (charts.js) of a counter, per second.
  rates(name) {
    return this.pairs((before, now) => {
      const grown = now[name] === null || before[name] === null ? null : now[name] - before[name];
      return grown === null || grown < 0 ? null : grown / (now.at - before.at);
    });
  }

  // Runs of a value. What it was while nobody looked is not known.
  values(name) {
    return this.pairs((before, now, gap) => (gap ? null : now[name]));
  }

  pairs(valueOf) {
    return this.samples.slice(1).map((now, index) => {
      const before = this.samples[index],
        gap = now.at - before.at > GAP_S;
      const same = before.started === now.started && before.model === now.model;
      return {from: before.at, to: now.at, value: same ? valueOf(before, now, gap) : null, gap};
    });
  }

  // Growth of a counter per second over the last `seconds`; null with less than two looks at one server in them.
  recent(name, seconds) {
    const {last} = this;
    if (!last || last[name] === null) return null;
    const first = this.samples.find(
      (each) =>
        each.at >= last.at - seconds &&
        each.started === last.started &&
        each.model === last.model &&
        each[name] !== null,
    );
    if (!first || first === last || first[name] > last[name]) return null;
    return (last[name] - first[name]) / (last.at - first.at);
  }
}

// Of each rank the shares of its time between two looks: computing, waiting for other ranks, and the rest. (A rank
// tells of its idle time with its next answer, so that is not read.) Null where it was started in between, or looked at
// once.
export function rankShares(before, now) {
  return now.ranks.map((rank) => {
    const old = before?.ranks.find(
      (each) => each.rank === rank.rank && each.pid === rank.pid && each.restarts === rank.restarts,
    );
    if (!old) return null;
    const ms = (now.at - before.at) * 1000;
    if (!(ms > 0)) return null;
    const busy = Math.min(1, Math.max(0, rank.busy_ms - old.busy_ms) / ms);
    const waited = Math.min(1 - busy, Math.max(0, rank.waited_ms - old.waited_ms) / ms);
    return {busy, waited, idle: 1 - busy - waited};
  });
}

// -------------------------------------------------------------------------------------------------------------- memory

// Lines that are drawn alike, by the beginning of their names; the first that fits counts.
const KINDS = [
  ["copies", "copies for flips", /^(weights (copy|side|image)|flip )/],
  ["weights", "weights", /^(weights|vision|embedding|head)/],
  ["kv", "KV rows", /^kv/],
  ["state", "states and drafts", /^(state|drafts|checkpoints)/],
  ["buffers", "buffers", /^(workspace|staging|load staging|exchange|mailboxes|acts|plan log|activations)/],
  ["processes", "processes", /process|^vocabulary/],
  ["driver", "driver", /^(context|graphs|communicators|runtime|library)/],
];
const OTHER = ["other", "other"];
export const LINE_KINDS = [...KINDS.map(([kind, name]) => ({kind, name})), {kind: OTHER[0], name: OTHER[1]}];

export function kindOf(line) {
  return (KINDS.find(([, , pattern]) => pattern.test(line)) ?? OTHER)[0];
}

// Cache that the kernel takes back: it is told, and in no sum.
export function isCache(line) {
  return line.startsWith("model file");
}

const MOMENTS = ["boot", "pipeline", "tensor", "flip"];

function heldAt(line, moment) {
  return line.held.includes("always") || line.held.includes(moment);
}

// The moment at which most is planned on a device, with its lines; of equal ones the one in force, then the first.
export function peakOf(ledger, device, layout) {
  const here = ledger.filter((line) => line.device === device);
  const sums = MOMENTS.map((moment) => ({
    moment,
    lines: here.filter((line) => heldAt(line, moment)),
  })).map((each) => ({...each, sum: each.lines.reduce((sum, line) => sum + line.mib, 0)}));
  const most = Math.max(...sums.map((each) => each.sum)),
    equal = sums.filter((each) => each.sum > most - 0.005);
  return equal.find((each) => each.moment === layout) ?? equal[0];
}

// One figure for each device that the plan, or a measurement, has lines of. `free`: device -> MiB that are free now.
export function barsOf(budget, layout, free = new Map()) {
  const ledger = budget.plan?.ledger ?? [];
  const used = new Set([...ledger, ...budget.measured].map((line) => line.device));
  return budget.devices
    .filter((device) => used.has(device.index))
    .map((device) => {
      const rows = budget.measured.filter((row) => row.device === device.index);
      const peak = peakOf(ledger, device.index, layout);
      const bars = [
        barOf(
          "predicted",
          `planned, ${layout ?? "now"}`,
          rows.filter((row) => row.predicted_mib !== null).map((row) => [row.line, row.predicted_mib]),
        ),
        barOf(
          "measured",
          "measured",
          rows.filter((row) => !isCache(row.line)).map((row) => [row.line, row.measured_mib]),
        ),
      ];
      if (peak && peak.moment !== layout) {
        bars.push(
          barOf(
            "peak",
            `planned, ${peak.moment}`,
            peak.lines.map((line) => [line.line, line.mib]),
          ),
        );
      }
      return {
        index: device.index,
        name: device.name ?? device.id,
        kind: device.kind,
        bars,
        rows: tableOf(rows, ledger, device.index, layout),
        peak_mib: budget.plan?.peak_mib?.[device.index] ?? null,
        peakMoment: peak?.moment ?? null,
        whole: wholeOf(budget, device, bars[1], free),
      };
    });
}

// Parts in the order of their kinds, so that what is alike lies together.
function barOf(key, name, lines) {
  const order = LINE_KINDS.map((each) => each.kind);
  const parts = lines
    .filter(([, value]) => value !== null && value > 0)
    .map(([line, value]) => ({line, mib: value, kind: kindOf(line)}));
  parts.sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
  let end = 0;
  for (const part of parts) {
    part.from = end;
    end += part.mib;
  }
  return {key, name, parts, sum: end, unknown: lines.filter(([, value]) => value === null).length};
}

// The device as a whole: what this server holds, what others do, what is free, and how much of that is the floor.
function wholeOf(budget, device, measured, free) {
  const card = budget.measured_cards.find((each) => each.device === device.index);
  const host = device.kind === "cpu";
  const total = host ? (budget.host.limit_mib ?? device.total_mib) : device.total_mib;
  const told = free.get(device.index) ?? null;
  const driver =
    card && card.driver_mib !== null && device.free_mib !== null ? device.free_mib - card.driver_mib : null;
  const left = told ?? driver;
  const held = host
    ? ((budget.measured_all ?? budget.measured_total).smaps_mib ?? measured.sum)
    : (card?.driver_mib ?? measured.sum);
  const others = total === null || left === null ? null : Math.max(0, total - left - held);
  return {
    total,
    held,
    others,
    free: left,
    floor: device.floor_mib,
    ceiling: device.ceiling_mib,
    from: told !== null ? "corridor" : "driver",
  };
}

// Every line of the ledger and every one that is measured; what is planned at other times stands beside it.
function tableOf(measured, ledger, device, layout) {
  const names = [
    ...new Set([
      ...measured.map((row) => row.line),
      ...ledger.filter((line) => line.device === device).map((line) => line.line),
    ]),
  ];
  return names.map((line) => {
    const row = measured.find((each) => each.line === line);
    const planned = ledger.filter((each) => each.device === device && each.line === line);
    const other = planned.filter((each) => !heldAt(each, layout));
    const predicted = row?.predicted_mib ?? null,
      found = row?.measured_mib ?? null;
    return {
      line,
      kind: kindOf(line),
      predicted,
      measured: found,
      here: Boolean(row),
      cache: isCache(line),
      difference: predicted === null || found === null ? null : found - predicted,
      how: row?.how ?? null,
      note: planned.find((each) => heldAt(each, layout))?.note ?? planned[0]?.note ?? "",
      elsewhere: other.map((each) => `${mib(each.mib)} at ${each.held.join(", ")}`).join("; "),
    };
  });
}

// ------------------------------------------------------------------------------------------------------------ timeline

// Spans {from, to, layout} between `from` and `now`. Each flip tells which layout it found, a committed one which it
// left. Where two do not meet, ranks were lost in between: a life begins again in the resting layout, and the event
// says when. Before the first thing that is known nothing is claimed beyond what the first flip found.
export function layoutSpans({flips, events, layout, from, now}) {
  const made = [],
    turns = [];
  const committed = flips.filter((flip) => flip.state === "committed" && flip.ms.total !== null);
  let at = from,
    current = flips.length ? flips[0].from : null;
  for (const flip of flips) {
    if (current !== null && flip.from !== current)
      turns.push({at: lossBetween(events, at, flip.at) ?? flip.at, to: flip.from});
    current = flip.from;
    at = flip.at;
    if (!committed.includes(flip)) continue;
    current = flip.to;
    at = flip.at + flip.ms.total / 1000;
    turns.push({at, to: flip.to});
  }
  if (layout && current !== null && layout !== current)
    turns.push({at: lossBetween(events, at, now) ?? now, to: layout});
  // Only the last flips are kept: what was before the first of them, and is not its beginning, is not known.
  let start = flips.length && flips[0].id > 1 ? Math.max(from, flips[0].at) : from,
    name = flips.length ? flips[0].from : layout;
  for (const turn of turns) {
    if (turn.at > start && name) made.push({from: start, to: turn.at, layout: name});
    start = Math.max(start, turn.at);
    name = turn.to;
  }
  if (name && now > start) made.push({from: start, to: now, layout: name});
  return made;
}

function lossBetween(events, from, to) {
  return events.find((event) => event.kind === "worker_lost" && event.at >= from && event.at <= to)?.at ?? null;
}

// Whether a sample's phase is of serving, of a flip, or of a load.
export function phaseKind(phase) {
  if (phase === "ready") return "ready";
  if (phase.startsWith("flip ")) return "flip";
  return ["recovering", "draining"].includes(phase) ? phase : "loading";
}

// Bands {from, to, name, class} of times in which the server did not just serve. What it was doing else is the phase of
// samples ([seconds, MiB, phase]); but old ones are thinned out, and one that stands for a long time tells of a moment
// in it. Flips are short, and known exactly from their records.
export function phaseBands(samples, began, flips = []) {
  const made = [];
  samples.forEach(([second, , phase], index) => {
    const kind = phaseKind(phase),
      earlier = index ? samples[index - 1] : [0, null, phase];
    const band = {from: began + earlier[0], to: began + second, name: kind, class: kind};
    if (kind === "ready" || kind === "flip" || band.to - band.from > COARSE_S) return;
    if (made.length && kind === phaseKind(earlier[2])) made.at(-1).to = band.to;
    else made.push(band);
  });
  const moved = flips.map((flip) => ({
    from: flip.at,
    to: flip.at + (flip.ms.total ?? 0) / 1000,
    name: `flip ${flip.id}`,
    class: "flip",
  }));
  return [...made, ...moved];
}

// Free memory as runs (charts.js): each value since the one before it.
export function freeRuns(samples, began) {
  return samples.map(([second, free], index) => ({
    from: began + (index ? samples[index - 1][0] : 0),
    to: began + second,
    value: free,
    gap: false,
  }));
}

// When the floor was not kept: the first sample of each dip below it.
export function breachesOf(device, began) {
  const below = ([, free]) => free !== null && device.floor_mib !== null && free < device.floor_mib;
  return device.samples
    .filter((sample, index) => below(sample) && !(index && below(device.samples[index - 1])))
    .map(([second, free, phase]) => ({at: began + second, free, phase}));
}
