from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer.remote import states

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def test_the_page_shows_the_table() -> None:
    assert f"```mermaid\n{states.picture()}```\n" in PAGE.read_text(), f"put this into {PAGE}:\n{states.picture()}"


def test_final_states_are_those_without_a_move_and_all_others_can_end() -> None:
    words = {value for name, value in vars(states).items() if name.isupper() and isinstance(value, str)}
    assert words == set(states.MOVES)
    assert {state for state, after in states.MOVES.items() if not after} == states.FINAL
    for state in states.MOVES:
        reached = {state}
        for _ in states.MOVES:
            reached |= {after for before in reached for after in states.MOVES[before]}
        assert reached & states.FINAL


@pytest.mark.parametrize("old", states.MOVES)
def test_only_the_tables_moves_are_moves(old: str) -> None:
    for new in states.MOVES:
        if new in states.MOVES[old] or new == old:
            assert states.move(old, new) == new
        else:
            with pytest.raises(ValueError, match=f"{old} cannot become {new}"):
                states.move(old, new)
