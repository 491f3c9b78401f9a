"""From `--devices`, a model and a box to ranks on cards: who is taken, who is left out and why, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from backends.gpu.arch import arch
from backends.gpu.capability import COMPILED
from backends.gpu.errors import UnknownArch
from budget import host_lines
from budget.facts import GIB, MIB, Box, Card, CpuFacts, Doubt, MemoryFacts
from budget.plan import Plan
from budget.profile import box_from_json
from homeserve.cards import Choice, choose, needs_of, told_of, too_old, without
from homeserve.errors import BudgetError, DeviceError, SettingError, UnsupportedModel
from homeserve.layouts.ranks import RankDevice, RankPlan
from homeserve.model_facts import ModelFacts, read_model
from homeserve.readiness import Readiness, SeenCard
from homeserve.settings import Settings, load
from homeserve.sizing import engine_limits, plan_of, ranks_of_plan

DATA = Path(__file__).parents[1] / "data"
RECORDED = {profile["id"]: profile for profile in json.loads((DATA / "boxes" / "boxes.json").read_text())}
HOST = MemoryFacts(64 * GIB, 64 * GIB, "MemTotal", 48 * GIB, 0)
CPU = CpuFacts("CPU", 16, 8, "physical cores", frozenset())

NVIDIA = Card(
    "nvidia", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "NVIDIA GeForce RTX 3090", "sm_86", pci="0000:01:00.0",
    total_bytes=24 * GIB, reserved_bytes=0, free_bytes=23 * GIB,
)  # fmt: skip
AMD = Card(
    "amd", "GPU-00000000deadbeef", "AMD Radeon RX 7900 XTX", "gfx1100", pci="0000:03:00.0", order=1,
    total_bytes=24 * GIB, used_bytes=0, free_bytes=24 * GIB,
)  # fmt: skip

NVML_HANGS = Doubt("NVML", "did not answer within 20 s", "what the PCI bus shows")


def box(*cards: Card) -> Box:
    return Box("here", HOST, CPU, cards)


def recorded(name: str) -> Box:
    """A box of the collection, with a host where the profile has none."""
    found = box_from_json(RECORDED[name], name)
    return replace(found, memory=found.memory or HOST, cpu=CPU)


@pytest.fixture(scope="module")
def counter() -> Iterator[ModelFacts]:
    """Hybrid, with a drafting block."""
    facts = read_model(str(DATA / "counter.gguf"), Settings())
    yield facts
    facts.checkpoint.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[ModelFacts]:
    facts = read_model(str(DATA / "tiny" / "llama.f32.gguf"), Settings())
    yield facts
    facts.checkpoint.close()


def chosen(facts: ModelFacts, words: str, where: Box, environ: dict[str, str] | None = None) -> Choice:
    testing = {"HOMESERVE_TESTING": "1"} if environ and "HOMESERVE_TESTING" in environ else {}
    return choose(load(words.split(), testing, Path("/")), facts, where, environ or {})


def ranked(facts: ModelFacts, words: str, where: Box, **environ: str) -> tuple[Settings, Plan, RankPlan]:
    choice = chosen(facts, words, where, environ)
    plan = plan_of(choice.settings, facts, where, among=choice.among)
    return choice.settings, plan, ranks_of_plan(choice.settings, plan, where, range(8))


# ---------------------------------------------------------------------------------------------------------------- named


def test_ranks_are_in_the_order_in_which_cards_are_named(counter: ModelFacts) -> None:
    """Not by size, as the planner would have them; each rank has a backend and a card of its own."""
    small = replace(AMD, total_bytes=8 * GIB, free_bytes=8 * GIB)
    for words, backends in (("rocm:0,cuda:0", ["rocm", "cuda"]), ("cuda:0,rocm:0", ["cuda", "rocm"])):
        _, plan, ranks = ranked(counter, f"--devices {words} --layout pipeline", box(NVIDIA, small))
        assert [device.backend for device in ranks.devices] == backends
        assert [plan.ceilings.devices[index].vendor for index in plan.ranks] == [
            {"cuda": "nvidia", "rocm": "amd"}[name] for name in backends
        ]
    assert ranks.devices[0] == RankDevice("cuda", 0, NVIDIA.id, NVIDIA.name) and ranks.on_cards
    assert ranks.devices[0].told == f"cuda:0, NVIDIA GeForce RTX 3090 ({NVIDIA.id})"


@pytest.mark.parametrize("word", ["cuda:1", "GPU-2", "0000:02:00.0", "02:00", "gpu-2"])
def test_a_card_by_each_of_its_names(llama: ModelFacts, word: str) -> None:
    second = replace(NVIDIA, id="GPU-2", pci="0000:02:00.0")
    if word.lower() == "gpu-2":  # too short for what people are given: ids of a profile
        settings = replace(load([], {}, "/"), devices=word)
    else:
        settings = load(["--devices", word], {}, "/")
    choice = choose(settings, llama, box(NVIDIA, second), {})
    assert choice.cards == (second,) and choice.settings.devices == "GPU-2" and not choice.among


def test_a_card_has_what_a_rank_on_the_cpu_would_hold(counter: ModelFacts) -> None:
    """The embedding, KV rows in blocks, and checkpoints in the pool of states: the ledger says so on the card."""
    settings, plan, ranks = ranked(counter, "--devices cuda:0 --max-running 4", box(NVIDIA))
    assert settings.ranks == 1 and ranks.acts is None and not ranks.flip
    lines = {(line.device, line.name): line for line in plan.lines}
    (index,) = plan.ranks
    on_cpu = plan_of(load(["--max-running", "4"], {}, "/"), counter, box())
    of_cpu = {line.name: line for line in on_cpu.lines}
    assert lines[index, "weights"].bytes == pytest.approx(of_cpu["weights"].bytes, rel=0.03)
    assert (
        lines[index, "state"].bytes == pytest.approx(of_cpu["state"].bytes, rel=0.01)
        and "checkpoints" in lines[index, "state"].note
    )
    assert not {name for _, name in lines} & {"embedding", "state checkpoints"}
    assert engine_limits(settings, plan, ranks).checkpoints == plan.checkpoints > 0


def test_floors_are_each_kinds_own_unless_one_is_said(llama: ModelFacts) -> None:
    _, plan, _ = ranked(llama, "--devices cuda:0", box(NVIDIA))
    assert [device.floor_bytes for device in plan.ceilings.devices] == [1024 * MIB, 256 * MIB]
    _, plan, _ = ranked(llama, "--devices cuda:0 --floor-mib 512", box(NVIDIA))
    assert [device.floor_bytes for device in plan.ceilings.devices] == [512 * MIB, 512 * MIB]


def test_two_cards_flip_from_one_copy_in_host_memory(counter: ModelFacts) -> None:
    """Never with both layouts on the cards at once: the backend has one arena."""
    settings, plan, ranks = ranked(counter, "--devices cuda:0,rocm:0 --flip manual", box(NVIDIA, AMD))
    assert plan.flip.fits and plan.flip.home == "copy" and ranks.flip and ranks.transit_bytes > 0
    names = {line.name for line in plan.lines}
    assert {"weights copy", host_lines.TRANSIT, host_lines.ACTS} <= names and not any(
        "resident" in name for name in names
    )
    limits = engine_limits(settings, plan, ranks)
    assert limits.flip is not None and limits.flip.transit_bytes > 0 and not limits.flip.unified
    assert ranks.acts is not None and ranks.acts.depth == 4


def test_one_card_twice_is_for_tests_alone(llama: ModelFacts) -> None:
    """By two names it is seen when the box is."""
    with pytest.raises(SettingError, match="is named twice: a card is one rank"):
        ranked(llama, f"--devices cuda:0,{NVIDIA.id}", box(NVIDIA))
    _, plan, ranks = ranked(
        llama, "--devices cuda:0,cuda:0 --flip manual --kv-tokens 4096", box(NVIDIA), HOMESERVE_TESTING="1"
    )
    assert plan.ranks == (0, 0) and [device.id for device in ranks.devices] == [NVIDIA.id] * 2 and ranks.flip


@pytest.mark.parametrize(
    ("words", "cards", "text"),
    [
        ("--devices cuda:1", (NVIDIA,), "--devices: there is no cuda:1 here: there is 1 of that kind"),
        ("--devices rocm:0", (NVIDIA,), "there is no rocm:0 here: there is none of that kind"),
        ("--devices GPU-ffffffff", (NVIDIA, AMD), "there is no card GPU-ffffffff here"),
        (
            "--backend rocm --devices GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
            (NVIDIA,),
            "is no card of --backend rocm",
        ),
        ("--backend rocm", (NVIDIA,), "--backend rocm: there is no card of AMD here"),
    ],
)
def test_a_card_that_is_not_there(llama: ModelFacts, words: str, cards: tuple[Card, ...], text: str) -> None:
    with pytest.raises(SettingError) as caught:
        chosen(llama, words, box(*cards))
    assert text in caught.value.message
    if "GPU-ffff" in words:
        assert told_of(NVIDIA, box(*cards)) in (caught.value.fix or "")


# --------------------------------------------------------------------------------------- what is known before anything


@pytest.mark.parametrize(
    ("environ", "word", "variable"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "cuda:0", "CUDA_VISIBLE_DEVICES is set to (nothing)"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cuda:0", "CUDA_VISIBLE_DEVICES is set to -1"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, "cuda:0", "CUDA_VISIBLE_DEVICES is set to GPU-1"),
        ({"HIP_VISIBLE_DEVICES": "1"}, "rocm:0", "HIP_VISIBLE_DEVICES is set to 1"),
        ({"ROCR_VISIBLE_DEVICES": "GPU-1"}, "rocm:0", "ROCR_VISIBLE_DEVICES is set to GPU-1"),
    ],
)
def test_a_hidden_card_is_one_error_with_the_variable(
    llama: ModelFacts, environ: dict[str, str], word: str, variable: str
) -> None:
    where = box(NVIDIA, AMD)
    with pytest.raises(DeviceError) as caught:
        chosen(llama, f"--devices {word}", where, environ)
    card = NVIDIA if word == "cuda:0" else AMD
    assert caught.value.message.startswith(f"{told_of(card, where)} is hidden: {variable}")
    assert (caught.value.fix or "").startswith(f"unset {variable.split()[0]}, add this card to it")
    assert chosen(llama, "", where, environ).cards == ((AMD,) if card is NVIDIA else (NVIDIA,)), "auto takes the rest"


def test_two_cards_of_one_uuid_cannot_be_told_apart(llama: ModelFacts) -> None:
    """Unless one of them is hidden."""
    first, second = replace(NVIDIA, twin=NVIDIA.id), replace(NVIDIA, id="nvidia-1", twin=NVIDIA.id, pci="0000:02:00.0")
    where = box(first, second)
    for word in ("cuda:0", "cuda:1", "0000:02:00.0"):
        with pytest.raises(DeviceError) as caught:
            chosen(llama, f"--devices {word}", where)
        assert f"its UUID {NVIDIA.id} is another card's too" in caught.value.message
        assert "hide one of the two with CUDA_VISIBLE_DEVICES" in (caught.value.fix or "")
    assert chosen(llama, "--devices cuda:0", where, {"CUDA_VISIBLE_DEVICES": "0"}).cards == (first,)
    left = chosen(llama, "", where)
    assert left.cards == () and len(left.left_out) == 2 and left.settings.devices == "cpu"


def test_a_card_of_unknown_memory_is_refused_by_name_and_left_out_by_itself(llama: ModelFacts) -> None:
    silent = Card("nvidia", "0000:01:00.0", "NVIDIA (10de:2204)", pci="0000:01:00.0")
    with pytest.raises(DeviceError, match="cannot be used: its memory is unknown; NVML .* is not there") as caught:
        chosen(llama, "--devices cuda:0", box(silent))
    assert "homeserve doctor" in (caught.value.fix or "")
    assert chosen(llama, "", box(silent)).left_out == (caught.value.message,)
    hangs = replace(box(silent), doubts=(NVML_HANGS,))
    assert chosen(llama, "", hangs).left_out[0].endswith("its memory is unknown; NVML did not answer within 20 s")
    of_amd = replace(silent, vendor="amd")
    with pytest.raises(DeviceError, match="cannot be used: its memory is unknown$"):
        chosen(llama, "--devices rocm:0", box(of_amd))


@pytest.mark.parametrize("words", ["--devices cuda:0", f"--devices {NVIDIA.id}", "--backend cuda"])
@pytest.mark.parametrize("cards", [(), (AMD,)], ids=("none", "amd"))
def test_without_a_card_of_nvidia_it_is_said_what_nvml_says(
    llama: ModelFacts, words: str, cards: tuple[Card, ...]
) -> None:
    """A driver that is broken and one that was never installed look alike on a bus that is not shown."""
    for where, text in (
        (box(*cards), "; NVML (libnvidia-ml.so.1, of NVIDIA's driver) is not there, or names none"),
        (replace(box(*cards), doubts=(NVML_HANGS,)), "; NVML did not answer within 20 s"),
    ):
        with pytest.raises(SettingError) as caught:
            chosen(llama, words, where)
        fix = caught.value.fix or ""
        assert caught.value.message.endswith(text) and "homeserve doctor" in fix
        if cards and "--backend" not in words:
            assert told_of(AMD, box(*cards)) in fix


def test_a_doubt_about_one_value_of_a_card_is_no_reason_that_another_is_not_there(llama: ModelFacts) -> None:
    about = Doubt(f"NVML {NVIDIA.id}", "says 9 MiB free of 8 MiB", "free is unknown")
    lost = Doubt("NVML card 1", "cannot be opened: lost, or not given to this user", "left out")
    with pytest.raises(SettingError, match="there is 1 of that kind$"):
        chosen(llama, "--devices cuda:1", replace(box(NVIDIA), doubts=(about,)))
    with pytest.raises(SettingError, match="of that kind; NVML card 1 cannot be opened: lost") as caught:
        chosen(llama, "--devices cuda:1", replace(box(NVIDIA), doubts=(about, lost)))
    assert "homeserve doctor" in (caught.value.fix or "")


@pytest.mark.parametrize("name", ["tg-quadro-p2000", "1080ti-win-desktop", "rx570-gtt-eq-vram"])
def test_recorded_cards_that_are_too_old(llama: ModelFacts, name: str) -> None:
    where = recorded(name)
    choice = chosen(llama, "", where)
    assert choice.cards == () and "is older than" in choice.left_out[0] and where.cards[0].arch in choice.left_out[0]
    kind = "cuda" if where.cards[0].vendor == "nvidia" else "rocm"
    with pytest.raises(DeviceError, match="is older than (sm_75|gfx900)"):
        chosen(llama, f"--devices {kind}:0", where)


def test_the_rule_of_too_old_arches_is_that_of_the_kernels() -> None:
    names = [f"sm_{number}" for number in (30, 61, 70, 72, 75, 80, 86, 90, 100, 120, 121)]
    names += ["gfx601", "gfx803", "gfx900", "gfx90a:sramecc+:xnack-", "gfx90c", "gfx1010", "gfx1103", "gfx1201"]
    for name in names:
        try:
            arch(name)
        except UnknownArch as error:
            assert too_old(name) and too_old(name) in error.message
        else:
            assert too_old(name) == ""


# ---------------------------------------------------------------------------------------------------- what is supported


def test_what_a_model_needs_and_no_card_has_is_named_whole(llama: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("homeserve.cards.needs_of", lambda *_, **__: (("Linear", "I64"), ("EmbedRows", "I64")))
    for arch_name in ("sm_86", "sm_90", "sm_88"):  # compiled, of the table, of no table
        where = box(replace(NVIDIA, arch=arch_name))
        with pytest.raises(UnsupportedModel) as caught:
            chosen(llama, "--devices cuda:0", where)
        assert "Linear on I64: no kernel" in caught.value.message and "EmbedRows on I64" in caught.value.message
        assert chosen(llama, "", where).settings.devices == "cpu"


@pytest.mark.parametrize("arch_name", ["sm_90", "sm_88", "gfx1151", "gfx1012"])
def test_an_arch_that_was_not_compiled_for_is_taken_by_name_and_told(llama: ModelFacts, arch_name: str) -> None:
    """Unknown is no yes: it is not taken by itself, and the line says how to have it."""
    card, word = (
        (replace(NVIDIA, arch=arch_name), "cuda:0") if arch_name[0] == "s" else (replace(AMD, arch=arch_name), "rocm:0")
    )
    named = chosen(llama, f"--devices {word}", box(card))
    assert (
        named.cards == (card,) and f"kernels for {arch_name}" in named.told[0] and "compiles them here" in named.told[0]
    )
    by_backend = chosen(llama, f"--backend {word[:4]}", box(card))
    assert by_backend.cards == (card,) and by_backend.told == named.told
    auto = chosen(llama, "", box(card))
    assert auto.cards == () and auto.settings.devices == "cpu"
    assert auto.left_out[0].endswith(f"--devices {word} has them compiled here")


def test_ranks_of_parts_need_more_than_one_of_the_whole(llama: ModelFacts) -> None:
    one, two = (set(needs_of(llama, Settings(), several=several)) for several in (False, True))
    assert ("SumRows", "F32") in two - one and ("Attention", "partial") in two - one
    assert ("MergeAttention", "sinks") not in two, "this model has none"


# ----------------------------------------------------------------------------------------------------------------- auto


def test_auto_takes_cards_whose_kernels_are_known(llama: ModelFacts) -> None:
    settings, plan, ranks = ranked(llama, "", box(NVIDIA))
    assert settings.devices == NVIDIA.id and ranks.devices[0].backend == "cuda" and plan.ranks == (0,)
    assert chosen(llama, "", box(NVIDIA)).may_be_cpu


def test_auto_without_cards_is_the_cpu_and_says_nothing(llama: ModelFacts) -> None:
    for cards in ((), (Card("intel", "0000:00:02.0", "Intel"),)):
        choice = chosen(llama, "", box(*cards))
        assert (choice.settings.devices, choice.cards, choice.left_out, choice.told) == ("cpu", (), (), ())
    assert chosen(llama, "--devices cpu:2", box(NVIDIA)) == Choice(load(["--devices", "cpu:2"], {}, "/"))
    assert chosen(llama, "--backend reference", box(NVIDIA)).cards == ()


@pytest.mark.parametrize("words", ["--deterministic", "--isa avx2", "--threads 2"])
def test_what_is_for_the_cpu_leaves_cards_out_and_says_so(llama: ModelFacts, words: str) -> None:
    choice = chosen(llama, words, box(NVIDIA))
    assert choice.cards == () and choice.settings.devices == "cpu"
    assert choice.left_out == (f"{told_of(NVIDIA, box(NVIDIA))} is left out: {words.split()[0]} is for the CPU",)


def test_a_model_that_no_card_has_room_for(llama: ModelFacts) -> None:
    """By name it is refused with the sum; by itself the composition root takes the CPU (`App._choose`)."""
    tiny = replace(NVIDIA, total_bytes=1400 * MIB, free_bytes=1200 * MIB)
    choice = chosen(llama, "", box(tiny))
    assert choice.cards == (tiny,) and choice.may_be_cpu
    for made in (choice, chosen(llama, "--devices cuda:0", box(tiny))):
        with pytest.raises(BudgetError, match="does not fit") as caught:
            plan_of(made.settings, llama, box(tiny), among=made.among)
        assert "--devices cpu" in (caught.value.fix or "")


def test_an_integrated_one_beside_a_card_is_used_by_name_alone(llama: ModelFacts) -> None:
    where = recorded("amdgpu-top-9060xt-plus-igpu")
    igpu = next(card for card in where.cards if card.unified)
    assert any("integrated, beside" in line for line in chosen(llama, "", where).left_out)
    assert chosen(llama, f"--devices rocm:{where.cards.index(igpu)}", where).cards == (igpu,)


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_auto_on_every_recorded_box_is_a_choice_and_a_plan(llama: ModelFacts, name: str) -> None:
    """Whoever is left out has a line; whoever is taken has a known arch and memory; the plan is the planner's."""
    where = recorded(name)
    choice = chosen(llama, "", where)
    of_vendors = [card for card in where.cards if card.vendor in ("nvidia", "amd")]
    assert len(choice.cards) + len(choice.left_out) == len(of_vendors)
    assert all(card.arch in COMPILED for card in choice.cards)
    if not choice.cards:
        assert choice.settings.devices == "cpu"
        return
    plan = plan_of(choice.settings, llama, where, among=choice.among)
    taken = {plan.ceilings.devices[index].id for index in plan.ranks}
    assert taken <= {card.id for card in choice.cards}


# -------------------------------------------------------------------------------------------------------------- drivers


SEEN = SeenCard(NVIDIA.id, "0000:01:00.0", NVIDIA.name, "sm_86", True)


def test_auto_leaves_out_what_drivers_cannot_open(llama: ModelFacts) -> None:
    where = box(NVIDIA, AMD)
    choice = chosen(llama, "", where)
    assert choice.cards == (NVIDIA, AMD)
    nothing = Readiness(missing=(("no libamdhip64.so", "install it"),))
    left = without(choice, where, {"nvidia": Readiness("CUDA 12.8", "NVRTC 12.9", (SEEN,)), "amd": nothing})
    assert left.cards == (NVIDIA,) and left.settings.devices == NVIDIA.id and left.settings.ranks == 1
    assert left.left_out == (f"{told_of(AMD, where)} is left out: no libamdhip64.so; install it",)
    none = without(choice, where, {"nvidia": Readiness("CUDA 12.8", "NVRTC 12.9"), "amd": nothing})
    assert none.cards == () and none.settings.devices == "cpu" and not none.may_be_cpu and not none.among
    assert "its driver does not show it" in none.left_out[0]
