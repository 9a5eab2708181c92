"""Which ranks of a mesh differ along which of its dimensions."""

from __future__ import annotations

import pytest

from formats.mesh import Mesh

PLANE = Mesh((("ep", 2), ("tp", 3)))
SAME = Mesh((("tp", 4), ("ep", 4)), same_ranks=True)


def test_dimensions_are_those_along_which_ranks_differ() -> None:
    assert PLANE.dimensions == ("ep", "tp")
    assert Mesh((("ep", 1), ("tp", 4))).dimensions == ("tp",)
    assert SAME.dimensions == ("tp",), "one stands for both"
    assert Mesh().dimensions == ()


@pytest.mark.parametrize(
    ("rank", "along", "peers"),
    [
        (4, {"tp"}, (3, 4, 5)),
        (4, {"ep"}, (1, 4)),
        (4, {"ep", "tp"}, (0, 1, 2, 3, 4, 5)),
        (4, set(), (4,)),
    ],
)
def test_peers_differ_along_these_dimensions_alone(rank: int, along: set[str], peers: tuple[int, ...]) -> None:
    assert PLANE.peers(rank, along) == peers


def test_over_the_same_ranks_all_are_peers() -> None:
    assert SAME.peers(2, {"tp"}) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("held", "along"),
    [("aaaaaa", set()), ("abcabc", {"tp"}), ("aaabbb", {"ep"}), ("abcdef", {"ep", "tp"}), ("aaaaab", {"ep", "tp"})],
)
def test_what_varies_along_which_dimension(held: str, along: set[str]) -> None:
    assert PLANE.varying(held) == along
    assert SAME.varying("abcd") == {"tp"} and SAME.varying("aaaa") == set()
