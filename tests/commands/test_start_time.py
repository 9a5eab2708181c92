"""What a command does before it moves bytes takes as long as moving a gigabyte does, so it is little."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.formats.errors import PlanError
from reshard.formats.notation import format_file
from reshard.formats.notation.format_file import all_formats, format_of


def test_a_format_reads_no_file_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_file, "READ", {})
    assert format_of("dcp").name == "dcp"
    assert list(format_file.READ) == ["dcp"]
    for name in ("none", "../programs/dcp", str(Path(format_file.PROGRAMS) / "dcp"), "dc?", ""):
        with pytest.raises(PlanError, match="unknown format"):
            format_of(name)
    assert list(all_formats()) == sorted(path.stem for path in format_file.PROGRAMS.glob("*.toml"))
