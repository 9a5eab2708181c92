"""Work that threads share."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from reshard.store.threads import share


@pytest.mark.parametrize("count", [1, 4])
def test_each_item_is_taken_once(count: int) -> None:
    found: list[int | None] = []
    items = [None, *range(100)]
    share(items, count, found.extend)
    assert sorted(found, key=str) == sorted(items, key=str)


def test_the_first_error_ends_the_others() -> None:
    taken: list[int] = []

    def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            taken.append(number)
            if number == 3:
                raise ValueError("three")
            time.sleep(0.002)

    with pytest.raises(ValueError, match="three"):
        share(range(10_000), 4, work)
    assert len(taken) < 200
