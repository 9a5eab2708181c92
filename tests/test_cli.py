"""The installed command, end to end, as a user types it: what it prints where, what it writes, what it refuses."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.cli.demo import compare
from reshard.formats.files.safetensors import build_header, read_header
from reshard.tiny_model import CONFIG, write_model
from tests import support
from tests.marks import thorough
from tests.slow import Turns
from tests.stores.hub_server import HubServer

ROOT = Path(__file__).parents[1]
_INSTALLED = Path(sys.executable).with_name("reshard")
RESHARD = [str(_INSTALLED)] if _INSTALLED.exists() else [sys.executable, "-m", "reshard"]
TINY = CONFIG | {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 101,
}
ESCAPE = "\x1b"


def run(
    *arguments: str | Path, cwd: Path | None = None, installed: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command; colours and bars are left to what it finds out itself.

    The ``installed`` one is a process of its own, and so is one with its own environment, which libraries read as they
    are imported.
    """
    if not installed and not environment:
        return support.command(*arguments, cwd=cwd, without=("NO_COLOR", "FORCE_COLOR"))
    env = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR"}} | environment
    return subprocess.run(
        [*RESHARD, *map(str, arguments)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120, check=False
    )


def ok(*arguments: str | Path, cwd: Path | None = None, installed: bool = False, **environment: str) -> str:
    """Run a command that must succeed; its stdout."""
    done = run(*arguments, cwd=cwd, installed=installed, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def document(*arguments: str | Path, cwd: Path | None = None) -> dict[str, Any]:
    """The document of a command with --json, which is all that stdout holds."""
    done = run(*arguments, "--json", cwd=cwd)
    assert done.returncode in {0, 1}, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found)[:2] == ["schema_version", "command"] and found["schema_version"] == 1
    return found


def refused(*arguments: str | Path, code: int = 2, cwd: Path | None = None, **environment: str) -> str:
    """Run a command that must fail as commands fail: one Error line, at most one Hint line, nothing on stdout."""
    return assert_refused(run(*arguments, cwd=cwd, **environment), code)


def assert_refused(done: subprocess.CompletedProcess[str], code: int = 2) -> str:
    """That a command has failed so; what it printed."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Error: "), done.stderr
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("Hint: ")), done.stderr
    return done.stderr


def sums(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def shards(folder: Path) -> dict[str, str]:
    """The sha256 of every file of the ranks."""
    return {name: digest for name, digest in sums(folder).items() if name.startswith("rank-")}


def write_checkpoint(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Path:
    """A checkpoint of float32 noise."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(1)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(build_header([(name, "F32", tuple(shape)) for name, shape in shapes.items()], {"format": "pt"}))
        for shape in shapes.values():
            file.write(generator.standard_normal(tuple(shape), dtype=np.float32).tobytes())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in two files: 4 KV heads, 8 heads, a vocabulary of 101."""
    return write_model(tmp_path_factory.mktemp("source") / "model", TINY)


@pytest.fixture(scope="module")
def tp4(model: Path) -> Path:
    """The same on four ranks."""
    ok("split", model, model.parent / "tp4", "--tp", "4")
    return model.parent / "tp4"


# ----------------------------------------------------------------------------------------------------- the round trip


def test_split_resplit_merge_gives_the_same_files(model: Path, tp4: Path, tmp_path: Path) -> None:
    ok("split", tp4, tmp_path / "tp2", "--tp", "2", installed=True)
    ok("split", tmp_path / "tp2", tmp_path / "tp8", "--tp", "8")
    ok("merge", tmp_path / "tp8", tmp_path / "merged", installed=True)
    assert sums(tmp_path / "merged") == sums(model)
    ok("split", model, tmp_path / "direct", "--tp", "8")
    assert shards(tmp_path / "tp8") == shards(tmp_path / "direct")


def test_summary_says_what_was_done(model: Path, tmp_path: Path) -> None:
    text = ok("split", "model", tmp_path / "out", "--tp", "4", cwd=model.parent)
    assert "Split model into 4 ranks: 30 tensors in 4 files" in text
    assert "padded from 101 to 104" in text
    assert str(tmp_path / "out") in text
    assert [line for line in text.splitlines() if not line.startswith("Time: ")] == text.splitlines()[:1]


def test_demo_shows_the_round(tmp_path: Path) -> None:
    text = ok("demo", tmp_path / "demo")
    assert "$ reshard split model tp4 --tp 4" in text
    assert "$ reshard merge tp8 merged" in text
    assert "5 of 5 files came back byte for byte" in text
    assert sums(tmp_path / "demo" / "merged") == sums(tmp_path / "demo" / "model")
    assert "is not an empty folder" in refused("demo", tmp_path / "demo")
    assert document("demo")["identical"] is True


def test_demo_notices_a_change(tmp_path: Path) -> None:
    for name, content in (("a", b"one"), ("b", b"other")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(content)
    (tmp_path / "a" / "lost").write_bytes(b"")
    found = compare(tmp_path / "a", tmp_path / "b")
    assert [file["name"] for file in found if not file["identical"]] == ["lost", "weights"]


# ------------------------------------------------------------------------------------------------------------ options


def test_ranks_add_up_to_one_run(model: Path, tp4: Path, tmp_path: Path) -> None:
    text = ok("split", model, tmp_path / "out", "--tp", "4", "--rank", "0", "--rank", "2")
    assert "ranks 0, 2 of 4" in text
    assert "still missing" in text
    partial = run("inspect", tmp_path / "out", "--json")
    assert partial.returncode == 1
    assert json.loads(partial.stdout)["ranks_missing"] == [1, 3]
    assert "rank-01-of-04" in refused("merge", tmp_path / "out", tmp_path / "merged")
    ok("split", model, tmp_path / "out", "--tp", "4", "--rank", "3", "--rank", "1")
    assert shards(tmp_path / "out") == shards(tp4)
    assert not (tmp_path / "out.partial").exists()


def test_max_shard_size_is_decimal(model: Path, tmp_path: Path) -> None:
    ok("split", model, tmp_path / "out", "--tp", "2", "--max-shard-size", "10kB")
    names = sorted(file.name for file in (tmp_path / "out" / "rank-00-of-02").glob("*.safetensors"))
    assert len(names) > 2
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    ok("merge", tmp_path / "out", tmp_path / "merged")
    assert sums(tmp_path / "merged") == sums(model)
    ok("merge", tmp_path / "out", tmp_path / "new", "--max-shard-size", "1GiB")
    assert (tmp_path / "new" / "model.safetensors").is_file()
    for size in ("3XB", "0", "iB", "-1GB"):
        assert "--max-shard-size" in refused("merge", tmp_path / "out", tmp_path / "x", f"--max-shard-size={size}")


@pytest.mark.parametrize("options", [["--fsync"], ["--workers", "1"], ["--workers", "7"], ["--no-checksum"]])
def test_options_that_change_no_byte_of_a_shard(model: Path, tp4: Path, tmp_path: Path, options: list[str]) -> None:
    ok("split", model, tmp_path / "out", "--tp", "4", *options)
    assert shards(tmp_path / "out") == shards(tp4)
    manifest = json.loads((tmp_path / "out" / "reshard.json").read_text())
    recorded = [f["checksum"] for f in manifest["ranks"][0]["files"] if f["name"].endswith(".safetensors")]
    assert (recorded == [None]) == (options == ["--no-checksum"])
    ok("merge", tmp_path / "out", tmp_path / "merged", *options)
    assert sums(tmp_path / "merged") == sums(model)


def test_one_rank_is_not_some_ranks(model: Path, tmp_path: Path) -> None:
    ok("split", model, tmp_path / "tp1", "--tp", "1")
    assert ok("merge", tmp_path / "tp1", tmp_path / "merged").startswith(
        f"Merged {tmp_path / 'tp1'} into one checkpoint"
    )


@pytest.mark.parametrize("command", [["plan"], ["plan", "--tp", "2"], ["plan", "--ep", "2"]])
def test_same_ranks_without_both_degrees(model: Path, command: list[str]) -> None:
    assert "--same-ranks goes with --tp N and --ep N" in refused(*command, model, "--same-ranks")


def test_a_plan_file_that_cannot_be_read(model: Path, tmp_path: Path) -> None:
    assert f"plan file {tmp_path}: cannot be read: it is a folder, not a file" in refused(
        "plan", model, "--plan", tmp_path
    )


@pytest.mark.parametrize("command", [["split", "--tp", "4"], ["merge"]])
def test_dry_run_writes_nothing(model: Path, tp4: Path, tmp_path: Path, command: list[str]) -> None:
    source = model if command[0] == "split" else tp4
    text = ok(*command, source, tmp_path / "out", "--dry-run")
    assert text.startswith("Would ")
    assert "nothing was written" in text.lower()
    assert list(tmp_path.iterdir()) == []
    assert document(*command, source, tmp_path / "out", "--dry-run")["dry_run"] is True
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert "exists" in refused(*command, source, tmp_path / "out", "--dry-run")


def test_json_and_quiet(model: Path, tmp_path: Path) -> None:
    found = document("split", model, tmp_path / "out", "--tp", "4")
    assert found["mesh"] == {"tp": 4}
    assert found["complete"] is True
    assert found["bytes"] == found["bytes_written"] > 0
    done = run("merge", tmp_path / "out", tmp_path / "merged", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{tmp_path / 'merged'}\n", "")


def test_version_help_and_module(tmp_path: Path) -> None:
    assert re.fullmatch(r"reshard \d+\.\d+\.\d+\n", ok("--version"))
    assert ok("-h") == ok("--help") == ok()
    for command in ("split", "merge", "plan", "inspect", "demo"):
        assert f"Usage: reshard {command}" in ok(command, "-h")
    module = subprocess.run([sys.executable, "-m", "reshard", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == ok("--version")


# ------------------------------------------------------------------------------------------------------------- errors


def test_wrong_paths(model: Path, tp4: Path, tmp_path: Path) -> None:
    assert "no such folder" in refused("split", "./nowhere", tmp_path / "out", "--tp", "2")
    assert "no such folder" in refused("merge", tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "link").symlink_to("gone")
    assert "is a link to gone" in refused("split", tmp_path / "link", tmp_path / "out", "--tp", "2")
    (tmp_path / "link").unlink()
    assert "no such" in refused("inspect", tmp_path / "nowhere")
    assert "no such folder: (empty)" in refused("inspect", "", cwd=tp4)
    (tmp_path / "empty").mkdir()
    assert "no weights" in refused("split", tmp_path / "empty", tmp_path / "out", "--tp", "2")
    assert "no weights" in refused("inspect", tmp_path / "empty")
    for name in ("", ".", "/", ".."):
        assert "is not a name for a new folder" in refused("diff", model, tp4, "--out", name, cwd=tmp_path / "empty")
    assert "nothing to merge" in refused("merge", model, tmp_path / "out")
    assert "one rank" in refused("split", tp4 / "rank-00-of-04", tmp_path / "out", "--tp", "2")
    assert "same folder" in refused("split", model, model, "--tp", "2")
    assert "lies in the other" in refused("split", model, model / "inside", "--tp", "2")
    assert "same folder" in refused("merge", tp4, tp4, "--overwrite")
    assert "no such folder" in refused("split", model, tmp_path / "a" / "b", "--tp", "2")
    for name in (".", "..", "/"):
        assert "not a name for a new folder" in refused("split", model, name, "--tp", "2", cwd=tmp_path / "empty")
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]


def test_a_tilde_that_no_shell_replaced_is_a_letter(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "~x")
    assert "full checkpoint" in ok("inspect", "./~x", cwd=tmp_path)
    ok("split", "./~x", "./~x2", "--tp", "2", cwd=tmp_path)
    assert "no such folder" in refused("split", "~nobody/x", tmp_path / "out", "--tp", "2")


def test_wrong_degrees_and_ranks(model: Path, tmp_path: Path) -> None:
    text = refused("split", model, tmp_path / "out", "--tp", "3")
    assert "8 attention heads do not divide by 3" in text
    assert "valid degrees: 1, 2, 4, 8" in text
    assert "--tp 0" in refused("split", model, tmp_path / "out", "--tp", "0")
    assert "--rank 4" in refused("split", model, tmp_path / "out", "--tp", "4", "--rank", "4")
    assert "--tp" in refused("split", model, tmp_path / "out")
    assert "--workers" in refused("split", model, tmp_path / "out", "--tp", "4", "--workers", "0")
    assert "'bogus'" in refused("bogus")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run("merge", tmp_path / "nowhere", tmp_path / "out", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "Error: no such folder" in done.stderr


def test_an_unexpected_error_is_one_line(model: Path, tmp_path: Path) -> None:
    code = (
        "import reshard.commands.split as command; command.start = lambda request: 1 / 0; "
        "from reshard.cli.commands import main; main()"
    )
    command = [sys.executable, "-c", code, "split", str(model), str(tmp_path / "out"), "--tp", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: internal error: ZeroDivisionError: division by zero\nHint: ")
    assert "--debug" in done.stderr
    assert len(done.stderr.splitlines()) == 2


# ------------------------------------------------------------------------------------------------- terminals and pipes


def on_a_terminal(*arguments: str | Path, columns: int = 80, **environment: str) -> str:
    """What a terminal of so many columns receives."""
    pid, descriptor = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.environ.update({"TERM": "xterm", **environment})
        os.execvp(RESHARD[0], [*RESHARD, *map(str, arguments)])
    received, poll = b"", select.poll()  # select takes no descriptor from 1,024 on
    poll.register(descriptor, select.POLLIN)
    while True:
        try:
            ready = poll.poll(60_000)
            chunk = os.read(descriptor, 65536) if ready else b""
        except OSError:
            chunk = b""
        if not chunk:
            break
        received += chunk
    os.close(descriptor)
    os.waitpid(pid, 0)
    return received.decode()


@thorough
def test_bars_and_colours_on_terminals_only(model: Path, tmp_path: Path) -> None:
    assert "B/s]" in on_a_terminal("split", model, tmp_path / "1", "--tp", "2")
    assert "B/s]" not in on_a_terminal("split", model, tmp_path / "2", "--tp", "2", "--quiet")
    assert "B/s]" not in on_a_terminal("split", model, tmp_path / "3", "--tp", "2", TERM="dumb")
    assert "B/s]" not in on_a_terminal("split", model, tmp_path / "4", "--tp", "2", HF_HUB_DISABLE_PROGRESS_BARS="1")
    done = run("split", model, tmp_path / "5", "--tp", "2")
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    assert ESCAPE in on_a_terminal("merge", "./nowhere", tmp_path / "6")
    assert ESCAPE not in on_a_terminal("merge", "./nowhere", tmp_path / "6", NO_COLOR="1")
    assert ESCAPE not in on_a_terminal("merge", "./nowhere", tmp_path / "6", TERM="dumb")
    assert ESCAPE not in run("merge", "./nowhere", tmp_path / "6").stderr
    assert ESCAPE in run("merge", "./nowhere", tmp_path / "6", FORCE_COLOR="1").stderr


def test_table_fits_the_terminal(model: Path) -> None:
    narrow = on_a_terminal("plan", model, "--tp", "8", columns=80).splitlines()
    table = narrow[next(i for i, line in enumerate(narrow) if line.startswith("tensor")) :]
    assert max(map(len, table)) <= 80
    assert "model.layers.{layer}.self_attn.q_proj.weight" in ok("plan", model, "--tp", "8")


def test_a_closed_pipe_is_silent(model: Path) -> None:
    process = subprocess.Popen([*RESHARD, "plan", str(model)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(60) == 141, "as a program that SIGPIPE ends; 1 would be an answer"


# ----------------------------------------------------------------------------------------------------------- interrupt


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_and_go_on(how: signal.Signals, code: int, model: Path, tmp_path: Path) -> None:
    command = ["split", str(model), str(tmp_path / "out"), "--tp", "2", "--workers", "1", "--max-shard-size", "4kB"]
    slowly = [sys.executable, "-m", "tests.slow", *command]
    turns, pipe = Turns(tmp_path / "turns"), subprocess.PIPE
    process = subprocess.Popen(slowly, cwd=ROOT, env=turns.environment, stdout=pipe, stderr=pipe, text=True)
    journals = "out.partial/.reshard-journal-*"
    turns.until(process, lambda: any('{"steps"' in path.read_text() for path in tmp_path.glob(journals)))
    turns.end(process, how)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (code, "")
    said = r"reshard: interrupted: \d.* of .* are kept: the same command goes on from there\n"
    assert re.fullmatch(said, errors)
    assert not (tmp_path / "out").exists()
    assert "unfinished output of split" in run("inspect", tmp_path / "out.partial").stdout
    assert "out.partial" in refused("inspect", tmp_path / "out")
    assert "of that had been written before" in subprocess.check_output(slowly, cwd=ROOT, text=True)
    assert not (tmp_path / "out.partial").exists()
    ok("merge", tmp_path / "out", tmp_path / "merged")
    assert sums(tmp_path / "merged") == sums(model)


# ---------------------------------------------------------------------------------------------------------------- plan


def test_a_plan_of_several_degrees(model: Path) -> None:
    one, two = (run("plan", model, "--tp", tp).stdout for tp in ("2", "4"))
    assert run("plan", model, "--tp", "2,4").stdout == f"{one}\n{two}"
    for more in (["--json"], ["--tp-plan"], ["--report", "page.html"]):
        assert "several degrees go without" in refused("plan", model, "--tp", "2,4", *more)


def test_plan_table(model: Path) -> None:
    found = document("plan", model, "--tp", "8")
    rows = {row["tensor"]: row for row in found["rows"]}
    layer = "model.layers.{layer}"
    assert {name.removeprefix(f"{layer}."): row["kind"] for name, row in rows.items()} == {
        "model.embed_tokens.weight": "vocabulary",
        "input_layernorm.weight": "replicated",
        "self_attn.q_proj.weight": "column",
        "self_attn.k_proj.weight": "column",
        "self_attn.v_proj.weight": "column",
        "self_attn.o_proj.weight": "row",
        "post_attention_layernorm.weight": "replicated",
        "mlp.gate_proj.weight": "column",
        "mlp.up_proj.weight": "column",
        "mlp.down_proj.weight": "row",
        "model.norm.weight": "replicated",
        "lm_head.weight": "vocabulary",
    }
    keys = rows[f"{layer}.self_attn.k_proj.weight"]
    assert (keys["full_shape"], keys["rank_shape"], keys["copies"], keys["tensors"]) == ([24, 24], [6, 24], 2, 3)
    assert found["padding"] == {"vocab": 104}
    assert found["bytes_per_rank"] == sum(row["bytes_per_rank"] for row in rows.values())
    # two row-parallel weights in each of three layers, and the embedding (forward) or the LM head (backward)
    assert found["all_reduce_per_token"]["forward"] == {"count": 7, "bytes": 7 * 24 * 2}
    assert found["all_reduce_per_token"]["backward"] == {"count": 7, "bytes": 7 * 24 * 2}
    parameters = sum(row["tensors"] * math.prod(row["full_shape"]) for row in rows.values())
    assert parameters == found["parameters"] == document("inspect", model)["parameters"]


def test_plan_says_what_split_does(model: Path, tp4: Path) -> None:
    found = document("plan", model, "--tp", "4")
    header = read_header(tp4 / "rank-03-of-04" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in header.tensors.values()) == found["bytes_per_rank"]
    shapes = {row["tensor"].replace("{layer}", "1"): tuple(row["rank_shape"]) for row in found["rows"]}
    for name, shape in shapes.items():
        assert header.tensors[name].shape == shape


def test_plan_of_experts_counts_their_all_reduce_once(tmp_path: Path) -> None:
    config = TINY | {"model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 2}
    config["tie_word_embeddings"] = True
    shapes: dict[str, Sequence[int]] = {"model.embed_tokens.weight": (101, 24), "model.norm.weight": (24,)}
    for layer in range(2):
        attention, norms = f"model.layers.{layer}.self_attn", ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"model.layers.{layer}.{norm}.weight": (24,) for norm in norms}
        shapes |= {f"{attention}.{name}_proj.weight": (24, 24) for name in "kv"}
        shapes |= {f"{attention}.q_proj.weight": (48, 24), f"{attention}.o_proj.weight": (24, 48)}
        moe = f"model.layers.{layer}.block_sparse_moe"
        shapes[f"{moe}.gate.weight"] = (4, 24)
        for expert in range(4):
            shapes |= {f"{moe}.experts.{expert}.{w}.weight": (40, 24) for w in ("w1", "w3")}
            shapes[f"{moe}.experts.{expert}.w2.weight"] = (24, 40)
    found = document("plan", write_checkpoint(tmp_path / "moe", config, shapes), "--tp", "2")
    kinds = {row["tensor"].rpartition(".")[0].rpartition(".")[2]: row["kind"] for row in found["rows"]}
    experts = {"gate": "replicated", "w1": "expert column", "w2": "expert row", "w3": "expert column"}
    assert kinds.items() >= {"embed_tokens": "vocabulary", **experts}.items()
    assert found["all_reduce_per_token"]["forward"] == {"count": 5, "bytes": 5 * 24 * 2}


def test_plan_without_a_degree_lists_all(model: Path) -> None:
    found = document("plan", model)
    assert found["valid_degrees"] == [1, 2, 4, 8]
    refusals = {entry["tp"]: entry["reason"] for entry in found["degrees"] if not entry["valid"]}
    assert set(refusals) >= {3, 5, 6, 7, 10, 12}
    assert refusals[6] == "8 attention heads do not divide by 6"
    text = ok("plan", model)
    assert re.search(
        r"^ +8  yes .*on other ranks too, [0-9]+% of the time in collectives, vocab padded 101 -> 104$",
        text,
        re.MULTILINE,
    )
    assert "Valid degrees: 1, 2, 4, 8." in text
    assert document("plan", model, "--no-pad-vocab")["valid_degrees"] == [1]


def test_saved_plan_is_the_same_plan(model: Path, tp4: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    ok("plan", model, "--save", mine)
    assert "q_proj.bias" not in mine.read_text()
    assert "exists" in refused("plan", model, "--save", mine)
    assert document("plan", model, "--tp", "4", "--plan", mine)["rows"] == document("plan", model, "--tp", "4")["rows"]
    renamed = shutil.copytree(model, tmp_path / "model")
    (renamed / "config.json").write_text(json.dumps(TINY | {"model_type": "brand_new"}, indent=2) + "\n")
    ok("split", renamed, tmp_path / "out", "--tp", "4", "--plan", mine)
    first, other = (root / "rank-00-of-04" / "model.safetensors" for root in (tmp_path / "out", tp4))
    data = [file.read_bytes()[len(read_header(file).raw) :] for file in (first, other)]
    assert data[0] == data[1]
    ok("merge", tmp_path / "out", tmp_path / "merged")
    assert sums(tmp_path / "merged") == sums(renamed)


# ------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_full_split_rank_and_file(model: Path, tp4: Path) -> None:
    full = document("inspect", model)
    assert (full["kind"], full["format"], full["model_type"]) == ("full checkpoint", "safetensors", "llama")
    assert (full["dtypes"], full["files"], full["complete"]) == ({"BF16": full["parameters"]}, 2, True)
    split = document("inspect", tp4)
    assert (split["kind"], split["mesh"], split["ranks_present"]) == ("split checkpoint", {"tp": 4}, [0, 1, 2, 3])
    assert (split["parameters"], split["tensors"]) == (full["parameters"], full["tensors"])
    assert split["padding"] == {"vocab": {"size": 101, "padded": 104}}
    assert split["source"] == model.name
    rank = document("inspect", tp4 / "rank-02-of-04")
    assert (rank["kind"], rank["rank"], rank["mesh"]) == ("one rank of a split checkpoint", 2, {"tp": 4})
    file = document("inspect", tp4 / "rank-02-of-04" / "model.safetensors")
    assert (file["kind"], file["rank"]) == ("one file of a split checkpoint", 2)
    assert document("inspect", model / "model-00001-of-00002.safetensors")["kind"] == "one file"
    here = document("inspect", ".", cwd=tp4)
    assert here == split | {"path": "."}


# ------------------------------------------------------------------------------------------------------------- the Hub


def in_one_process(
    *commands: Sequence[str | Path], cwd: Path = ROOT, **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    """What commands do, one after the other, in a process with its own environment, which libraries read as they are
    imported: the Hub's client takes longer for that than a command.
    """
    code = (
        "import json, sys; from tests.support import command; "
        "found = [command(*arguments) for arguments in json.load(sys.stdin)]; "
        "json.dump([(done.returncode, done.stdout, done.stderr) for done in found], sys.stdout)"
    )
    given = json.dumps([[*map(str, arguments)] for arguments in commands])
    env = os.environ | environment
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, input=given, capture_output=True, text=True)
    return [subprocess.CompletedProcess([], *found) for found in json.loads(done.stdout)]


@thorough
def test_hub_id(model: Path, tp4: Path, tmp_path: Path) -> None:
    (tmp_path / "hub" / "org").mkdir(parents=True)
    shutil.copytree(model, tmp_path / "hub" / "org" / "tiny")
    with HubServer(tmp_path / "hub") as hub:
        env, cache = hub.environment(tmp_path / "home"), ["--cache-dir", tmp_path / "cache"]
        found = json.loads(ok("plan", "org/tiny", "--tp", "4", "--json", *cache, **env))
        assert found["source"] == "org/tiny"
        assert not list((tmp_path / "cache").glob("models--*/blobs/*safetensors*"))
        inspected, split, nothing, revision = in_one_process(
            ["inspect", "org/tiny", "--json", *cache],
            ["split", "org/tiny", tmp_path / "out", "--tp", "4", *cache, "--revision", "main"],
            ["split", "org/nothing", tmp_path / "no", "--tp", "4"],
            ["plan", "org/tiny", "--revision", "nope", *cache],
            **env,
        )
        assert inspected.returncode == split.returncode == 0 and '"llama"' in inspected.stdout
        assert shards(tmp_path / "out") == shards(tp4)
        assert json.loads((tmp_path / "out" / "reshard.json").read_text())["source"]["location"] == "org/tiny"
        assert "org/nothing" in assert_refused(nothing) and "no revision" in assert_refused(revision)
        hub.require_token = "hf_secret"
        cold = ["--cache-dir", tmp_path / "cold"]
        without, given = in_one_process(
            ["split", "org/tiny", tmp_path / "no", "--tp", "4", *cold],
            ["split", "org/tiny", tmp_path / "yes", "--tp", "4", "--token", "hf_secret", *cold],
            **env,
        )
        assert "--token" in assert_refused(without) and given.returncode == 0
        assert shards(tmp_path / "yes") == shards(tp4)


# -------------------------------------------------------------------------------------------------- what is not loaded


def imported(*commands: Sequence[str | Path]) -> set[str]:
    """The modules that a process has loaded once it has carried out some commands."""
    code = (
        "import sys; from reshard.cli.commands import cli; from reshard.cli.printing import run_to_exit_code; "
        "codes = [run_to_exit_code(cli, line.split('|')) for line in sys.argv[1:]]; "
        "print(*sys.modules, file=sys.stderr); sys.exit(max(codes))"
    )
    command = [sys.executable, "-c", code, *("|".join(map(str, arguments)) for arguments in commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_help_loads_nothing_heavy() -> None:
    assert not imported(["--help"]) & {"numpy", "torch", "huggingface_hub", "safetensors", "tqdm", "asyncio"}


def test_nothing_heavy_is_loaded_for_local_files(model: Path, tp4: Path, tmp_path: Path) -> None:
    heavy = {"torch", "transformers", "huggingface_hub", "obstore", "tqdm", "asyncio", "ssl", "http", "email"}
    split, merge = ["split", model, tmp_path / "out", "--tp", "4"], ["merge", tp4, tmp_path / "merged"]
    assert not imported(split, merge, ["plan", model, "--tp", "4"], ["inspect", tp4]) & heavy


@thorough
def test_numpy_starts_no_threads(model: Path, tp4: Path, tmp_path: Path) -> None:
    """Those of its linear algebra would spin beside the work; those that move bytes have ended."""
    code = (
        "import sys; from reshard.cli.commands import cli; cli(sys.argv[1:], standalone_mode=False); "
        "from pathlib import Path; threads = Path('/proc/self/task'); "
        "print(len(list(threads.iterdir())) if threads.is_dir() else 1)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    for command in (["split", model, tmp_path / "out", "--tp", "4"], ["merge", tp4, tmp_path / "merged"]):
        arguments = [sys.executable, "-c", code, *command, "--quiet"]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.splitlines()[-1] == "1"


def test_the_api_is_there_when_asked_for(model: Path) -> None:
    code = (
        "import sys, reshard; assert 'numpy' not in sys.modules; import reshard.mesh.plan; "
        "from reshard.mesh.plan import Plan; "
        "print(reshard.plan(sys.argv[1], tp=2).mesh, reshard.split.__name__, reshard.ReshardError.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True)
    assert done.stdout == "tp 2 split ReshardError\n"
