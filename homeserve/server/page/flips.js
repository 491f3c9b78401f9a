// The part of the box view that tells of layouts: which was in force when, what flips did, why none happens now, and
// the button that begins one.

import {h, setAttribute, setText, table} from "./nodes.js";
import {timeLabel} from "./scales.js";
import {layoutSpans, mib, milliseconds, number, phaseBands, rate, UNKNOWN} from "./facts.js";
import {panel} from "./panels.js";
import {Timeline} from "./timeline.js";

export const OTHER = {pipeline: "tensor", tensor: "pipeline"};
const OVER = ["committed", "abandoned"];
const COLUMNS = [
  {name: "Flip"},
  {name: "When"},
  {name: "From, to"},
  {name: "By"},
  {name: "Result"},
  {name: "Took", number: true},
  {name: "Drain", number: true},
  {name: "Prepare", number: true},
  {name: "Commit", number: true},
  {name: "Requests", number: true},
  {name: "Rows", number: true},
  {name: "Moved MiB", number: true},
  {name: "Why", class: "long"},
];
const SPEEDS = [
  {name: "Layout"},
  {name: "Prompt tok/s", number: true},
  {name: "Generated tok/s", number: true},
  {name: "Plans measured", number: true},
  {name: "Estimated prompt", number: true},
  {name: "Estimated generated", number: true},
];

export function underWay(flips) {
  return flips?.last.find((flip) => !OVER.includes(flip.state)) ?? null;
}

export class Flips {
  constructor({onFlip}) {
    this.policy = h("p", {class: "policy"});
    this.button = h("button", {type: "button", hidden: true, onclick: () => this.asked && onFlip(this.asked)});
    this.answer = h("p", {class: "answer", role: "status"});
    this.timeline = new Timeline();
    this.speeds = table("Speed of each layout", SPEEDS);
    this.table = table("Flips, newest first", COLUMNS);
    this.none = h("p", {class: "quiet-line"}, "No flip yet.");
    this.past = h("div", {}, h("h4", {}, "Flips"), this.none, this.table.node);
    this.asked = null;
    this.node = panel(
      "Layouts and flips",
      "flips",
      h("div", {class: "tools-line"}, this.policy, h("span", {class: "grow"}), this.button),
      this.answer,
      this.timeline.node,
      h("h4", {}, "Speed of each layout"),
      this.speeds.node,
      this.past,
    );
  }

  show(state) {
    const {status, flips, corridor, from, to, flipAnswer, away} = state;
    if (!status) return;
    this.showButton(status, flips, away);
    setText(this.answer, flipAnswer?.text ?? "");
    setAttribute(this.answer, "class", flipAnswer?.bad ? "answer bad" : "answer");
    const list = flips?.last ?? [],
      began = this.known(state);
    const spans = layoutSpans({
      flips: list,
      events: status.events,
      layout: status.layout,
      from: Math.max(from, began),
      now: status.at,
    });
    const bands = corridor?.devices.length ? phaseBands(corridor.devices[0].samples, corridor.began) : [];
    this.timeline.draw({from, to, spans, bands, flips: list, events: [...status.events, ...state.notes]});
    this.showSpeeds(status, state.budget);
    this.past.hidden = status.ranks.length < 2;
    this.none.hidden = list.length > 0;
    this.table.node.hidden = !list.length;
    this.table.fill([...list].reverse().map(rowOf));
  }

  // Since when the layout is known: since the start; of a model that comes and goes since this page has seen it.
  known({status, corridor, models, ring}) {
    if (models.length < 2) return corridor?.began ?? status.started;
    return (
      ring.samples.find((each) => each.started === status.started && each.model === status.model.id)?.at ?? status.at
    );
  }

  showButton({flip, layout, ranks, state}, flips, away) {
    const several = ranks.length > 1,
      running = underWay(flips);
    const abandoned = Object.values(flip.abandoned ?? {}).reduce((sum, count) => sum + count, 0);
    const counts = flip.committed ? ` ${number(flip.committed)} committed, ${number(abandoned)} abandoned.` : "";
    setText(
      this.policy,
      several || flip.policy !== "off" ? policyText(flip) + counts : `No flips: ${flip.hold_reason ?? UNKNOWN}.`,
    );
    this.button.hidden = !several;
    this.asked = !running && !away && layout && state === "ready" ? OTHER[layout] : null;
    setText(
      this.button,
      running
        ? `Flip ${running.id} to ${running.to}: ${running.state} …`
        : `Flip to ${OTHER[layout] ?? "the other layout"} now`,
    );
    this.button.disabled = this.asked === null;
  }

  showSpeeds({layouts_measured: measured, layout}, budget) {
    const planned = budget?.plan?.speed ?? {},
      names = ["pipeline", "tensor"].filter((name) => measured[name] || planned[name]);
    this.speeds.node.previousSibling.hidden = this.speeds.node.hidden = !names.length;
    this.speeds.fill(
      names.map((name) => ({
        key: name,
        cells: [
          name === layout ? `${name} (now)` : name,
          rate(measured[name]?.prefill_tok_s),
          rate(measured[name]?.decode_tok_s),
          number(measured[name]?.n),
          rate(planned[name]?.prefill_tok_s),
          rate(planned[name]?.decode_tok_s),
        ],
      })),
    );
  }

  close() {
    this.timeline.close();
  }
}

function rowOf(flip) {
  const moved = flip.ranks.map((rank) => rank.sent_bytes),
    known = moved.length && moved.every((size) => size !== null);
  return {
    key: `flip ${flip.id}`,
    class: `flip-${flip.state}`,
    cells: [
      number(flip.id),
      {text: timeLabel(flip.at, 1), title: new Date(flip.at * 1000).toLocaleString()},
      `${flip.from} → ${flip.to}`,
      flip.cause,
      flip.state,
      {text: milliseconds(flip.ms.total), "data-ms": flip.ms.total ?? ""},
      milliseconds(flip.ms.drain),
      milliseconds(flip.ms.prepare),
      milliseconds(flip.ms.commit),
      number(flip.live.requests),
      number(flip.live.rows),
      known ? mib(moved.reduce((sum, size) => sum + size, 0) / 2 ** 20) : UNKNOWN,
      flip.reason ?? "",
    ],
  };
}

function policyText({policy, hold_reason: held}) {
  if (policy === "manual") return "Policy manual: a flip comes when somebody asks for one.";
  if (policy === "auto")
    return held ? `Policy auto: none now, because ${held}.` : "Policy auto: a flip comes where it pays.";
  return `Policy ${policy ?? UNKNOWN}${held ? `: ${held}` : ""}.`;
}

// What a refusal says, with its arithmetic where it has one.
export function refusalText(status, error) {
  if (!error) return `The server answered ${status}.`;
  const {needed_mib: needed, available_mib: available, device} = error;
  if (needed === undefined || needed === null) return `Not begun: ${error.message}`;
  const lacks =
    available === undefined || available === null
      ? ""
      : `, ${mib(available)} MiB there: ${mib(needed - available)} MiB lack`;
  return `Not begun: ${error.message} (needed ${mib(needed)} MiB${device ? ` on ${device}` : ""}${lacks})`;
}
