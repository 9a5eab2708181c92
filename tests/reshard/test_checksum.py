from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.checksum import PartialSum, combine, file_checksum


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combine_is_the_crc_of_the_concatenation(first, second):
    assert combine(crc32(first), crc32(second), len(second)) == crc32(first + second)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=8), st.randoms())
def test_parts_in_any_order(parts, random):
    whole = b"".join(parts)
    places, offset = [], 0
    for part in parts:
        places.append((offset, part))
        offset += len(part)
    random.shuffle(places)
    total = PartialSum(len(whole))
    complete = [total.add(offset, len(part), crc32(part)) for offset, part in places]
    assert complete == [False] * (len(parts) - 1) + [True]
    assert total.is_complete
    assert total.value() == f"{crc32(whole):08x}"


def test_a_gap_is_an_error():
    total = PartialSum(10)
    total.add(0, 4, 1)
    with pytest.raises(RuntimeError, match="do not cover its 10 bytes: 0 to 4"):
        total.value()
    total.add(6, 4, 1)
    with pytest.raises(RuntimeError, match="0 to 4, 6 to 10"):
        total.value()


def test_file(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * 3_000_000)
    assert file_checksum(tmp_path / "f") == f"{crc32(b'x' * 3_000_000):08x}"
