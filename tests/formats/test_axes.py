"""Laws of the notation: an oracle lays out the full tensor's indices with numpy, and every operation must agree with
it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.formats.errors import NotationError
from reshard.formats.notation.axes import (
    Dim,
    Run,
    Shape,
    Share,
    Summand,
    deal,
    degrees,
    encloses,
    merge_runs,
    owned,
    parse,
    segments,
    share,
    unit_of,
)

AXES = ("kv", "group", "head", "ff", "vocab")

factors = st.deferred(lambda: st.one_of(st.sampled_from(AXES), st.integers(1, 3), sums(2)))


def sums(max_summands: int) -> st.SearchStrategy[Dim]:
    summands = st.lists(factors, min_size=1, max_size=3).map(lambda fs: Summand(tuple(fs)))
    return st.lists(summands, min_size=1, max_size=max_summands).map(lambda bs: Dim(tuple(bs)))


dims = sums(3)
sizes = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4, 6]) for axis in AXES})
small = st.fixed_dictionaries({axis: st.sampled_from([1, 2, 3, 4]) for axis in AXES})


def dealt(indices: list[int], share: Share) -> list[int]:
    """A share of a list: of its elements or, in units, of a list of lists of them, handed out as a pack of cards."""
    unit = share.unit or 1
    units = [indices[start : start + unit] for start in range(0, len(indices), unit)]
    each = math.ceil(len(units) / share.parts)
    hands = [units[start : start + each] for start in range(0, len(units), each)]
    return [index for hand in hands[share.index : share.index + 1] for unit in hand for index in unit]


def oracle(dim: Dim, sizes: dict[str, int], shares: dict[str, Share]) -> list[int]:
    """The owned indices, by enumerating every index of every factor."""
    found: list[int] = []
    start = 0
    for summand in dim.summands:
        indices = np.zeros(1, dtype=np.int64)
        size = 1
        for factor in summand.factors:
            if isinstance(factor, Dim):
                own, length = oracle(factor, sizes, shares), factor.size(sizes)
            else:
                length = factor if isinstance(factor, int) else sizes[factor]
                own = list(range(length))
                if isinstance(factor, str) and factor in shares:
                    own = dealt(own, shares[factor])
            indices = (indices[:, None] * length + np.array(own, dtype=np.int64)[None, :]).reshape(-1)
            size *= length
        found += (start + indices).tolist()
        start += size
    return found


def draw_shares(data, sizes: dict[str, int], *, empty: bool = True) -> dict[str, Share]:
    """For each axis equal parts, or parts in units; without ``empty``, of a rank that has some of each."""
    shares = {}
    for axis in AXES:
        unit = data.draw(st.none() | st.integers(1, 4))
        possible = [p for p in range(1, sizes[axis] + 2) if unit or sizes[axis] % p == 0]
        parts = data.draw(st.sampled_from(possible))
        hands = [Share(parts, index, unit) for index in range(parts)]
        shares[axis] = data.draw(st.sampled_from([of for of in hands if empty or of.run(sizes[axis]).length]))
    return shares


def expand(runs: tuple[Run, ...]) -> list[int]:
    return [index for run in runs for index in range(run.offset, run.end)]


@given(dims, sizes, st.data())
def test_owned_runs_are_those_of_the_enumeration(dim, sizes, data):
    shares = draw_shares(data, sizes)
    assume(dim.size(sizes) < 5000)
    runs = owned(dim, sizes, shares)
    assert expand(runs) == oracle(dim, sizes, shares)
    assert all(a.end < b.offset for a, b in itertools.pairwise(runs)), "runs are maximal and increasing"


counted = st.tuples(dims, st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 3), (8, 3), (3, 2)])).map(
    lambda pair: replace(pair[0], step=pair[1][0], per=pair[1][1])
)


def places(dim: Dim, sizes: dict[str, int]) -> list[int]:
    """The index of which each place of a dimension in blocks keeps the first bit, where all indices have as many."""
    size = dim.whole.size(sizes)
    return [place * dim.step // dim.per for place in range(-(-size * dim.per // dim.step))]


@given(counted, sizes, st.data())
def test_blocks_are_owned_whole_or_refused(dim, sizes, data):
    """A rank owns the places that keep its indices; refused is what leaves a block to two, or in two pieces."""
    assume(dim.whole.size(sizes) < 5000)
    shares = draw_shares(data, sizes)
    indices, size = set(oracle(dim.whole, sizes, shares)), dim.whole.size(sizes)
    blocks = [set(range(first, min(first + dim.step, size))) for first in range(0, size, dim.step)]
    cut = [block for block in blocks if block & indices not in (set(), block)]
    assert dim.size(sizes) == len(places(dim, sizes))
    if cut:
        with pytest.raises(NotationError, match=f"cut a block of {dim.step}"):
            owned(dim, sizes, shares)
    else:
        expected = [place for place, index in enumerate(places(dim, sizes)) if index in indices]
        assert expand(owned(dim, sizes, shares)) == expected


@given(st.lists(st.sampled_from(AXES), min_size=1, max_size=2), counted, sizes, st.data())
def test_blocks_of_a_part_of_its_own_begin_anew_with_each_repetition(outer, part, sizes, data):
    """``(kv [q + k])/128`` is owned as ``(q + k)/128`` of each kv that is owned."""
    whole = Dim((Summand((*outer, replace(part.whole, apart=True))),))
    assume(whole.size(sizes) < 5000)
    dim, shares = whole.in_blocks(part.step, part.per), draw_shares(data, sizes)
    repeated = oracle(Dim((Summand((*outer, 1)),)), sizes, shares)
    assert dim.whole == whole and dim.counted == (part.step, part.per)
    try:
        each = expand(owned(part, sizes, shares))
    except NotationError:
        with pytest.raises(NotationError, match="cut a block"):
            owned(dim, sizes, shares)
        return
    length = part.size(sizes)
    assert dim.size(sizes) == math.prod(sizes[axis] for axis in outer) * length
    assert expand(owned(dim, sizes, shares)) == [index * length + place for index in repeated for place in each]
    assert str(parse(str(dim))) == str(dim)


rows = st.lists(dims, min_size=2, max_size=3).map(lambda ds: Dim((Summand(tuple(ds)),)))


@given(rows, st.sampled_from([(1, 1), (2, 1), (4, 1), (4, 3)]), small, st.data())
def test_a_row_unfolded_is_the_same_elements_in_the_same_order(row, counted, sizes, data):
    step, per = counted
    dim = replace(row, step=step, per=per)
    assume(dim.whole.size(sizes) < 1500)
    unfolded, shares = dim.unfolded(sizes), draw_shares(data, sizes, empty=False)  # nothing is refused before
    lengths = [found.size(sizes) for found in unfolded]
    assert math.prod(lengths) == dim.size(sizes)
    last = row.summands[0].factors[-1]
    assert len(unfolded) == (len(row.summands[0].factors) if last.size(sizes) % step == 0 else 1)
    try:
        expected = expand(owned(dim, sizes, shares))
    except NotationError:
        with pytest.raises(NotationError):
            [owned(part, sizes, shares) for part in unfolded]
        return
    found = [expand(owned(part, sizes, shares)) for part in unfolded]
    assert np.ravel_multi_index(np.ix_(*found), lengths).reshape(-1).tolist() == expected


def test_what_is_not_a_row_of_dimensions_is_not_unfolded():
    sizes = dict.fromkeys(AXES, 4)
    for text in ("ff/2", "(kv head)/2", "(kv (group + 1))/2", "((kv head) + (ff head))/2"):
        (dim,) = parse(text).dims
        assert dim.unfolded(sizes) == (dim,)
    shape = parse("((kv group) (ff head))/8 -> head")
    assert str(shape.unfolded(sizes)) == "(kv group) (ff head)/8 -> head"
    assert shape.unfolded({**sizes, "ff": 3}) is shape


@given(st.lists(counted, min_size=1, max_size=3), st.integers(0, 3))
def test_text_and_back(dims, arrow):
    shape = Shape(tuple(dims), arrow if 0 < arrow < len(dims) else None)
    again = parse(str(shape))
    assert str(again) == str(shape)
    assert again.sizes(dict.fromkeys(AXES, 3)) == shape.sizes(dict.fromkeys(AXES, 3))


@given(sizes, st.data())
def test_every_element_is_owned_and_ranks_share_only_whole_replicas(sizes, data):
    family = ("kv", "group")
    degree = data.draw(st.sampled_from([n for n in range(1, 49) if deal(family, sizes, n) is not None]))
    parts = deal(family, sizes, degree)
    assert parts is not None
    assert math.prod(parts.values()) == degree
    query, key = parse("(kv group head)").dims[0], parse("(kv head)").dims[0]
    owners: dict[int, list[int]] = {}
    for rank in range(degree):
        shares = share(parts, rank)
        q, k = expand(owned(query, sizes, shares)), expand(owned(key, sizes, shares))
        for index in q:
            owners.setdefault(index, []).append(rank)
        kv_of_q = {index // (sizes["group"] * sizes["head"]) for index in q}
        assert kv_of_q == {index // sizes["head"] for index in k}, "a query head sits with its KV head"
        assert all(sum(i // sizes["head"] == h for i in q) == sizes["head"] for h in {i // sizes["head"] for i in q}), (
            "no head is cut"
        )
    assert sorted(owners) == list(range(query.size(sizes)))
    assert all(len(ranks) == 1 for ranks in owners.values())


@given(st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True), sizes)
def test_degrees_are_exactly_those_that_can_be_dealt(family, sizes):
    valid = degrees(family, sizes, 10**6)
    most = math.prod(sizes[axis] for axis in family)
    assert valid == {d for d in range(1, most + 2) if deal(family, sizes, d) is not None}
    assert 1 in valid and most in valid


def test_uneven_kv_and_tp():
    assert deal(["kv", "group"], {"kv": 6, "group": 4}, 4) == {"kv": 2, "group": 2}
    assert deal(["kv", "group"], {"kv": 6, "group": 1}, 4) is None
    assert deal(["kv", "group"], {"kv": 2, "group": 8}, 8) == {"kv": 2, "group": 4}


def test_first_axis_is_slowest():
    parts = {"kv": 2, "group": 2}
    assert [share(parts, rank)["kv"].index for rank in range(4)] == [0, 0, 1, 1]
    assert [share(parts, rank)["group"].index for rank in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "sizes", "shares", "expected"),
    [
        # GPT-2: each block of q, k, v is dealt on its own
        (
            "(kv head + kv head + kv head)",
            {"kv": 4, "head": 2},
            {"kv": Share(2, 1)},
            [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23],
        ),
        # GPT-NeoX: q, k, v of a head lie together
        ("(kv 3 head)", {"kv": 4, "head": 2}, {"kv": Share(2, 1)}, list(range(12, 24))),
        # Falcon: KV heads used up, the query heads of a group are dealt, k and v replicated
        (
            "(kv (group + 1 + 1) head)",
            {"kv": 1, "group": 2, "head": 2},
            {"kv": Share(1, 0), "group": Share(2, 1)},
            [2, 3, 4, 5, 6, 7],
        ),
        # gpt-oss: gate and up interleaved
        ("(ff 2)", {"ff": 4}, {"ff": Share(2, 1)}, [4, 5, 6, 7]),
        # scales for blocks of 2 rows, the last one short
        ("ff/2", {"ff": 6}, {"ff": Share(3, 2)}, [2]),
        ("ff/4", {"ff": 6}, {}, [0, 1]),
        # of two parts of 3 rows each, with blocks of 2: two blocks each, the second of one row
        ("(kv [head])/2", {"kv": 2, "head": 3}, {"kv": Share(2, 1)}, [2, 3]),
        ("(kv [group head + 1])/2", {"kv": 2, "group": 2, "head": 2}, {"group": Share(2, 1)}, [1, 2, 4, 5]),
        # 4 values of 6 bits in three bytes
        ("ff*3/4", {"ff": 8}, {"ff": Share(2, 1)}, [3, 4, 5]),
        ("ff*3/4", {"ff": 6}, {}, [0, 1, 2, 3, 4]),
    ],
)
def test_known_layouts(text, sizes, shares, expected):
    assert expand(owned(parse(text).dims[0], sizes, shares)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("(kv head", "not closed"),
        ("kv head)", "stands where an axis"),
        ("(kv [head + ff)", "stands where an axis"),
        ("(kv [head + ff", "a bracket is not closed"),
        ("[kv head]", "stands where an axis"),
        ("([head] kv)", "square brackets stand once, around the last factor"),
        ("(kv [head] + kv [ff])", "square brackets stand once"),
        ("(kv [group [head]])", "square brackets stand once"),
        ("(kv (group [head]))", "square brackets stand once"),
        ("(kv [group] [head])", "square brackets stand once"),
        ("(kv + )", "nothing stands before ')'"),
        ("( )", "nothing stands before ')'"),
        ("kv * head", "'/' stands between"),
        ("kv % head", "cannot read '% head'"),
        ("ff*3", "'/' stands between"),
        ("ff*3/", "'/' stands between"),
        ("ff*3 32", "'/' stands between"),
        ("ff*0/32", "'/' stands between"),
        ("ff/32*3", "'/' stands between"),
        ("ff/0", "'/' stands between"),
        ("*3/32", "'/' stands between"),
        ("-> hidden", "an arrow stands once"),
        ("hidden ->", "an arrow stands once"),
        ("a -> b -> c", "an arrow stands once"),
        ("(kv q: head)", "a label stands at the start"),
        ("0 hidden", "a size of 0"),
        ("/8", "'/' stands between"),
        ("ff/ff", "'/' stands between"),
        ("... ff ...", "'...' stands once"),
        ("(... ff)", "'...' stands where an axis"),
    ],
)
def test_bad_notation_is_refused_with_its_text(text, complaint):
    with pytest.raises(NotationError) as error:
        parse(text)
    assert complaint in error.value.message
    assert text in error.value.message


def test_labels_change_nothing():
    plain, labelled = parse("(kv (group + 1 + 1) head) hidden"), parse("(kv (q: group + k: 1 + v: 1) head) hidden")
    sizes = {"kv": 2, "group": 3, "head": 4, "hidden": 5}
    assert plain.sizes(sizes) == labelled.sizes(sizes) == (40, 5)
    assert "q: group" in str(labelled)


@given(st.lists(st.integers(0, 5), max_size=4), sizes)
def test_an_open_shape_is_any_shape_and_owned_whole(lengths, sizes):
    shape = parse("...")
    assert parse(str(shape)) == shape and shape != parse("")
    closed = shape.closed(lengths)
    assert closed.sizes({}) == tuple(lengths) and not closed.axes
    shares = {axis: Share(size, size - 1) for axis, size in sizes.items()}
    for dim, length in zip(closed.dims, lengths, strict=True):
        assert expand(owned(dim, sizes, shares)) == list(range(length))
    assert parse("ff 3").closed(lengths) == parse("ff 3"), "only an open shape is what one finds"


@pytest.mark.parametrize(
    ("text", "lengths", "expected"),
    [
        ("... -> ff", (7, 12), "7 -> ff"),
        ("... ff", (7, 3, 12), "7 3 ff"),
        ("ff ...", (12,), "ff"),
        ("ff -> ... hidden", (12, 3, 5), "ff -> 3 hidden"),
        ("expert ... -> ff", (2, 3, 4, 12), "expert 3 4 -> ff"),
        ("ff ... hidden", (12,), "ff hidden"),
    ],
)
def test_an_open_shape_leaves_room_beside_what_it_names(text, lengths, expected):
    assert str(parse(text)) == text
    assert parse(text).closed(lengths) == parse(expected)


def test_output_dimension():
    assert parse("ff hidden").output_dim == 0
    assert parse("hidden -> ff").output_dim == 1
    assert parse("expert hidden -> (ff 2)").output_dim == 2
    assert parse("expert ff hidden").output_dim == 1
    assert parse("hidden").output_dim is None


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ("ff hidden", {1}),
        ("1 hidden", {1}),
        ("hidden -> ff", {0}),
        ("expert hidden -> (ff 2)", {0, 1}),
        ("expert ff hidden", {2}),
        ("channels hidden 3", {1}),
        ("channels hidden 3 3", {1}),
        ("hidden 1 tap", {2}),
        ("1 1 head 1", set()),  # a number for each head, whatever else is around it
        ("head 1 1", set()),
        ("hidden", set()),
    ],
)
def test_input_dimensions(shape, dims):
    assert parse(shape).input_dims == dims


def test_an_axis_without_size_and_a_cut_block_are_named():
    with pytest.raises(NotationError, match="axis 'ff' has no size"):
        parse("ff").sizes({})
    with pytest.raises(NotationError, match="rows 0 to 3 of 'ff' cut a block of 2"):
        owned(parse("ff/2").dims[0], {"ff": 6}, {"ff": Share(2, 0)})
    with pytest.raises(NotationError, match="axis 'ff' of size 6 does not divide into 4"):
        owned(parse("ff").dims[0], {"ff": 6}, {"ff": Share(4, 0)})


@given(st.integers(1, 400), st.integers(1, 40), st.integers(1, 12))
def test_units_go_to_the_ranks_in_order_and_as_many_to_each_as_to_the_first(size, unit, parts):
    runs = [Share(parts, index, unit).run(size) for index in range(parts)]
    assert expand(tuple(runs)) == list(range(size)), "in order, each once"
    assert all(run.offset % unit == 0 for run in runs if run.length), "no unit is cut"
    units = [-(-run.length // unit) for run in runs]
    assert units[0] == math.ceil(math.ceil(size / unit) / parts)
    assert all(more == units[0] or not less for more, less in itertools.pairwise(units)), "only the last one is short"


@given(st.integers(1, 12), st.integers(1, 30), st.integers(1, 30))
def test_units_that_divide_are_equal_parts(parts, units, unit):
    """What can be dealt evenly is dealt the same way in units."""
    size = parts * units * unit
    for index in range(parts):
        assert Share(parts, index, unit).run(size) == Share(parts, index).run(size)


counted_once = st.tuples(
    st.lists(st.integers(1, 6), max_size=2), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 32]), st.integers(1, 3)
)


@given(counted_once, st.integers(1, 40))
def test_a_unit_is_the_least_that_cuts_no_block(counted, boundary):
    """With plain numbers behind the axis, a cut falls between blocks where it falls between units, and nowhere else."""
    numbers, step, per = counted
    dim = Dim((Summand(("ff", *numbers)),), step, per)
    sizes, shares = {"ff": 2 * boundary}, {"ff": Share(2, 0)}
    if boundary % unit_of(dim, "ff", sizes):
        with pytest.raises(NotationError, match=f"cut a block of {step}"):
            owned(dim, sizes, shares)
    else:
        owned(dim, sizes, shares)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("ff", 1),
        ("ff/32", 32),
        ("(ff 2)/128", 64),
        ("(gate: ff + up: ff)/128", 128),
        ("ff*3/32", 32),
        ("(ff (head group))/64", 16),
        ("(kv head)/8", 1),
        ("(ff + 3 (ff 4))/8", 8),
    ],
)
def test_the_unit_that_a_dimension_needs(text, unit):
    (dim,) = parse(text).dims
    assert unit_of(dim, "ff", {"ff": 90, "head": 6, "group": 2, "kv": 4}) == unit


@pytest.mark.parametrize(
    ("text", "enclosing"),
    [
        ("(kv group head)", {"kv", "group"}),
        ("(heads (nope + rope))", {"heads"}),
        ("(kv (group + 1 + 1) head)", {"kv", "group"}),
        ("(expert ff)", {"expert"}),
        ("(ff 2)", set()),
        ("(gate: ff + up: ff)", set()),
        ("((kv group) head + ff)", {"kv", "group"}),
        ("((kv head) ff)", {"kv", "head"}),
    ],
)
def test_axes_that_enclose_others(text, enclosing):
    (dim,) = parse(text).dims
    assert {axis for axis in dim.axes if encloses(dim, axis)} == enclosing


@given(st.dictionaries(st.integers(0, 4), st.sets(st.integers(0, 11))), st.sets(st.integers(0, 12)))
def test_segments_have_the_same_holders_throughout(held: dict[int, set[int]], ends: set[int]) -> None:
    runs = {holder: [Run(index, 1) for index in sorted(of)] for holder, of in held.items()}
    parts = [*segments({holder: [*merge_runs(of)] for holder, of in runs.items()}, ends)]
    for run, holders in parts:
        assert run.length > 0 and all({h for h in held if i in held[h]} == holders for i in range(run.offset, run.end))
    covered = [i for run, _ in parts for i in range(run.offset, run.end)]
    assert covered == sorted(covered) and set(covered) >= set().union(*held.values())
    assert ends <= {edge for run, _ in parts for edge in (run.offset, run.end)} or len(ends) == 1
