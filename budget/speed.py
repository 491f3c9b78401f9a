"""Roofline of a plan: what the box's own numbers allow, per layout, and how sure that is.

One token of one request is bound by reading: every weight that it uses, and the KV rows before it, once. A prompt is
bound by arithmetic, as soon as a chunk is long enough that its weights are read once for many tokens.

    decode,  pipeline   the ranks work one after the other: sum of their times, and a handoff between neighbours
    decode,  tensor     the ranks work at once: the slowest one's time, and two sums over all ranks in each layer
    prefill, pipeline   consecutive chunks fill all ranks: the slowest rank's time
    prefill, tensor     the slowest rank's time, and two sums per layer of every token's row

    time of a rank      bytes / (bandwidth x READ_EFFICIENCY) + its layers x LAYER_S        (decode)
                        max(ops / (operations x OPS_EFFICIENCY), bytes / chunk / bandwidth)  (a prompt's token)
    a sum over n ranks  COLLECTIVE_S + 2 (n - 1) / n x row bytes / (link x COLLECTIVE_EFFICIENCY)

That prefill pipelines and decode does not is why a layout is good for the one and bad for the other.

**How far off it is.** The constants were fitted by hand to what users of other engines published for known cards
(tokens per second of a single stream without drafting, and measured / predicted; the test holds the whole list):

    decode   27B Q5_K_M, a 3090 capped to 230 W                     21            0.63
             32B Q4_K_M, 7900 XTX                                   31.6          0.98
             30B-A3B Q4_K_M, 7900 XTX                               152           0.83
             32B Q4_K_M, 2 x 3090, pipeline                         42.3          1.34
             27B Q4_K_M, 2 x 7900 XTX, pipeline / tensor            34.5 / 41.6   0.89 / 0.94
             27B 8 bit, 5090 + 2 x 3080, pipeline / tensor          31 / 40.3     1.18 / 1.00
             27B Q4_K_M, Radeon 780M                                4.1           0.97
             27B Q4_K_M, Strix Halo                                 11            0.94
             35B-A3B Q6_K, Strix Halo                               43            0.64
    prefill  27B Q4_K_M, 3090                                       1025          0.70
             27B Q4_K_M, 4090                                       2311          0.68
             27B 8 bit, 5090 + 2 x 3080, pipeline / tensor          7439 / 1681   1.52 / 1.35
             27B 4 bit, 2 x 3090, tensor, 8 lanes of gen 3 / gen 4  1446 / 1680   1.14 / 0.97
             32B Q4_K_M, 2 x 3090, layers without pipelining        1338          0.59

So a number is believed within 0.55 to 1.7 times itself for cards whose rates are known, and less where they are
guessed. After a start it is corrected by measurement.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from budget.cards import known_rates, link_gb_s
from budget.ceilings import Device

READ_EFFICIENCY = 0.75
"""Of a device's memory bandwidth that kernels reach on packed weights; dense models of the table above."""
OPS_EFFICIENCY = 0.25
"""Of a card's dense 8-bit rate that matrix products of packed weights reach, unpacking and attention included."""
LAYER_S = 60e-6
"""Of a card for each layer that one token passes, beside reading: kernel starts, small kernels, routing of experts."""
COLLECTIVE_S = 60e-6
"""One sum over cards without peer access: through host memory."""
COLLECTIVE_EFFICIENCY = 0.4
"""Of a link during sums through host memory: each byte crosses it twice."""
COPY_EFFICIENCY = 0.75
"""Of a link while weights are copied to a card."""
HANDOFF_S = 50e-6
HOST_COPY_BYTES_S = 25e9
"""What host memory gives to all ranks that are filled at the same time."""
FLIP_FIXED_S = 0.1
"""Drain, digests and census of a flip in which nothing moves."""
CHUNK = 256
"""Tokens of a prompt that share one reading of the weights."""
ROW_BYTES = 2
"""Of an activation on its way between ranks."""

CPU_READ_EFFICIENCY = 0.6
CPU_OPS_EFFICIENCY = 0.6
CPU_LAYER_S = 8e-6
CPU_COLLECTIVE_S = 10e-6
CPU_CORE_OPS_S = 100e9
"""8-bit operations of one core with 256-bit vectors at about 3 GHz."""
CPU_CORE_READ_BYTES_S = 12e9
"""The most that one core reads from memory."""
CPU_CORES = 8
"""Taken where nobody says how many there are."""

SURE = (0.55, 1.7)
"""Factors around a prediction from known rates: see the table."""
UNSURE = (0.35, 2.5)
"""... and from guessed ones: a class of devices spans about that much."""

_CPU_MEMORY: tuple[tuple[str, float], ...] = (
    (r"epyc|xeon.*(platinum|gold|6\d{3}|w[579]-)|threadripper.*pro|ampere|graviton", 200e9),
    (r"threadripper|xeon", 80e9),
    (r"ryzen ai max", 110e9),
    (r"ryzen.* [789]\d{3}|ryzen ai|core.* ultra|i[3579]-1[2345]\d{3}|zen ?[45]", 65e9),
    (r"raspberry|cortex|celeron|atom|n\d{2,3}\b", 12e9),
)
"""Memory of a CPU by words of its name: channels and generation that such machines usually have."""
_CPU_MEMORY_DEFAULT = 40e9
_LINK_DEFAULT = 8e9
"""A link that nobody describes: generation 3 with eight lanes, or 4 with four."""


@dataclass(frozen=True)
class DeviceRates:
    """What a device can do at best. `sure` False: at least one number is a guess by class, not a fact of this device.
    `source` says where the numbers are from, for people. The rest is how much of it kernels reach."""

    read_bytes_s: float
    int8_ops_s: float
    link_bytes_s: float
    sure: bool
    source: str
    read_efficiency: float = READ_EFFICIENCY
    ops_efficiency: float = OPS_EFFICIENCY
    layer_s: float = LAYER_S
    collective_s: float = COLLECTIVE_S
    memory_bytes_s: float = 0.0
    """What the memory gives to all that read it at once, where several ranks may (0: nobody shares it)."""


@dataclass(frozen=True)
class Work:
    """What one rank does for a token in one layout.

    read_bytes       weights read per decode step (one stream)
    kv_bytes         KV bytes read per decode step at the depth that is asked about
    ops              multiply-adds x 2 of one prompt token
    """

    read_bytes: float
    kv_bytes: float
    ops: float


@dataclass(frozen=True)
class LayoutSpeed:
    """Tokens per second. `low` and `high` factors bound what is believed: decode_tok_s * low .. decode_tok_s * high."""

    prefill_tok_s: float
    decode_tok_s: float
    low: float
    high: float
    note: str


def rates_of(device: Device, cores: int | None = None) -> DeviceRates:
    """Of a device, from what the probe read and from tables. `cores`: of the CPU, where known."""
    if device.kind == "cpu":
        return _cpu_rates(device, cores)
    card = device.card
    unified = device.kind == "uma"
    known = known_rates(device.name, device.arch, unified)
    read, sure, source = known.gb_s * 1e9, known.sure, known.source
    if card is not None and card.bandwidth_bytes_s:
        read, source = card.bandwidth_bytes_s, f"its memory's clock and width; {known.source}"
    if unified:
        return DeviceRates(read, known.tops * 1e12, read / 2, sure, source)
    link = link_gb_s(card.link.gen, card.link.width) if card is not None and card.link is not None else None
    if link is None:
        return DeviceRates(read, known.tops * 1e12, _LINK_DEFAULT, False, f"{source}; its link is a guess")
    return DeviceRates(read, known.tops * 1e12, link * 1e9, sure, source)


def _cpu_rates(device: Device, cores: int | None) -> DeviceRates:
    name = device.name.lower()
    memory = next((rate for words, rate in _CPU_MEMORY if re.search(words, name)), _CPU_MEMORY_DEFAULT)
    count = cores or CPU_CORES
    read = min(memory, count * CPU_CORE_READ_BYTES_S)
    counted = f"{count} cores" if cores else f"{count} cores taken"
    return DeviceRates(
        read_bytes_s=read,
        int8_ops_s=count * CPU_CORE_OPS_S,
        link_bytes_s=read / 2,
        sure=False,
        source=f"a guess by the kind of CPU ({counted})",
        read_efficiency=CPU_READ_EFFICIENCY,
        ops_efficiency=CPU_OPS_EFFICIENCY,
        layer_s=CPU_LAYER_S,
        collective_s=CPU_COLLECTIVE_S,
        memory_bytes_s=memory,
    )


def shared_rates(alone: DeviceRates, ranks: int, threads: int, cores: int) -> DeviceRates:
    """What each of `ranks` ranks of `threads` threads gets of a CPU while all of them compute. They share its memory,
    and its cores (0: each thread has one)."""
    part = min(1.0, cores / (ranks * threads)) if cores and threads else 1.0
    read = min(alone.read_bytes_s * part, alone.memory_bytes_s / ranks if alone.memory_bytes_s else alone.read_bytes_s)
    return replace(alone, read_bytes_s=read, int8_ops_s=alone.int8_ops_s * part)


def pipeline_speed(
    work: Sequence[Work], rates: Sequence[DeviceRates], hidden: int, layers: int, chunk: int = CHUNK
) -> LayoutSpeed:
    """Of the pipeline layout (also of a single rank); `work` and `rates` have one entry for each rank, in order."""
    shares = _layer_shares(work, layers)
    row_s = [hidden * ROW_BYTES / rate.link_bytes_s for rate in rates]
    handoffs = sum(HANDOFF_S + seconds for seconds in row_s[1:])
    decode = sum(_step_s(each, rate, share) for each, rate, share in zip(work, rates, shares, strict=True)) + handoffs
    prefill = max(_token_s(each, rate, chunk) for each, rate in zip(work, rates, strict=True))
    if len(work) > 1:
        prefill = max(prefill, *row_s[1:])
    return _speed(prefill, decode, rates)


def experts_away(
    cards: LayoutSpeed, away: Work, host: DeviceRates, rates: Sequence[DeviceRates], hidden: int, layers: int
) -> LayoutSpeed:
    """Of a pipeline whose routed experts of `layers` layers run on the host (`away`): in each of them a card waits for
    the host, so the times add up, and each token's row goes there and back."""
    row_s = hidden * ROW_BYTES / min(rate.link_bytes_s for rate in rates)
    decode = 1 / cards.decode_tok_s + _step_s(away, host, layers) + 2 * layers * (HANDOFF_S + row_s)
    prefill = 1 / cards.prefill_tok_s + _token_s(away, host, CHUNK) + 2 * layers * (HANDOFF_S / CHUNK + row_s)
    return _speed(prefill, decode, [*rates, host])


def tensor_speed(
    work: Sequence[Work], rates: Sequence[DeviceRates], hidden: int, layers: int, chunk: int = CHUNK
) -> LayoutSpeed:
    """Of the tensor layout: every rank has a shard of every layer, and two sums in each tie them together."""
    ranks = len(work)
    decode = max(_step_s(each, rate, layers) for each, rate in zip(work, rates, strict=True))
    prefill = max(_token_s(each, rate, chunk) for each, rate in zip(work, rates, strict=True))
    if ranks > 1:
        link = min(rate.link_bytes_s for rate in rates) * COLLECTIVE_EFFICIENCY
        row_s = 2 * (ranks - 1) / ranks * hidden * ROW_BYTES / link
        decode += 2 * layers * (max(rate.collective_s for rate in rates) + row_s)
        prefill += 2 * layers * (row_s + max(rate.collective_s for rate in rates) / chunk)
    return _speed(prefill, decode, rates)


def flip_seconds(moved_bytes: Sequence[float], rates: Sequence[DeviceRates]) -> float:
    """One flip in one direction, when rank r is refilled with moved_bytes[r]: the slowest link, or the host's memory
    that all of them are copied from."""
    slowest = max(
        (moved / (rate.link_bytes_s * COPY_EFFICIENCY) for moved, rate in zip(moved_bytes, rates, strict=True)),
        default=0.0,
    )
    return FLIP_FIXED_S + max(slowest, sum(moved_bytes) / HOST_COPY_BYTES_S)


def break_even(cost_s: float, tensor_tok_s: float, pipeline_tok_s: float) -> int:
    """Prompt tokens from which a flip to the pipeline layout, with its way back, pays: N = C / (1/X - 1/P) for a round
    trip of C seconds and prefill speeds X and P of the tensor and the pipeline layout.

    Raises ValueError where a number is not positive, or X is not below P: then no N is large enough.
    """
    if not (cost_s > 0 and 0 < tensor_tok_s < pipeline_tok_s < float("inf")):
        what = f"cost {cost_s} s, tensor {tensor_tok_s} tok/s, pipeline {pipeline_tok_s} tok/s"
        raise ValueError(f"there is no break-even: {what} (all must be positive, and the pipeline's prefill faster)")
    return round(cost_s / (1 / tensor_tok_s - 1 / pipeline_tok_s))


# ------------------------------------------------------------------------------------------------------- one rank


def _step_s(work: Work, rate: DeviceRates, layers: float) -> float:
    """Seconds of a rank for one decoded token."""
    return (work.read_bytes + work.kv_bytes) / (rate.read_bytes_s * rate.read_efficiency) + layers * rate.layer_s


def _token_s(work: Work, rate: DeviceRates, chunk: int) -> float:
    """Seconds of a rank for one token of a prompt."""
    reading = work.read_bytes / chunk / (rate.read_bytes_s * rate.read_efficiency)
    return max(work.ops / (rate.int8_ops_s * rate.ops_efficiency), reading)


def _layer_shares(work: Sequence[Work], layers: int) -> list[float]:
    """Layers of each rank, by what it reads."""
    total = sum(each.read_bytes for each in work)
    return [layers * each.read_bytes / total if total else layers / len(work) for each in work]


def _speed(prefill_s: float, decode_s: float, rates: Sequence[DeviceRates]) -> LayoutSpeed:
    sure = all(rate.sure for rate in rates)
    low, high = SURE if sure else UNSURE
    guesses = list(dict.fromkeys(rate.source for rate in rates if not rate.sure))
    note = "rates of these devices are known" if sure else f"rough: {'; '.join(guesses)}"
    return LayoutSpeed(1 / prefill_s if prefill_s else 0.0, 1 / decode_s if decode_s else 0.0, low, high, note)
