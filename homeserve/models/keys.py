"""Typed and bounded reading of metadata that nobody vouches for: every complaint names the key.

A safetensors folder's `config.json` arrives under GGUF's keys, so there is one reader.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized

from homeserve.errors import InvalidModelFile, UnsupportedModel

LAYERS_MAX = 1024
"""More layers than any known model by far; a bound on what a hostile header can ask for."""
WIDTH_MAX = 1 << 20
"""Bound on hidden, feed-forward and per-head widths and on head counts."""
VOCAB_MAX = 1 << 22
CONTEXT_MAX = 1 << 31

SOURCE = "model metadata"
"""Stands where an error names a file: these values may come from any part of a split file or from config.json."""


class Keys:
    """Typed, bounded reading of one architecture's metadata. Every method raises InvalidModelFile with the key."""

    def __init__(self, metadata: Mapping[str, object], arch: str) -> None:
        self.metadata = metadata
        self.arch = arch

    def key(self, name: str) -> str:
        """`name` under the architecture's prefix; names of other sections stay as they are."""
        return name if name.startswith(("homeserve.", "tokenizer.", "general.")) else f"{self.arch}.{name}"

    def has(self, name: str) -> bool:
        return self.metadata.get(self.key(name)) is not None

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = WIDTH_MAX) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"must be a whole number, is {_shown(value)}")
        if not low <= value <= high:
            raise self.error(name, f"must be from {low} to {high}, is {value}")
        return value

    def number(self, name: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number with low < value <= high (`default` is returned unchecked)."""
        if default is not None and not self.has(name):
            return default
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"must be a number, is {_shown(value)}")
        if not (math.isfinite(value) and low < value <= high):
            raise self.error(name, f"must be over {low} and at most {high}, is {value}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be text, is {_shown(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, is {_shown(value)}")
        return value

    def per_layer(self, name: str, layers: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A number for every layer: the file has one for all, or an array of `layers`."""
        if default is not None and not self.has(name):
            return default
        value = self._value(name, None)
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return (self.integer(name),) * layers
        if len(value) != layers:
            raise self.error(name, f"has {len(value)} entries for {layers} layers")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int) or not 1 <= entry <= WIDTH_MAX:
                raise self.error(name, f"entries must be from 1 to {WIDTH_MAX}, one is {_shown(entry)}")
        return tuple(value)

    def same(self, name: str, default: int | None = None, *, low: int = 1, high: int = WIDTH_MAX) -> int:
        """A whole number, or an array that holds the same one for every layer. Raises UnsupportedModel for others."""
        value = self.metadata.get(self.key(name))
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return self.integer(name, default, low=low, high=high)
        first = value[0] if len(value) else None
        if isinstance(first, bool) or not isinstance(first, int) or not low <= first <= high:
            raise self.error(name, f"entries must be whole numbers from {low} to {high}, the first is {_shown(first)}")
        if any(entry != first for entry in value):
            raise UnsupportedModel(
                f"{self.key(name)} differs between layers: one value for all is supported", field=self.key(name)
            )
        return first

    def flags(self, name: str, blocks: int) -> tuple[bool, ...] | None:
        """An array of true and false, one for each block; None where there is none or it is no array."""
        value = self.metadata.get(self.key(name))
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            return None
        if len(value) != blocks:
            raise self.error(name, f"has {len(value)} entries for {blocks} layers")
        if not all(isinstance(entry, bool) for entry in value):
            raise self.error(name, "entries must be true or false")
        return tuple(bool(entry) for entry in value)

    def count(self, name: str) -> int | None:
        """Length of an array, or None where there is none."""
        value = self.metadata.get(self.key(name))
        return len(value) if isinstance(value, Sized) and not isinstance(value, str) else None

    def error(self, name: str, what: str) -> InvalidModelFile:
        return InvalidModelFile(SOURCE, self.key(name), what)

    def _value(self, name: str, default: object) -> object:
        value = self.metadata.get(self.key(name))
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


def _shown(value: object) -> str:
    """A value of an untrusted file, short enough for an error."""
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."
