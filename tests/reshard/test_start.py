"""What a command does before it moves bytes takes as long as moving a gigabyte does, so it is little."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.errors import PlanError
from formats.notation import rewrites
from formats.notation.rewrites import page_of, pages


def test_a_format_reads_no_page_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrites, "READ", {})
    assert page_of("dcp").name == "dcp"
    assert list(rewrites.READ) == ["dcp"]
    for name in ("none", "../programs/dcp", str(Path(rewrites.PAGES) / "dcp"), "dc?", ""):
        with pytest.raises(PlanError, match="no format that is written here"):
            page_of(name)
    assert list(pages()) == sorted(path.stem for path in rewrites.PAGES.glob("*.toml"))
