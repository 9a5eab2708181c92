"""Which tests ``make test`` leaves to ``make test-all``.

The rule: a test is thorough if it shows for one more model, mesh or moment what ``make test`` shows for one of each
kind, or if it needs several ranks, a server, a browser or an installation of its own. A law (hypothesis) is in both:
with a quarter of its examples, 25 at most, in ``make test``, with all of them in ``make test-all``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import pytest
from hypothesis import settings

thorough = pytest.mark.thorough
of_ranks = pytest.mark.usefixtures("fork_server")
"""Tests that fork processes: they come first, in as few of pytest's own processes as possible (see ``conftest.py``)."""


def one_of_each(values: Iterable[Any], kind: Callable[[Any], Hashable] = lambda _: None) -> list[Any]:
    """Cases of a test: the first of each kind, and the others as thorough ones.

    ``kind`` is given a case's arguments: one, or a tuple of several. By default all cases are of one kind.
    """
    seen: set[Hashable] = set()
    cases = []
    for value in values:
        named = hasattr(value, "marks")  # a pytest.param
        arguments = value.values if named else value
        several = arguments if isinstance(arguments, tuple) else (arguments,)
        found = kind(arguments)
        marks = thorough if found in seen else ()
        cases.append(pytest.param(*several, marks=marks, id=value.id if named else None))
        seen.add(found)
    return cases


def examples(number: int) -> settings:
    """So many examples of a law, where a law has 100 by default: ``make test`` has a quarter, and 25 at most."""
    is_quick = settings().max_examples < 100
    return settings(max_examples=max(1, min(25, number // 4)) if is_quick else number)
