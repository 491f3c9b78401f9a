// Charts as SVG nodes: a chart of values over time, and a cursor by which every chart can be read.
//
// What a series is made of are *runs*, {from, to, value, gap}: `value` held, or was the mean, between two looks at the
// server. Nothing is interpolated. A run over a time in which nobody looked has `gap` and is drawn dashed; a value that
// is not known is null and leaves a hole.
//
// No chart is a picture alone. Each has a sentence (the name of its picture), a table of its values that opens below
// it, and a cursor: a slider over the picture that arrow keys and pointers move, and that says what is there. Colour
// never tells by itself: series differ in dashes, bands and bars in pattern and by their names.

import {h, s, setAttribute, setText, table} from "./nodes.js";
import {linear, niceStep, reduce, runAt, thin, ticks, timeLabel, timeTicks} from "./scales.js";

const STOPS_MAX = 240; // of a cursor over time
const ROWS_MAX = 12; // of a table of values

// -------------------------------------------------------------------------------------------------------------- cursor

// A slider over a picture. `source` has `count`, `text(index)`, `near(x, y)` (an index), `moved(index or null)`; with
// `step(index, key)` up and down go elsewhere than one on.
export class Cursor {
  constructor(label, source) {
    this.source = source;
    this.index = null;
    this.node = h("div", {
      class: "cursor",
      role: "slider",
      tabindex: "0",
      "aria-label": label,
      "aria-orientation": "horizontal",
      "aria-valuemin": "0",
      onkeydown: (event) => this.key(event),
      onfocus: () => this.move(this.index ?? Math.max(0, source.count - 1)),
      onblur: () => this.move(null),
      onpointermove: (event) => this.point(event),
      onpointerdown: (event) => this.point(event),
      onpointerleave: () => document.activeElement !== this.node && this.move(null),
    });
    this.refresh();
  }

  point(event) {
    const place = this.node.getBoundingClientRect();
    if (this.source.count) this.move(this.source.near(event.clientX - place.left, event.clientY - place.top));
  }

  key(event) {
    const {count} = this.source,
      at = this.index ?? count - 1,
      far = Math.max(2, Math.round(count / 10));
    const places = {
      ArrowLeft: at - 1,
      ArrowRight: at + 1,
      ArrowDown: at - 1,
      ArrowUp: at + 1,
      PageDown: at - far,
      PageUp: at + far,
      Home: 0,
      End: count - 1,
    };
    if (!(event.key in places) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const elsewhere = this.source.step?.(at, event.key);
    this.move(elsewhere ?? places[event.key]);
  }

  move(index) {
    const last = this.source.count - 1;
    this.index = index === null || last < 0 ? null : Math.min(last, Math.max(0, index));
    this.refresh();
    this.source.moved(this.index);
  }

  // The source has changed below the cursor.
  refresh() {
    const {count} = this.source;
    setAttribute(this.node, "aria-valuemax", Math.max(0, count - 1));
    const at = this.index ?? Math.max(0, count - 1);
    setAttribute(this.node, "aria-valuenow", at);
    setAttribute(this.node, "aria-valuetext", count ? this.source.text(at) : "nothing to read yet");
  }
}

// ---------------------------------------------------------------------------------------------------------- time chart

const MARGIN = {top: 16, right: 8, bottom: 20, left: 52};

// Values over time. `draw(data)` takes {from, to, series, bands, bandNames, lines, marks, format, now, summary, low,
// high, top}:
//   series  [{name, class, runs, reduce}], drawn in this order; `area` fills what is below
//   bands   [{from, to, name, class}] behind everything        lines  [{value, name}] across
//   marks   [{at, name, class}] small signs along the upper edge
export class TimeChart {
  constructor(title, {height = 150, key = null} = {}) {
    this.height = height;
    this.data = null;
    this.stops = [];
    this.readout = h("span", {class: "readout"});
    this.picture = s("svg", {role: "img", "aria-label": "nothing to show yet", class: "picture", height});
    this.hair = s("line", {class: "hair", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden"});
    this.cursor = new Cursor(`${title}: values over time`, this);
    this.legend = h("p", {class: "legend"});
    this.values = null;
    this.more = h("details", {class: "values", ontoggle: () => this.fillTable()}, h("summary", {}, "As a table"));
    this.title = title;
    const head = h("figcaption", {}, h("span", {class: "title"}, title), this.readout);
    const plot = h("div", {class: "plot"}, this.picture, this.cursor.node);
    this.node = h("figure", {class: "chart", "data-chart": key}, head, plot, this.legend, this.more);
    this.width = 0;
    this.watcher = new ResizeObserver(() => this.resized());
    this.watcher.observe(plot);
    this.plot = plot;
  }

  close() {
    this.watcher.disconnect();
  }

  resized() {
    const width = this.plot.clientWidth;
    if (!width || width === this.width) return;
    this.width = width;
    if (this.data) this.draw(this.data);
  }

  draw(data) {
    const held = this.cursor.index === null ? null : this.stops[this.cursor.index];
    this.data = data;
    if (!this.width) this.width = this.plot.clientWidth;
    if (!this.width) return; // not shown yet: `resized` draws
    const inner = this.width - MARGIN.left - MARGIN.right;
    this.shown = data.series.map((each) => ({
      ...each,
      runs: thin(each.runs, data.from, data.to, inner, each.reduce ?? "mean"),
    }));
    this.x = linear([data.from, data.to], [MARGIN.left, this.width - MARGIN.right]);
    this.y = linear(this.domain(data), [this.height - MARGIN.bottom, MARGIN.top]);
    setAttribute(this.picture, "viewBox", `0 0 ${this.width} ${this.height}`);
    setAttribute(this.picture, "width", this.width);
    setAttribute(this.picture, "aria-label", `${this.title}: ${data.summary}`);
    this.picture.replaceChildren(
      ...this.bands(),
      ...this.axes(),
      ...this.shown.flatMap((each) => this.series(each)),
      ...this.lines(),
      ...this.marks(),
      this.hair,
    );
    this.fillLegend();
    this.stops = this.stopsOf();
    if (held !== null) this.cursor.index = this.near(this.x(held));
    this.cursor.refresh();
    this.moved(this.cursor.index);
    if (this.more.open) this.fillTable();
  }

  // From 0, or `low`, to `high`, or to the next tick above all values and no less than `top`.
  domain({low = 0, high = null, top = 1}) {
    if (high !== null) return [low, high];
    const values = this.shown.flatMap((each) => each.runs.map((run) => run.value)).filter((value) => value !== null);
    const span = Math.max(top, ...values) - low,
      step = niceStep(span, 4);
    return [low, Math.ceil(span / step - 1e-9) * step + low];
  }

  axes() {
    const low = this.y.invert(this.height - MARGIN.bottom),
      high = this.y.invert(MARGIN.top);
    const made = ticks(low, high, 4).flatMap((value) => {
      const y = this.y(value);
      return [
        s("line", {class: "grid", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y}),
        s("text", {class: "tick", x: MARGIN.left - 6, y: y + 4, "text-anchor": "end"}, this.data.format(value)),
      ];
    });
    const {step, at} = timeTicks(this.data.from, this.data.to, Math.max(2, Math.floor(this.width / 110)));
    const labels = at.filter((each) => this.x(each) > MARGIN.left + 24 && this.x(each) < this.width - 28);
    return [
      ...made,
      ...labels.map((each) =>
        s("text", {class: "tick", x: this.x(each), y: this.height - 5, "text-anchor": "middle"}, timeLabel(each, step)),
      ),
    ];
  }

  series({class: name, runs, area}) {
    let solid = "",
      dashed = "",
      under = "",
      end = null;
    const floor = this.y(Math.max(0, this.y.invert(this.height - MARGIN.bottom)));
    for (const run of runs) {
      if (run.value === null) {
        end = null;
        continue;
      }
      const from = Math.max(this.x(run.from), MARGIN.left).toFixed(1),
        to = this.x(run.to).toFixed(1),
        y = this.y(run.value).toFixed(1);
      if (run.gap) {
        dashed += `M${from} ${y}H${to}`;
        end = null;
        continue;
      }
      solid += end === null || Math.abs(end - from) > 1 ? `M${from} ${y}H${to}` : `V${y}H${to}`;
      under += `M${from} ${floor}V${y}H${to}V${floor}Z`;
      end = Number(to);
    }
    const made = [s("path", {class: `line ${name}`, d: solid}), s("path", {class: `line gap ${name}`, d: dashed})];
    return area ? [s("path", {class: `area ${name}`, d: under}), ...made] : made;
  }

  bands() {
    const {from, to, bands = []} = this.data;
    return bands
      .filter((band) => band.to >= from && band.from <= to)
      .map((band) => {
        const start = Math.max(MARGIN.left, this.x(band.from)),
          end = Math.min(this.width - MARGIN.right, this.x(band.to));
        const height = this.height - MARGIN.top - MARGIN.bottom;
        const box = {x: start, y: MARGIN.top, width: Math.max(1.5, end - start), height, class: `band ${band.class}`};
        return s("rect", box, s("title", {}, band.name));
      });
  }

  lines() {
    return (this.data.lines ?? []).flatMap(({value, name, class: kind = "limit"}) => {
      const y = this.y(value);
      if (y < MARGIN.top - 1 || y > this.height - MARGIN.bottom + 1) return [];
      return [
        s("line", {class: `across ${kind}`, x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y, y2: y}),
        s("text", {class: "across-name", x: this.width - MARGIN.right - 4, y: y - 5, "text-anchor": "end"}, name),
      ];
    });
  }

  marks() {
    const {from, to, marks = []} = this.data;
    return marks
      .filter((mark) => mark.at >= from && mark.at <= to)
      .map((mark) =>
        s(
          "path",
          {class: `mark ${mark.class}`, d: `M${this.x(mark.at)} ${MARGIN.top}l-5 -9h10z`},
          s("title", {}, mark.name),
        ),
      );
  }

  fillLegend() {
    const names = [...this.shown.map((each) => [each.class, each.name, "line"]), ...(this.data.bandNames ?? [])];
    const wanted = names.map(([, name]) => name).join("\n");
    if (this.legend.dataset.names === wanted) return;
    this.legend.dataset.names = wanted;
    this.legend.hidden = names.length < 2;
    this.legend.replaceChildren(
      ...names.map(([kind, name, shape]) => {
        const sign =
          shape === "line"
            ? s(
                "svg",
                {class: "key", width: 22, height: 10, "aria-hidden": "true"},
                s("path", {class: `line ${kind}`, d: "M0 5H22"}),
              )
            : s(
                "svg",
                {class: "key", width: 14, height: 10, "aria-hidden": "true"},
                s("rect", {class: `band ${kind}`, width: 14, height: 10}),
              );
        return h("span", {}, sign, name);
      }),
    );
  }

  // ------------------------------------------------------------------------------------------------------- as a source

  get count() {
    return this.stops.length;
  }

  stopsOf() {
    const ends = [...new Set(this.shown.flatMap((each) => each.runs.map((run) => run.to)))]
      .filter((at) => at >= this.data.from && at <= this.data.to)
      .sort((a, b) => a - b);
    const every = Math.ceil(ends.length / STOPS_MAX);
    return ends.filter((_, index) => (ends.length - 1 - index) % (every || 1) === 0);
  }

  near(x) {
    const at = this.x.invert(x);
    let best = 0;
    this.stops.forEach((stop, index) => {
      if (Math.abs(stop - at) < Math.abs(this.stops[best] - at)) best = index;
    });
    return best;
  }

  text(index) {
    const at = this.stops[index],
      {bands = []} = this.data;
    const band = bands.find((each) => each.from <= at && each.to >= at);
    return [timeLabel(at, 1), ...this.valuesAt(at), ...(band ? [band.name] : [])].join(", ");
  }

  valuesAt(at) {
    return this.shown.map(({name, runs}) => {
      const value = runAt(runs, at)?.value ?? null;
      return `${name} ${value === null ? "unknown" : this.data.format(value)}`;
    });
  }

  moved(index) {
    setText(this.readout, index === null ? (this.data?.now ?? "") : this.text(index));
    setAttribute(this.hair, "visibility", index === null ? "hidden" : "visible");
    if (index === null) return;
    const x = this.x(this.stops[index]);
    setAttribute(this.hair, "x1", x);
    setAttribute(this.hair, "x2", x);
  }

  fillTable() {
    if (!this.more.open || !this.data) return;
    const {from, to, series, format} = this.data,
      width = (to - from) / ROWS_MAX;
    if (!this.values) {
      const columns = [{name: "From"}, ...series.map((each) => ({name: each.name, number: true}))];
      this.values = table(`${this.title}, ${ROWS_MAX} parts of the time shown`, columns);
      this.more.append(this.values.node);
    }
    const rows = Array.from({length: ROWS_MAX}, (_, part) => {
      const start = from + part * width,
        end = start + width;
      const told = series.map((each) => {
        const value = reduce(
          each.runs.filter((run) => run.to > start && run.to <= end),
          each.reduce ?? "mean",
        );
        return value === null ? "unknown" : format(value);
      });
      return {cells: [timeLabel(start, 1), ...told]};
    });
    this.values.fill(rows.reverse());
  }
}
