"""However many floods there are, the queue is not full for the next tenant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift_engine.queue_room import tenants_room


@given(st.integers(1, 2000), st.integers(1, 50))
def test_floods_never_fill_the_queue_and_one_fills_most_of_it(
    max_waiting: int, num_floods: int
) -> None:
    waiting = [0] * num_floods
    while any(own + 1 <= tenants_room(max_waiting, sum(waiting)) for own in waiting):
        smallest = min(range(num_floods), key=lambda i: waiting[i])
        waiting[smallest] += 1
    num_left = max_waiting - sum(waiting)
    assert num_left >= 0
    if max_waiting >= 9 * num_floods:
        assert num_left >= 1
    if num_floods == 1:
        assert sum(waiting) >= max_waiting * 7 // 9


def test_a_full_queue_has_room_for_nobody() -> None:
    assert tenants_room(10, 10) == tenants_room(10, 11) == 0
