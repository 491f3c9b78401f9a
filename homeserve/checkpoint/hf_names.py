"""Names of tensors in a safetensors folder, and where each goes.

    model.layers.3.self_attn.q_proj.weight      ->  blk.3.attn_q.weight
    model.layers.3.mlp.experts.7.up_proj.weight ->  blk.3.ffn_up_exps.weight, expert 7 of the stack
    mtp.layers.0.mlp.up_proj.weight             ->  blk.{trunk layers}.ffn_up.weight

Models that also see or hear wrap the text part; the wrapping is taken off, the other parts have no place and none is
needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homeserve.checkpoint.hf_rules import BlockedPlace, FamilyRules, Form, Place

_WRAPPINGS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.text_model.", "model."),
)
_OTHER_PARTS = (
    *("model.visual.", "visual.", "model.vision_tower.", "vision_tower.", "model.vision_model.", "model.audio_tower."),
    *("audio_tower.", "model.multi_modal_projector.", "multi_modal_projector.", "model.embed_vision."),
    *("model.embed_audio.",),
)
_LAYER = re.compile(r"(model|mtp)\.layers\.(\d{1,6})\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts\.)(\d{1,6})(\..+)")
_DRAFT = {
    "mtp.fc.weight": Place("nextn.eh_proj.weight"),
    "mtp.pre_fc_norm_embedding.weight": Place("nextn.enorm.weight", Form.PLUS_ONE),
    "mtp.pre_fc_norm_hidden.weight": Place("nextn.hnorm.weight", Form.PLUS_ONE),
    "mtp.norm.weight": Place("nextn.shared_head_norm.weight", Form.PLUS_ONE),
}
_BLOCKS, _SCALES = "_blocks", "_scales"


@dataclass(frozen=True)
class Piece:
    """A tensor's part in what becomes `target`: the whole of it, matrix `expert` of a stack, or blocks or scales."""

    target: str
    form: Form = Form.AS_IS
    expert: int | None = None
    blocked: BlockedPlace | None = None
    scales: bool = False


def pieces_of(name: str, rules: FamilyRules, layers: int, *, wrapped: bool = False) -> tuple[Piece, ...] | None:
    """Where a tensor goes, with `layers` layers before the drafting block. Empty: nowhere, and nothing is lost; None:
    the family has no such tensor. `wrapped`: the config is one of several parts."""
    for wrapping, plain in _WRAPPINGS:
        if name.startswith(wrapping):
            name = plain + name[len(wrapping) :]
            break
    if name.endswith(rules.ignored) or (wrapped and name.startswith(_OTHER_PARTS)):
        return ()
    if name.startswith("mtp.") and not rules.drafts:
        return None
    if name in _DRAFT:
        place = _DRAFT[name]
        return (Piece(f"blk.{layers}.{place.target}", place.form),)
    layer = _LAYER.fullmatch(name)
    if layer is None:
        stem, _, suffix = name.rpartition(".")
        role = rules.tensors.get(stem)
        return (_plain("", role, suffix, rules),) if role and suffix in ("weight", "bias") else None
    number = int(layer[2]) + (layers if layer[1] == "mtp" else 0)
    return _in_layer(f"blk.{number}.", layer[3], rules)


def draft_blocks(names: list[str]) -> int:
    """Drafting blocks of a folder that holds tensors of these names."""
    numbers = {layer[2] for name in names if (layer := _LAYER.fullmatch(name)) and layer[1] == "mtp"}
    return len(numbers)


def _in_layer(block: str, name: str, rules: FamilyRules) -> tuple[Piece, ...] | None:
    expert = _EXPERT.fullmatch(name)
    if expert:
        target = rules.experts.get(f"{expert[1]}*{expert[3]}")
        return (Piece(block + target, expert=int(expert[2])),) if target else None
    if name in rules.bare:
        return tuple(Piece(block + place.target, place.form) for place in rules.bare[name])
    for ending in (_BLOCKS, _SCALES):
        places = rules.blocked.get(name.removesuffix(ending)) if name.endswith(ending) else None
        if places:
            return tuple(Piece(block + p.target, blocked=p, scales=ending == _SCALES) for p in places)
    stem, _, suffix = name.rpartition(".")
    role = rules.layer_tensors.get(stem)
    return (_plain(block, role, suffix, rules),) if role and suffix in ("weight", "bias") else None


def _plain(block: str, role: str, suffix: str, rules: FamilyRules) -> Piece:
    return Piece(f"{block}{role}.{suffix}", Form.PLUS_ONE if role in rules.plus_one else Form.AS_IS)
