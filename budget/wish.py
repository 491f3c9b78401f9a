"""What is asked of a plan. Zero and None are "choose for me"."""

from __future__ import annotations

from dataclasses import dataclass

from budget.facts import MIB

PAGE = 16
"""Slots of a KV page."""
DEFAULT_RUNNING = 16
"""Requests at once where nobody says how many (fewer for models with large recurrent states)."""

DEFAULT_DRAFTS = 3
"""The most drafts of a round where nobody says how many."""
NO_DRAFTS_IN_A_PIPELINE = "several ranks draft in the tensor layout, and they stay in the pipeline layout"

DEFAULT_CARD_FLOOR = 1024 * MIB
DEFAULT_HOST_FLOOR = 256 * MIB


@dataclass(frozen=True)
class Wish:
    """The settings that a plan depends on, as `homeserve up` and `homeserve budget` have them.

    `devices` are words of `--devices` (empty: auto), in order of rank with `in_order`, else by size; of no devices but
    `among` (ids; empty: of all) an auto chooses. `cpu_ranks` ranks share the CPU where it is the only device. Each
    of them computes on `threads`, and all of them have `cores` (0: not known). `layout` is auto, pipeline or tensor;
    `flip` is auto, on or off: auto has both layouts where neither `layout` nor the vectors of one layout alone choose;
    on has both whatever chooses, and the chosen one is then the layout to rest in. Of CPU ranks auto has both where
    that costs no tokens. `image_spill`: each rank has an image of the next layout in place of one copy of the weights
    for all, and the other image on disk.
    `cpu_moe`: layers whose routed experts stay on the CPU; -1 is "the planner's choice", 0 none.
    `draft`: the drafting block is held, where the model has one, for at most `drafts` drafts of a round.
    `floor_bytes`: what must remain free at the peak on every card and the host; None takes the defaults (1024 MiB a
    card, 256 MiB of the host, nothing on unified devices).
    """

    context: int = 0
    kv_tokens: int = 0
    kv_type: str = "f16"
    running: int = 0
    chunk: int = 256
    logit_rows: int = 0
    devices: tuple[str, ...] = ()
    in_order: bool = False
    twice: bool = False
    """One card may be named for several ranks."""
    among: tuple[str, ...] = ()
    cpu_ranks: int = 1
    unified: bool = False
    """Ranks on the CPU hold weights, KV rows and states once, together."""
    layout: str = "auto"
    flip: str = "auto"
    image_spill: bool = False
    weight_vector: tuple[int, ...] = ()
    token_vector: tuple[int, ...] = ()
    pipeline_ratio: tuple[int, ...] = ()
    cpu_moe: int = -1
    draft: bool = True
    drafts: int = 0
    vision: bool = False
    prefix_cache: bool = True
    state_bits: int = 32
    floor_bytes: int | None = None
    threads: int = 0
    cores: int = 0
    peer_groups: tuple[int, ...] = ()
    """Bytes of peer aperture that each process group maps."""
    exclusive: bool = True
    """Exactly one layout's KV pool holds physical pages; False prices both resident at once."""
    resident: bool = True
    """Whether the weights of both layouts may lie on the cards at once, where they fit."""
    like_cpu: bool = False
    """Cards hold a model as ranks on the CPU do: the embedding where it is read, KV rows in the same blocks, and
    checkpoints in the pool of states; and they exchange through shared memory."""
    dense: int = 0
    """Bytes that a backend without kernels for packed weights holds for each (2: bf16, 4: float32); 0: they stay
    packed."""


def pages(tokens: int) -> int:
    """Slots of the whole pages that hold so many tokens."""
    return -(-tokens // PAGE) * PAGE


KEPT_WINDOWS = 4
"""Windows that the prefix cache keeps for requests that have ended, beside those of running ones that are idle."""


def window_slots(window: int, tokens: int, running: int, chunk: int, *, kept: bool = True) -> int:
    """Slots of a pool for layers that see the last `window` tokens, beside a pool of `tokens`.

    A request that decodes holds the pages that its window touches, one more than would hold it at the worst; the prompt
    rows of a plan, `chunk` of them, are beside the windows behind them. `kept`: the prefix cache keeps some windows for
    others to go on behind. And no layer keeps more than all tokens.
    """
    windows = running + (KEPT_WINDOWS if kept else 0)
    most = windows * (pages(window) + PAGE) + pages(chunk)
    return min(pages(tokens), most)
