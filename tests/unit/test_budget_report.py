"""The report for a person: everything it must answer stands there, in order, aligned, and its sums add up."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from budget.boxes import ModelRow, box_report
from budget.facts import MIB, Box, Doubt
from budget.ledger import ALWAYS, Line
from budget.page import WIDTH, Column, Style, gained, grouped, mib, regrouped, style_of, table, wrapped
from budget.plan import Priced, Unknown
from budget.question import Question
from budget.report import Measured, elsewhere, measured_table, report, summary
from budget.sums import arithmetic

GOLDEN = Path(__file__).parents[1] / "data" / "budget_report.txt"
ASKED = Question("models/dense-27b.gguf", None, ("--box", "laptop.json"))
CODES = re.compile(r"\x1b\[[0-9;]*m")


def number(text: str) -> float:
    return float(text.replace(" ", ""))


# ------------------------------------------------------------------------------------------------------------ the plan


def test_the_report_is_the_one_that_was_looked_at(told: SimpleNamespace) -> None:
    """A change of layout is seen here: read the new page before the file is replaced with it."""
    found = "\n".join(report(told.plan, told.host, told.doubts, ASKED)) + "\n"
    assert found == GOLDEN.read_text()


def test_the_first_sentence_says_what_fits_and_what_binds(told: SimpleNamespace) -> None:
    text = " ".join(report(told.plan, told.host, (), ASKED)[:3])
    for words in (
        "FITS: dense-27b (Q4_K_M)",
        "65 536 tokens of context",
        "16 requests at once (--max-running)",
        "65 536 tokens of f16 KV in all: 4 096 tokens for each of 16 at once",
        "'kv pool' on device 1",
    ):
        assert words in text
    one = " ".join(report(replace(told.plan, running=1), told.host, (), ASKED)[:3])
    little = " ".join(report(replace(told.plan, kv_tokens=128), told.host, (), ASKED)[:3])
    assert "128 tokens of f16 KV in all: 8 tokens for each of 16 at once" in little
    assert "1 request at once (--max-running), 65 536 tokens of f16 KV;" in one
    assert "1 request at once" in summary(replace(told.plan, running=1))[0]


def test_the_first_sentence_says_what_this_version_cannot(told: SimpleNamespace) -> None:
    lines = report(told.plan, told.host, told.doubts, ASKED)
    assert lines[0].startswith("FITS, but this version computes on the CPU only. dense-27b (Q4_K_M) with")
    assert "To run it (not in this version, see the first line)" in lines
    refusing = replace(ASKED, refused=lambda settings: ("--layout auto",) if "layout" in settings else ())
    text = " ".join(report(told.plan, told.host, (), refusing)[:2])
    assert text.startswith("FITS, but this version has no --layout auto. dense-27b")
    assert "To run it" in report(told.plan, told.host, (), ASKED)


def test_advice_that_this_version_refuses_is_marked(told: SimpleNamespace) -> None:
    asked = replace(ASKED, refused=lambda settings: ("--kv-type q8_0",) if settings.get("kv_type") == "q8_0" else ())
    lines = report(told.plan, told.host, (), asked)
    text = " ".join(" ".join(lines).split())
    assert "half the bytes for each token (not in this version) --max-running 8" in text
    assert "fewer rows in flight Speed" in text
    nearest = report(told.refusal, told.host, (), asked)
    assert any(line.startswith("  run it, not in this version   homeserve up models/dense-27b") for line in nearest)


def test_another_mix_is_another_file(told: SimpleNamespace) -> None:
    asked = Question("m.gguf", None, ("--quant", "q2_k"))
    shape = replace(told.plan.shape, name="dense-27b in Q2_K", quant="Q2_K")
    lines = report(replace(told.plan, shape=shape), told.host, (), asked)
    assert lines[0].startswith("FITS: dense-27b in Q2_K with 65 536")
    at = lines.index("To run it (MODEL is a Q2_K file of m.gguf, which is not here)")
    assert lines[at + 1] == "  homeserve up MODEL --max-running 16"
    other = report(replace(told.refusal, nearest={"quant": "Q2_K"}), told.host, (), ASKED)
    assert "  It needs a Q2_K file of models/dense-27b.gguf." in other
    other = report(replace(told.refusal, nearest={"quant": "IQ2_XS"}), told.host, (), ASKED)
    assert "  It needs an IQ2_XS file of models/dense-27b.gguf." in other


def test_a_pool_that_nobody_asked_for_binds_nothing(told: SimpleNamespace) -> None:
    lines = report(replace(told.plan, most_tokens=200000), told.host, (), ASKED)
    text = " ".join(lines[:4])
    assert "nothing binds yet: 200 000 tokens would fit, then 'kv pool' on device 1" in text
    assert not any(line.startswith("Why it binds") for line in lines)
    assert not any("binds" in line for line in summary(replace(told.plan, most_tokens=200000)))


def test_parts_come_in_the_order_in_which_they_are_asked_for(told: SimpleNamespace) -> None:
    text = "\n".join(report(told.plan, told.host, told.doubts, ASKED))
    heads = (
        "FITS", "Device 0,", "Device 1,", "Device 2,", "Ranks:", "What to change", "Speed", "What was looked at",
        "What is in doubt", "To run it", "Words",
    )  # fmt: skip
    places = [text.index(head) for head in heads]
    assert places == sorted(places)


@pytest.mark.parametrize("what", ["plan", "refusal", "unknown"])
def test_a_page_is_100_wide_and_plain_ascii(told: SimpleNamespace, what: str) -> None:
    lines = report(getattr(told, what), told.host, told.doubts, ASKED)
    assert all(len(line) <= WIDTH for line in lines if "homeserve " not in line)
    assert all(line.isascii() and line == line.rstrip() for line in lines)


@pytest.mark.parametrize("what", ["plan", "refusal", "unknown"])
def test_colour_changes_no_character(told: SimpleNamespace, what: str) -> None:
    plain = report(getattr(told, what), told.host, told.doubts, ASKED)
    coloured = report(getattr(told, what), told.host, told.doubts, ASKED, Style(colour=True))
    assert coloured != plain
    assert [CODES.sub("", line).rstrip() for line in coloured] == plain


def test_a_ceiling_is_a_sum_that_adds_up(told: SimpleNamespace) -> None:
    text = arithmetic(told.ceilings.devices[0], told.host)
    assert text == "32 607.0 total - 507.0 reserved - 20.0 used by others - 1 024.0 floor = ceiling 31 056.0"
    numbers = [number(part) for part in re.findall(r"[\d ]*\d\.\d", text)]
    assert numbers[0] - sum(numbers[1:-1]) == pytest.approx(numbers[-1])
    host = arithmetic(told.ceilings.devices[2], told.host)
    assert host == "65 536.0 total - 5 536.0 used by others - 256.0 floor = ceiling 59 744.0"


def test_a_unified_ceiling_counts_the_hosts_memory_once(told: SimpleNamespace) -> None:
    apu = told.laptop.devices[0]
    assert arithmetic(apu, told.host).startswith(
        "1 024.0 carve-out + 24 576.0 GTT = ceiling 25 600.0 (GTT is the host's"
    )
    less = arithmetic(replace(apu, ceiling_bytes=20000 * MIB), told.host)
    assert "- 5 600.0 that others hold or the host does not have = ceiling 20 000.0" in less


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ceiling_bytes": None, "why_not": "its memory is unknown"}, "ceiling unknown: its memory is unknown"),
        ({"reserved_bytes": None}, "reserved (unknown) - 527.0 kept back or used by others"),
        ({"reserved_bytes": None, "free_bytes": None, "ceiling_bytes": 31583 * MIB}, "used by others (unknown)"),
        ({"ceiling_bytes": 0, "total_bytes": 1200 * MIB}, "nothing is left, ceiling 0.0"),
    ],
)
def test_what_a_ceiling_lacks_is_said(told: SimpleNamespace, changes: dict[str, object], words: str) -> None:
    assert words in arithmetic(replace(told.ceilings.devices[0], **changes), told.host)


def test_the_sums_below_a_table_are_those_of_its_lines(told: SimpleNamespace) -> None:
    lines = report(told.plan, told.host, (), ASKED)
    start = next(at for at, line in enumerate(lines) if line.startswith("Device 0"))
    end = lines.index("", start)
    pipeline = 0.0
    for line in lines[start:end]:
        found = re.match(r"  [a-z ]{3,20}?\s{2,}([\d ]*\d\.\d)  [#.]{12}  (.*)", line)
        if found and ("pipeline" in found[2] or "always" in found[2]):
            pipeline += number(found[1])
    assert f"pipeline {grouped(pipeline, 1)}" in " ".join(lines[start:end])
    assert "peak 23 055.7 (flip) of 31 056.0: 8 000.3 left" in " ".join(lines[start:end])


def test_what_fits_is_never_shown_as_lacking_by_rounding(told: SimpleNamespace) -> None:
    device = replace(told.ceilings.devices[0], ceiling_bytes=10 * (MIB + 60_000))
    ceilings = replace(told.ceilings, devices=(device, *told.ceilings.devices[1:]))
    lines = tuple(Line(0, f"part {at}", MIB + 60_000, ALWAYS, "computed") for at in range(10))
    text = "\n".join(report(replace(told.plan, ceilings=ceilings, lines=lines), told.host, (), ASKED))
    assert "0.0 left" in text and "lack" not in text


def test_the_rank_that_binds_is_marked(told: SimpleNamespace) -> None:
    lines = report(told.plan, told.host, (), ASKED)
    assert [line for line in lines if "<- binds" in line][0].split()[0] == "1"
    assert not any("Ranks:" in line for line in report(replace(told.plan, ranks=(0,)), told.host, (), ASKED))


def test_what_to_change_is_a_flag_and_a_gain(told: SimpleNamespace) -> None:
    text = "\n".join(report(told.plan, told.host, (), ASKED))
    assert re.search(r"--kv-type q8_0 +\+41 000 tokens of context +half the bytes", text)
    assert re.search(r"--max-running 8 --chunk 128 +\+512 tokens", text)


def test_speed_is_a_range_and_the_flip_says_when_it_pays(told: SimpleNamespace) -> None:
    text = "\n".join(report(told.plan, told.host, (), ASKED))
    assert re.search(r"pipeline +7 246 \(3 623 to 8 695\) +40\.0 \(20\.0 to 48\.0\) +the bandwidth", text)
    assert "3.20 s; it pays from 7 004 prompt tokens on" in text
    never = report(replace(told.plan, break_even_tokens=None), told.host, (), ASKED)
    assert any("it never pays here" in line for line in never)


def test_the_option_that_was_taken_stands_first_and_is_marked(told: SimpleNamespace) -> None:
    lines = report(told.plan, told.host, (), ASKED)
    at = lines.index("What was looked at")
    names = [line.split("  ")[1] for line in lines[at + 2 : at + 5]]
    assert names == ["both cards, weights 30,17", "device 0 alone", "with a CPU rank"]
    assert re.search(r"65 536 +7 246 +61\.0  <- taken$", lines[at + 2])
    refused = report(told.refusal, told.host, (), ASKED)
    assert refused[refused.index("Looked at, and not taken") + 2].split("  ")[1] == "device 0 alone"


def test_requests_at_once_are_told_where_options_differ_in_them(told: SimpleNamespace) -> None:
    one = Priced("with a CPU rank, one request at a time", 900, 9.0, 2.0, "slower")
    plan = replace(told.plan, priced=(*told.plan.priced, one), wish=replace(told.plan.wish, running=0))
    lines = report(plan, told.host, (), ASKED)
    at = lines.index("What was looked at")
    assert [re.split(r"  +", line)[2] for line in lines[at + 1 : at + 6]] == ["at once", "16", "16", "16", "1"]
    assert "at once" not in report(told.plan, told.host, (), ASKED)[at + 1]


def test_an_unknown_host_is_a_way_that_was_not_looked_at(told: SimpleNamespace) -> None:
    cpu = replace(told.ceilings.devices[2], ceiling_bytes=None)
    plan = replace(told.plan, ceilings=replace(told.ceilings, devices=(*told.ceilings.devices[:2], cpu)))
    text = " ".join(" ".join(report(plan, told.host, (), ASKED)).split())
    assert "with the host - - - not looked at, its memory is unknown (--assume-ram-mib N)" in text
    named = replace(plan, wish=replace(plan.wish, devices=("cuda:0", "cuda:1")))
    assert "with the host" not in "\n".join(report(named, told.host, (), ASKED))


def test_a_bar_is_a_share_of_something_that_is_known(told: SimpleNamespace) -> None:
    cpu = replace(told.ceilings.devices[2], ceiling_bytes=None)
    plan = replace(told.plan, ceilings=replace(told.ceilings, devices=(*told.ceilings.devices[:2], cpu)))
    lines = report(plan, told.host, (), ASKED)
    start = next(at for at, line in enumerate(lines) if line.startswith("Device 2"))
    assert not any("#" in line or "...." in line for line in lines[start : lines.index("", start)])


def test_devices_are_named_as_devices_wants_them(told: SimpleNamespace) -> None:
    lines = report(told.plan, told.host, (), ASKED)
    heads = [line.split(":")[0] + ":" + line.split(":")[1] for line in lines if line.startswith("Device ")]
    assert [head.split(", ")[1] for head in heads][:2] == ["cuda:0", "cuda:1"]
    assert any(line.startswith("Device 2, cpu: AMD Ryzen") for line in lines)
    apu = report(replace(told.plan, ceilings=told.laptop, ranks=(0,)), told.host, (), ASKED)
    assert any(line.startswith("Device 0, rocm:0: AMD Radeon 780M") for line in apu)


def test_only_words_of_the_page_are_explained(told: SimpleNamespace) -> None:
    def words(lines: list[str]) -> list[str]:
        return [re.split(r"  +", line)[1] for line in lines[lines.index("Words") + 1 :] if line[2:3].strip()]

    assert words(report(told.plan, told.host, (), ASKED)) == ["boot", "pipeline", "tensor", "flip", "floor", "rank"]
    state = Line(0, "state", MIB, ALWAYS, "computed")
    lines = report(replace(told.plan, lines=(*told.plan.lines, state)), told.host, (), ASKED, Style(colour=True))
    assert "state" in words([CODES.sub("", line) for line in lines])
    assert "carve-out" in words(report(replace(told.plan, ceilings=told.laptop, ranks=(0,)), told.host, (), ASKED))


def test_what_was_measured_on_another_box_is_a_reserve_here(told: SimpleNamespace) -> None:
    lines = (Line(0, "engine process", MIB, ALWAYS, "measured", "Python"), Line(0, "kv", MIB, ALWAYS, "measured"))
    for outcome in (told.plan, told.refusal):
        found = elsewhere(replace(outcome, lines=lines))
        assert not isinstance(found, Unknown)
        assert [(line.source, line.note) for line in found.lines] == [
            ("reserve", "measured elsewhere: Python"), ("reserve", "measured elsewhere")
        ]  # fmt: skip
    assert elsewhere(told.plan) == told.plan and elsewhere(told.unknown) == told.unknown


def test_amounts_of_other_texts_are_spelt_as_on_the_page() -> None:
    assert regrouped("full at 28512 tokens, 11932 MiB lack") == "full at 28 512 tokens, 11 932 MiB lack"
    assert regrouped("the larger of pipeline 13505 and tensor 13199 MiB") == (
        "the larger of pipeline 13 505 and tensor 13 199 MiB"
    )
    same = "--kv-tokens 114096, id 26720, gfx1103, x:1234 MiB, 2.1 requests, 41 001 tokens"
    assert regrouped(same) == same
    assert regrouped("256 beside 1 requests and 1 layers") == "256 beside 1 request and 1 layer"


def test_a_number_is_not_cut_by_the_end_of_a_line() -> None:
    for at in range(80, 100):
        assert all(not line.endswith(" 41") for line in wrapped("x" * at + " 41 000 tokens"))
    assert table(Style(), [Column("", limit=12)], [["about 12 345 678"]]) == ["  about", "  12 345 678"]


def test_a_doubt_says_once_what_was_taken(told: SimpleNamespace) -> None:
    doubt = Doubt("host memory", "the profile does not say it", "taken as 30000 MiB because that was asked")
    text = "\n".join(report(told.plan, told.host, [doubt], ASKED))
    assert "the profile does not say it; taken: 30 000 MiB because that was asked" in text


def test_doubts_are_told_once_and_the_missing_backend_first(told: SimpleNamespace) -> None:
    twice = (*reversed(told.doubts), *told.doubts)
    lines = report(told.plan, told.host, twice, ASKED)
    at = lines.index("What is in doubt")
    assert lines[at + 1].startswith("  - backend: this version computes on the CPU only")
    assert sum("reserved memory is not told" in line for line in lines) == 1
    many = [Doubt(f"card {at}", "x", "y") for at in range(100)]
    assert any("and 60 more" in line for line in report(told.plan, told.host, many, ASKED))


def test_devices_without_a_line_are_told_with_their_reason(told: SimpleNamespace) -> None:
    card = replace(told.ceilings.devices[1], index=2, usable=False, why_not="no backend for intel devices")
    cpu = replace(told.ceilings.devices[2], index=3)
    ceilings = replace(told.ceilings, devices=(*told.ceilings.devices[:2], card, cpu))
    lines = report(replace(told.plan, ceilings=ceilings, lines=told.plan.lines[:9]), told.host, (), ASKED)
    assert "Device 2 (NVIDIA GeForce RTX 3080) is not used: no backend for intel devices" in lines
    assert "Device 3 (AMD Ryzen 9 7950X) holds nothing in this plan" in lines


def test_one_memory_of_two_devices_is_told_as_one(told: SimpleNamespace) -> None:
    lines = (Line(0, "kv", 20000 * MIB, ALWAYS, "computed"), Line(1, "engine", 400 * MIB, ALWAYS, "reserve"))
    plan = replace(told.plan, ceilings=told.laptop, lines=lines, ranks=(0,), binds=replace(told.plan.binds, device=0))
    text = " ".join(report(plan, told.host, (), ASKED))
    assert "Devices 0 and 1 draw from the same memory. Together they may hold 28 312.0 MiB" in text
    assert (
        "at the worst moment (boot) they hold 19 376.0 = 20 000.0 on device 0 - 1 024.0 of it in the carve-out" in text
    )
    assert "which does not count here + 400.0 on device 1." in text


def test_a_model_that_is_not_here_is_said_beside_its_command(told: SimpleNamespace) -> None:
    lines = report(told.plan, told.host, (), Question(None, "s.json"))
    at = lines.index("To run it (MODEL is the file, which is not here)")
    assert lines[at + 1] == "  homeserve up MODEL --max-running 16"


# ----------------------------------------------------------------------------------------------- refusal and unknown


def test_a_refusal_is_a_sum_that_a_person_can_check(told: SimpleNamespace) -> None:
    lines = report(told.refusal, told.host, (), ASKED)
    head = " ".join(lines[:3])
    assert head.startswith("DOES NOT FIT: dense-27b (Q4_K_M) with 65 536 tokens of context and 16 requests at once")
    assert "device 1 (NVIDIA GeForce RTX 3080) lacks 604.0 MiB" in head
    terms = [re.match(r"  ([ +=-])\s+([\d ]*\d\.\d)  (.*)", line) for line in lines]
    signed = [(found[1], number(found[2])) for found in terms if found]
    held = [value for sign, value in signed if sign in " +"]
    needed, lacking = [value for sign, value in signed if sign == "="]
    (there,) = [value for sign, value in signed if sign == "-"]
    assert sum(held) == pytest.approx(needed) and needed - there == pytest.approx(lacking) == pytest.approx(604.0)


def test_a_refusal_ends_in_commands_to_paste(told: SimpleNamespace) -> None:
    lines = report(told.refusal, told.host, (), ASKED)
    asked = "models/dense-27b.gguf --box laptop.json --context 16384 --kv-type q8_0 --max-running 16"
    assert f"  look at it   homeserve budget {asked}" in lines
    assert "  run it       homeserve up models/dense-27b.gguf --context 16384 --kv-type q8_0 --max-running 16" in lines
    other = report(replace(told.refusal, nearest={"quant": "Q2_K", "vision": "off"}), told.host, (), ASKED)
    assert any("--quant Q2_K" in line for line in other) and not any("run it" in line for line in other)
    none = report(replace(told.refusal, nearest=None, nearest_text=""), told.host, (), ASKED)
    assert "  none was found: nothing smaller fits either" in none


def test_a_lack_of_shared_memory_is_a_sum_with_the_carve_out(told: SimpleNamespace) -> None:
    """What lies in the carve-out is taken off, what the CPU holds is added."""
    lines = (Line(0, "weights", 25000 * MIB, ALWAYS, "computed"), Line(1, "engine", 5000 * MIB, ALWAYS, "reserve"))
    refusal = replace(
        told.refusal, ceilings=told.laptop, device=0, lines=lines, needed_bytes=(25000 - 1024 + 5000) * MIB,
        available_bytes=28312 * MIB,
    )  # fmt: skip
    lines_told = report(refusal, told.host, (), ASKED)
    text = "\n".join(lines_told)
    assert "lacks 664.0 MiB of the memory that it shares (needed 28 976.0, there is 28 312.0)" in " ".join(lines_told)
    assert re.search(r"- +1 024\.0  of it in the carve-out, which is not shared", text)
    assert re.search(r"\+ +5 000\.0  held by device 1 \(AMD Ryzen", text) and re.search(r"= +28 976\.0  needed", text)


def test_a_lack_is_told_in_one_rounding(told: SimpleNamespace) -> None:
    """The first line, the sum and the table of options say the same number; no reason repeats it in another one."""
    lines = tuple(Line(1, f"part {at}", MIB + 60_000, ALWAYS, "computed") for at in range(10))
    needed, there = sum(line.bytes for line in lines), 2 * MIB + 70_000
    name = told.ceilings.devices[1].name
    short = Priced("x", None, None, None, f"{-(-(needed - there) // MIB)} MiB lack on {name}")
    reason = f"dense-27b (Q4_K_M) with 512 tokens of context does not fit: it would hold 11 MiB on {name}, 2 MiB may be"
    reason += " used, 9 MiB are missing. This backend has no kernel for packed weights"
    refusal = replace(
        told.refusal, lines=lines, needed_bytes=needed, available_bytes=there, reason=reason, priced=(short,),
        wish=replace(told.refusal.wish, context=0),
    )  # fmt: skip
    text = " ".join(" ".join(report(refusal, told.host, (), ASKED)).split())
    assert "DOES NOT FIT: dense-27b (Q4_K_M) even with 512 tokens of context" in text
    assert "lacks 8.9 MiB (needed 11.0, there is 2.1)" in text and "= 8.9 MiB lack" in text
    assert f"8.9 MiB lack on {name}" in text and "9 MiB are missing" not in text
    assert "Why: This backend has no kernel for packed weights The option" in text


def test_what_others_hold_of_the_same_memory_is_in_the_sum(told: SimpleNamespace) -> None:
    refusal = replace(told.refusal, needed_bytes=9900 * MIB)
    text = "\n".join(report(refusal, told.host, (), ASKED))
    assert re.search(r"\+ +400\.0  held by other devices of this memory", text)
    assert re.search(r"= +9 900\.0  needed", text) and re.search(r"= +1 004\.0  MiB lack", text)


def test_the_unknown_is_said_and_not_guessed(told: SimpleNamespace) -> None:
    lines = report(told.unknown, None, (), None)
    assert lines[0] == "UNKNOWN: whether it fits cannot be said: the box says nothing about its memory."
    assert any(re.search(r"cpu +unknown +unknown", line) for line in lines)


# ------------------------------------------------------------------------------------------------------------- the box


def test_a_box_is_told_with_the_models_that_fit(told: SimpleNamespace) -> None:
    rows = [
        ModelRow("a.gguf", told.plan, ""),
        ModelRow("b.gguf", told.refusal, ""),
        ModelRow("c.gguf", None, "is not GGUF"),
    ]
    box = Box("my-box", told.host, None, environment="vm")
    lines = box_report(box, told.ceilings, told.doubts, rows, 3, Style(), ("--box", "b.json"))
    text = "\n".join(lines)
    assert lines[0].startswith("my-box: NVIDIA GeForce RTX 5090 + NVIDIA GeForce RTX 3080, in a VM; up to 31 056.0 MiB")
    assert re.search(r"a\.gguf +20 200\.0 +yes +65 536 +65 536", text)
    assert re.search(r"b\.gguf +20 200\.0 +no +604\.0 MiB lack on device 1", text)
    assert re.search(r"c\.gguf +unknown +is not GGUF", text)
    assert "and 3 more that were not looked at" in text
    assert lines[lines.index("More about one of them") + 1] == "  homeserve budget a.gguf --box b.json"
    assert lines[-1].startswith("  floor")
    assert all(len(line) <= WIDTH for line in lines)
    none = box_report(box, told.ceilings, (), [], 0, Style())
    assert any("homeserve pull fetches one" in line for line in none)


def test_a_box_that_says_nothing_is_no_error(told: SimpleNamespace) -> None:
    lines = box_report(Box("b", None, None), told.unknown.ceilings, (), [], 0, Style())
    assert lines[0] == "This box says nothing about its memory: no plan can be made for it."


# -------------------------------------------------------------------------------------------------------- of up, pages


def test_the_summary_of_up_is_a_sum_for_each_device(told: SimpleNamespace) -> None:
    lines = summary(told.plan)
    assert lines[0].startswith("context 65 536, 65 536 tokens of f16 KV, 16 requests at once")
    second = lines[2]
    parts = [int(word.replace(" ", "")) for word in re.findall(r" (\d[\d ]*)(?= [+=])", second)]
    assert second.endswith("= 8 800 of 8 896 MiB") and sum(parts) == 8800
    assert any(line.startswith("'kv pool' on device 1") for line in lines)
    assert len(summary(replace(told.plan, doubts=()))) == len(lines) - bool(told.plan.doubts)


def test_predicted_against_measured_says_what_was_not_measured() -> None:
    rows = [
        Measured(0, "weights", 100.0, 103.0, "mapping homeserve-weights"),
        Measured(0, "kv", 1000.0, 990.0, "mapping homeserve-kv"),
        Measured(0, "plan log", 5.0, None, None),
    ]
    lines = measured_table(rows)
    assert re.search(r"weights +100\.0 +103\.0 +\+3\.0 \(\+3%\) +mapping", lines[1])
    assert re.search(r"plan log +5\.0 +not measured$", lines[3])
    assert re.search(r"total measured +1 100\.0 +1 093\.0 +-7\.0 \(-1%\)", lines[4])


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("encoding", "terminal", "environ", "colour", "blocks"),
    [
        ("utf-8", True, {}, True, True),
        ("utf-8", True, {"NO_COLOR": "1"}, False, True),
        ("utf-8", True, {"NO_COLOR": ""}, True, True),
        ("utf-8", True, {"TERM": "dumb"}, False, True),
        ("utf-8", False, {}, False, True),
        ("ascii", True, {}, True, False),
        ("latin-1", False, {}, False, False),
    ],
)
def test_colour_and_blocks_only_where_they_can_be_shown(
    encoding: str, terminal: bool, environ: dict[str, str], colour: bool, blocks: bool
) -> None:
    stream = (Terminal if terminal else io.TextIOWrapper)(io.BytesIO(), encoding=encoding)
    assert style_of(stream, environ) == Style(colour, blocks)


def test_bars_show_shares_to_the_nearest_character() -> None:
    style = Style()
    shares = (0.0, 0.12, 0.13, 0.5, 0.9, 1.0, 7.0)
    assert [style.bar(share, 4) for share in shares] == ["....", "....", "#...", "##..", "####", "####", "####"]
    assert Style(blocks=True).bar(0.5, 4) == "██░░"


def test_numbers_are_grouped_and_unknown_is_a_word() -> None:
    assert grouped(41000) == "41 000" and grouped(1234.56, 1) == "1 234.6" and gained(41000) == "+41 000"
    assert gained(-512) == "-512" and mib(None) == "unknown" and mib(1536 * 1024) == "1.5"


def test_a_table_wraps_within_the_page_and_drops_empty_columns() -> None:
    rows = [["a", "", "word " * 40], ["b", "", "short"]]
    lines = table(Style(), [Column("x"), Column("nothing"), Column("text")], rows)
    assert "nothing" not in lines[0] and len(lines) > 4 and all(len(line) <= WIDTH for line in lines)
