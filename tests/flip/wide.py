"""Models with a head so wide that the layouts differ in what they are good at.

Of a tiny model nearly all time is spent on waiting for messages, and one layout is then faster at everything: there
is nothing to flip for. Models that people use have vocabularies of a hundred thousand tokens and more. Their head is
a large part of each token that is drawn and none of a prompt's; the pipeline layout's last rank has it alone and
reads it for each group of answers, in the tensor layout each rank reads its share once for all of them. So a tiny
model gets such a head here: rows for tokens that do not exist, all zero, which are never the best ones of a model
that is sure, nor of any other at which the real ones are told to be better.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HEADS = ("token_embd.weight", "output.weight")
LISTS: dict[str, Callable[[int], Any]] = {
    "tokenizer.ggml.tokens": lambda at: f"<|unused_{at}|>",
    "tokenizer.ggml.token_type": lambda _: int(gguf.TokenType.UNUSED),
    "tokenizer.ggml.scores": lambda _: -1e9,
}


def widened(source: Path, target: Path, rows: int) -> None:
    """The same model with a vocabulary of `rows`."""
    reader = gguf.GGUFReader(source)
    arch = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            _copy(writer, name, field, rows)
    untied = any(tensor.name == "output.weight" for tensor in reader.tensors)
    for tensor in reader.tensors:
        data = np.asarray(tensor.data)
        if tensor.name in HEADS:
            data = np.concatenate([data, np.zeros((rows - len(data), *data.shape[1:]), data.dtype)])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    assert untied or any(tensor.name == "token_embd.weight" for tensor in reader.tensors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy(writer: gguf.GGUFWriter, name: str, field: Any, rows: int) -> None:
    value = field.contents()
    if name in LISTS:
        value = list(value) + [LISTS[name](at) for at in range(len(value), rows)]
    elif name.endswith(".vocab_size"):
        value = rows
    kind = field.types[0]
    writer.add_key_value(name, value, kind, sub_type=field.types[1] if kind is gguf.GGUFValueType.ARRAY else None)
