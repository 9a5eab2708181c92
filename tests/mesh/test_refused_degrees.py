"""Why a degree is not possible: in the words of the field."""

from __future__ import annotations

import re

import pytest

from reshard.formats.notation.architecture_files import BUILT_IN, load_architecture
from reshard.formats.notation.axes import Share, deal, parse, share
from reshard.mesh.degrees import cuts_blocks, does_not_divide


@pytest.mark.parametrize(
    ("family", "degree", "words"),
    [
        ([("kv", 12), ("group", 1)], 5, "12 attention heads do not divide by 5"),
        ([("kv", 4), ("group", 5)], 8, "20 attention heads do not divide by 8"),
        ([("group", 3)], 2, "a size of 3 (group) does not divide by 2"),
        ([("expert", 60)], 8, "60 experts do not divide by 8"),
        ([("ff", 18944)], 3, "an intermediate size of 18,944 does not divide by 3"),
        ([("moe_ff", 1408)], 3, "an intermediate size of experts of 1,408 does not divide by 3"),
        ([("vocab", 1003)], 2, "a vocabulary of 1,003 does not divide by 2"),
        ([("own", 3)], 2, "a size of 3 (own) does not divide by 2"),
        ([("own", 3), ("other", 2)], 4, "a size of 6 (own x other) does not divide by 4"),
    ],
)
def test_a_family(family: list[tuple[str, int]], degree: int, words: str) -> None:
    assert deal([axis for axis, _ in family], dict(family), degree) is None, "or it would not be refused"
    assert does_not_divide(family, degree) == words


@pytest.mark.parametrize(
    ("dim", "sizes", "degree", "words"),
    [
        ("ff/128", {"ff": 704}, 2, "an intermediate size of 704 is 5.5 blocks of 128, which do not divide by 2"),
        ("ff/128", {"ff": 18432}, 5, "an intermediate size of 18,432 is 144 blocks of 128, which do not divide by 5"),
        (
            "(kv group head)/128",
            {"kv": 40, "group": 1, "head": 64},
            8,
            "2,560 rows of attention heads are 20 blocks of 128, which do not divide by 8",
        ),
        (
            "(kv head)/128",
            {"kv": 8, "head": 64},
            8,
            "512 rows of KV heads are 4 blocks of 128, which do not divide by 8",
        ),
        ("ff/128", {"ff": 1024}, 2, None),
        ("ff", {"ff": 704}, 2, None),
        ("(ff + ff)/128", {"ff": 704}, 2, None),
        ("hidden/128", {"hidden": 704}, 2, None),
        ("(hidden ff)/128", {"hidden": 10, "ff": 704}, 2, None),
    ],
)
def test_a_block(dim: str, sizes: dict[str, int], degree: int, words: str | None) -> None:
    family = [axis for axis in ("kv", "group", "ff") if axis in sizes]
    shares: dict[str, Share] = share(deal(family, sizes, degree) or dict.fromkeys(family, degree), 0)
    ((found),) = parse(dim).dims
    assert cuts_blocks(found, sizes, shares) == words


def test_every_family_of_the_built_in_architectures_has_words() -> None:
    for path in sorted(BUILT_IN.glob("*.toml")):
        for families in load_architecture(path).families.values():
            for family in families:
                said = does_not_divide([(axis, 3) for axis in family], 2)
                assert not re.search(r"a size of \d+ \(", said), (path.name, family)
