"""`Checkpoint`: one view of a model on disk, whichever format holds it.

Names and keys are GGUF's (`blk.0.attn_q.weight`, `llama.block_count`): the richer of the two vocabularies, so that the
rest of the program knows one. A safetensors folder is translated into it when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.base import TensorView
from backends.quant import QuantType
from homeserve.checkpoint.mapped import MappedFile

FILE_TYPES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS",
    20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M",
    28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE",
    39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
"""`general.file_type`: the mixture that a quantiser aimed at. Only a label: the true type stands with each tensor."""


@dataclass(frozen=True)
class TokenizerSource:
    """What a tokenizer is made from.

    `metadata` holds the keys under `tokenizer.` (and the end-of-generation ids of a safetensors folder, translated).
    `json_path` is the folder's tokenizer.json, None for a GGUF. `digest` identifies the vocabulary (hex), for caches.
    """

    metadata: Mapping[str, object]
    json_path: str | None
    digest: str


@dataclass
class Checkpoint:
    """A model on disk. Everything but the tensors' bytes is copied out of the files.

    `metadata` values are int, float, bool, str, or a sequence of these (`homeserve.checkpoint.gguf.Array`).
    """

    path: str
    arch: str
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorView]
    tokenizer: TokenizerSource
    chat_templates: Mapping[str, str]
    file_bytes: int
    quant_label: str
    files: Sequence[MappedFile] = field(repr=False, default=())

    def will_need(self) -> None:
        """Start reading the files ahead of the load."""
        for file in self.files:
            file.will_need()

    def drop_pages(self) -> None:
        """Give back the resident pages of the mapped files; views stay valid and read from disk again."""
        for file in self.files:
            file.drop_pages()

    def close(self) -> None:
        """Let go of tensors and maps. A view that somebody still holds keeps its own file mapped."""
        self.tensors = {}
        for file in self.files:
            file.close()
        self.files = ()


def quant_label(file_type: object, tensors: Mapping[str, TensorView]) -> str:
    """The name of the mixture by `general.file_type`, else the type that holds most of the bytes."""
    if isinstance(file_type, int) and (name := FILE_TYPES.get(file_type & ~1024)):
        return name
    weight: dict[QuantType, int] = {}
    for tensor in tensors.values():
        weight[tensor.type] = weight.get(tensor.type, 0) + tensor.nbytes
    return max(weight, key=lambda kind: weight[kind]).name if weight else "none"


def chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """The Jinja templates by name; the unnamed one is 'default'."""
    templates: dict[str, str] = {}
    prefix = "tokenizer.chat_template"
    for key, value in metadata.items():
        if not isinstance(value, str):
            continue
        if key == prefix:
            templates["default"] = value
        elif key.startswith(prefix + "."):
            templates[key[len(prefix) + 1 :]] = value
    return templates
