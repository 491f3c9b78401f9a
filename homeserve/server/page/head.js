// The head of the box view: what serves, in a line; a choice of the model where there are several, and of the time that
// is shown; and a notice of whatever is not as it should be.

import {h, setText} from "./nodes.js";
import {duration, number} from "./facts.js";

export const RANGES = [
  ["2 min", 120],
  ["10 min", 600],
  ["1 h", 3600],
  ["all", null],
];

const TELLING = {
  recovering: "A worker is being started again: open answers pause and go on.",
  draining: "The server is shutting down: it takes no new requests.",
};

const button = (text, onclick) => h("button", {type: "button", class: "quiet", onclick}, text);

export class Head {
  // `asked`: what is done about it: onModel(id), onLoad(id, "load" or "unload"), onRange(seconds), onRetry(), onKey().
  constructor(asked, range) {
    this.asked = asked;
    this.model = h("strong", {class: "name"});
    this.facts = h("span", {class: "facts"});
    this.chips = h("p", {class: "chips"});
    this.notice = this.madeNotice();
    const line = h("p", {class: "line"}, this.model, " ", this.facts);
    const pick = h("div", {class: "pick"}, this.madeChooser(), madeRange(asked, range));
    this.node = h("div", {class: "head"}, h("div", {class: "who"}, line, this.chips), pick);
  }

  madeNotice() {
    this.why = h("span");
    this.retry = button("Try now", this.asked.onRetry);
    this.key = button("Enter the key", this.asked.onKey);
    this.progress = h("progress", {"aria-label": "Load"});
    return h("div", {class: "notice", role: "status", hidden: true}, this.why, this.progress, this.retry, this.key);
  }

  madeChooser() {
    this.select = h("select", {onchange: () => this.asked.onModel(this.select.value)});
    this.swap = button("Load", () => this.asked.onLoad(this.target.id, this.target.what));
    this.answer = h("span", {class: "soft", role: "status"});
    const choose = h("label", {class: "choose"}, h("span", {}, "Model"), this.select);
    this.chooser = h("div", {class: "models", hidden: true}, choose, this.swap, this.answer);
    return this.chooser;
  }

  show(state) {
    this.showModels(state);
    this.showNotice(state);
    this.showLine(state);
  }

  showLine({status, away, missing, chosen}) {
    const model = status?.model.id ? status.model : null;
    const none = status?.state === "loading" ? "loading" : status ? "no model in memory" : "";
    setText(this.model, model?.id ?? (missing ? chosen : none));
    setText(this.facts, model ? `${model.arch} ${model.quant} · context ${number(model.context)}` : "");
    const chips = status
      ? [
          ["state", away ? "away" : status.state],
          ["layout", status.layout],
          ["epoch", status.epoch],
          ["ranks", status.ranks.length || null],
          ["up", duration(status.at - status.started)],
          ["version", status.version],
        ].filter(([, value]) => value !== null)
      : [];
    const wanted = chips.map(([name, value]) => `${name} ${value}`).join("\n");
    if (this.chips.dataset.told === wanted) return;
    this.chips.dataset.told = wanted;
    this.chips.replaceChildren(
      ...chips.map(([name, value]) =>
        h("span", {class: `chip ${name}`, "data-value": value}, h("span", {}, `${name} `), h("b", {}, String(value))),
      ),
    );
  }

  showModels({models, chosen, status, modelAnswer}) {
    this.chooser.hidden = models.length < 2;
    const options = [
      ["", "the one used last"],
      ...models.map((each) => [each.id, `${each.id}${each.homeserve ? ` (${each.homeserve.state})` : ""}`]),
    ];
    const wanted = options.map(([, text]) => text).join("\n");
    if (this.select.dataset.told !== wanted) {
      this.select.dataset.told = wanted;
      this.select.replaceChildren(...options.map(([value, text]) => h("option", {value}, text)));
    }
    if (this.select.value !== chosen) this.select.value = chosen;
    const found = models.find((each) => each.id === (chosen || status?.model.id));
    const what = {loaded: "unload", unloaded: "load", failed: "load"}[found?.homeserve?.state];
    this.target = found && what ? {id: found.id, what} : null;
    this.swap.hidden = !this.target;
    setText(this.swap, what === "unload" ? "Unload" : "Load");
    setText(this.answer, modelAnswer ?? "");
  }

  showNotice({status, away, missing, chosen}) {
    const loading = !away && status?.state === "loading" ? status.load : null;
    const absent = missing ? `${chosen} is not in memory: ${missing}` : null;
    const told = loading ? `Loading: ${loading.stage} ` : (TELLING[status?.state] ?? "");
    setText(this.why, away?.text ?? absent ?? told);
    this.notice.hidden = !this.why.textContent;
    this.retry.hidden = !away || away.locked;
    this.key.hidden = !away?.locked;
    this.progress.hidden = !loading;
    if (!loading) return;
    if (loading.total_bytes) {
      this.progress.max = loading.total_bytes;
      this.progress.value = loading.done_bytes ?? 0;
    } else this.progress.removeAttribute("value");
  }

  close() {}
}

function madeRange({onRange}, range) {
  const choices = RANGES.map(([name, seconds]) => {
    const onchange = () => onRange(seconds);
    const input = h("input", {type: "radio", name: "box-range", value: name, checked: seconds === range, onchange});
    return h("label", {}, input, h("span", {}, name));
  });
  return h("fieldset", {class: "range"}, h("legend", {}, "Time shown"), ...choices);
}
