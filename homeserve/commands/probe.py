"""Say what this box is: memory, cores, graphics cards, and what cannot be known of them.

It asks drivers what they know and opens no device itself. `--json` prints a box profile, which `homeserve budget --box
FILE` reads on any other machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budget.probe import Sources, read_box
from homeserve.errors import SettingError

if TYPE_CHECKING:
    import argparse

    from budget.disk import DiskRate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a box profile")
    parser.add_argument(
        "--disk", metavar="FOLDER", help="also measure how fast FOLDER's disk reads (writes up to 256 MiB)"
    )
    parser.add_argument("--root", metavar="FOLDER", default="/", help="read /proc and /sys of a recorded tree instead")
    parser.add_argument("--nvml", metavar="FILE", help="ask this libnvidia-ml.so instead of the system's")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if not Path(args.root).is_dir():
        raise SettingError(f"{args.root}: no such folder", field="root", fix="give a folder that holds proc and sys")
    if args.nvml is not None and os.path.exists(args.nvml) and not os.path.isfile(args.nvml):
        raise SettingError(f"--nvml: {args.nvml}: not a regular file", field="nvml", fix="give a libnvidia-ml.so")
    disk = _measure(args.disk) if args.disk is not None else None
    box = read_box(Sources(root=args.root, nvml=args.nvml, amdsmi=True))
    if args.json:
        from budget.profile import box_to_json

        print(json.dumps(box_to_json(box) | ({"disk": _disk_json(disk)} if disk is not None else {}), indent=1))
        return 0
    from budget.box_page import box_page
    from budget.page import style_of

    print("\n".join(box_page(box, disk, style_of(sys.stdout, environ))))
    return 0


def _measure(folder: str) -> DiskRate:
    from budget.disk import measure_disk

    try:
        return measure_disk(folder)
    except OSError as error:
        raise SettingError(
            f"{folder}: cannot be measured: {error.strerror or error}",
            field="disk",
            fix="give a folder that exists, can be written, and has some MiB free",
        ) from error


def _disk_json(disk: DiskRate) -> dict[str, Any]:
    return {"path": disk.path, "read_mb_s": round(disk.read_bytes_s / 1e6, 1), "direct": disk.direct}
