"""How a family's `config.json` and tensor names are told in GGUF's words: the values that `hf_families` is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto


class Kind(Enum):
    """What stands at a name of config.json."""

    WHOLE = auto()
    """A positive whole number."""
    REAL = auto()
    """A positive number."""
    CAP = auto()
    """A positive number; null means none, which GGUF says as 0."""
    SOME = auto()
    """A positive whole number; 0 and null mean that there is nothing."""
    FLAG = auto()
    ROOT = auto()
    """A positive number; GGUF has 1 / sqrt of it."""


@dataclass(frozen=True)
class Row:
    """`key` (after `<arch>.`) is what stands at `name` (or at the other names that a family's configs use for it).

    `default` is what `transformers` takes where a config leaves it out; None: nothing is said, if not `required`.
    `when`: the setting that must be true for the row to count.
    """

    key: str
    name: str
    kind: Kind = Kind.WHOLE
    required: bool = True
    default: int | float | bool | None = None
    other_names: tuple[str, ...] = ()
    when: str = ""


class Form(Enum):
    """What becomes of a tensor on its way to GGUF's form; made by `safetensors_forms`."""

    AS_IS = auto()
    PLUS_ONE = auto()
    """Every element grows by one."""
    MINUS_EXP = auto()
    """-exp of every element."""
    TRANSPOSED = auto()
    """Each of a stack of matrices."""
    EVEN_COLS_TRANSPOSED = auto()
    """Each of a stack, its even columns alone; ODD likewise."""
    ODD_COLS_TRANSPOSED = auto()
    EVEN_COLS = auto()
    ODD_COLS = auto()


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: GGUF's name (in a layer: after `blk.N.`)."""

    target: str
    form: Form = Form.AS_IS


@dataclass(frozen=True)
class BlockedPlace:
    """Where a pair of tensors `NAME_blocks` and `NAME_scales` goes as one of 4-bit floats; `rows` as in `Form`."""

    target: str
    first_row: int = 0
    row_step: int = 1


Names = Mapping[str, str]


@dataclass(frozen=True)
class LayerTypes:
    """`layer_types` of a config as a list of booleans: `key` is true where a layer is of type `true`, and false where
    it is full attention. Where a config has none, `period_names` give every how many layers there is a full one."""

    key: str
    true: str
    period_key: str
    period_names: tuple[str, ...]
    period: int


@dataclass(frozen=True)
class FamilyRules:
    """How one `model_type` is translated.

    rows                     of two for one key the later one counts
    tensors, layer_tensors   names without `.weight` / `.bias` -> GGUF's, likewise
    bare                     names that have no such suffix, in a layer -> where they go
    plus_one                 GGUF roles whose weights a folder stores less one
    must_equal               settings that may only have the values given (None stands for absent or null)
    rope_dims                share of a head that rope turns where a config does not say it
    wide_heads               width of a head in layers that see everything, where windowed ones have another; these turn
                             the first `rope_dims` of their pairs alone, and a `use_double_wide_mlp` doubles the
                             feed-forward of layers that share the K and V of others
    rope_swa_base            base of rope in layers with a window, where these have their own
    experts                  name in a layer of one expert's tensors, `*` for its number -> GGUF's stack
    ignored                  ends of names that carry nothing
    drafts                   the folder may hold a drafting block under `mtp.`
    tied                     what `transformers` takes where a config leaves out tie_word_embeddings
    fixed                    keys that follow from the family alone
    """

    arch: str
    rows: tuple[Row, ...]
    tensors: Names
    layer_tensors: Names
    must_equal: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    bare: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    blocked: Mapping[str, tuple[BlockedPlace, ...]] = field(default_factory=dict)
    plus_one: frozenset[str] = frozenset()
    layer_types: LayerTypes | None = None
    rope_base: float = 10000.0
    rope_dims: float = 1.0
    rope_swa_base: float = 0.0
    wide_heads: int = 0
    delta: bool = False
    experts: Names = field(default_factory=dict)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    drafts: bool = False
    tied: bool = False
    quant_methods: tuple[str, ...] = ()
    fixed: Mapping[str, object] = field(default_factory=dict)
