"""A plan as a picture: for each device a bar for each moment, made of its ledger lines, against the device's ceiling.

    device 0: NAME                                            ceiling 31 056.0 MiB
    boot      |weights      |kv pool |staging|                |
    pipeline  |weights      |kv pool |activations |           |
                                                              ceiling line

Every device has a scale of its own, so that the ceiling stands at the same place for all of them and a small card can
be read beside a large one; what exceeds a ceiling reaches beyond that line. A part that is too narrow for its name is
named in the legend only; the legend has every name. One file, no script, no font of its own, readable on light and on
dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from budget.ceilings import Ceilings, Device
from budget.ledger import Line, held_bytes, peak_bytes
from budget.page import grouped, mib
from budget.plan import Plan, Refusal
from budget.sums import moments_of, title, what_binds

WIDTH = 960
MARGIN = 24
LABELS = 84
"""Width of the moments' names."""
BAR, GAP = 20, 6
CHARACTER = 0.62
"""Widest mean character of a plain sans-serif, of its size: what a label is believed to take."""
OVER_MAX = 2.0
"""What exceeds a ceiling is drawn up to this many ceilings; beyond, the bar is cut and its number says it."""

COLOURS = (
    "#7fb2e5", "#f2b36b", "#8fd19e", "#e59aa5", "#b9a3e3", "#e3d26b", "#79cfcf", "#d7a884", "#a9c46c", "#e2a0d6",
    "#9fb0c0", "#c9c2b0",
)  # fmt: skip
"""Of parts: light enough for dark letters on both grounds. The largest parts have them; as many more are striped."""

_STYLE = """
svg { font-family: system-ui, sans-serif; }
.ground { fill: #ffffff; } .ink { fill: #1f2328; } .soft { fill: #59636e; } .over { fill: #b42318; }
.on { fill: #14181d; } .stripe { stroke: #14181d; stroke-width: 2; opacity: 0.55; }
.track { fill: #eef1f4; } .part { stroke: #ffffff; stroke-width: 1; }
.ceiling { stroke: #b42318; stroke-width: 2; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #15181c; } .ink { fill: #e8eaed; } .soft { fill: #a3adb8; } .over { fill: #ff9d92; }
  .track { fill: #262b31; } .part { stroke: #15181c; } .ceiling { stroke: #ff8a7d; }
}
"""


_STRIPES = (
    '<defs><pattern id="stripes" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="stripe" x1="0" y1="0" x2="0" y2="5"/></pattern></defs>'
)


@dataclass(frozen=True)
class _Paint:
    """How a part is filled."""

    colour: str
    striped: bool


@dataclass(frozen=True)
class _Scale:
    """Bytes of one device to pixels."""

    left: float
    width: float
    whole: float

    def at(self, count: float) -> float:
        return self.left + self.width * count / self.whole


def svg(outcome: Plan | Refusal) -> str:
    """The picture of a plan, or of the option that came nearest."""
    layouts = outcome.layouts if isinstance(outcome, Plan) else _layouts_held(outcome.lines)
    moments = moments_of(layouts)
    paints = _paints(outcome.ceilings, outcome.lines)
    devices = [each for each in outcome.ceilings.devices if any(line.device == each.index for line in outcome.lines)]
    over = _over(outcome.ceilings, outcome.lines)
    parts, y = [], MARGIN + 18.0
    parts.append(_text(MARGIN, y, _title(outcome), 17, "ink", weight="600"))
    y += 22
    parts.append(_text(MARGIN, y, _subtitle(outcome), 13, "soft"))
    y += 14
    for device in devices:
        drawn, y = _device(device, outcome.lines, moments, paints, over, y + 26)
        parts += drawn
    drawn, y = _legend(paints, y + 30)
    parts += drawn
    height = round(y + MARGIN)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img">\n<title>{escape(_clean(_title(outcome)))}</title>\n<style>{_STYLE}</style>\n{_STRIPES}'
    )
    ground = f'<rect class="ground" width="{WIDTH}" height="{height}"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def label_width(text: str, size: float) -> float:
    """What a label takes at most, in pixels."""
    return len(text) * size * CHARACTER


# ------------------------------------------------------------------------------------------------------------- details


def _title(outcome: Plan | Refusal) -> str:
    verdict = "fits" if isinstance(outcome, Plan) else "does not fit"
    return _cut(f"{title(outcome.shape)} {verdict}", 17, WIDTH - 2 * MARGIN)


def _subtitle(outcome: Plan | Refusal) -> str:
    if isinstance(outcome, Plan):
        text = (
            f"{grouped(outcome.context)} tokens of context, {outcome.running} at once, {grouped(outcome.kv_tokens)}"
            f" tokens of {outcome.wish.kv_type} KV; {what_binds(outcome)}"
        )
    else:
        lacking = mib(max(0, outcome.needed_bytes - outcome.available_bytes))
        text = f"Device {outcome.device} lacks {lacking} MiB: needed {mib(outcome.needed_bytes)}, there is" + (
            f" {mib(outcome.available_bytes)}"
        )
    return _cut(text, 13, WIDTH - 2 * MARGIN)


def _layouts_held(lines: Sequence[Line]) -> tuple[str, ...]:
    """The layouts that lines which are not always held speak of; both of them, or the pipeline."""
    some = {moment for line in lines if line.held_words != ("always",) for moment in line.held}
    return tuple(layout for layout in ("pipeline", "tensor") if layout in some) or ("pipeline",)


def _paints(ceilings: Ceilings, lines: Sequence[Line]) -> dict[str, _Paint]:
    """Name -> how it is filled, the same on every device; the largest shares of a ceiling first, as in each bar."""
    share: dict[str, float] = {}
    for line in lines:
        whole = ceilings.devices[line.device].ceiling_bytes or peak_bytes(lines, line.device) or 1
        if line.bytes > 0:
            share[line.name] = max(share.get(line.name, 0.0), line.bytes / whole)
    names = sorted(share, key=lambda name: -share[name])
    return {name: _Paint(COLOURS[at % len(COLOURS)], at >= len(COLOURS)) for at, name in enumerate(names)}


def _over(ceilings: Ceilings, lines: Sequence[Line]) -> float:
    """How many ceilings the worst device holds, at least 1 and at most OVER_MAX."""
    shares = [
        peak_bytes(lines, device.index) / device.ceiling_bytes for device in ceilings.devices if device.ceiling_bytes
    ]
    return min(OVER_MAX, max([1.0, *shares]))


def _device(
    device: Device, lines: Sequence[Line], moments: Sequence[str], paints: dict[str, _Paint], over: float, y: float
) -> tuple[list[str], float]:
    room = WIDTH - 2 * MARGIN - LABELS - 96.0
    whole = device.ceiling_bytes or peak_bytes(lines, device.index) or 1
    scale = _Scale(MARGIN + LABELS, room / over, whole)
    limit = "unknown" if device.ceiling_bytes is None else f"{mib(device.ceiling_bytes)} MiB"
    end = scale.at(whole)
    ceiling = f"ceiling {limit}"
    # The name gives way to the ceiling's label, which ends at its line.
    name = _cut(f"Device {device.index}: {device.name}", 14, end - label_width(ceiling, 12) - 16 - MARGIN)
    parts = [_text(MARGIN, y, name, 14, "ink", weight="600"), _text(end, y, ceiling, 12, "over", anchor="end")]
    y += 8
    top = y
    for moment in moments:
        parts += _bar(device, lines, moment, paints, scale, over, y)
        y += BAR + GAP
    if device.ceiling_bytes is not None:
        parts.append(f'<line class="ceiling" x1="{end:.1f}" y1="{top - 3:.1f}" x2="{end:.1f}" y2="{y - GAP + 3:.1f}"/>')
    return parts, y


def _bar(
    device: Device, lines: Sequence[Line], moment: str, paints: dict[str, _Paint], scale: _Scale, over: float, y: float
) -> list[str]:
    middle = y + BAR / 2 + 4
    track = scale.width * over
    parts = [
        _text(MARGIN, middle, moment, 12, "soft"),
        f'<rect class="track" x="{scale.left:.1f}" y="{y:.1f}" width="{track:.1f}" height="{BAR}"/>',
    ]
    begin, limit = 0.0, scale.whole * over
    held = [line for line in lines if line.device == device.index and moment in line.held and line.bytes > 0]
    for line in sorted(held, key=lambda line: list(paints).index(line.name)):
        left, right = scale.at(min(begin, limit)), scale.at(min(begin + line.bytes, limit))
        begin += line.bytes
        if right - left < 0.3:
            continue
        hint = escape(_clean(f"{line.name}: {mib(line.bytes)} MiB, {moment}"))
        parts += _filled(left, y, right - left, BAR, paints[line.name], hint)
        if label_width(line.name, 11) + 8 <= right - left:
            parts.append(_text((left + right) / 2, middle, line.name, 11, "on", anchor="middle"))
    total = held_bytes(lines, device.index, moment)
    beyond = device.ceiling_bytes is not None and total > device.ceiling_bytes
    parts.append(_text(WIDTH - MARGIN, middle, mib(total), 12, "over" if beyond else "ink", anchor="end"))
    return parts


def _legend(paints: dict[str, _Paint], y: float) -> tuple[list[str], float]:
    """Every name with its colour, in rows."""
    parts, x = [], float(MARGIN)
    for name, paint in paints.items():
        label = _cut(name, 12, WIDTH / 2)
        width = 18 + label_width(label, 12) + 18
        if x + width > WIDTH - MARGIN and x > MARGIN:
            x, y = float(MARGIN), y + 20
        parts += _filled(x, y - 10, 12, 12, paint)
        parts.append(_text(x + 18, y, label, 12, "ink"))
        x += width
    y += 22
    note = (
        "Each bar is one moment; numbers at its right are MiB held then. The red line is what may be held at the peak."
    )
    parts.append(_text(MARGIN, y, note, 12, "soft"))
    return parts, y


def _filled(x: float, y: float, width: float, height: float, paint: _Paint, hint: str = "") -> list[str]:
    title = f"<title>{hint}</title>" if hint else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
    parts = [f'<rect class="part" {place} fill="{paint.colour}">{title}</rect>']
    return [*parts, f'<rect {place} fill="url(#stripes)" pointer-events="none"/>'] if paint.striped else parts


def _text(x: float, y: float, text: str, size: int, kind: str, anchor: str = "start", weight: str = "") -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size}"{where}{bold}>{escape(_clean(text))}</text>'


def _cut(text: str, size: float, width: float) -> str:
    """As much of a text as its place holds."""
    most = max(1, int(width / (size * CHARACTER)))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _clean(text: str) -> str:
    """Without characters that XML does not have (a model's name may hold anything)."""
    return "".join(each if each.isprintable() else " " for each in text)
