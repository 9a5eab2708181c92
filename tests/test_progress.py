"""How far a long command is, as lines of text."""

from __future__ import annotations

import pytest

from reshard.cli import progress
from reshard.cli.progress import Progress


def test_a_line_a_minute_with_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("split", how="log") as shown:
        for second in range(0, 151, 10):
            now[0] = 100.0 + second
            shown(second * 10_000_000, 10_000_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0] == "split: 600.00 MB of 10.00 GB (6%), 10.00 MB/s, 16 min left"
    assert lines[1] == "split: 1.20 GB of 10.00 GB (12%), 10.00 MB/s, 15 min left"


def test_none_says_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with Progress("split", how="none") as shown:
        shown(1, 2)
        shown(2, 2)
    assert capsys.readouterr().err == ""
