"""Nothing that is there is lost: each option and argument with which a command writes, at what is not its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

import reshard
from reshard.cli.commands import COMMANDS
from reshard.cli.options import NewFile, NewFolder
from reshard.formats.errors import ReshardError
from tests.support import command, command_named, contents, write_checkpoint

READ = {"source", "base", "original", "shards", "a", "b", "delta", "plan_file", "config", "adapter", "patch", "into",
        "sources", "cache_dir", "python", "engine_python", "loader"}  # fmt: skip
"""What is read; of the cache, the Hub's client decides."""
NEEDED = {
    "plan": ["--tp", "2"], "profile": ["--tp", "1"], "split": ["--tp", "2"], "verify": [], "merge": [],
    "diff": [], "patch": [], "average": [], "demo": [], "live": ["--from", "fsdp2:2", "--to", "vllm:tp1"],
}  # fmt: skip
VERBS = {"live": ["plan"]}


def _written() -> Iterator[tuple[str, click.Parameter]]:
    for name in COMMANDS:
        for param in command_named(name).params:
            if isinstance(param.type, NewFile | NewFolder) or (name, param.name) == ("demo", "folder"):
                yield name, param
            else:
                is_read = not isinstance(param.type, click.Path) or param.name in READ
                assert is_read, f"{name} {param.opts[0]} is new: does it write?"


WRITTEN = [*_written()]
FILES = [(name, param.opts[0]) for name, param in WRITTEN if isinstance(param.type, NewFile)]
FOLDERS = [(name, param) for name, param in WRITTEN if not isinstance(param.type, NewFile)]


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A model, its shards, and what else a folder may have."""
    write_checkpoint(tmp_path / "model")
    write_checkpoint(tmp_path / "tuned", seed=1)
    assert command("split", "model", "tp2", "--tp", "2", cwd=tmp_path).returncode == 0
    (tmp_path / "own.html").write_text('<!DOCTYPE html>\n<html lang="en">\n<p>a thesis')
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "link").symlink_to("model/model.safetensors")
    (tmp_path / "nowhere").symlink_to("not-there")
    return tmp_path


OTHERS = ("model/model.safetensors", "model/config.json", "tp2/rank-00-of-02/model.safetensors", "own.html", "empty",
          "link", "nowhere", "model")  # fmt: skip


def _arguments(name: str, made: Path, place: str | None = None) -> list[str]:
    """The arguments of a command, in their order; ``place`` is that of the output."""
    second = {"verify": "tp2", "diff": "tuned", "patch": "tuned", "average": "tuned"}
    sources = {"demo": [], "merge": ["tp2"]}.get(name, ["model", *([second[name]] if name in second else [])])
    return [name, *sources, *([place] if place is not None else [])]


@pytest.mark.parametrize(("name", "option"), FILES)
def test_a_file_that_is_there_is_not_replaced(name: str, option: str, made: Path) -> None:
    """This is known before anything is read: the source need not be there."""
    before = contents(made)
    for other in (*OTHERS, "no-folder/page.html"):
        sources = [f"missing/{word}" for word in _arguments(name, made)[1:]]
        done = command(name, *VERBS.get(name, ()), *sources, *NEEDED[name], option, other, cwd=made)
        assert done.returncode == 2 and done.stdout == "" and f"Error: {other}" in done.stderr, done.stderr
        assert "will not be overwritten" in done.stderr or "there is no folder" in done.stderr
    assert contents(made) == before and (made / "link").is_symlink() and (made / "nowhere").is_symlink()


@pytest.mark.parametrize(("name", "param"), FOLDERS, ids=lambda each: each if isinstance(each, str) else each.name)
def test_a_folder_that_is_not_the_outputs_is_not_replaced(name: str, param: click.Parameter, made: Path) -> None:
    before = contents(made)
    for other in OTHERS:
        place = [param.opts[0], other] if isinstance(param, click.Option) else []
        line = [*_arguments(name, made, None if place else other), *NEEDED[name], *place]
        overwrite = [["--overwrite"]] if name in {"split", "merge", "patch", "average"} else []
        for more in ([], *(overwrite if other != "model" else [])):  # that is a checkpoint
            done = command(*line, *more, cwd=made)
            assert done.returncode == 2, (line, more, done.stdout)
    assert contents(made) == before


@pytest.mark.parametrize(
    "write",
    [
        lambda made, out: reshard.split(made / "model", out, tp=2),
        lambda made, out: reshard.merge(made / "tp2", out),
        lambda made, out: reshard.average(made / "model", out, others=[made / "tuned"]),
        lambda made, out: reshard.patch(made / "model", out, delta=made / "delta"),
        lambda made, out: reshard.diff(made / "model", made / "tuned", out=out),
    ],
    ids=["split", "merge", "average", "patch", "diff"],
)
def test_from_python(write: Callable[[Path, Path], object], made: Path) -> None:
    reshard.diff(made / "model", made / "tuned", out=made / "delta")
    before = contents(made)
    for other in OTHERS:
        with pytest.raises(ReshardError):
            write(made, made / other)
    assert contents(made) == before


def test_a_page_replaces_a_page(made: Path) -> None:
    """Whatever it showed; not what another option of the same command has just written."""
    page = made / "page.html"
    assert command("plan", "model", "--tp", "2", "--report", page, cwd=made).returncode == 0
    first = page.read_text()
    assert "reshard plan model --tp 2 --report" in first
    done = command("diff", "model", "tuned", "--report", page, cwd=made)
    assert done.returncode == 1 and page.read_text() != first
    done = command("plan", "model", "--tp", "2", "--save", "rules.toml", "--report", "rules.toml", cwd=made)
    assert done.returncode == 2 and (made / "rules.toml").read_text().startswith("name = ")
