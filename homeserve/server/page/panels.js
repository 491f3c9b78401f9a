// The parts of the box view that tell of the machine as it is now: how fast it is, on which ranks, and what befell it.
// Each part has `node`, `show(state)` and `close()`; `state` is box.js's.

import {TimeChart} from "./charts.js";
import {h, setText, table} from "./nodes.js";
import {reduce, timeLabel} from "./scales.js";
import {duration, milliseconds, number, rankShares, rate, share, UNKNOWN} from "./facts.js";

const UNWATCHED = "not watched by this page";
const NOW_S = 5; // over which "now" is a mean

export function panel(title, key, ...children) {
  const heading = `box-${key}`;
  return h("section", {class: `panel ${key}`, "aria-labelledby": heading}, h("h3", {id: heading}, title), ...children);
}

// --------------------------------------------------------------------------------------------------------------- speed

export class Speed {
  constructor() {
    this.tiles = new Map();
    this.list = h("dl", {class: "tiles"});
    this.charts = {
      generated: new TimeChart("Generated tokens per second", {key: "generated"}),
      prompt: new TimeChart("Prompt tokens per second", {key: "prompt"}),
      requests: new TimeChart("Requests", {key: "requests"}),
      kv: new TimeChart("KV tokens", {key: "kv"}),
    };
    this.node = panel(
      "Speed and load",
      "speed",
      this.list,
      h("div", {class: "grid two"}, ...Object.values(this.charts).map((chart) => chart.node)),
    );
  }

  show(state) {
    const {status, ring, from, to} = state;
    if (!status) return;
    this.showTiles(status, ring);
    const first = ring.samples[0]?.at ?? to;
    const bands = first > from ? [{from, to: first, name: UNWATCHED, class: "unwatched"}] : [];
    const shared = {from, to, bands, bandNames: bands.map((band) => [band.class, band.name, "band"])};
    this.charts.generated.draw({...shared, ...tokensChart(ring, "generated", "s1", from)});
    this.charts.prompt.draw({...shared, ...tokensChart(ring, "prompt", "s3", from)});
    this.charts.requests.draw({...shared, ...requestsChart(status, ring)});
    this.charts.kv.draw({...shared, ...kvChart(status, ring)});
  }

  showTiles(status, ring) {
    const {requests, kv, prefix, engine, draft} = status;
    this.tile(
      "generated",
      "Generated",
      `${rate(ring.recent("generated", NOW_S))} tok/s`,
      `${number(status.tokens.generated)} since the load`,
    );
    this.tile(
      "prompt",
      "Prompt",
      `${rate(ring.recent("prompt", NOW_S))} tok/s`,
      `${number(status.tokens.prompt)} since the load`,
    );
    this.tile(
      "requests",
      "Requests",
      `${number(requests.running)} running`,
      `${number(requests.waiting)} waiting, ${number(requests.finished)} finished, ${number(requests.failed)} failed`,
    );
    this.tile(
      "kv",
      "KV in use",
      share(kv.used_tokens, kv.capacity_tokens),
      `${number(kv.used_tokens)} of ${number(kv.capacity_tokens)}, ${number(kv.cached_tokens)} cached`,
    );
    this.tile(
      "prefix",
      "Prefix cache",
      share(prefix.hits, prefix.lookups),
      prefix.lookups
        ? `${number(prefix.hits)} of ${number(prefix.lookups)} hit, ${number(prefix.hit_tokens)} tokens`
        : "no look-up yet",
    );
    const drafted = draft.accept_len === null ? "none yet" : `${number(draft.accept_len, 2)} a round`;
    this.tile(
      "draft",
      "Drafting",
      draft.enabled === null ? UNKNOWN : draft.enabled || draft.accept_len !== null ? drafted : "off",
      draft.enabled === false ? `off now: ${draft.why_not}` : "tokens that one round brings",
    );
    this.tile("lag", "Loop lag", milliseconds(engine.loop_lag_ms.p50), `p99 ${milliseconds(engine.loop_lag_ms.p99)}`);
    this.tile(
      "overhead",
      "Step overhead",
      milliseconds(engine.step_overhead_ms.p50),
      `p99 ${milliseconds(engine.step_overhead_ms.p99)}`,
    );
  }

  tile(key, name, value, more) {
    if (!this.tiles.has(key)) {
      const made = {value: h("dd", {class: "value"}), more: h("dd", {class: "more"})};
      this.tiles.set(key, made);
      this.list.append(h("div", {class: "tile", "data-tile": key}, h("dt", {}, name), made.value, made.more));
    }
    setText(this.tiles.get(key).value, value);
    setText(this.tiles.get(key).more, more);
  }

  close() {
    Object.values(this.charts).forEach((chart) => chart.close());
  }
}

function tokensChart(ring, name, kind, from) {
  const runs = ring.rates(name);
  const inside = runs.filter((run) => run.to > from);
  const now = `now ${rate(ring.recent(name, NOW_S))}, mean ${rate(reduce(inside, "mean"))}`;
  const series = [{name: "tokens/s", class: kind, runs, area: true}];
  return {format: rate, top: 10, series, now, summary: `${now}, most ${rate(reduce(inside, "max"))}`};
}

function requestsChart({requests: {running, waiting}}, ring) {
  const now = `${number(running)} running, ${number(waiting)} waiting`;
  const series = [
    {name: "running", class: "s1", runs: ring.values("running"), reduce: "max", area: true},
    {name: "waiting", class: "s2 dashes", runs: ring.values("waiting"), reduce: "max"},
  ];
  return {format: (value) => number(value), top: 4, series, now, summary: now};
}

function kvChart({kv: {capacity_tokens: capacity, used_tokens: used, cached_tokens: cached}}, ring) {
  const series = [
    {name: "in use", class: "s1", runs: ring.values("used"), reduce: "max", area: true},
    {name: "cached", class: "s5 dots", runs: ring.values("cached"), reduce: "max"},
  ];
  return {
    format: (value) => number(value),
    high: capacity || null,
    lines: capacity ? [{value: capacity, name: `capacity ${number(capacity)}`}] : [],
    series,
    now: `${share(used, capacity)} in use`,
    summary: `${number(used)} in use and ${number(cached)} cached of ${number(capacity)}`,
  };
}

// --------------------------------------------------------------------------------------------------------------- ranks

const RANK_COLUMNS = [
  {name: "Rank"},
  {name: "Device"},
  {name: "Backend"},
  {name: "Holds"},
  {name: "Busy", number: true},
  {name: "Waits for ranks", number: true},
  {name: "Idle", number: true},
  {name: "Memory MiB", number: true},
  {name: "Restarts", number: true},
  {name: "Process", number: true},
];

export class Ranks {
  constructor() {
    this.table = table("Ranks, one a row", RANK_COLUMNS);
    this.node = panel("Ranks", "ranks", this.table.node);
  }

  show({status, before}) {
    if (!status) return;
    const shares = rankShares(before, status);
    this.node.hidden = !status.ranks.length;
    this.table.fill(
      status.ranks.map((rank, index) => {
        const part = shares[index],
          shown = (value) => (part ? `${number(100 * value)} %` : UNKNOWN);
        const backend = [
          rank.backend,
          rank.isa,
          rank.threads === null ? null : `${rank.threads} thread${rank.threads === 1 ? "" : "s"}`,
        ];
        return {
          key: `rank ${rank.rank}`,
          cells: [
            number(rank.rank),
            rank.device ?? UNKNOWN,
            backend.filter((each) => each).join(" "),
            holdsOf(rank, status),
            shown(part?.busy),
            shown(part?.waited),
            shown(part?.idle),
            number(rank.rss_mib),
            {text: number(rank.restarts), class: rank.restarts ? "number strong" : "number"},
            rank.pid === null ? UNKNOWN : String(rank.pid),
          ],
        };
      }),
    );
  }

  close() {}
}

// Layers of a rank, or its share of every layer.
export function holdsOf(rank, {layout, vectors}) {
  if (rank.layers) return `layers ${rank.layers[0]} to ${rank.layers[1] - 1}`;
  if (layout !== "tensor") return UNKNOWN;
  const whole = vectors.weight?.reduce((sum, each) => sum + each, 0);
  return whole ? `${number((100 * vectors.weight[rank.rank]) / whole)} % of every layer` : "a share of every layer";
}

// -------------------------------------------------------------------------------------------------------------- events

const EVENT_WORDS = {
  worker_lost: "worker lost",
  recovered: "recovered",
  corridor_breach: "floor not kept",
  flip_abandoned: "flip abandoned",
  rank_note: "note of a rank",
  budget_lowered: "budget lowered",
  no_drafting: "no drafting",
  drafting_off: "drafting off",
  drafts_barred: "drafts barred",
  failed: "failed",
  page: "this page",
};

export class Events {
  constructor() {
    this.none = h("p", {class: "quiet-line"}, "Nothing has happened.");
    this.table = table("Events, newest first", [
      {name: "When"},
      {name: "What"},
      {name: "Rank", number: true},
      {name: "Told", class: "long"},
    ]);
    this.node = panel("Events", "events", this.none, this.table.node);
  }

  show({status, notes}) {
    const told = [...(status?.events ?? []), ...notes].sort((a, b) => b.at - a.at);
    this.none.hidden = told.length > 0;
    this.table.node.hidden = !told.length;
    this.table.fill(
      told.map((event) => ({
        key: event.kind,
        class: `event-${event.kind}`,
        cells: [
          {text: timeLabel(event.at, 1), title: new Date(event.at * 1000).toLocaleString()},
          EVENT_WORDS[event.kind] ?? event.kind.replaceAll("_", " "),
          event.rank === null ? "" : String(event.rank),
          event.folder && !event.text.includes(event.folder)
            ? `${event.text} (evidence in ${event.folder})`
            : event.text,
        ],
      })),
    );
  }

  close() {}
}
