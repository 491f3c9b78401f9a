"""The picture of a plan: sound XML, everything inside it, no label on another, bars that end where the sums say."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from budget.facts import MIB
from budget.ledger import ALWAYS, Line
from budget.picture import BAR, COLOURS, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"
Rectangle = tuple[float, float, float, float]


def drawn(outcome: object) -> ElementTree.Element:
    return ElementTree.fromstring(svg(outcome))  # type: ignore[arg-type]


def boxes(root: ElementTree.Element) -> list[tuple[str, Rectangle]]:
    """Each label with the rectangle that it takes at most: left, top, right, bottom."""
    found = []
    for text in root.iter(f"{NAMESPACE}text"):
        words, size = text.text or "", float(text.get("font-size", "0"))
        x, y, width = float(text.get("x", "0")), float(text.get("y", "0")), len(words) * size * 0.6
        left = {"end": x - width, "middle": x - width / 2}.get(text.get("text-anchor", ""), x)
        found.append((words, (left, y - 0.8 * size, left + width, y + 0.25 * size)))
    return found


def long_names(told: SimpleNamespace) -> object:
    """A plan with every name as long as a hostile file could make it."""
    name = "<a & very> long \x00 name " * 12
    devices = tuple(replace(device, name=name) for device in told.ceilings.devices)
    lines = tuple(Line(at % 3, f"line {at} {'x' * 60}", 800 * MIB, ALWAYS, "computed") for at in range(24))
    return replace(
        told.plan,
        shape=replace(told.plan.shape, name=name),
        ceilings=replace(told.ceilings, devices=devices),
        lines=lines,
    )


@pytest.mark.parametrize("what", ["plan", "refusal", "long"])
def test_no_label_lies_on_another_or_outside(told: SimpleNamespace, what: str) -> None:
    root = drawn(long_names(told) if what == "long" else getattr(told, what))
    _, _, width, height = (float(part) for part in root.get("viewBox", "").split())
    found = boxes(root)
    assert len(found) > 20
    for words, (left, top, right, bottom) in found:
        assert 0 <= left and right <= width and 0 <= top and bottom <= height, words
    for (one, a), (other, b) in combinations(found, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)


def test_a_bar_is_as_long_as_what_is_held(told: SimpleNamespace) -> None:
    root = drawn(told.plan)
    ceiling = float(root.find(f"{NAMESPACE}line[@class='ceiling']").get("x1"))  # type: ignore[union-attr,arg-type]
    parts = [rect for rect in root.iter(f"{NAMESPACE}rect") if rect.get("class") == "part"]
    bars = [rect for rect in parts if rect.get("height") == str(BAR)]
    rows: dict[str, list[ElementTree.Element]] = {}
    for rect in bars:
        rows.setdefault(rect.get("y", ""), []).append(rect)
    boot = next(iter(rows.values()))
    left = float(boot[0].get("x", ""))
    held = sum(float(rect.get("width", "")) for rect in boot) / (ceiling - left)
    assert held == pytest.approx((9000.25 + 4000.5 + 555 + 512) / 31056, abs=0.001)


def test_what_exceeds_a_ceiling_reaches_beyond_its_line(told: SimpleNamespace) -> None:
    root = drawn(told.refusal)
    ceiling = float(root.find(f"{NAMESPACE}line[@class='ceiling']").get("x1"))  # type: ignore[union-attr,arg-type]
    ends = [
        float(rect.get("x", "")) + float(rect.get("width", ""))
        for rect in root.iter(f"{NAMESPACE}rect")
        if rect.get("class") == "part"
    ]
    assert max(ends) > ceiling + 5
    fits = drawn(told.plan)
    line = float(fits.find(f"{NAMESPACE}line[@class='ceiling']").get("x1"))  # type: ignore[union-attr,arg-type]
    bars = [r for r in fits.iter(f"{NAMESPACE}rect") if r.get("class") == "part" and r.get("height") == str(BAR)]
    assert max(float(r.get("x", "")) + float(r.get("width", "")) for r in bars) <= line + 0.2


def test_moments_and_names_are_all_there(told: SimpleNamespace) -> None:
    words = [words for words, _ in boxes(drawn(told.plan))]
    assert words.count("boot") == words.count("flip") == 3
    for line in told.plan.lines:
        assert line.name in words
    one = replace(told.plan, layouts=("pipeline",))
    assert "tensor" not in [words for words, _ in boxes(drawn(one))]


def test_it_stands_alone_and_reads_on_both_grounds(told: SimpleNamespace) -> None:
    text = svg(told.plan)
    assert "prefers-color-scheme: dark" in text and "<script" not in text
    assert re.findall(r"(?:href|src)\s*=|url\((?!#stripes)", text) == []
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    for colour in COLOURS:  # dark letters stand on each
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue > 140


def test_no_two_names_look_the_same(told: SimpleNamespace) -> None:
    """Names of a legend of up to twice as many as there are colours: beyond the colours, they are striped."""
    lines = tuple(Line(0, f"part {at}", (40 - at) * MIB, ALWAYS, "computed") for at in range(2 * len(COLOURS)))
    root = drawn(replace(told.plan, lines=lines))
    fills: list[tuple[str, ...]] = []
    for rect in root.iter(f"{NAMESPACE}rect"):
        if rect.get("height") != "12":
            continue
        if rect.get("class") == "part":
            fills.append((rect.get("fill", ""),))
        else:
            fills[-1] = (*fills[-1], rect.get("fill", ""))
    assert len(fills) == len(set(fills)) == 2 * len(COLOURS)


def test_an_unknown_ceiling_has_no_line(told: SimpleNamespace) -> None:
    devices = tuple(replace(device, ceiling_bytes=None) for device in told.ceilings.devices)
    root = drawn(replace(told.plan, ceilings=replace(told.ceilings, devices=devices)))
    assert root.find(f"{NAMESPACE}line[@class='ceiling']") is None
    assert "ceiling unknown" in [words for words, _ in boxes(root)]


def test_a_mix_that_is_in_the_name_is_told_once(told: SimpleNamespace) -> None:
    shape = replace(told.plan.shape, name="dense-27b in Q2_K", quant="Q2_K")
    assert "<title>dense-27b in Q2_K fits</title>" in svg(replace(told.plan, shape=shape))
