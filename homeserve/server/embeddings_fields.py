"""The fields of `/v1/embeddings`, and what it answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

INPUTS_LIMIT = 2048


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """`input`: a text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    """`base64`: of little-endian float32."""
    dimensions: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """The first so many numbers of each embedding, brought to length 1 again."""
    user: str | None = None
    pooling: Literal["mean", "last", "cls"] | None = None
    """Ours: how the states of an input become one; unsaid: as the server was told."""
    add_special_tokens: bool | None = None
    """Ours: whether texts get the tokens that the model's tokenizer puts around them; unsaid: they do."""


class Embedding(msgspec.Struct, kw_only=True):
    """Of one input."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    """The embeddings, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage
