"""The declaration held against what was built: the ops of a layer are read back into facts and compared.

Three checks, all on the finished op list, all of *our* work (a damaged file was refused before): a builder that forgets
a window, takes a bias that was not declared or swaps a scale is found at load, by name, and not by wrong text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from backends.base import (
    AddGated,
    DeltaNet,
    DraftStep,
    EmbedRows,
    GatedActivation,
    GatherRows,
    HiddenStep,
    Linear,
    MergeAttention,
    Norm,
    Op,
    Rope,
    RopeStore,
    Scale,
    SelectRows,
    SumRows,
    Zero,
)
from backends.base import Attention as AttentionOp
from backends.base import Experts as ExpertsOp
from homeserve.models.conform_parts import NOTHING, Facts, Parts
from homeserve.models.stages import (
    Attention,
    Dense,
    Experts,
    GatedDeltaNet,
    RopeFacts,
    SharedExpert,
    Stage,
    TokenInput,
    stage_name,
)

_EXCHANGES = SumRows | GatherRows | MergeAttention


class DeclarationMismatch(AssertionError):
    """Ops and declaration differ: a defect of this program. Names the layer, the stage and every differing field."""


def check_layers(
    declared: Mapping[int, tuple[Stage, ...]],
    built: Mapping[int, Sequence[Op]],
    resolved: Callable[[RopeFacts], Rope],
    kv_index: Mapping[int, int],
    parts: Parts | None = None,
) -> None:
    """Raises DeclarationMismatch unless exactly the declared layers were built, and each as declared.

    `resolved` gives the op's rope for a declared one, `kv_index` the pool layer of a global layer's K and V; `parts`
    says what this rank has of each stage in the tensor layout.
    """
    if set(declared) != set(built):
        raise DeclarationMismatch(f"layers {sorted(declared)} were declared, {sorted(built)} were built")
    for layer, stages in declared.items():
        said = [declared_facts(stage, layer, resolved, kv_index) for stage in stages]
        if parts is not None:
            said = [
                parts.of(layer, at, stage, facts) for at, (stage, facts) in enumerate(zip(stages, said, strict=True))
            ]
        check_layer(layer, said, built_facts(built[layer]))


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
    """Every update that a stage owes is added to the residual exactly once, or handed on exactly once; and what a stage
    does to its update before (a norm, a shared expert's share) is done by the rank that wrote it.

    `owed`: an update arrives with the residual. Raises DeclarationMismatch with the index of the op that breaks it.
    """
    ops = before_hidden(ops)
    _check_held(ops)
    written_here = False
    for index, op in enumerate(ops):
        if isinstance(op, DraftStep) and owed:
            raise DeclarationMismatch(f"op {index} (DraftStep) follows an update that was never added")
        if isinstance(op, Norm | SelectRows) and op.src.name == "x":
            if owed != (op.add is not None):
                what = "adds no update, and one is owed" if owed else "adds an update that nobody owes"
                raise DeclarationMismatch(f"op {index} ({type(op).__name__}) {what}")
            owed = written_here = False
        if isinstance(op, AddGated) and op.into.name == "x":
            if not owed:
                raise DeclarationMismatch(f"op {index} (AddGated) adds an update that nobody owes")
            owed = written_here = False
        if isinstance(op, Scale) and owed:
            raise DeclarationMismatch(f"op {index} (Scale) scales a residual that lacks an update")
        if _transforms_update(op) and not written_here:
            whose = "that the previous rank owes" if owed else "that nobody owes"
            raise DeclarationMismatch(f"op {index} ({type(op).__name__}) changes an update {whose}")
        if _writes_update(op):
            if owed:
                raise DeclarationMismatch(f"op {index} overwrites an update that was never added")
            owed = written_here = True
    if owed and not handed_on:
        raise DeclarationMismatch("the last update is owed at the end of the model")


def check_hidden(ops: Sequence[Op], *, samples: bool) -> None:
    """The rank that `samples` and no other has rows behind the output norm: the very norm of the head, of the residual
    as the head had it, or the rows that the head selects from. Raises DeclarationMismatch."""
    found = next((at for at, op in enumerate(ops) if isinstance(op, HiddenStep)), None)
    if (found is not None) != samples:
        raise DeclarationMismatch(f"a rank that {'samples' if samples else 'does not sample'} has mark {found} of rows")
    if found is None:
        return
    mark, behind, before = ops[found], ops[found + 1 :], ops[:found]
    at = next(at for at, op in enumerate(ops) if isinstance(op, SelectRows))
    select, head = before[at], before[at + 1]
    assert isinstance(mark, HiddenStep) and isinstance(select, SelectRows), "found by their kinds"
    if not behind:
        normed = any(isinstance(op, Norm) and op.src.name == "x" and op.out == select.src for op in before[:at])
        if mark.rows != select.src or not normed or _overwritten(before[at:], mark.rows.name):
            raise DeclarationMismatch(f"the rows {mark.rows.name} of embeddings are not those that the head reads")
        return
    said = Norm(select.src, head.weight, head.eps, mark.rows, select.add) if isinstance(head, Norm) else None
    if list(behind) != [said]:
        raise DeclarationMismatch(f"op {found + 1} is not the head's norm of all rows")
    if changed := [name for name in ("x", "update") if _overwritten(before[at:], name)]:
        raise DeclarationMismatch(f"{changed[0]} is written between the head and op {found + 1}, which reads it")


def _overwritten(ops: Sequence[Op], name: str) -> bool:
    return any(name in _written(op) or (isinstance(op, AddGated) and op.into.name == name) for op in ops)


def before_hidden(ops: Sequence[Op]) -> Sequence[Op]:
    """Without the mark `HiddenStep` and what is behind it."""
    return ops[: next((at for at, op in enumerate(ops) if isinstance(op, HiddenStep)), len(ops))]


def _check_held(ops: Sequence[Op]) -> None:
    """An output that waits is joined once, and the residual stays as it is in between."""
    held = False
    for index, op in enumerate(ops):
        changes = getattr(op, "add", None) is not None or isinstance(op, SelectRows | Scale)
        if held and (changes or (isinstance(op, AddGated) and op.into.name == "x")):
            raise DeclarationMismatch(f"op {index} ({type(op).__name__}) changes the residual while an output waits")
        writes = "held" in _written(op) and not isinstance(op, Norm)
        joins = isinstance(op, AddGated) and op.src.name == "held"
        if writes and held:
            raise DeclarationMismatch(f"op {index} overwrites an output that nothing joined")
        if joins and not held:
            raise DeclarationMismatch(f"op {index} (AddGated) adds an output that does not wait")
        held = writes or (held and not joins)
    if held:
        raise DeclarationMismatch("an output waits at the end, and nothing joined it")


def _written(op: Op) -> list[str]:
    """Names of the buffers that an op writes anew."""
    written = [part.out for part in op.parts] if isinstance(op, Linear) else [getattr(op, "out", None)]
    return [buffer.name for buffer in written if buffer is not None]


def _writes_update(op: Op) -> bool:
    fresh = not (isinstance(op, Norm) and op.src.name == "update")
    return fresh and "update" in _written(op)


def _transforms_update(op: Op) -> bool:
    return (isinstance(op, Norm) and op.src.name == "update") or (isinstance(op, AddGated) and op.into.name == "update")


# ------------------------------------------------------------------------------------------------ what was declared


def declared_facts(
    stage: Stage, layer: int, resolved: Callable[[RopeFacts], Rope], kv_index: Mapping[int, int]
) -> Facts:
    """A declared stage in the terms in which built ops can be read back."""
    facts: Facts = {"stage": stage_name(stage), "norm": stage.read.norm.value, "eps": stage.read.eps}
    facts |= {"update": stage.update.kind.value, "post_norm_eps": stage.update.post_norm_eps}
    facts["joined_eps"] = stage.update.joined_eps
    facts["scales_residual"] = stage.update.scales_residual
    match stage:
        case Attention():
            own = stage.kv_source is None
            facts |= {name: getattr(stage, name) for name in _ATTENTION_NUMBERS}
            facts |= {name: getattr(stage, name) for name in ("gated", "sinks", "q_norm", "v_from_k")}
            facts["k_norm"], facts["v_norm"] = stage.k_norm and own, stage.v_norm and own
            facts["rope"] = resolved(stage.rope) if stage.rope else None
            facts["own_kv"] = own
            facts["kv_layer"] = kv_index[layer if stage.kv_source is None else stage.kv_source]
            kv_biases = (stage.k_bias, stage.v_bias) if own else ()
            facts["biases"] = (stage.q_bias, *kv_biases, stage.output_bias)
        case GatedDeltaNet():
            facts |= {name: getattr(stage, name) for name in _DELTA_NUMBERS}
            facts["biases"] = (False,) * 5
        case Dense():
            facts |= {"width": stage.width, "activation": stage.activation.value}
            facts["biases"] = (stage.gate_bias, stage.up_bias, stage.down_bias)
        case Experts():
            facts |= {name: getattr(stage, name) for name in ("count", "used", "width", "normalise", "scale", "shared")}
            facts |= {"func": stage.func.value, "activation": stage.activation.value}
            facts |= {name: getattr(stage, name) for name in ("selection_bias", "router_eps", "gains")}
            facts["expert_biases"] = (stage.gate_bias, stage.up_bias, stage.down_bias)
            facts["router_bias"] = stage.router_bias
        case TokenInput():
            facts |= {name: getattr(stage, name) for name in ("width", "first", "projection_eps")}
            facts |= {"activation": stage.activation.value, "biases": (False,) * 3}
    return facts


_ATTENTION_NUMBERS = ("heads", "kv_heads", "head_dim", "q_step", "scale", "window", "softcap")
_DELTA_NUMBERS = ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "tiled")


# --------------------------------------------------------------------------------------------------- what was built


def built_facts(ops: Sequence[Op]) -> list[Facts]:
    """The stages that a layer's ops make up. A stage starts at a norm of the residual and ends where it updates it."""
    starts = [index for index, op in enumerate(ops) if _starts_a_stage(op)]
    if ops and starts[:1] != [0]:
        return [{"stage": f"{type(ops[0]).__name__} without a norm"}]
    ends = [*starts[1:], len(ops)][: len(starts)]
    return [_stage_facts(ops[start:end]) for start, end in zip(starts, ends, strict=True)]


def _first_of(part: str) -> int:
    """Of some rows or columns of a tensor, by their name `TENSOR[first:end]` or `TENSOR[,first:end]`."""
    return int(part.rpartition("[")[2].lstrip(",").partition(":")[0] or -1)


def _starts_a_stage(op: Op) -> bool:
    """A router's own norm of the residual is no start: it follows the experts'."""
    if isinstance(op, Norm):
        return op.src.name == "x" and op.out.name != "router_in"
    return isinstance(op, Linear) and op.src.name == "embedded"


def _stage_facts(ops: Sequence[Op]) -> Facts:
    facts: Facts = {"stage": "unknown", "post_norm_eps": 0.0, "joined_eps": 0.0, "update": "none"}
    facts["scales_residual"] = False
    by_token = any(isinstance(op, Linear) and op.src.name == "embedded" for op in ops)
    if by_token:
        facts |= {"stage": "token-input", "norm": "none", "eps": 0.0, "biases": _biases(ops)}
    for op in ops:
        match op:
            case Scale():
                facts["scales_residual"] = True
            case EmbedRows(out=out, table=table):
                facts |= {"width": out.width, "first": _first_of(table.name)}
            case Linear(src=src, parts=parts) if src.name == "embedded":
                # A rank that has no row of the table still says which columns are meant.
                facts |= {"width": parts[0].out.width, "first": _first_of(parts[0].weight.name)}
            case GatedActivation(kind=kind) if by_token:
                facts["activation"] = kind
            case Norm(src=src, eps=eps) if src.name in ("update", "held"):
                facts["joined_eps" if facts["update"] == "join" else "post_norm_eps"] = eps
            case Norm(out=out, eps=eps) if out.name == "router_in":
                facts["router_eps"] = eps
            case AddGated(src=src) if src.name == "held":
                facts["update"] = "join"
            case Norm(eps=eps) if by_token:
                facts["projection_eps"] = eps
            case Norm(eps=eps):
                facts |= {"norm": "rms", "eps": eps}
            case AttentionOp():
                facts |= _attention_facts(op, ops)
            case DeltaNet():
                facts["stage"] = "delta-net"
                facts |= {name: getattr(op, name) for name in _DELTA_NUMBERS}
                facts["biases"] = _biases(ops)
                if op.eps != facts.get("eps"):
                    facts["eps"] = (facts.get("eps"), op.eps)
            case ExpertsOp():
                facts |= _experts_facts(op, ops) | {"router_eps": facts.get("router_eps", 0.0)}
            case GatedActivation(kind=kind, out=out) if not _of_shared(ops):
                facts |= {"stage": "dense", "activation": kind, "width": out.width, "biases": _biases(ops)}
            case Zero() if facts["stage"] == "unknown":
                facts |= {"stage": NOTHING} | _shared_facts(ops)
            case _ if not isinstance(op, Linear | RopeStore | GatedActivation | AddGated | Zero | _EXCHANGES):
                facts["stage"] = type(op).__name__
        if _writes_update(op) or "held" in _written(op):
            facts["update"] = "add" if _writes_update(op) else "hold"
    return facts


def _attention_facts(op: AttentionOp, ops: Sequence[Op]) -> Facts:
    facts: Facts = {"stage": "attention"}
    facts |= {name: getattr(op, name) for name in _ATTENTION_NUMBERS}
    facts |= {"q_step": op.q_step or op.head_dim, "gated": op.gated, "sinks": op.sinks is not None}
    facts |= {"kv_layer": op.layer, "biases": _biases(ops)}
    weights = {
        part.out.name.removeprefix("own_").partition(".")[0]: part.weight
        for each in ops
        if isinstance(each, Linear)
        for part in each.parts
    }
    facts["v_from_k"] = "k" in weights and weights["k"] == weights.get("v")
    for store in ops:
        if isinstance(store, RopeStore):
            facts |= {"rope": store.rope, "v_norm": store.v_norm, "own_kv": store.k is not None}
            facts |= {"q_norm": store.q_norm is not None, "k_norm": store.k_norm is not None}
            same = ("layer", "heads", "kv_heads", "head_dim", "q_step", "q")
            facts |= {f"{name} where stored": getattr(store, name) for name in same if _differ(store, op, name)}
    for merge in ops:
        if isinstance(merge, MergeAttention):
            facts |= {"sinks": merge.sinks is not None, "gated": merge.gate is not None}
            facts["merged"] = (merge.heads, merge.head_dim, merge.first, merge.own)
    return facts


def _differ(store: RopeStore, op: AttentionOp, name: str) -> bool:
    return bool(getattr(store, name) != getattr(op, name))


def _experts_facts(op: ExpertsOp, ops: Sequence[Op]) -> Facts:
    routing = op.routing
    facts: Facts = {"stage": "experts", "count": routing.experts, "used": routing.used, "func": routing.func}
    facts |= {"normalise": routing.normalise, "scale": routing.scale, "activation": op.kind}
    facts |= {"selection_bias": routing.selection is not None, "gains": routing.gains is not None}
    facts["width"] = op.gate.height if op.gate.height == op.up.height == op.down.weight.cols else 0
    facts["expert_biases"] = tuple(matrix.bias is not None for matrix in (op.gate, op.up, op.down))
    parts = [part for each in ops if isinstance(each, Linear) for part in each.parts]
    facts["router_bias"] = any(part.bias is not None for part in parts if part.out == op.logits)
    if op.held is not None:
        facts["held"] = op.held
    return facts | {"shared": None} | _shared_facts(ops)


def _of_shared(ops: Sequence[Op]) -> bool:
    """Whether a gated activation among them is a shared expert's."""
    return any(isinstance(op, ExpertsOp) or (isinstance(op, Linear) and _writes(op, "router")) for op in ops)


def _shared_facts(ops: Sequence[Op]) -> Facts:
    """Of a shared expert, where there is one."""
    facts: Facts = {}
    for act in ops:
        if isinstance(act, GatedActivation):
            added = [each for each in ops if isinstance(each, AddGated) and each.src.name == "shared_out"]
            gated = len(added) == 1 and added[0].gate is not None
            facts["shared"] = SharedExpert(act.out.width, gated) if added else "computed and not added"
    return facts


def _writes(op: Linear, name: str) -> bool:
    return any(part.out.name.partition(".")[0] == name for part in op.parts)


def _biases(ops: Sequence[Op]) -> tuple[bool, ...]:
    return tuple(part.bias is not None for op in ops if isinstance(op, Linear) for part in op.parts)


def _brief(value: object) -> str:
    if isinstance(value, Rope):
        pairing = "interleaved" if value.interleaved else "halves"
        ends = f"{value.frequencies[0]:.6g}..{value.frequencies[-1]:.6g}"
        return f"rope({pairing}, {len(value.frequencies)} pairs {ends}, magnitude {value.magnitude:.6g})"
    return repr(value)
