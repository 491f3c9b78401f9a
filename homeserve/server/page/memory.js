// The parts of the box view that tell of memory: what was planned and what is held, and what stayed free.

import {MemoryBars} from "./bars.js";
import {TimeChart} from "./charts.js";
import {h, setAttribute, setText, table} from "./nodes.js";
import {reduce, timeLabel} from "./scales.js";
import {barsOf, breachesOf, countOf, freeRuns, mib, number, phaseBands, signed} from "./facts.js";
import {panel} from "./panels.js";

const COLUMNS = [
  {name: "Line"},
  {name: "Planned", number: true},
  {name: "Measured", number: true},
  {name: "Difference", number: true},
  {name: "Planned at other times"},
  {name: "How it was measured", class: "long"},
];
const PHASE_NAMES = [
  ["loading", "loading", "band"],
  ["flip", "flip", "band"],
  ["recovering", "recovering", "band"],
];

// Free MiB of each device of the corridor at its last sample.
export function freeNow(corridor) {
  return new Map((corridor?.devices ?? []).map((device) => [device.index, device.samples.at(-1)?.[1] ?? null]));
}

export class Memory {
  constructor({onMeasure}) {
    this.why = h("p", {class: "quiet-line"});
    this.binds = h("p", {class: "binds"});
    this.again = h("button", {type: "button", class: "quiet", onclick: onMeasure}, "Measure now");
    this.age = h("span", {class: "soft"});
    this.devices = h("div");
    this.unused = h("ul", {class: "unused"});
    this.shown = new Map();
    this.node = panel(
      "Memory",
      "memory",
      h("div", {class: "tools-line"}, this.binds, h("span", {class: "grow"}), this.age, this.again),
      this.why,
      this.devices,
      this.unused,
    );
  }

  show({status, budget, budgetWhy, corridor, to, budgetAt}) {
    setText(this.why, budget ? "" : (budgetWhy ?? "being read …"));
    this.why.hidden = Boolean(budget);
    this.binds.hidden = this.again.hidden = this.age.hidden = !budget;
    if (!budget) return this.showDevices([]);
    setText(this.binds, bindsText(budget));
    setText(this.age, budgetAt ? `measured ${timeLabel(budgetAt, 1)}` : "");
    const figures = barsOf(budget, status?.layout ?? null, freeNow(corridor));
    this.showDevices(figures, budget);
    const idle = budget.devices.filter(
      (device) => !device.usable || !figures.some((figure) => figure.index === device.index),
    );
    this.unused.replaceChildren(
      ...idle.map((device) =>
        h("li", {}, `${device.name ?? device.id}: not used${device.why_not ? `, ${device.why_not}` : ""}`),
      ),
    );
    this.unused.hidden = !idle.length;
  }

  showDevices(figures, budget) {
    const keyOf = ({index, name}) => `${index} ${name}`;
    const wanted = new Set(figures.map(keyOf));
    for (const [key, part] of this.shown) {
      if (wanted.has(key)) continue;
      part.close();
      this.shown.delete(key);
    }
    for (const figure of figures) {
      const key = keyOf(figure);
      if (!this.shown.has(key)) {
        this.shown.set(key, new DeviceMemory(figure, figures.length === 1 && innerWidth > 640));
        this.devices.append(this.shown.get(key).node);
      }
      this.shown.get(key).show(figure, budget);
    }
  }

  close() {
    this.showDevices([]);
  }
}

function bindsText({plan, devices}) {
  if (!plan?.binds) return "Nothing is planned";
  const {device, line, why} = plan.binds;
  const name = devices.find((each) => each.index === device)?.name ?? device;
  return `Binds: ${line} on ${name}${why ? ` (${why})` : ""}`;
}

class DeviceMemory {
  // `alone`: there is no other device, and room for its lines.
  constructor({index, name}, alone) {
    this.bars = new MemoryBars(name);
    this.sums = h("p", {class: "sums"});
    this.table = table(`Memory of ${name}, line by line, in MiB`, COLUMNS);
    const more = h(
      "details",
      {class: "values", open: alone},
      h("summary", {}, "Line by line, in MiB"),
      this.table.node,
    );
    this.node = h("div", {class: "device", "data-device": index}, h("h4", {}, name), this.bars.node, this.sums, more);
  }

  show(figure, budget) {
    const {bars, rows} = figure,
      [predicted, measured] = bars;
    this.bars.draw(figure);
    setText(this.sums, sumsText(figure, budget));
    this.table.fill([
      ...rows.map(rowOf),
      {
        key: "sum",
        class: "sum",
        cells: [
          "sum",
          mib(predicted.sum),
          mib(measured.sum),
          signed(rows.reduce((sum, row) => sum + (row.difference ?? 0), 0)),
          "",
          measured.unknown ? `${countOf(measured.unknown)} unknown; the difference is of the others` : "",
        ],
      },
    ]);
  }

  close() {
    this.bars.close();
    this.node.remove();
  }
}

function sumsText({whole, bars: [predicted, measured], peak_mib: peak, peakMoment, kind}, budget) {
  const unknown = measured.unknown ? ` (${countOf(measured.unknown)} unknown)` : "";
  const told = [`Planned ${mib(predicted.sum)}, measured ${mib(measured.sum)} MiB${unknown}.`];
  if (peak !== null) told.push(`The plan's peak is ${mib(peak)} MiB (${peakMoment}) of at most ${mib(whole.ceiling)}.`);
  told.push(`Free now ${mib(whole.free)}${whole.free === null ? "" : " MiB"}, floor ${mib(whole.floor)} MiB.`);
  if (kind !== "cpu") return told.join(" ");
  const {measured_all: all, measured_total: total} = budget;
  if (total.later_mib) told.push(`${mib(total.later_mib)} MiB of the plan come with a first guided answer.`);
  if (all) {
    const sums = `planned ${mib(all.predicted_mib)}, measured ${mib(all.smaps_mib)} MiB`;
    told.push(`All ${all.models} models that are in: ${sums}.`);
  }
  return told.join(" ");
}

function rowOf(row) {
  const planned = row.here && row.predicted !== null ? mib(row.predicted) : row.here ? "not planned" : "not now";
  const how = row.cache ? `${row.how ?? ""} (cache: in no sum)` : (row.how ?? (row.here ? "not measured" : ""));
  return {
    key: row.line,
    class: row.here ? null : "elsewhere",
    cells: [
      {text: row.line, title: row.note, class: `of ${row.kind}`},
      {text: planned, "data-mib": row.predicted ?? ""},
      {text: row.here ? mib(row.measured) : "not now", "data-mib": row.measured ?? ""},
      row.here ? signed(row.difference) : "",
      row.elsewhere,
      how,
    ],
  };
}

// ------------------------------------------------------------------------------------------------------------ corridor

export class Corridor {
  constructor() {
    this.why = h("p", {class: "quiet-line"}, "being read …");
    this.list = h("div", {class: "grid wide"});
    this.zoom = h("input", {type: "checkbox"});
    this.charts = new Map();
    this.node = panel(
      "Free memory over time",
      "corridor",
      h("label", {class: "check"}, this.zoom, " only the range that was seen"),
      this.why,
      this.list,
    );
    this.zoom.addEventListener("change", () => this.last && this.show(this.last));
  }

  show(state) {
    this.last = state;
    const {corridor, corridorWhy} = state;
    setText(this.why, corridor ? "" : (corridorWhy ?? "being read …"));
    this.why.hidden = Boolean(corridor);
    for (const device of corridor?.devices ?? []) this.showDevice(device, state);
  }

  showDevice(device, state) {
    const {corridor, budget, from, to} = state;
    const name = budget?.devices.find((each) => each.index === device.index)?.name ?? `device ${device.index}`;
    if (!this.charts.has(device.index)) {
      const chart = new TimeChart(`Free MiB, ${name}`, {height: 190, key: `corridor ${device.index}`});
      const least = h("p", {class: "sums"});
      this.charts.set(device.index, {chart, least});
      this.list.append(h("div", {class: "device", "data-device": device.index}, chart.node, least));
    }
    const {chart, least} = this.charts.get(device.index),
      runs = freeRuns(device.samples, corridor.began);
    const bands = phaseBands(device.samples, corridor.began, state.flips?.last);
    const breaches = breachesOf(device, corridor.began),
      now = device.samples.at(-1)?.[1] ?? null;
    const lowest = reduce(
      runs.filter((run) => run.to > from && run.from < to),
      "min",
    );
    chart.draw({
      from,
      to,
      format: (value) => number(value),
      ...this.domain(runs, from, to),
      series: [{name: "free", class: "s6", runs, reduce: "min", area: !this.zoom.checked}],
      bands,
      bandNames: PHASE_NAMES.filter(([kind]) => bands.some((band) => band.class === kind && band.to >= from)),
      lines:
        device.floor_mib === null
          ? []
          : [{value: device.floor_mib, name: `floor ${number(device.floor_mib)}`, class: "floor"}],
      marks: breaches.map((each) => ({
        at: each.at,
        class: "breach",
        name: `below the floor: ${mib(each.free)} MiB (${each.phase})`,
      })),
      now: `now ${number(now)} MiB`,
      summary: `now ${number(now)}, least in this time ${number(lowest)}, floor ${number(device.floor_mib)}`,
    });
    setText(least, leastText(device, corridor.began));
    setAttribute(least, "class", device.breaches ? "sums bad" : "sums");
  }

  domain(runs, from, to) {
    if (!this.zoom.checked) return {};
    const inside = runs.filter((run) => run.to > from && run.from < to),
      low = reduce(inside, "min"),
      high = reduce(inside, "max");
    if (low === null) return {};
    const margin = Math.max(1, (high - low) / 10);
    return {low: low - margin, high: high + margin};
  }

  close() {
    for (const {chart} of this.charts.values()) chart.close();
  }
}

function leastText({min_free_mib: least, at, phase, floor_mib: floor, breaches}, began) {
  const when = at === null ? "" : ` at ${timeLabel(began + at, 1)} (${phase})`;
  const kept = breaches ? `not kept ${breaches} ${breaches === 1 ? "time" : "times"}` : "kept all the time";
  return `Least free since the start: ${mib(least)} MiB${when}. Floor ${mib(floor)} MiB, ${kept}.`;
}
