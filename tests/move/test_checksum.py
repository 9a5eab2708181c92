from __future__ import annotations

import itertools
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.formats.files.checksum import PIECE, WIDTH, PartialSum, checksum, file_checksum, sum_part


def definition(content: bytes) -> str:
    """The checksum as its module's first lines define it, word by word."""
    words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, len(content), 8)]
    sums = [sum(words[column::1021]) for column in range(1021)] + [len(content)]
    return blake2b(b"".join((s % 2**64).to_bytes(8, "little") for s in sums), digest_size=8).hexdigest()


def content(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 8 * WIDTH, 8 * WIDTH + 1, 8 * WIDTH * 3 - 5, 50_001])
def test_definition(size):
    assert checksum([content(size)]) == definition(content(size))


@given(st.integers(1, 60_000), st.lists(st.integers(0, 60_000), max_size=6), st.randoms())
def test_parts_in_any_order(size, cuts, random):
    whole = content(size)
    bounds = sorted({0, size, *(cut for cut in cuts if cut < size)})
    places = list(itertools.pairwise(bounds))
    random.shuffle(places)
    one, other = PartialSum(size), PartialSum(size)
    for place, (a, b) in enumerate(places):
        assert not one.is_complete and not other.is_complete
        (one if place % 2 else other).add(a, b - a, sum_part(whole[a:b], a))
    one.merge(other)
    assert one.is_complete
    assert one.value() == definition(whole)


def test_a_part_is_the_same_wherever_words_begin_alike():
    whole = content(5000)
    part = sum_part(whole, 3)
    assert part.fits(11) and not part.fits(4)
    total = PartialSum(8203)
    total.add(0, 3203, None)
    total.add(3203, 5000, part)
    assert total.value() == definition(bytes(3203) + whole)


def test_what_is_missing_is_an_error():
    total = PartialSum(10)
    total.add(0, 4, sum_part(b"1234", 0))
    with pytest.raises(RuntimeError, match="4 of the 10 bytes"):
        total.value()


SIZE = 50_000


@given(st.sets(st.integers(0, 64 * WIDTH - 1), min_size=1, max_size=20), st.integers(0, SIZE - 8 * WIDTH))
def test_whatever_changes_within_one_row_of_columns_is_seen(bits, place):
    damaged = bytearray(content(SIZE))
    for bit in bits:
        damaged[place // 8 * 8 + bit // 8] ^= 1 << bit % 8
    assert checksum([bytes(damaged)]) != checksum([content(SIZE)])


@pytest.mark.parametrize("distance", [512, 4096, 8 * (WIDTH - 1), 8 * (WIDTH + 1), 8192])
def test_two_signs_flipped_are_seen(distance):
    """The highest bits of two words are those that their sum loses."""
    damaged = bytearray(content(SIZE))
    damaged[7] ^= 0x80
    damaged[7 + distance] ^= 0x80
    assert checksum([bytes(damaged)]) != checksum([content(SIZE)])


@given(st.sets(st.integers(0, SIZE * 8 - 1), min_size=1, max_size=3))
def test_flipped_bits_are_seen(bits):
    assume(len({bit // 64 % WIDTH for bit in bits}) == len(bits))
    damaged = bytearray(content(SIZE))
    for bit in bits:
        damaged[bit // 8] ^= 1 << bit % 8
    assert checksum([bytes(damaged)]) != checksum([content(SIZE)])


@given(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1), st.integers(1, SIZE))
def test_exchanged_blocks_are_seen(first, second, size):
    first, second = sorted((first, second))
    assume((second - first) % (8 * WIDTH))
    size = min(size, second - first, SIZE - second)
    whole = content(SIZE)
    one, other = whole[first : first + size], whole[second : second + size]
    moved = whole[:first] + other + whole[first + size : second] + one + whole[second + size :]
    assert (checksum([moved]) == checksum([whole])) == (one == other)


@pytest.mark.parametrize("size", [0, 5, PIECE, PIECE + 3])
def test_file(tmp_path, size):
    (tmp_path / "f").write_bytes(content(size))
    assert file_checksum(tmp_path / "f") == checksum([content(size)])
