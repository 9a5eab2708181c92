"""Where a part of a tensor lies in it: in rows of equal length, at equal distances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Rows(NamedTuple):
    """Rows of ``inner`` bytes; each begins ``stride`` bytes behind the one before."""

    inner: int
    stride: int

    def ranges(self, offset: int, begin: int, length: int) -> Iterator[tuple[int, int, int]]:
        """The ranges that bytes ``begin`` to ``begin + length`` of the rows take, the first of which is at ``offset``.

        Yields the offset of each, its place among these bytes, and its length.
        """
        done = 0
        while done < length:
            row, within = divmod(begin + done, self.inner)
            count = min(self.inner - within, length - done)
            yield offset + row * self.stride + within, done, count
            done += count


class Lies(NamedTuple):
    """Where a part lies in a tensor: from byte ``base`` on, in one piece or in ``rows``."""

    base: int
    rows: Rows | None
