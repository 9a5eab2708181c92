"""No option is ignored in silence: with it, a command does something else, or refuses it; by command and by format."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from reshard.cli.commands import COMMANDS, cli
from reshard.formats.files.safetensors import read_header
from reshard.formats.notation.format_file import all_formats, format_of
from reshard.text import shorten
from tests.marks import one_of_each, thorough
from tests.support import LLAMA, command, command_named, contents, write_checkpoint

CONFIG = LLAMA | {"intermediate_size": 44, "vocab_size": 38, "hidden_size": 24}
"""An MLP that does not divide by 8, and a vocabulary that does not divide by 4."""
FORMS = [None, "huggingface", *all_formats()]
QUICK = {None, "vllm", "dcp"}
"""Ours, one of files for a rank each, and one of chunks."""
VALUES = {
    "--tp": "2", "--ep": "2", "--pp": "2", "--pp-layers": "1,2", "--rank": "0", "--max-shard-size": "3KB",
    "--part": "0/2", "--pad-vocab-to": "24", "--plan": "rules.toml", "--config": "model", "--revision": "main",
    "--save": "saved.toml", "--draft": "draft.toml", "--report": "page.html", "--as": "vllm",
    "--device": "cpu", "--compute-dtype": "float32", "--batch": "3", "--seq": "9", "--seed": "5", "--prompt": "Hello",
    "--adapter": "model", "--patch": "model", "--into": "model", "--from": "fsdp2:2", "--to": "vllm:tp2",
    "--dtype": "fp32", "--quantize": "fp8-block", "--names": "modules",
    "--weights": "0.25,0.75", "--link": "10GB/s", "--timeout": "7", "--engine": "vllm", "--engine-python": "nowhere",
    "--loader": "nowhere", "--flops": "1TFLOP/s",
}  # fmt: skip
"""What the options are given; the others are flags."""
NO_RESULT = {
    "--token", "--cache-dir", "--download", "--workers", "--fsync", "--overwrite", "--debug", "--progress", "--help",
}  # fmt: skip
"""How something is reached or done, which no result shows."""
VACUOUS = {
    ("split", "--names"): "the modules of a Llama have the published names",
    ("merge", "--names"): "the modules of a Llama have the published names",
    ("patch", "--names"): "the modules of a Llama have the published names",
    ("split", "--no-pad-vocab"): "where nothing is padded",
    ("split", "--uneven"): "where boxes may have any size",
    ("split", "--no-checksum"): "where no manifest is written",
    ("merge", "--no-checksum"): "what is merged has no manifest",
    ("plan", "--dtype"): "where only names are printed",
    ("plan", "--no-pad-vocab"): "where nothing is padded",
    ("plan", "--uneven"): "where boxes may have any size",
}
"""What a command keeps, where it changes nothing."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its shards, and what the options name."""
    folder = tmp_path_factory.mktemp("options")
    file = write_checkpoint(folder / "model", config=CONFIG) / "model.safetensors"
    data, begin = bytearray(file.read_bytes()), min(info.offset for info in read_header(file).tensors.values())
    data[begin + 1 :: 2] = bytes(byte & 0xBF for byte in data[begin + 1 :: 2])  # BF16 below 2: they have a mean
    file.write_bytes(data)
    assert command("split", "model", "shards", "--tp", "4", cwd=folder).returncode == 0
    (folder / "rules.toml").write_text("tensors = {}\n")
    return folder


def options_of(name: str) -> Iterator[str]:
    for param in command_named(name).params:
        option = max(param.opts, key=len)
        if isinstance(param, click.Option) and option not in NO_RESULT:
            assert param.is_flag or option in VALUES, f"{name} {option} is new: say what it is given here"
            yield option


def outcome(made: Path, work: Path, line: list[str]) -> tuple[object, ...]:
    """What a command line does in a fresh copy of the folder."""
    shutil.copytree(made, work)
    done = command(*line, cwd=work)
    texts = (re.sub(r"\d+\.\d+ s\b|\"seconds\": [\d.]+", "", text) for text in (done.stdout, done.stderr))
    files = {name: data for name, data in contents(work).items() if not name.startswith("shards")}
    found = (done.returncode, *texts, {name: _without_times(data) for name, data in files.items()})
    shutil.rmtree(work)
    return found


def _without_times(data: bytes) -> bytes:
    return re.sub(rb"\"(mtime_ns|ctime_ns|inode|mtime|time|ctime)\": \d+", b"", data)


def ignored(made: Path, tmp_path: Path, name: str, line: list[str]) -> set[str]:
    """The options with which a command line does just what it does without. What may fork workers forks none."""
    if any("--workers" in param.opts for param in command_named(name).params):
        line = [*line, "--workers", "1"]
    plain, found = outcome(made, tmp_path / "plain", line), set()
    assert plain[0] == 0, plain[2]
    for option in set(options_of(name)):
        if option not in line:
            more = [option, *([VALUES[option]] if option in VALUES else [])]
            if outcome(made, tmp_path / "more", [*line, *more]) == plain:
                found.add(option)
    return {option for option in found if (name, option) not in VACUOUS}


WITHOUT_RANKS = {"huggingface", "deepspeed-universal"}


@pytest.mark.parametrize("form", [pytest.param(form, marks=() if form in QUICK else thorough) for form in FORMS])
def test_split(form: str | None, made: Path, tmp_path: Path) -> None:
    line = [
        "split",
        "model",
        "out",
        *(["--as", form] if form else []),
        *(["--tp", "4"] if form not in WITHOUT_RANKS else []),
    ]
    if command(*line, "--dry-run", cwd=made).returncode:  # the format is not for this model
        done = command(*line, "--pad-vocab-to", "24", cwd=made)
        assert done.returncode == 2 and "--pad-vocab-to" in done.stderr
        return
    assert ignored(made, tmp_path, "split", line) == set()


@pytest.mark.parametrize("form", FORMS)
def test_options_that_cannot_be_kept_are_named(form: str | None, made: Path) -> None:
    format = format_of(form) if form not in {None, "huggingface"} else None
    refused = {
        "--pad-vocab-to": form is not None,
        "--names": form not in {"huggingface", "dcp", None},
        "--uneven": form is not None
        and (format is None or form in WITHOUT_RANKS or not format.container.chunks or format.padding.to is not None),
        "--max-shard-size": format is not None and not format.files.has_parts,
        "--rank": form == "huggingface" or (format is not None and format.container.chunks),
    }
    mesh = [] if form in WITHOUT_RANKS else ["--tp", "2"]
    for option, is_refused in refused.items():
        value = [VALUES[option]] if option in VALUES else []
        done = command("split", "model", "out", *(["--as", form] if form else []), *mesh, option, *value, "--dry-run",
                       cwd=made)  # fmt: skip
        says = f"Error: {option} is not possible with the format '{form or 'safetensors'}'"
        assert done.stderr.startswith(says) == is_refused, (option, done.stderr)


@pytest.mark.parametrize(
    "line",
    one_of_each([
        "merge shards out", "plan model", "plan model --tp 4", "plan model --as vllm --tp 4",
        "plan model --as dcp --tp 4", "plan model --tp-plan", "live plan model --from fsdp2:2 --to vllm:tp2", "formats",
        "formats model", "models", "models llama", "inspect model", "inspect shards",
        "verify model shards --exact-only", "average model shards mean --tp 2",
    ], lambda line: line.partition(" ")[0]),
)  # fmt: skip
def test_other_commands(line: str, made: Path, tmp_path: Path) -> None:
    name, *_ = line.split()
    assert name in COMMANDS
    assert ignored(made, tmp_path, name, line.split()) == set()


def test_uneven_is_not_ignored(made: Path) -> None:
    plain = command("split", "model", "out", "--tp", "8", "--dry-run", cwd=made)
    assert plain.returncode == 2 and "--uneven" not in plain.stderr.splitlines()[0]
    assert command("split", "model", "out", "--tp", "8", "--uneven", "--dry-run", cwd=made).returncode == 0


def test_a_config_that_transformers_refuses_is_one_line(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config=LLAMA)
    done = command("plan", "model", "--tp-plan", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("Error: transformers cannot build a model of type 'llama'")


def test_a_narrow_table_of_formats_keeps_the_beginnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names lose their beginning, and sentences and commands their end: what comes first says what they are."""
    monkeypatch.setattr("reshard.cli.formats.terminal_width", lambda: 70)
    cli.main(["formats"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    vllm = next(line for line in lines if line.startswith("vllm "))
    assert len(vllm) <= 70 and re.search(r"  vllm serve.*…$", vllm)
    assert shorten("model.layers", 7) == "…layers" and shorten("model.layers", 7, keep_beginning=True) == "model.…"
