"""Generated tables: do they say what they were made with, and has each rule a line of its own?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.formats.notation.tables import CONFIG_DEFAULTS, HEADS
from reshard.source.completeness import REQUIRED
from reshard.verify.bytes.kept import KEPT
from tools import engine_names, transformers_names
from tools.required import LEVELS
from tools.tables import MADE_WITH, text_of

TABLES = {
    engine_names.OUTPUT: ("vllm", engine_names.LEVELS),
    engine_names.OBSERVED: ("vllm", {}),
    engine_names.SGLANG.output: ("sglang", engine_names.LEVELS),
    engine_names.SGLANG.observed: ("sglang", {}),
    transformers_names.OUTPUT: ("transformers", transformers_names.LEVELS),
    REQUIRED: ("transformers", LEVELS),
    HEADS: ("transformers", {}),
    KEPT: ("transformers", {}),
    CONFIG_DEFAULTS: ("transformers", {}),
}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_a_table_says_what_it_was_made_with_and_reads_line_by_line(path: Path) -> None:
    program, levels = TABLES[path]
    text = path.read_text()
    document = json.loads(text)
    made_with = document.pop(MADE_WITH)
    assert [*made_with] == [program] and made_with[program][0].isdigit()
    assert text == text_of(document, made_with, levels)


def test_a_rule_is_one_line_and_what_holds_rules_is_indented() -> None:
    rules = {"b": [{"types": ["x", "y"], "tensors": {"a": {"from": ["c"]}, "d": "e"}}], "a": []}
    assert text_of(rules, {"vllm": "1"}, {"b": 3}).splitlines() == [
        "{",
        ' "made_with": {',
        '  "vllm": "1"',
        " },",
        ' "a": [],',
        ' "b": [',
        "  {",
        '   "types": ["x", "y"],',
        '   "tensors": {',
        '    "a": {"from": ["c"]},',
        '    "d": "e"',
        "   }",
        "  }",
        " ]",
        "}",
    ]
