"""Faults for tests, as text: `rank=1,step=decode,nth=3,action=kill`. Parsed here, fired by homeserve.worker.faults.

The engine process checks the text at start and hands it to the first life of the named rank only: a fault fires once
in a fleet's whole life, so the worker that takes the dead one's place lives.

    step     load | prefill | decode: a plan that loads; one with rows that bring tokens; one with rows that continue
             draft | verify: a step of drafting; the rows of a plan that has drafts, and once more in the same plan
             before those that count are accepted
             prepare.* | commit.*: a step of a flip (homeserve.worker.flip); spill | promote: an image of weights on its
             way to the disk and back
    nth      fires on the nth such step of that worker (default 1)
    action   kill       SIGKILL to itself, before the step runs
             stop       SIGSTOP to itself, before the step runs
             refuse     the plan is answered with a reason instead of being run
             enospc     the step ends with the error of a full disk
             corrupt    the step runs, and one byte of what it made is another one: of a payload, an image, the arena;
                        of the answer, where the step makes nothing else
             delay:MS   the step starts MS milliseconds later

Drafts for tests, as text too (`LoadSpec.drafts_test`):

    wrong      every draft is another token than the one that was drafted, the least likely one, and none counts
    accept:N   exactly the first N drafts of a row count, whatever was drawn (what is answered is not the model's then,
               unless N is 0)
"""

from __future__ import annotations

from dataclasses import dataclass

from homeserve.errors import SettingError

PREPARE_STEPS = ("prepare.check", "prepare.pack", "prepare.exchange", "prepare.digest")
COMMIT_STEPS = (
    "commit.release",
    "commit.map",
    "commit.write_kv",
    "commit.write_state",
    "commit.refill",
    "commit.verify",
    "commit.rebind",
)
IMAGE_STEPS = ("spill", "promote")
STEPS = ("load", "prefill", "decode", "draft", "verify", *PREPARE_STEPS, *COMMIT_STEPS, *IMAGE_STEPS)
ACTIONS = ("kill", "stop", "refuse", "enospc", "corrupt", "delay:MS")
FORM = "rank=N,step=STEP,nth=N,action=ACTION"
DELAY_MS_MAX = 600_000


@dataclass(frozen=True)
class Fault:
    """One fault. `delay_ms` belongs to the action `delay`."""

    rank: int
    step: str
    nth: int
    action: str
    delay_ms: int = 0


@dataclass(frozen=True)
class ForcedDrafts:
    """`wrong`: other tokens than drafted. `accept`: so many drafts of a row count; None: those that were drawn."""

    wrong: bool = False
    accept: int | None = None


def parse(text: str) -> Fault | None:
    """The fault that `text` describes; None for an empty text. Raises SettingError naming what is wrong with it."""
    if not text.strip():
        return None
    given: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        if key not in ("rank", "step", "nth", "action") or key in given:
            raise _wrong(f"{part.strip()!r} is not expected here")
        given[key] = value
    if given.get("step") not in STEPS:
        raise _wrong(f"step {given.get('step')!r} is not known; known: {', '.join(STEPS)}")
    action, delay_ms = _action(given.get("action", ""))
    return Fault(
        rank=_number("rank", given.get("rank", "0"), 0, 1023),
        step=given["step"],
        nth=_number("nth", given.get("nth", "1"), 1, 2**31),
        action=action,
        delay_ms=delay_ms,
    )


def parse_drafts(text: str) -> ForcedDrafts:
    """What `text` makes of drafts; nothing for an empty one. Raises SettingError naming what is wrong with it."""
    name, _, count = text.partition(":")
    if text in ("", "wrong"):
        return ForcedDrafts(wrong=True, accept=0) if text else ForcedDrafts()
    if name == "accept" and count.isascii() and count.isdigit() and len(count) <= 4:
        return ForcedDrafts(accept=int(count))
    raise SettingError(
        f"drafts for tests: {text!r} is not known", field="drafts_test", fix="write it as wrong or accept:N"
    )


def _action(text: str) -> tuple[str, int]:
    name, colon, argument = text.partition(":")
    if name == "delay" and colon:
        return name, _number("delay", argument, 0, DELAY_MS_MAX)
    if text not in ACTIONS or colon:
        raise _wrong(f"action {text!r} is not known; known: {', '.join(ACTIONS)}")
    return name, 0


def _number(what: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
        raise _wrong(f"{what} {text!r} is not a number from {low} to {high}")
    return int(text)


def _wrong(what: str) -> SettingError:
    return SettingError(f"fault: {what}", field="fault", fix=f"write it as {FORM}")
