"""docs/FLIP.md says what the code does: the table of states, the routes' codes, the metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from homeserve.engine.flip import TABLE, TOLD, FlipAction, FlipEvent, FlipState

PAGE = Path(__file__).parents[2] / "docs" / "FLIP.md"
COLUMNS = (
    FlipEvent.ASK, FlipEvent.DRAINED, FlipEvent.MISFIT, FlipEvent.YES, FlipEvent.NO, FlipEvent.EXPIRED, FlipEvent.LOST,
)  # fmt: skip


def rows() -> dict[str, list[str]]:
    """State -> the cells behind it."""
    text = PAGE.read_text().partition("## States")[2].partition("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells[2:]}


def said(state: FlipState, event: FlipEvent) -> str:
    """The cell that the page has to have."""
    to, action = TABLE[state, event]
    match action:
        case FlipAction.NEVER:
            return ""
        case FlipAction.REFUSE:
            return "refused"
        case FlipAction.NOTHING:
            return "goes on"
        case FlipAction.LOSE:
            return "life ends, abandoned"
        case FlipAction.FINISH:
            return "→ idle, committed"
        case FlipAction.GIVE_UP:
            return "→ idle, abandoned"
    return f"→ {to.value}"


@pytest.mark.parametrize("state", list(FlipState), ids=lambda state: state.value)
def test_the_page_has_the_table_of_states(state: FlipState) -> None:
    told, *cells = rows()[state.value]
    assert cells == [said(state, event) for event in COLUMNS]
    assert told == ("" if state is FlipState.IDLE else TOLD.get(state, state.value))


def test_the_page_names_every_state_and_no_other() -> None:
    assert list(rows()) == [state.value for state in FlipState]


def test_the_page_names_the_codes_of_a_refusal() -> None:
    text = PAGE.read_text()
    for code in ("flip_running", "already_there", "single_rank", "flip_off", "not_ready", "does_not_fit", "bad_target"):
        assert re.search(rf"`{code}`", text), code
