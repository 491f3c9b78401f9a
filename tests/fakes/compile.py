"""What the fake compilers run: FILE WARP DEFINES... -> the path of a library of emulated kernels, on stdout.

All that the file includes lies beside it, or in tests/simt. What is compiled goes two folders above it. Exit 1 with the
compiler's text where it does not compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1] / "kernel")]

import simt_rig as rig  # noqa: E402


def main(file: str, warp: str, *defines: str) -> int:
    rig.CACHE = Path(file).parents[2]
    try:
        print(rig.build_alone(Path(file), int(warp), *defines))
    except RuntimeError as failed:
        print(failed)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
