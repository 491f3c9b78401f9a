"""A GGUF file that lacks a tensor: all the rest as it was."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def without_tensor(source: Path, target: Path, *names: str) -> Path:
    """`source` without the tensors `names`, at `target`."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[0]
            inner = field.types[1] if kind is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kind, sub_type=inner)
    kept = [tensor for tensor in reader.tensors if tensor.name not in names]
    assert len(kept) == len(reader.tensors) - len(names), f"not in {source.name}: one of {names}"
    for tensor in kept:
        writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
