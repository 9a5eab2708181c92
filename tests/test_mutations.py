"""The lines that ``make mutants`` changes are there, each once."""

from __future__ import annotations

from benchmarks.mutations import MUTATIONS, ROOT, place_of


def test_each_mutation_has_its_line() -> None:
    """``place_of`` raises ValueError for one that has not."""
    assert len({(place_of(mutation, ROOT), mutation.old, mutation.new) for mutation in MUTATIONS}) == len(MUTATIONS)
