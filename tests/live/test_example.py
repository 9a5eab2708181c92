"""The example of the how-to runs: processes that train and serve, and both versions arrive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.marks import thorough
from tests.support import command

EXAMPLE = Path(__file__).parents[2] / "docs/how-to/push.py"


@thorough
def test_the_push_of_the_how_to(tmp_path: Path) -> None:
    assert command("demo", tmp_path / "demo").returncode == 0
    line = [sys.executable, EXAMPLE, tmp_path / "demo/model"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    exact = [f"receiver {rank}: version {version} is exact" for rank in (0, 1) for version in (1, 2)]
    assert all(line in done.stdout for line in exact), done.stdout
