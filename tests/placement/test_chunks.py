"""The algebra of chunks: runs of products, and chunks that have each element of a tensor once."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import MismatchError
from reshard.formats.files.chunks import Chunk, check_tiling, whole_shape
from reshard.formats.notation.axes import Run, product_runs


@st.composite
def factors(draw: st.DrawFn) -> list[tuple[list[Run], int]]:
    found = []
    for size in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        kept = draw(st.sets(st.integers(0, size - 1), min_size=1))
        runs = [Run(index, 1) for index in sorted(kept)]
        found.append(([Run(0, size)] if len(kept) == size else runs, size))
    return found


@given(factors())
def test_the_runs_of_a_product_have_its_elements(of: list[tuple[list[Run], int]]) -> None:
    sizes = [size for _, size in of]
    numbers = np.arange(np.prod(sizes)).reshape(sizes)
    kept = [[index for run in runs for index in range(run.offset, run.end)] for runs, _ in of]
    wanted = numbers[np.ix_(*kept)].ravel().tolist()
    assert [index for run in product_runs(of) for index in range(run.offset, run.end)] == wanted


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3), st.randoms())
def test_only_chunks_that_have_each_element_once_tile(cuts: list[list[int]], random) -> None:
    ends = [[0, *itertools.accumulate(lengths)] for lengths in cuts]
    runs = [[(first, end - first) for first, end in itertools.pairwise(dim)] for dim in ends]
    chunks = {i: Chunk(*zip(*each, strict=True)) for i, each in enumerate(itertools.product(*runs))}
    shape = tuple(dim[-1] for dim in ends)
    assert whole_shape(chunks.values()) == shape
    check_tiling("t", chunks, shape, Path("folder"))
    twice = {**chunks, **{len(chunks) + i: chunk for i, chunk in chunks.items()}}
    check_tiling("t", twice, shape, Path("folder"))  # copies are compared as they are read
    if len(chunks) > 1:
        with pytest.raises(MismatchError):
            check_tiling("t", {**chunks, len(chunks): random.choice(chunks)}, shape, Path("folder"))
        del chunks[random.randrange(len(chunks))]
        with pytest.raises(MismatchError):
            check_tiling("t", chunks, shape, Path("folder"))
