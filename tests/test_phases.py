"""A request goes forward: how many files run in more than one of its phases may only fall (tests/phases.py)."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.phases import PHASES, ROOT

IN_MORE_THAN_ONE, IN_THREE = 32, 15
"""The most files that run in more than one phase of a split, and in three or more. They may only fall."""


def test_a_split_goes_back_no_more_than_it_did() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.phases"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    began = re.search("^phases: (.*)$", done.stdout, re.MULTILINE)
    assert began and {*began[1].split()} == {*PHASES.values()}, "a function of PHASES has another name now"
    files, more, three = map(int, re.findall(r"\d+", done.stdout.splitlines()[-1]))
    assert files > 30 and more <= IN_MORE_THAN_ONE and three <= IN_THREE, done.stdout
