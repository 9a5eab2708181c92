"""Which ranks of a mesh differ along which of its dimensions."""

from __future__ import annotations

import pytest

from reshard.formats.documents import Unfit
from reshard.formats.mesh import Mesh, read_mesh

PLANE = Mesh((("ep", 2), ("tp", 3)))
SAME = Mesh((("tp", 4), ("ep", 4)), same_ranks=True)


def test_dimensions_are_those_along_which_ranks_differ() -> None:
    assert PLANE.dimensions == ("ep", "tp")
    assert Mesh((("ep", 1), ("tp", 4))).dimensions == ("tp",)
    assert SAME.dimensions == ("tp",), "one stands for both"
    assert Mesh().dimensions == ()


@pytest.mark.parametrize(
    ("rank", "along", "peers"),
    [(4, {"tp"}, (3, 4, 5)), (4, {"ep"}, (1, 4)), (4, {"ep", "tp"}, (0, 1, 2, 3, 4, 5)), (4, set(), (4,))],
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


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (PLANE, "ep 2 x tp 3"),
        (SAME, "tp 4 = ep 4"),
        (Mesh((("tp", 8),), uneven=(("ff", 32), ("moe", 1))), "tp 8 with ff in units of 32 and moe in units of 1"),
    ],
)
def test_a_mesh_and_its_document(mesh: Mesh, text: str) -> None:
    assert read_mesh(mesh.to_document(), "here") == mesh
    assert str(mesh) == text


def test_units_are_of_their_axes() -> None:
    mesh = read_mesh({"tp": 8, "uneven": {"shared_ff": 1, "ff": 32}}, "here")
    assert mesh.uneven == (("ff", 32), ("shared_ff", 1))
    assert (mesh.unit("ff"), mesh.unit("kv")) == (32, None)


@pytest.mark.parametrize("units", [32, ["ff"], {"ff": 0}, {"ff": "32"}, {"ff": None}, {"ff": True}])
def test_what_does_not_give_units_is_refused(units: object) -> None:
    with pytest.raises(Unfit, match=r"file\.uneven.* should be"):
        read_mesh({"tp": 8, "uneven": units}, "file")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "file has no dimensions"),
        ({"pp": 2, "same_ranks": True}, "file has no dimensions over the same ranks"),
        ({"tp": 2, "same_ranks": 1}, "file.same_ranks should be true or false"),
        ({"tp": 2, "dp": 2}, "'dp' of 2 is not a mesh dimension"),
        ({"tp": 2, "pp": 2}, "pp is not its first dimension"),
    ],
)
def test_what_is_no_mesh(document: dict[str, object], message: str) -> None:
    with pytest.raises(Unfit, match=message):
        read_mesh(document, "file")
