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
    const layout = status?.layout ?? null,
      {plan} = budget;
    const binding = plan?.binds ? budget.devices.find((device) => device.index === plan.binds.device) : null;
    setText(
      this.binds,
      plan?.binds
        ? `Binds: ${plan.binds.line} on ${binding?.name ?? plan.binds.device}${plan.binds.why ? ` (${plan.binds.why})` : ""}`
        : "Nothing is planned",
    );
    setText(this.age, budgetAt ? `measured ${timeLabel(budgetAt, 1)}` : "");
    this.showDevices(barsOf(budget, layout, freeNow(corridor)), budget);
    const idle = budget.devices.filter((device) => !device.usable || !this.shown.has(device.index));
    this.unused.replaceChildren(
      ...idle.map((device) =>
        h("li", {}, `${device.name ?? device.id}: not used${device.why_not ? `, ${device.why_not}` : ""}`),
      ),
    );
    this.unused.hidden = !idle.length;
  }

  showDevices(figures, budget) {
    for (const [index, part] of this.shown) {
      if (figures.some((figure) => figure.index === index)) continue;
      part.close();
      this.shown.delete(index);
    }
    for (const figure of figures) {
      if (!this.shown.has(figure.index)) {
        this.shown.set(figure.index, new DeviceMemory(figure, figures.length === 1 && innerWidth > 640));
        this.devices.append(this.shown.get(figure.index).node);
      }
      this.shown.get(figure.index).show(figure, budget);
    }
  }

  close() {
    this.showDevices([]);
  }
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
    const {whole, bars, rows, peak_mib: peak, peakMoment} = figure,
      [predicted, measured] = bars;
    this.bars.draw(figure);
    const parts = [
      `Planned ${mib(predicted.sum)}, measured ${mib(measured.sum)} MiB${measured.unknown ? ` (${countOf(measured.unknown)} unknown)` : ""}.`,
      peak === null ? "" : `The plan's peak is ${mib(peak)} MiB (${peakMoment}) of at most ${mib(whole.ceiling)}.`,
      `Free now ${mib(whole.free)}${whole.free === null ? "" : " MiB"}, floor ${mib(whole.floor)} MiB.`,
      figure.kind === "cpu" && budget.measured_total.later_mib
        ? `${mib(budget.measured_total.later_mib)} MiB of the plan come with a first guided answer.`
        : "",
    ];
    setText(this.sums, parts.filter((part) => part).join(" "));
    this.table.fill([
      ...rows.map(rowOf),
      {
        key: "sum",
        class: "sum",
        cells: [
          "sum",
          mib(predicted.sum),
          mib(measured.sum),
          signed(measured.sum - predicted.sum),
          "",
          measured.unknown ? `without ${countOf(measured.unknown)} unknown` : "",
        ],
      },
    ]);
  }

  close() {
    this.bars.close();
    this.node.remove();
  }
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
    const when = device.at === null ? "" : ` at ${timeLabel(corridor.began + device.at, 1)} (${device.phase})`;
    setText(
      least,
      `Least free since the start: ${mib(device.min_free_mib)} MiB${when}. Floor ${mib(device.floor_mib)} MiB, ${device.breaches ? `not kept ${device.breaches} ${device.breaches === 1 ? "time" : "times"}` : "kept all the time"}.`,
    );
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
