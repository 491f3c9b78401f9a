"""Known graphics devices by name: memory bandwidth, and dense 8-bit integer operations (where a chip has none, half
precision ones).

From the vendors' public specifications: bandwidth is data rate x bus width; operations are the tensor or matrix rate
without sparsity, at boost clock (what NVIDIA prints is twice that for Ampere and Ada, four times for Blackwell: sparse,
or in 4 bits). Of chips that compute in system memory the bandwidth is that of the memory which they are usually sold
with; it is no fact of the box, so it is never sure.

A name is looked up by the longest key whose words it holds in a row; failing that by the architecture of the chip.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class CardRates:
    """Gigabytes read and tera-operations per second. `sure`: of this very device, not of its class."""

    gb_s: float
    tops: float
    sure: bool
    source: str


def known_rates(name: str, arch: str | None, unified: bool) -> CardRates:
    """Of the device called `name`. Never fails: what no table has is taken by class, and not sure."""
    return _known_rates(name, arch, unified)


def link_gb_s(gen: int | None, width: int | None) -> float | None:
    """One direction of a PCIe link after its line coding; None where generation or width are unknown."""
    per_lane = _LANE_GB_S.get(gen or 0)
    return per_lane * width if per_lane is not None and width else None


_LANE_GB_S: Mapping[int, float] = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}

_NVIDIA: Mapping[str, tuple[float, float]] = {
    # Blackwell
    "rtx 5090": (1792, 838), "rtx 5080": (960, 450), "rtx 5070 ti": (896, 351), "rtx 5070": (672, 247),
    "rtx 5060 ti": (448, 190), "rtx 5060": (448, 153), "rtx 5050": (320, 105),
    "rtx 5090 laptop": (896, 456), "rtx 5080 laptop": (896, 334), "rtx 5070 ti laptop": (672, 248),
    "rtx 5070 laptop": (384, 199), "rtx 5060 laptop": (384, 143),
    "rtx pro 6000 blackwell": (1792, 1000), "rtx pro 6000 blackwell max q": (1792, 877),
    "rtx pro 5000 blackwell": (1344, 516), "rtx pro 4500 blackwell": (896, 400), "rtx pro 4000 blackwell": (672, 312),
    "b200": (8000, 4500),
    # Hopper
    "h100": (3350, 1979), "h100 pcie": (2000, 1513), "h100 nvl": (3938, 1671), "h200": (4800, 1979),
    "gh200": (4000, 1979),
    # Ada
    "rtx 4090": (1008, 661), "rtx 4080 super": (736, 418), "rtx 4080": (717, 390), "rtx 4070 ti super": (672, 353),
    "rtx 4070 ti": (504, 321), "rtx 4070 super": (504, 284), "rtx 4070": (504, 233), "rtx 4060 ti": (288, 177),
    "rtx 4060": (272, 121), "rtx 4090 laptop": (576, 343), "rtx 4080 laptop": (432, 271), "rtx 4070 laptop": (256, 160),
    "rtx 4060 laptop": (256, 116), "rtx 4050 laptop": (192, 97),
    "rtx 6000 ada": (960, 728), "rtx 5000 ada": (576, 522), "rtx 4500 ada": (432, 317), "rtx 4000 ada": (360, 214),
    "rtx 4000 sff ada": (280, 153), "rtx 2000 ada": (224, 96), "l4": (300, 242), "l40": (864, 362), "l40s": (864, 733),
    # Ampere
    "rtx 3090 ti": (1008, 320), "rtx 3090": (936, 285), "rtx 3080 ti": (912, 273), "rtx 3080": (760, 238),
    "rtx 3070 ti": (608, 174), "rtx 3070": (448, 163), "rtx 3060 ti": (448, 130), "rtx 3060": (360, 102),
    "rtx 3050": (224, 73), "rtx 3080 ti laptop": (512, 151), "rtx 3080 laptop": (448, 121),
    "rtx 3070 laptop": (448, 106), "rtx 3060 laptop": (336, 82), "rtx 3050 laptop": (192, 44),
    "a100": (1555, 624), "a100 sxm4 80gb": (2039, 624), "a100 80gb pcie": (1935, 624), "a30": (933, 330),
    "a40": (696, 299), "a10": (600, 250), "a10g": (600, 140), "a2": (200, 36), "rtx a6000": (768, 310),
    "rtx a5000": (768, 222), "rtx a4500": (640, 189), "rtx a4000": (448, 153), "rtx a2000": (288, 64),
    # Volta, Turing
    "v100": (900, 125), "titan v": (653, 110), "t4": (320, 130), "titan rtx": (672, 261), "quadro rtx 8000": (672, 261),
    "quadro rtx 6000": (672, 261), "quadro rtx 5000": (448, 179), "rtx 2080 ti": (616, 215),
    "rtx 2080 super": (496, 178), "rtx 2080": (448, 161), "rtx 2070 super": (448, 145), "rtx 2070": (448, 119),
    "rtx 2060 super": (448, 115), "rtx 2060": (336, 103), "gtx 1660 ti": (288, 22), "gtx 1660 super": (336, 20),
    "gtx 1660": (192, 20), "gtx 1650 super": (192, 18), "gtx 1650": (128, 12),
    # Pascal
    "gtx 1080 ti": (484, 45), "titan xp": (548, 49), "gtx 1080": (320, 35), "gtx 1070 ti": (256, 33),
    "gtx 1070": (256, 26), "gtx 1060": (192, 17), "gtx 1050 ti": (112, 8.5), "gtx 1050": (112, 7.4), "mx250": (48, 5),
    "mx150": (48, 4.5), "quadro p2000": (140, 12), "quadro p1000": (82, 7.6), "quadro p400": (32, 2.6),
    "p40": (347, 47), "p4": (192, 22), "p100": (732, 19),
}  # fmt: skip

_AMD: Mapping[str, tuple[float, float]] = {
    # RDNA 4
    "rx 9070 xt": (640, 389), "rx 9070": (640, 289), "rx 9060 xt": (320, 205), "r9700": (640, 383),
    # RDNA 3
    "rx 7900 xtx": (960, 123), "rx 7900 xt": (800, 103), "rx 7900 gre": (576, 92), "rx 7900m": (576, 77),
    "rx 7800 xt": (624, 75), "rx 7700 xt": (432, 70), "rx 7600 xt": (288, 45), "rx 7600": (288, 43),
    "w7900": (864, 123), "w7800": (576, 90), "w7700": (576, 57), "w7600": (288, 40),
    # RDNA 2: 8-bit dot products, no matrix units
    "rx 6950 xt": (576, 95), "rx 6900 xt": (512, 92), "rx 6800 xt": (512, 83), "rx 6800": (512, 65),
    "rx 6750 xt": (432, 53), "rx 6700 xt": (384, 53), "rx 6700": (320, 45), "rx 6650 xt": (280, 43),
    "rx 6600 xt": (256, 42), "rx 6600": (224, 36), "rx 6500 xt": (144, 23), "w6800": (512, 71),
    # RDNA, Vega, GCN: half precision
    "rx 5700 xt": (448, 20), "rx 5700": (448, 16), "rx 5600 xt": (288, 14), "rx 5500 xt": (224, 10),
    "radeon vii": (1024, 54), "rx vega 64": (484, 25), "rx vega 56": (410, 21), "0x6860": (484, 25), "rx 590": (256, 7),
    "rx 580": (256, 6.2), "rx 570": (224, 5.1), "rx 560": (112, 2.6), "r7 240": (29, 0.5),
    # Instinct
    "mi25": (484, 25), "mi50": (1024, 53), "mi60": (1024, 59), "mi100": (1229, 185), "mi210": (1638, 181),
    "mi250x": (3277, 383), "mi250": (3277, 362), "mi300x": (5300, 2615), "mi325x": (6000, 2615), "mi355x": (8000, 5000),
}  # fmt: skip

_INTEL: Mapping[str, tuple[float, float]] = {
    "arc a770": (560, 262), "arc a750": (512, 229), "arc a580": (512, 197), "arc a380": (186, 66),
    "arc b580": (456, 233), "arc b570": (380, 203), "arc pro b60": (456, 197), "arc pro b50": (224, 170),
}  # fmt: skip

_IN_SYSTEM_MEMORY: Mapping[str, tuple[float, float]] = {
    "8060s": (256, 59), "8050s": (256, 47), "strix halo": (256, 59), "890m": (120, 24), "880m": (120, 18),
    "860m": (120, 12), "840m": (120, 6), "780m": (90, 16.6), "760m": (90, 10.6), "740m": (90, 5), "680m": (77, 14.7),
    "660m": (77, 7), "610m": (77, 2), "raphael": (83, 2.2), "granite ridge": (90, 2.2), "van gogh": (88, 6.5),
    "rembrandt": (77, 14.7), "phoenix": (90, 16.6), "hawk point": (90, 16.6), "strix point": (120, 24),
    "cezanne": (51, 4.1), "renoir": (51, 3.8), "lucienne": (51, 3.8), "barcelo": (51, 4.1), "mi300a": (5300, 1961),
    "gb10": (273, 250), "thor": (273, 258), "orin": (205, 100), "arc 140t": (136, 74), "arc 140v": (136, 67),
    "arc 130v": (136, 53), "arc 130t": (136, 63), "iris plus": (51, 2), "iris xe": (51, 8), "uhd": (51, 1),
    "hd graphics": (26, 0.4),
}  # fmt: skip
"""Bandwidth of the system memory that these come with."""

_BY_ARCH: Mapping[str, tuple[float, float]] = {
    "gfx1151": (256, 59), "gfx1150": (120, 24), "gfx1152": (120, 12), "gfx1103": (90, 16.6), "gfx1035": (77, 14.7),
    "gfx1036": (83, 2.2), "gfx1033": (88, 6.5), "gfx90c": (51, 4.1), "gfx902": (38, 3), "gfx942": (5300, 2615),
    "gfx90a": (1638, 181), "gfx908": (1229, 185), "gfx906": (1024, 53), "gfx900": (410, 21), "gfx803": (224, 5),
    "gfx1030": (512, 65), "gfx1031": (384, 53), "gfx1032": (224, 36), "gfx1100": (800, 103), "gfx1101": (432, 70),
    "gfx1102": (288, 43), "gfx1200": (320, 150), "gfx1201": (640, 289), "sm_61": (256, 26), "sm_60": (732, 19),
    "sm_70": (900, 125), "sm_75": (448, 119), "sm_80": (1555, 624), "sm_86": (448, 150), "sm_89": (288, 177),
    "sm_90": (3350, 1979), "sm_100": (8000, 4500), "sm_120": (448, 190), "sm_121": (273, 250),
}  # fmt: skip
"""A modest member of each architecture."""

_DISCRETE = (250.0, 50.0)
_UNIFIED = (60.0, 5.0)
_TABLES = (_NVIDIA, _AMD, _INTEL, _IN_SYSTEM_MEMORY)
_KEYS = sorted(((key, table) for table in _TABLES for key in table), key=lambda pair: len(pair[0]), reverse=True)


@lru_cache(maxsize=512)
def _known_rates(name: str, arch: str | None, unified: bool) -> CardRates:
    words = f" {' '.join(re.findall(r'[a-z0-9]+', name.lower()))} "
    for key, table in _KEYS:
        if f" {key} " in words:
            gb_s, tops = table[key]
            if unified or table is _IN_SYSTEM_MEMORY:
                return CardRates(gb_s, tops, False, f"usual memory of the {key.upper()}")
            smaller = any(f" {word} " in words and word not in key for word in ("laptop", "mobile", "mig"))
            part = ", of which this is a smaller kind" if smaller else ""
            return CardRates(gb_s, tops, not smaller, f"specification of the {key.upper().replace('0X', '0x')}{part}")
    if arch is not None and arch in _BY_ARCH:
        gb_s, tops = _BY_ARCH[arch]
        return CardRates(gb_s, tops, False, f"a guess by its architecture, {arch}")
    gb_s, tops = _UNIFIED if unified else _DISCRETE
    return CardRates(gb_s, tops, False, "a guess: this device is in no table")
