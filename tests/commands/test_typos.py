"""A path that is written wrong: what was meant is said, and no network is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.formats.errors import CheckpointError
from reshard.store import hub
from reshard.store.selection import HubAccess, Weights
from tests.support import command, write_checkpoint


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, from which the Hub cannot be asked."""
    write_checkpoint(tmp_path / "model")
    write_checkpoint(tmp_path / "small/out8")
    monkeypatch.chdir(tmp_path)

    def asked(*_: object) -> None:
        raise CheckpointError("the Hub was asked")

    monkeypatch.setattr(hub, "_download", asked)
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("modle", "model"), ("Model", "model"), ("model1x", "model"), ("small/outt8", "small/out8"), ("smal", "small"),
     ("./modle", "model"), ("small/../modle", "model")],
)  # fmt: skip
def test_what_was_meant(typed: str, meant: str, there: Path) -> None:
    for line in (("split", typed, "new", "--tp", "2"), ("plan", typed), ("inspect", typed), ("profile", typed)):
        done = command(*line)
        assert done.returncode == 2 and f"no such folder: {typed}" in done.stderr, done.stderr
        assert "did you mean" in done.stderr and f"{meant}'?" in done.stderr, done.stderr


@pytest.mark.parametrize("other", ["gpt2", "model2", "small/out16", "org/name", "small/another"])
def test_another_name_is_asked_of_the_hub(other: str, there: Path) -> None:
    """Another number is another version, and a name that is near to none is one of the Hub's."""
    for source, revision in ((other, None), ("modle", "main")):
        with pytest.raises(CheckpointError, match="the Hub was asked"):
            hub.fetch(source, HubAccess(revision=revision), Weights.HEADERS)
