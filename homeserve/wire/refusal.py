"""An error of the tree on its way from a worker to the engine: the same class arrives, with the same facts.

A worker turns the error into the fields of a `Result` (`refused`), the engine makes it again (`error_of`). The notes of
an exception (`add_note`: in which step it came) are told behind its text. Every class
that a worker may raise is in the table; anything else (`failed`) arrives as a `WorkerError` with the reason. An answer
that says "I waited for another rank in vain" names that rank (`waited_for`): it is no word about the one that answers.
"""

from __future__ import annotations

from backends.acts import PeerLate
from homeserve.errors import (
    BudgetError,
    DeviceError,
    HomeserveError,
    InvalidModelFile,
    ModelError,
    ModelNotFound,
    SettingError,
    UnknownArchitecture,
    UnsupportedModel,
    WireError,
    WorkerError,
    WorkerStartError,
)
from homeserve.wire.records import Result

FAULT = "fault"
"""The `code` of a result whose plan failed by a bug or by the machine, not by what was asked."""

PEER_LATE = "peer_late"
"""The `code` of a result whose plan waited for another rank for too long; `parts` are that rank and the label."""

_PLAIN: dict[str, type[HomeserveError]] = {
    kind.code: kind
    for kind in (
        BudgetError,
        DeviceError,
        ModelError,
        ModelNotFound,
        SettingError,
        UnsupportedModel,
        WireError,
        WorkerStartError,
    )
}


def refused(rank: int, seq: int, epoch: int, error: HomeserveError) -> Result:
    """The answer to a plan that `error` ended."""
    return Result(
        rank,
        seq,
        epoch,
        ok=False,
        reason=with_notes(error, error.message),
        code=error.code,
        field=error.field or "",
        fix=error.fix or "",
        parts=_parts(error),
    )


def failed(rank: int, seq: int, epoch: int, error: Exception) -> Result:
    """The answer to a plan that ended with something else."""
    if isinstance(error, PeerLate):
        parts = (str(error.peer), error.label)
        return Result(rank, seq, epoch, ok=False, reason=str(error), code=PEER_LATE, parts=parts)
    reason = with_notes(error, f"{type(error).__name__}: {error}")
    return Result(rank, seq, epoch, ok=False, reason=reason, code=FAULT)


def with_notes(error: Exception, text: str) -> str:
    """`text`, and what was noted on the error's way."""
    return "; ".join((text, *getattr(error, "__notes__", ())))


def waited_for(result: Result) -> int | None:
    """The rank for which this one waited in vain; None for any other answer."""
    return int(result.parts[0]) if result.code == PEER_LATE and result.parts else None


def error_of(result: Result) -> HomeserveError:
    """The error that a result which is not `ok` stands for."""
    field, fix = result.field or None, result.fix or None
    if result.code == InvalidModelFile.code and len(result.parts) == 3:
        path, where, what = result.parts
        return InvalidModelFile(path, where, what, fix=fix)
    if result.code == UnknownArchitecture.code and result.parts:
        return UnknownArchitecture(result.parts[0], result.parts[1:])
    kind = _PLAIN.get(result.code)
    if kind is None:
        return WorkerError(f"rank {result.rank}: {result.reason}", field=field, fix=fix)
    return kind(result.reason, field=field, fix=fix)


def _parts(error: HomeserveError) -> tuple[str, ...]:
    if isinstance(error, InvalidModelFile):
        return (error.path, error.where, error.reason)
    if isinstance(error, UnknownArchitecture):
        return (error.arch, *error.known)
    return ()
