from __future__ import annotations

import pytest

from reshard.formats.errors import NotationError
from reshard.formats.notation.expressions import read_expression

NAMES = {
    "hidden_size": 64, "heads": 4, "kinds": ["full", "linear", "full"], "layer": 1, "rope": {"factor": 2},
    "flag": False, "zero": 0, "per_layer": {"1": {"heads": 5}},
}  # fmt: skip


def value(text: str):
    return read_expression(text).evaluate(NAMES.get)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hidden_size / heads", 16),
        ("head_dim or hidden_size / heads", 16),
        ("missing", None),
        ("missing * 2 + 1", None),
        ("-missing", None),
        ("kinds[layer]", "linear"),
        ("kinds[-1]", "full"),
        ("per_layer[layer].heads", 5),
        ("per_layer[layer + 1].heads", None),
        ("kinds[missing]", None),
        ("kinds[layer] == 'linear' and layer in [1, 2]", True),
        ("layer not in [1, 2]", False),
        ("missing > 1", False),
        ("1 if flag else 2", 2),
        ("rope.factor", 2),
        ("missing.factor", None),
        ("rope['factor'] * len(kinds)", 6),
        ("max(heads, 7) // 2 % 2", 1),
        ("not flag", True),
        ("missing is None", True),
        ("1 < heads <= 4", True),
        ("zero or heads", 4),
        ("int(hidden_size * 2.5 // 3)", 53),
        ("int(missing)", None),
        ("(kinds + kinds)[5]", "full"),
        ("9223372036854775807 - 1", 9223372036854775806),
    ],
)
def test_values(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hidden_size / 3", "64 / 3 is not a whole number"),
        ("kinds[9]", "cannot be evaluated"),
        ("hidden_size +", "is not an expression"),
        ("__import__('os')", "is not allowed"),
        ("heads ** 9", "is not allowed"),
        ("[x for x in kinds]", "is not allowed"),
        ("(lambda: 1)()", "is not allowed"),
        ("hidden_size / zero", "cannot be evaluated"),
        ("kinds + 1", "is not a number"),
        ("...", "is not allowed"),
        ("b'x'", "is not allowed"),
        ("1j", "is not allowed"),
        ("'a' * 3000000000", "'a' is not a number"),
        ("[0] * 500000000", "[0] is not a number"),
        ("'%1999999999d' % 1", "is not a number"),
        ("sum([1] * 100000000)", "[1] is not a number"),
        ("sum(kinds)", "is not a number"),
        ("-kinds", "is not a number"),
        ("9223372036854775807 + 1", "more than a size can be"),
        ("hidden_size * 1e308", "more than a size can be"),
        ("int('9' )" + " * 9" * 30, "more than a size can be"),
        ("-" + "9" * 100, "more than a size can be"),
        ("int(1e400)", "cannot be evaluated"),
        ("-" * 60 + "1", "nested more than 50 levels deep"),
    ],
)
def test_what_is_refused(text, complaint):
    with pytest.raises(NotationError) as error:
        value(text)
    assert complaint in error.value.message
    assert text in error.value.message


def test_attributes_reach_nothing_of_python():
    assert value("rope.__class__") is None
    with pytest.raises(NotationError):
        value("hidden_size.__class__")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-" * 5000 + "1", "at most 2,000 characters"),
        ("-" * 1999 + "1", "nested more than"),
        ("(" * 900 + "1" + ")" * 900, "is not an expression"),
        ("9" * 1900 + "x", "is not an expression"),
        ("1\0", "is not an expression"),
        ("x" * 3000, "at most 2,000 characters"),
    ],
)
def test_what_is_too_much_to_be_read(text, complaint):
    with pytest.raises(NotationError) as error:
        read_expression(text)
    assert complaint in error.value.message and len(error.value.message) < 1000


def test_lists_do_not_grow_without_end():
    with pytest.raises(NotationError, match="longer than 10,000"):
        read_expression("x + x + x").evaluate({"x": [0] * 4000}.get)
