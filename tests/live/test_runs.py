"""Which runs a rank holds, against brute force over lists of indices."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import Run
from reshard.formats.notation.placements import Placements, Runs, ShardedDim, cut, runs_of
from tests.marks import thorough


def indices(runs: Runs) -> list[int]:
    return [index for run in runs for index in range(run.offset, run.end)]


def chunk(things: list[int], pieces: int, index: int) -> list[int]:
    """``torch.chunk``, with empty pieces at the end."""
    each = -(-len(things) // pieces)
    return things[index * each : (index + 1) * each]


def distributed(size: int, sizes: tuple[int, ...], coordinate: tuple[int, ...], placements: Placements) -> list[int]:
    """What ``distribute_tensor`` does to one dimension."""
    found = list(range(size))
    for pieces, index, placement in zip(sizes, coordinate, placements, strict=True):
        if placement is not None:
            parts = [chunk(found, placement.parts, part) for part in range(placement.parts)]
            found = [each for part in parts for each in chunk(part, pieces, index)]
    return found


def fully_sharded(size: int, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> list[int]:
    """What ``fully_shard`` does over each dimension of the mesh to what the ones behind it have cut before."""
    found = list(range(size))
    for pieces, index in zip(reversed(sizes), reversed(coordinate), strict=True):
        found = chunk(found, pieces, index)
    return found


def ranks(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, sizes)))


meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(st.integers(0, 60), st.integers(1, 9))
def test_pieces_are_those_of_chunk(size: int, pieces: int) -> None:
    runs = (Run(2, size // 3), Run(70, size - size // 3))
    assert [indices(cut(runs, pieces, at)) for at in range(pieces)] == [
        chunk(indices(runs), pieces, at) for at in range(pieces)
    ]


@given(st.data(), st.tuples(st.integers(0, 20), st.integers(1, 20)), meshes)
def test_plain_cuts_in_the_order_of_the_mesh(
    data: st.DataObject, shape: tuple[int, int], sizes: tuple[int, ...]
) -> None:
    kinds = st.sampled_from([None, ShardedDim(0), ShardedDim(1)])
    placements = data.draw(st.lists(kinds, min_size=len(sizes), max_size=len(sizes)))
    held: list[tuple[int, int]] = []
    for coordinate in ranks(sizes):
        expected = [
            distributed(size, sizes, coordinate, [each if each and each.dim == dim else None for each in placements])
            for dim, size in enumerate(shape)
        ]
        runs = runs_of(shape, sizes, coordinate, placements, [len(each) for each in expected])
        assert [indices(dim) for dim in runs] == expected
        held += itertools.product(*expected)
    replicas = math.prod(size for size, each in zip(sizes, placements, strict=True) if each is None)
    assert sorted(held) == sorted([*itertools.product(*map(range, shape))] * replicas)


@given(st.integers(0, 60), st.integers(2, 5), st.integers(2, 5), st.integers(1, 3))
def test_fully_sharded_over_what_is_sharded(size: int, data: int, tensor: int, replicas: int) -> None:
    sizes, placements = (data, replicas, tensor), [ShardedDim(0, tensor), None, ShardedDim(0)]
    for coordinate in ranks(sizes):
        expected = fully_sharded(size, (data, tensor), (coordinate[0], coordinate[2]))
        (runs,) = runs_of([size], sizes, coordinate, placements, [len(expected)])
        assert indices(runs) == expected


@given(st.integers(0, 60), st.integers(2, 4), st.integers(2, 5))
def test_parts_that_are_cut_one_by_one(size: int, pieces: int, parts: int) -> None:
    """As transformers cuts gate and up, which are two parts of one dimension."""
    for rank in range(pieces):
        expected = distributed(size, (pieces,), (rank,), [ShardedDim(1, parts)])
        runs = runs_of([3, size], [pieces], [rank], [ShardedDim(1, parts)], [3, len(expected)])
        assert [indices(dim) for dim in runs] == [[0, 1, 2], expected]
        assert all(before.end < after.offset for before, after in itertools.pairwise(runs[1]))  # joined


def study(size: int, sizes: tuple[int, int]) -> str:
    """How the runs of a tensor fare that ``distribute_tensor`` made with the placements of ``fully_shard``."""
    placements = [ShardedDim(0, sizes[1]), ShardedDim(0)]
    truth = [distributed(size, sizes, coordinate, placements) for coordinate in ranks(sizes)]
    if truth == [fully_sharded(size, sizes, coordinate) for coordinate in ranks(sizes)]:
        return "same"
    found = [
        indices(runs_of([size], sizes, coordinate, placements, [len(own)])[0])
        for coordinate, own in zip(ranks(sizes), truth, strict=True)
    ]
    if found == truth:
        return "told apart"
    return "seen" if {index for each in found for index in each} != set(range(size)) else "silent"


def test_a_wrong_reading_never_covers_the_tensor() -> None:
    cases = itertools.product(range(1, 30), (2, 3), (2, 3, 4))
    assert {study(size, (data, tensor)) for size, data, tensor in cases} == {"same", "told apart", "seen"}


@thorough
def test_a_wrong_reading_never_covers_a_larger_tensor() -> None:
    cases = itertools.product(range(1, 130), (2, 3, 4, 5, 8), (2, 3, 4, 8))
    found = [study(size, (data, tensor)) for size, data, tensor in cases]
    assert {kind: found.count(kind) for kind in found} == {"same": 2312, "told apart": 253, "seen": 15}


def test_two_readings_that_no_rank_can_tell_apart_are_refused() -> None:
    with pytest.raises(PlanError, match=r"two readings of .*_StridedShard"):
        runs_of([13], [2, 2, 4], [0, 1, 0], [ShardedDim(0, 8), ShardedDim(0), ShardedDim(0)], [1])


def test_three_cuts_are_read_or_refused() -> None:
    found = []
    for size, coordinate in itertools.product(range(1, 30), ranks((2, 3, 2))):
        expected = fully_sharded(size, (2, 3, 2), coordinate)
        try:
            (runs,) = runs_of(
                [size], (2, 3, 2), coordinate, [ShardedDim(0, 6), ShardedDim(0, 2), ShardedDim(0)], [len(expected)]
            )
        except PlanError:
            found.append("refused")
        else:
            assert indices(runs) == expected
            found.append("read")
    assert found.count("read") > 2 * found.count("refused") > 0


def test_a_part_of_another_shape_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no reading of \[Replicate\(\), Shard\(1\)\] on a mesh 2x2 .* part \[4, 4\]"):
        runs_of([4, 6], [2, 2], [0, 1], [None, ShardedDim(1)], [4, 4])


def test_a_scalar_and_a_tensor_of_nothing() -> None:
    assert runs_of([], [2], [1], [None], []) == ()
    assert runs_of([0, 2], [2], [1], [ShardedDim(0)], [0, 2]) == ((), (Run(0, 2),))
    assert runs_of([1, 2], [2], [1], [ShardedDim(0)], [0, 2]) == ((), (Run(0, 2),))
