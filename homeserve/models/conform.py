"""The declaration held against what was built: the ops of a layer are read back into facts and compared.

Two checks, both on the finished op list, both of *our* work (a damaged file was refused before): a builder that forgets
a window, takes a bias that was not declared or swaps a scale is found at load, by name, and not by wrong text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from backends.base import Attention as AttentionOp
from backends.base import Buffer, GatedActivation, Linear, Norm, Op, Rope, RopeStore, SelectRows
from homeserve.models.stages import Attention, RopeFacts, Stage, stage_name

Facts = dict[str, object]


class DeclarationMismatch(AssertionError):
    """Ops and declaration differ: a defect of this program. Names the layer, the stage and every differing field."""


def check_layers(
    declared: Mapping[int, tuple[Stage, ...]],
    built: Mapping[int, Sequence[Op]],
    resolved: Callable[[RopeFacts], Rope],
) -> None:
    """Raises DeclarationMismatch unless exactly the declared layers were built, and each as declared."""
    if set(declared) != set(built):
        raise DeclarationMismatch(f"layers {sorted(declared)} were declared, {sorted(built)} were built")
    for layer, stages in declared.items():
        check_layer(layer, [declared_facts(stage, resolved) for stage in stages], built_facts(built[layer]))


def check_layer(layer: int, declared: Sequence[Facts], built: Sequence[Facts]) -> None:
    """Compare the stages of one layer, fact by fact."""
    if len(declared) != len(built):
        kinds = [" and ".join(str(facts["stage"]) for facts in side) or "nothing" for side in (declared, built)]
        raise DeclarationMismatch(f"layer {layer} declares {kinds[0]}, {kinds[1]} was built")
    for index, (said, found) in enumerate(zip(declared, built, strict=True)):
        wrong = [
            f"{name} is declared {_brief(said.get(name))}, built {_brief(found.get(name))}"
            for name in sorted(said.keys() | found.keys())
            if said.get(name) != found.get(name)
        ]
        if wrong:
            raise DeclarationMismatch(f"layer {layer}, stage {index} ({said['stage']}): {'; '.join(wrong)}")


def check_updates(ops: Sequence[Op], *, owed: bool, handed_on: bool) -> None:
    """Every update that a stage owes is added to the residual exactly once, or handed on exactly once.

    `owed`: an update arrives with the residual. Raises DeclarationMismatch with the index of the op that breaks it.
    """
    for index, op in enumerate(ops):
        if isinstance(op, Norm | SelectRows) and op.src.name == "x":
            if owed != (op.add is not None):
                what = "adds no update, and one is owed" if owed else "adds an update that nobody owes"
                raise DeclarationMismatch(f"op {index} ({type(op).__name__}) {what}")
            owed = False
        if isinstance(op, Linear) and any(part.out.name == "update" for part in op.parts):
            if owed:
                raise DeclarationMismatch(f"op {index} overwrites an update that was never added")
            owed = True
    if owed and not handed_on:
        raise DeclarationMismatch("the last update is owed at the end of the model")


def declared_facts(stage: Stage, resolved: Callable[[RopeFacts], Rope]) -> Facts:
    """A declared stage in the terms in which built ops can be read back."""
    facts: Facts = {"stage": stage_name(stage), "norm": stage.read.norm.value, "eps": stage.read.eps}
    facts["update"] = stage.update.kind.value
    if isinstance(stage, Attention):
        facts |= {name: getattr(stage, name) for name in ("heads", "kv_heads", "head_dim", "scale", "window")}
        facts["rope"] = resolved(stage.rope) if stage.rope else None
        facts["biases"] = (stage.q_bias, stage.k_bias, stage.v_bias, stage.output_bias)
    else:
        facts |= {"width": stage.width, "activation": stage.activation.value}
        facts["biases"] = (stage.gate_bias, stage.up_bias, stage.down_bias)
    return facts


def built_facts(ops: Sequence[Op]) -> list[Facts]:
    """The stages that a layer's ops make up. A stage starts at a norm of the residual and ends where it updates it."""
    starts = [index for index, op in enumerate(ops) if isinstance(op, Norm) and op.src.name == "x"]
    ends = [*starts[1:], len(ops)]
    return [_stage_facts(ops[start:end]) for start, end in zip(starts, ends, strict=True)]


def _stage_facts(ops: Sequence[Op]) -> Facts:
    facts: Facts = {"stage": "unknown"}
    biases: list[bool] = []
    for op in ops:
        match op:
            case Norm(eps=eps):
                facts |= {"norm": "rms", "eps": eps}
            case Linear(parts=parts):
                biases += [part.bias is not None for part in parts]
            case RopeStore(rope=rope):
                facts["rope"] = rope
            case AttentionOp() as attention:
                facts["stage"] = "attention"
                names = ("heads", "kv_heads", "head_dim", "scale", "window")
                facts |= {name: getattr(attention, name) for name in names}
            case GatedActivation(kind=kind, out=Buffer(width=width)):
                facts |= {"stage": "dense", "activation": kind, "width": width}
            case _:
                facts["stage"] = type(op).__name__
    last = ops[-1]
    added = isinstance(last, Linear) and [part.out.name for part in last.parts] == ["update"]
    facts |= {"biases": tuple(biases), "update": "add" if added else "none"}
    return facts


def _brief(value: object) -> str:
    if isinstance(value, Rope):
        pairing = "interleaved" if value.interleaved else "halves"
        ends = f"{value.frequencies[0]:.6g}..{value.frequencies[-1]:.6g}"
        return f"rope({pairing}, {len(value.frequencies)} pairs {ends}, magnitude {value.magnitude:.6g})"
    return repr(value)
