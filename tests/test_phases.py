"""A request goes forward: how many files run in more than one of its phases may only fall (tests/phases.py)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.phases import PHASES, ROOT, VALUES

IN_MORE_THAN_ONE, IN_THREE = 10, 2
"""The most files that run in more than one phase of a split, and in three or more. They may only fall."""


def test_a_split_goes_back_no_more_than_it_did() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.phases"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    began = re.search("^phases: (.*)$", done.stdout, re.MULTILINE)
    assert began and {*began[1].split()} == {*PHASES.values()}, "a function of PHASES has another name now"
    files, more, three = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert files > 30 and more <= IN_MORE_THAN_ONE and three <= IN_THREE, done.stdout


TOUCHING = {
    "concurrent", "fcntl", "io", "mmap", "os", "select", "shutil", "signal", "socket", "subprocess", "tempfile",
    "threading", "time",
}  # fmt: skip
"""Modules of files, processes, locks and clocks."""
OF_FILES = {
    "exists", "glob", "is_dir", "is_file", "iterdir", "lstat", "mkdir", "open", "read_bytes", "read_text", "rename",
    "rglob", "stat", "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
"""Methods of a path that ask or change the disk."""


@pytest.mark.parametrize("file", sorted(VALUES))
def test_values_touch_no_file_and_keep_no_state(file: str) -> None:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        assert TOUCHING.isdisjoint(name.partition(".")[0] for name in names), names
        assert not isinstance(node, ast.Global)
        assert not (isinstance(node, ast.Attribute) and node.attr in OF_FILES), (node.lineno, node.attr)
        assert not (isinstance(node, ast.Name) and node.id == "open"), node.lineno
