// What happened when: the layout in force as a strip, flips as signs on it, and below it what befell the machine. The
// cursor goes from one happening to the next.

import {Cursor} from "./charts.js";
import {h, s, setAttribute, setText} from "./nodes.js";
import {linear, timeLabel, timeTicks} from "./scales.js";
import {duration, milliseconds} from "./facts.js";

const HEIGHT = 116,
  LEFT = 8,
  STRIP = 26,
  SIGN = 60,
  EVENT = 82;

export class Timeline {
  constructor() {
    this.readout = h("span", {class: "readout"});
    this.picture = s("svg", {role: "img", "aria-label": "nothing to show yet", class: "picture", height: HEIGHT});
    this.stops = [];
    this.cursor = new Cursor("Layouts, flips and events over time", this);
    this.plot = h("div", {class: "plot"}, this.picture, this.cursor.node);
    this.legend = madeLegend();
    const head = h("figcaption", {}, h("span", {class: "title"}, "Layout over time"), this.readout);
    this.node = h("figure", {class: "chart", "data-chart": "layouts"}, head, this.plot, this.legend);
    this.width = 0;
    this.data = null;
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
    if (this.data) this.draw(this.data);
  }

  // {from, to, spans, bands, flips, events}: spans and bands as of facts.js, flips and events as the server tells them.
  draw(data) {
    const held = this.cursor.index === null ? null : this.stops[this.cursor.index]?.key;
    this.data = data;
    if (!this.width) this.width = this.plot.clientWidth;
    if (!this.width) return;
    this.x = linear([data.from, data.to], [LEFT, this.width - LEFT]);
    this.stops = this.stopsOf(data);
    setAttribute(this.picture, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    setAttribute(this.picture, "width", this.width);
    setAttribute(this.picture, "aria-label", this.summary(data));
    this.picture.replaceChildren(...this.times(), ...this.spans(), ...this.bands(), ...this.names(), ...this.signs());
    const again = this.stops.findIndex((stop) => stop.key === held);
    if (held) this.cursor.index = again < 0 ? null : again;
    this.cursor.refresh();
    this.moved(this.cursor.index);
  }

  spans() {
    return this.placed().flatMap(({layout, from, width}) => {
      const box = {x: from, y: STRIP, width, height: 22, class: `layout ${layout}`, "data-layout": layout};
      const edge = s("path", {class: "layout-edge", d: `M${from} ${STRIP + 20}h${width}`});
      return layout === "tensor" ? [s("rect", box), edge] : [s("rect", box)];
    });
  }

  names() {
    return this.placed()
      .filter(({width}) => width > 62)
      .map(({layout, from}) => s("text", {class: "layout-name", x: from + 7, y: STRIP + 15}, layout));
  }

  // Spans that are shown, with their place.
  placed() {
    const {from, to, spans} = this.data;
    return spans
      .filter((span) => span.to > from && span.from < to)
      .map((span) => {
        const start = Math.max(LEFT, this.x(span.from)),
          end = Math.min(this.width - LEFT, this.x(span.to));
        return {layout: span.layout, from: start, width: Math.max(1, end - start)};
      });
  }

  bands() {
    const {from, to, bands} = this.data;
    return bands
      .filter((band) => band.class !== "flip" && band.to >= from && band.from <= to)
      .map((band) => {
        const start = Math.max(LEFT, this.x(band.from)),
          end = Math.min(this.width - LEFT, this.x(band.to));
        return s(
          "rect",
          {x: start, y: STRIP, width: Math.max(1.5, end - start), height: 22, class: `band ${band.class}`},
          s("title", {}, band.name),
        );
      });
  }

  times() {
    const {step, at} = timeTicks(this.data.from, this.data.to, Math.max(2, Math.floor(this.width / 110)));
    return at
      .filter((each) => this.x(each) > 28 && this.x(each) < this.width - 28)
      .flatMap((each) => [
        s("line", {class: "grid", x1: this.x(each), x2: this.x(each), y1: STRIP, y2: HEIGHT - 20}),
        s("text", {class: "tick", x: this.x(each), y: HEIGHT - 5, "text-anchor": "middle"}, timeLabel(each, step)),
      ]);
  }

  signs() {
    return this.stops.map((stop) => {
      const x = this.x(stop.at),
        kind = stop.kind;
      const d =
        kind === "event"
          ? `M${x} ${EVENT}l6 10h-12z`
          : kind === "abandoned"
            ? `M${x - 5} ${SIGN - 5}l10 10m0 -10l-10 10`
            : `M${x - 5} ${SIGN}a5 5 0 1 0 10 0a5 5 0 1 0 -10 0`;
      return s("path", {d, class: `sign ${kind}`, "data-stop": stop.key});
    });
  }

  stopsOf({from, to, flips, events}) {
    const told = [
      ...flips.map((flip) => ({
        key: `flip ${flip.id}`,
        at: flip.at,
        kind: ["committed", "abandoned"].includes(flip.state) ? flip.state : "under-way",
        text: flipText(flip),
      })),
      ...events.map((event) => ({
        key: `${event.kind} ${event.at}`,
        at: event.at,
        kind: "event",
        text: `${event.kind}: ${event.text}`,
      })),
    ];
    return told.filter((stop) => stop.at >= from && stop.at <= to).sort((a, b) => a.at - b.at);
  }

  summary({from, to, spans, flips}) {
    const inside = flips.filter((flip) => flip.at >= from),
      done = inside.filter((flip) => flip.state === "committed").length;
    const last = spans.at(-1)?.layout ?? "unknown";
    const given = inside.filter((flip) => flip.state === "abandoned").length;
    return `Layouts over the last ${duration(to - from)}: now ${last}; flips: ${done} committed, ${given} abandoned`;
  }

  // ------------------------------------------------------------------------------------------------------- as a source

  get count() {
    return this.stops.length;
  }

  text(index) {
    return `${timeLabel(this.stops[index].at, 1)}, ${this.stops[index].text}`;
  }

  near(x) {
    let best = 0;
    this.stops.forEach((stop, index) => {
      if (Math.abs(this.x(stop.at) - x) < Math.abs(this.x(this.stops[best].at) - x)) best = index;
    });
    return best;
  }

  moved(index) {
    const idle = this.data && !this.stops.length ? "no flip and no event in this time" : "";
    setText(this.readout, index === null ? idle : this.text(index));
    const key = index === null ? null : this.stops[index].key;
    for (const sign of this.picture.querySelectorAll(".sign"))
      sign.classList.toggle("marked", sign.dataset.stop === key);
  }
}

function madeLegend() {
  const signs = [
    ["sign committed", "M0 5a5 5 0 1 0 10 0a5 5 0 1 0 -10 0", "flip committed"],
    ["sign abandoned", "M1 1L9 9M9 1L1 9", "flip abandoned"],
    ["sign event", "M5 0L10 9H0z", "event"],
    ["band loading", "M0 0H12V10H0z", "loading"],
    ["band recovering", "M0 0H12V10H0z", "recovering"],
  ].map(([kind, d, name]) => {
    const key = {class: "key", width: 12, height: 10, "aria-hidden": "true"};
    return h("span", {}, s("svg", key, s("path", {class: kind, d})), name);
  });
  return h("p", {class: "legend"}, ...signs);
}

export function flipText(flip) {
  const took = flip.ms.total === null ? "" : ` in ${milliseconds(flip.ms.total)}`;
  const why = flip.reason ? `: ${flip.reason}` : "";
  return `flip ${flip.id}, ${flip.from} to ${flip.to}, by ${flip.cause}, ${flip.state}${took}${why}`;
}
