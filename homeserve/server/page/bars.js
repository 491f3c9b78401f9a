// The memory of one device as bars: the whole device on top, and below it, on a scale of their own, what was planned
// and what is measured, part by part. One cursor reads all of them: left and right go from part to part, up and down to
// the bar above and below. Parts that are one line of the ledger are marked together.

import {Cursor} from "./charts.js";
import {h, s, setAttribute, setText} from "./nodes.js";
import {linear, ticks} from "./scales.js";
import {countOf, LINE_KINDS, mib, number} from "./facts.js";

const BAR = 26,
  GAP = 42,
  TOP = 18,
  LETTER = 6.4;
const PATTERNS = {
  kv: "M0 6L6 0",
  state: "M3 0V6",
  buffers: "M0 3H6",
  copies: "M0 6L6 0M0 0L6 6",
  processes: "M3 2.4V3.6",
  driver: "M0 0L6 6",
  others: "M0 6L6 0",
  floor: "M0 0L6 6",
};
let made = 0;

export class MemoryBars {
  constructor(name) {
    this.name = name;
    this.prefix = `p${made++}`;
    this.readout = h("p", {class: "readout"});
    this.picture = s("svg", {role: "img", "aria-label": "nothing to show yet", class: "picture"});
    this.stops = [];
    this.cursor = new Cursor(`Memory of ${name}: part by part`, this);
    this.plot = h("div", {class: "plot"}, this.picture, this.cursor.node);
    this.legend = h("p", {class: "legend"});
    this.node = h("figure", {class: "chart"}, this.plot, this.readout, this.legend);
    this.width = 0;
    this.figure = null;
    this.watcher = new ResizeObserver(() => this.resized());
    this.watcher.observe(this.plot);
  }

  close() {
    this.watcher.disconnect();
  }

  resized() {
    const width = this.plot.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    if (this.figure) this.draw(this.figure);
  }

  // `figure`: one of `barsOf` (facts.js).
  draw(figure) {
    this.figure = figure;
    if (!this.width) this.width = this.plot.clientWidth;
    if (!this.width) return;
    const rows = this.rows(figure),
      height = TOP + rows.length * (BAR + GAP);
    setAttribute(this.picture, "height", height);
    setAttribute(this.picture, "width", this.width);
    setAttribute(this.picture, "viewBox", `0 0 ${this.width} ${height}`);
    setAttribute(this.picture, "aria-label", this.summary(figure));
    this.stops = [];
    const nodes = rows.flatMap((row, index) => this.row(row, TOP + index * (BAR + GAP), index));
    this.picture.replaceChildren(this.patterns(), ...nodes);
    this.fillLegend(rows);
    this.cursor.move(this.cursor.index);
  }

  rows({bars, whole}) {
    const most = Math.max(...bars.map((bar) => bar.sum), 1);
    const inside = bars.map((bar) => ({
      key: bar.key,
      title: bar.name,
      sum: `${mib(bar.sum)} MiB${bar.unknown ? `, and ${countOf(bar.unknown)} unknown` : ""}`,
      most,
      parts: bar.parts.map((part) => ({...part, name: part.line})),
    }));
    return whole.total === null ? inside : [this.wholeRow(whole), ...inside];
  }

  wholeRow({total, held, others, free, floor, ceiling}) {
    const parts = [{name: "this server, measured", line: "*held", mib: held, kind: "held"}];
    if (others !== null) parts.push({name: "others", line: "*others", mib: others, kind: "others"});
    if (free !== null) {
      const kept = Math.min(floor ?? 0, free);
      parts.push({name: "free above the floor", line: "*free", mib: free - kept, kind: "free"});
      if (kept > 0) parts.push({name: "free, the floor", line: "*floor", mib: kept, kind: "floor"});
    } else
      parts.push({name: "free or others', unknown", line: "*unknown", mib: Math.max(0, total - held), kind: "free"});
    let end = 0;
    for (const part of parts) {
      part.from = end;
      end += part.mib;
    }
    const marks = floor === null ? [] : [{at: total - floor, name: `floor ${number(floor)}`}];
    const most = ceiling === null ? "" : `, at most ${mib(ceiling)} for this server`;
    return {
      key: "whole",
      title: "whole device",
      sum: `${mib(total)} MiB${most}`,
      most: Math.max(total, end),
      parts,
      marks,
    };
  }

  row({key, title, sum, most, parts, marks = []}, y, row) {
    const x = linear([0, most], [0, this.width]);
    const short = this.width < 520 && key === "whole" ? sum.split(",")[0] : sum;
    const nodes = [s("text", {class: "bar-title", x: 0, y: y - 6}, s("tspan", {class: "strong"}, title), ` ${short}`)];
    for (const part of parts) {
      const from = x(part.from),
        width = Math.max(0.75, x(part.from + part.mib) - from);
      this.stops.push({row, bar: title, key, part, x: from + width / 2, y: y + BAR / 2, half: width / 2});
      const box = {x: from, y, width, height: BAR, "data-bar": key, "data-line": part.line, "data-mib": part.mib};
      nodes.push(s("rect", {...box, class: `part ${part.kind}`}));
      if (part.kind in PATTERNS)
        nodes.push(
          s("rect", {x: from, y, width, height: BAR, fill: `url(#${this.prefix}-${part.kind})`, class: "hatch"}),
        );
      if (width > part.name.length * LETTER + 10) {
        nodes.push(s("text", {class: `in-part ${part.kind}`, x: from + 6, y: y + BAR / 2 + 4}, part.name));
      }
    }
    for (const mark of marks)
      nodes.push(
        s("path", {class: "floor-mark", d: `M${x(mark.at)} ${y - 4}V${y + BAR + 4}`}, s("title", {}, mark.name)),
      );
    const scale = ticks(0, most, Math.max(2, Math.floor(this.width / 130)));
    nodes.push(
      ...scale.map((value) =>
        s(
          "text",
          {
            class: "tick",
            x: Math.min(x(value), this.width),
            y: y + BAR + 13,
            "text-anchor": value === 0 ? "start" : x(value) > this.width - 20 ? "end" : "middle",
          },
          number(value, value % 1 ? 1 : 0),
        ),
      ),
    );
    return nodes;
  }

  patterns() {
    return s(
      "defs",
      {},
      ...Object.entries(PATTERNS).map(([kind, d]) =>
        s(
          "pattern",
          {id: `${this.prefix}-${kind}`, width: 6, height: 6, patternUnits: "userSpaceOnUse"},
          s("path", {d, class: `stroke ${kind}`}),
        ),
      ),
    );
  }

  summary({bars, whole, name}) {
    const told = bars.map((bar) => `${bar.name} ${mib(bar.sum)} MiB`).join(", ");
    const free = `free ${mib(whole.free)} of ${mib(whole.total)} MiB, floor ${mib(whole.floor)} MiB`;
    return `Memory of ${name}: ${told}; ${free}`;
  }

  fillLegend(rows) {
    const there = new Set(rows.flatMap((row) => row.parts.map((part) => part.kind)));
    const names = LINE_KINDS.filter(({kind}) => there.has(kind));
    const wanted = names.map(({name}) => name).join("\n");
    if (this.legend.dataset.names === wanted) return;
    this.legend.dataset.names = wanted;
    this.legend.replaceChildren(
      ...names.map(({kind, name}) => {
        const box = {width: 16, height: 12};
        const hatch = kind in PATTERNS ? [s("rect", {...box, fill: `url(#${this.prefix}-${kind})`})] : [];
        return h(
          "span",
          {},
          s("svg", {...box, class: "key", "aria-hidden": "true"}, s("rect", {...box, class: `part ${kind}`}), ...hatch),
          name,
        );
      }),
    );
  }

  // ------------------------------------------------------------------------------------------------------- as a source

  get count() {
    return this.stops.length;
  }

  text(index) {
    const {bar, part} = this.stops[index];
    if (part.line.startsWith("*")) return `${bar}: ${part.name} ${mib(part.mib)} MiB`;
    const others = this.figure.bars
      .filter((each) => each.name !== bar)
      .flatMap((each) => {
        const same = each.parts.filter((other) => other.line === part.line);
        return same.length ? [`${each.name} ${mib(same.reduce((sum, other) => sum + other.mib, 0))}`] : [];
      });
    return [`${part.line}: ${bar} ${mib(part.mib)} MiB`, ...others].join(", ");
  }

  near(x, y) {
    let best = 0;
    // The bar at that height, and in it the part that is there, or the nearest.
    const far = (stop) => Math.abs(y - stop.y) * 1e4 + Math.max(0, Math.abs(x - stop.x) - stop.half);
    this.stops.forEach((stop, index) => {
      if (far(stop) < far(this.stops[best])) best = index;
    });
    return best;
  }

  step(at, key) {
    const way = {ArrowUp: -1, ArrowDown: 1}[key];
    if (!way || !this.stops.length) return null;
    const here = this.stops[at],
      there = this.stops.filter((stop) => stop.row === here.row + way);
    if (!there.length) return at;
    const same = there.find((stop) => stop.part.line === here.part.line);
    const nearest = there.reduce((best, stop) => (Math.abs(stop.x - here.x) < Math.abs(best.x - here.x) ? stop : best));
    return this.stops.indexOf(same ?? nearest);
  }

  moved(index) {
    const line = index === null ? null : this.stops[index].part.line;
    setText(this.readout, index === null ? "Point at a part, or use the arrow keys, to read it." : this.text(index));
    for (const box of this.picture.querySelectorAll("rect.part")) {
      box.classList.toggle("marked", line !== null && box.dataset.line === line);
    }
  }
}
