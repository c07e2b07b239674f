from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from epp.kvcache.tokens.growing import GrowingIds
from epp.kvcache.tokens.pieces import Ids


def ids(*values: int) -> Ids:
    return np.array(values, dtype=np.uint32)


def test_a_continuation_lies_behind_what_it_continues() -> None:
    buffer = GrowingIds([ids(1, 2), ids(3)])
    again, length = buffer.continued(3, 2, [ids(3, 4), ids(5)])
    assert again is buffer
    assert (length, buffer.view(5).tolist(), buffer.view(3).tolist()) == (5, [1, 2, 3, 4, 5], [1, 2, 3])


def test_an_end_that_changes_and_a_second_continuation_get_their_own() -> None:
    buffer = GrowingIds([ids(1, 2, 3)])
    changed, length = buffer.continued(3, 2, [ids(9, 4)])
    assert changed is not buffer
    assert changed.view(length).tolist() == [1, 2, 9, 4]
    buffer.continued(3, 3, [ids(4)])
    other, length = buffer.continued(3, 3, [ids(5)])
    assert other is not buffer
    assert (other.view(length).tolist(), buffer.view(4).tolist()) == ([1, 2, 3, 5], [1, 2, 3, 4])


def test_without_room_it_moves_and_a_shorter_end_is_a_copy() -> None:
    buffer = GrowingIds([ids(1)], room=0)
    moved, length = buffer.continued(1, 1, [np.arange(1000, dtype=np.uint32)])
    assert moved is not buffer
    assert length == 1001
    cut, length = moved.continued(1001, 1, [])
    assert (cut is moved, cut.view(length).tolist()) == (False, [1])


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.lists(st.integers(0, 3), max_size=6)), max_size=40))
def test_every_view_ever_given_stays_what_it_was(steps: list[tuple[int, int, list[int]]]) -> None:
    turns: list[tuple[GrowingIds, list[int]]] = [(GrowingIds([ids(1, 2)]), [1, 2])]
    for which, dropped, new in steps:
        buffer, values = turns[which % len(turns)]
        kept = max(len(values) - dropped, 0)
        continued, length = buffer.continued(len(values), kept, [ids(*new)])
        assert length == kept + len(new)
        turns.append((continued, values[:kept] + new))
        for each, expected in turns:
            assert each.view(len(expected)).tolist() == expected
