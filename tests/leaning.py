"""Models of random weights whose heads prefer a few tokens, so that a drafting block that knows nothing is often right.

The rows of a few tokens in the head are made larger. The largest logit is then nearly always one of theirs, for the
trunk and for its drafting block: each goes on choosing among them by its own weights. With nothing in common but that,
about one draft of so many is right, and every number of drafts from none to all comes to count.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

TOKENS = (7, 40, 41, 199, 230)
LARGER = 6.0


def leaning(source: Path, target: Path) -> Path:
    """A copy of a file with a head of its own in 32-bit floats."""
    reader = gguf.GGUFReader(source)
    head = next(tensor for tensor in reader.tensors if tensor.name == "output.weight")
    assert head.tensor_type is gguf.GGMLQuantizationType.F32
    data = bytearray(source.read_bytes())
    rows = np.frombuffer(data, np.float32, head.n_elements, int(head.data_offset)).reshape(int(head.shape[1]), -1)
    rows[list(TOKENS)] *= LARGER
    target.write_bytes(data)
    return target
