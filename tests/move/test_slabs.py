"""Laws of the transfer planner, against an oracle that indexes the full tensor with numpy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import architecture_from_document
from reshard.formats.notation.axes import parse
from reshard.mesh.plan import Box, Layout, make_plan
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model
from reshard.move.slabs import Transfer
from reshard.placement.pieces import Piece, Spread
from tests.marks import examples

SIZES = {"kv": 6, "group": 4, "head": 4, "vocab": 13, "hidden": 5, "ff": 24, "expert": 6}
RULES = {
    "q": "(kv group head) hidden",
    "k": "(kv head) hidden",
    "o": "hidden (kv group head)",
    "embed": "vocab hidden",
    "head": "hidden -> vocab",
    "c_attn": "hidden -> (kv group head + kv head + kv head)",
    "falcon": "(kv (group + 1 + 1) head) hidden",
    "qkv": "(kv group head + kv head + kv head) hidden",
    "experts": "expert hidden -> (ff 2)",
    "down": "expert ff hidden",
    "scalar": "",
    "norm": "hidden",
    "sinks": "(kv group)",
    "empty": "hidden none",
}
MESHES = [Mesh((("tp", n),)) for n in (1, 2, 3, 4, 6, 8, 12, 24)] + [
    Mesh((("ep", e), ("tp", t))) for e in (2, 3) for t in (1, 2, 4)
]
FEW = [MESHES[1], MESHES[2], MESHES[-2]]


@pytest.fixture(scope="module")
def model() -> Model:
    document = {
        "sizes": {axis: axis for axis in SIZES} | {"none": "0"},
        "parallel": {"tp": [["kv", "group"], ["ff"], ["vocab"]], "ep": [["expert"]], "pad": ["vocab"]},
        "tensors": RULES,
    }
    architecture = architecture_from_document(document, "test", "test")
    tensors = [FullTensor(n, "F32", parse(r).sizes(SIZES | {"none": 0}), "file") for n, r in RULES.items()]
    return bind(architecture, SIZES, tensors)


def take(full: np.ndarray, box: Box) -> np.ndarray:
    """What a rank holds of a tensor, with zeros in the padding."""
    for d, runs in enumerate(box.dims):
        indices = [i for run in runs for i in range(run.offset, run.end)]
        padded = np.zeros(
            (*full.shape[:d], max([full.shape[d], *(i + 1 for i in indices)]), *full.shape[d + 1 :]), full.dtype
        )
        padded[tuple(slice(0, n) for n in full.shape)] = full
        full = np.take(padded, indices, axis=d) if indices else padded[(*[slice(None)] * d, slice(0, 0))]
    return np.ascontiguousarray(full)


def spread(layout: Layout) -> Spread:
    """What each rank has, each part in one piece."""
    pieces = {}
    for rank, box in layout.boxes.items():
        shape = [sum(run.length for run in runs) for runs in box.dims]
        strides = tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))
        pieces[rank] = (Piece(tuple(map(tuple, box.dims)), strides, 0),)
    return Spread(layout.full, tuple(range(len(layout.full))), pieces)


def raw(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def carry_out(
    transfer: Transfer, sources: list[np.ndarray], targets: list[np.ndarray], budget: int
) -> list[np.ndarray]:
    """Run all slabs in memory; how often each byte of each target was written."""
    times = [np.zeros(target.size, int) for target in targets]
    reads = [np.zeros(source.size, int) for source in sources]
    for slab in transfer.slabs(budget):
        read = []
        for r in slab.reads:
            mask = np.zeros(r.shape, int)
            for run in r.needed if r.needed is not None else [slice(None)]:
                mask[..., run if isinstance(run, slice) else slice(run.offset, run.end)] = 1
            part = sources[r.rank][r.offset : r.offset + r.nbytes].reshape(r.shape)
            reads[r.rank][r.offset : r.offset + r.nbytes] += mask.reshape(-1)
            read.append(part if r.needed is None else np.where(mask, part, 99))
        write, count = (
            [of[r.rank][r.offset : r.offset + r.nbytes].reshape(r.shape) for r in slab.writes]
            for of in (targets, times)
        )
        for c in slab.checks:
            block = read[c.source][c.source_slices] if c.source is not None else 0
            other = read[c.target][c.target_slices]
            assert np.array_equal(np.broadcast_to(block, other.shape), other)
        for c in slab.copies:
            write[c.target][c.target_slices] = 0 if c.source is None else read[c.source][c.source_slices]
            count[c.target][c.target_slices] += 1
    assert all((r <= 1).all() for r in reads), "no source byte is read twice"
    return [*times, *reads]


@examples(200)
@given(
    name=st.sampled_from(sorted(RULES)),
    before=st.sampled_from(MESHES),
    after=st.sampled_from(MESHES),
    budget=st.sampled_from([1, 64, 100, 1000, 100_000]),
    data=st.data(),
)
def test_any_mesh_to_any_mesh_equals_indexing_the_full_tensor(model, name, before, after, budget, data):
    ranks = data.draw(st.frozensets(st.integers(0, after.size - 1), min_size=1))
    if data.draw(st.booleans()):
        ranks = frozenset(range(after.size))
    check_moves(*(make_plan(model, mesh).layouts[name] for mesh in (before, after)), ranks, budget)


@pytest.mark.parametrize("after", FEW, ids=str)
@pytest.mark.parametrize("before", FEW, ids=str)
def test_these_meshes_to_each_other(model: Model, before: Mesh, after: Mesh) -> None:
    """The law above on few meshes, the same in every run."""
    plans = [make_plan(model, mesh) for mesh in (before, after)]
    for name, budget in itertools.product(RULES, (1, 100)):
        check_moves(*(plan.layouts[name] for plan in plans), frozenset(range(after.size)), budget)


def check_moves(source: Layout, target: Layout, ranks: frozenset[int], budget: int) -> None:
    """Move a tensor to some ranks, and compare with indexing the full one."""
    full = np.arange(1, 1 + int(np.prod(source.full)), dtype=np.float32).reshape(source.full)
    sources = [raw(take(full, box)) for box in source.boxes.values()]
    expected = [raw(take(full, box)) for box in target.boxes.values()]
    targets = [np.full(e.size, 255, np.uint8) for e in expected]
    counts = carry_out(Transfer(spread(source), spread(target), 32, ranks), sources, targets, budget)
    for rank in ranks:
        assert np.array_equal(targets[rank], expected[rank])
        assert (counts[rank] == 1).all(), "every target byte is written once"
    if len(ranks) == len(expected):
        assert all((count == 1).all() for count in counts[len(expected) :]), "every source byte is read once"


@given(name=st.sampled_from(sorted(RULES)), mesh=st.sampled_from(MESHES))
@examples(60)
def test_a_rank_alone_reads_only_what_it_owns(model, name, mesh):
    plan = make_plan(model, mesh)
    source, target = make_plan(model, MESHES[0]).layouts[name], plan.layouts[name]
    transfer = Transfer(spread(source), spread(target), 32, frozenset({mesh.size - 1}))
    wanted = 0
    for slab in transfer.slabs(1000):
        for r in slab.reads:
            rows = r.nbytes // r.shape[-1] if r.shape[-1] else 0
            wanted += r.nbytes if r.needed is None else rows * sum(run.length for run in r.needed)
    box = target.boxes[target.ranks - 1]
    owned = [
        sum(min(run.end, size) - run.offset for run in runs if run.offset < size)
        for runs, size in zip(box.dims, source.full, strict=True)
    ]
    assert wanted == 4 * int(np.prod(owned))


@given(name=st.sampled_from(sorted(RULES)), mesh=st.sampled_from(MESHES), budget=st.sampled_from([64, 4096]))
@examples(60)
def test_slabs_stay_within_the_budget(model, name, mesh, budget):
    layout = make_plan(model, mesh).layouts[name]
    full = make_plan(model, MESHES[0]).layouts[name]
    for before, after in ((full, layout), (layout, full)):
        every = frozenset(range(len(after.boxes)))
        transfer = Transfer(spread(before), spread(after), 32, every)
        assert all(slab.nbytes <= max(budget, len(before.boxes) + len(after.boxes)) for slab in transfer.slabs(budget))


def test_elements_that_no_source_holds_are_never_written(model):
    layout = make_plan(model, Mesh((("tp", 2),))).layouts["q"]
    half = replace(layout, boxes={0: layout.boxes[0]})
    whole = make_plan(model, Mesh()).layouts["q"]
    assert list(Transfer(spread(layout), spread(whole), 32, frozenset({0})).slabs(1000))
    with pytest.raises(PlanError, match="no source holds"):
        list(Transfer(spread(half), spread(whole), 32, frozenset({0})).slabs(1000))
