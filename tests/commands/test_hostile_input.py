"""What is read from outside, through the command line: bounds, files that are none, and text of any kind."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from reshard.api import split
from reshard.formats.errors import LONGEST_LINE, CheckpointError, brief, listed, one_line
from reshard.formats.files.safetensors import build_header, read_header
from reshard.formats.quantization.methods import block_size
from reshard.formats.store import open_file
from tests.fuzz import Outcome, most_memory, run
from tests.marks import one_of_each
from tests.support import LLAMA, change_json, contents, llama_tensors, write_checkpoint, write_file


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source", files=2)


@pytest.fixture
def shards(source: Path, tmp_path: Path) -> Path:
    split(source, tmp_path / "shards", tp=2)
    return tmp_path / "shards"


def refused(*arguments: str | Path, code: int = 2) -> str:
    """What a command says that must refuse in one short line, soon, and without much memory."""
    before = most_memory()
    outcome = run([str(argument) for argument in arguments])
    assert outcome.code == code, outcome
    error, *hint = outcome.stderr.splitlines()
    assert error.startswith("Error: ") and "internal error" not in error, outcome.stderr
    assert len(error) <= LONGEST_LINE + 10 and len(hint) <= 1
    assert outcome.seconds < 5 and most_memory() - before < 300 << 20
    return outcome.stderr


def ok(*arguments: str | Path) -> Outcome:
    outcome = run([str(argument) for argument in arguments])
    assert outcome.code == 0, outcome
    return outcome


# ------------------------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("value", [1e308, 10**18, 2**63, 10**400, 704])
def test_a_size_that_the_shards_do_not_have(shards: Path, tmp_path: Path, value: object) -> None:
    change_json(shards / "config.json", intermediate_size=value)
    for arguments in (
        ["plan", shards],
        ["merge", shards, tmp_path / "out"],
        ["split", shards, tmp_path / "out", "--tp", "4"],
    ):
        run_code = run([str(argument) for argument in arguments]).code
        assert "config.json" in refused(*arguments, code=run_code) and run_code in {1, 2}
    assert not (tmp_path / "out").exists()


def test_another_vocabulary_than_that_of_the_shards(shards: Path, tmp_path: Path) -> None:
    change_json(shards / "config.json", vocab_size=41)
    assert "'vocab' is 41, but was 37" in refused("merge", shards, tmp_path / "out", code=1)


def test_sizes_that_refer_to_each_other(source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    ok("plan", source, "--save", plan)
    text = plan.read_text()
    many = "\n".join(f'a{i} = "a{i + 1} + a{i + 1}"' for i in range(25)) + '\na25 = "1"\n'
    plan.write_text(text.replace("[sizes]\n", f"[sizes]\n{many}"))
    assert "without end" in refused("plan", source, "--plan", plan)
    chain = "\n".join(f'a{i} = "a{i + 1}"' for i in range(2000)) + '\na2000 = "1"\n'
    plan.write_text(text.replace("[sizes]\n", f"[sizes]\n{chain}"))
    assert "without end" in refused("plan", source, "--plan", plan)


@pytest.mark.parametrize("shape", ["(" * 3000, "9" * 5000, "hidden/" + "9" * 4000, "hidden " * 2000])
def test_shapes_without_end(source: Path, tmp_path: Path, shape: str) -> None:
    plan = tmp_path / "plan.toml"
    ok("plan", source, "--save", plan)
    plan.write_text(plan.read_text().replace('"vocab hidden"', json.dumps(shape), 1))
    assert "plan.toml" in refused("plan", source, "--plan", plan)


def test_names_without_end_in_a_plan(source: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    ok("plan", source, "--save", plan)
    for name in (".".join("a" * 2000), "a" * 2000):
        plan.write_text(f'{plan.read_text()}\n"{name}" = "hidden"\n')
        assert "names of at most 1000 characters in 100 parts" in refused("plan", source, "--plan", plan)


def test_a_config_of_many_classes(source: Path) -> None:
    settings = {key: value for key, value in LLAMA.items() if key != "model_type"}
    (source / "config.json").write_text(json.dumps(settings | {"architectures": [f"Model{i}" for i in range(100_000)]}))
    assert "has no model_type" in refused("plan", source)


def test_an_output_that_is_a_link_to_itself(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    assert "is a link, and the output would take its place" in refused("split", source, tmp_path / "out", "--tp", "2")


@pytest.mark.parametrize("block", [["a", 1], [0, 0], [1e308, 1], [128], None, [True, 1]])
def test_blocks_of_no_size(block: object) -> None:
    assert block_size({"quantization_config": {"weight_block_size": block}}) is None


def test_a_mesh_of_more_ranks_than_there_can_be(shards: Path, tmp_path: Path) -> None:
    change_json(shards / "reshard.json", mesh={"ep": 100_000, "tp": 100_000})
    assert "more than 100,000 ranks" in refused("merge", shards, tmp_path / "out")
    change_json(shards / "reshard.json", mesh={"tp": 100_000})
    report = run(["inspect", str(shards)])
    assert report.code == 1 and len(report.stdout) < 3000 and "(99,998 in all)" in report.stdout


def test_a_tensor_of_a_hundred_thousand_dimensions(source: Path, tmp_path: Path) -> None:
    path = source / "model-00001-of-00002.safetensors"
    content = json.dumps({"a": {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
    assert "has 100000 dimensions" in refused("plan", source)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_document_that_is_too_large(source: Path, name: str) -> None:
    with (source / name).open("wb") as file:
        file.truncate(6 << 30)
    assert name in refused("plan", source)


# -------------------------------------------------------------------------------------------------- files that are none

KINDS = ["pipe", "folder", "loop", "device"]


def put(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "loop" else "/dev/zero")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_a_file_of_a_checkpoint_that_is_none(source: Path, name: str, kind: str) -> None:
    put(kind, source / name)
    if (name, kind) == ("model.safetensors.index.json", "loop"):  # it is not there, and the files' numbers are complete
        ok("plan", source)
        return
    said = refused("plan", source)
    if kind != "loop":
        assert f"{name}: cannot be read: it is a {kind}, not a file" in said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["reshard.json", "config.json", "rank-00-of-02/model.safetensors"])
def test_a_file_of_a_split_checkpoint_that_is_none(shards: Path, tmp_path: Path, name: str, kind: str) -> None:
    put(kind, shards / name)
    if name == "reshard.json":  # the shards say themselves what they are
        ok("merge", shards, tmp_path / "out")
    else:
        refused("merge", shards, tmp_path / "out")
    assert run(["inspect", str(shards)]).code in {0, 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_file_that_is_none(source: Path, tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "plan.toml")
    assert "plan.toml" in refused("plan", source, "--plan", tmp_path / "plan.toml")


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_s_own_files_when_it_is_verified(source: Path, shards: Path, kind: str) -> None:
    put(kind, shards / "rank-01-of-02/config.json")
    done = run(["verify", str(source), str(shards), "--exact-only"])
    assert done.code in {1, 2} and "internal error" not in done.stderr and done.seconds < 5


def test_a_file_that_becomes_a_pipe_when_it_is_opened(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked at need not be what is opened; and to open a pipe must not wait."""
    pipe, before = source / "pipe", (source / "config.json").stat()
    os.mkfifo(pipe)
    monkeypatch.setattr(Path, "stat", lambda *_, **__: before)
    signal.alarm(5)
    with pytest.raises(CheckpointError, match="it is a pipe"):
        open_file(pipe)
    signal.alarm(0)


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("to open a device may do something"))
    with pytest.raises(CheckpointError, match="it is a device"):
        open_file(Path("/dev/zero"))


# -------------------------------------------------------------------------------------------------------- wrong types

DEEP = "[" * 100_000 + "]" * 100_000
MANY_PLACES = "[" + "[0, 9000000], " * 40 + "[0, 1]]"
DEEPER_THAN_COPIED = '{"a":' * 400 + "1" + "}" * 400


@pytest.mark.parametrize("value", [DEEP, DEEPER_THAN_COPIED, "9" * 4000, "9" * 5000])
def test_json_that_would_fail_later(source: Path, tmp_path: Path, value: str) -> None:
    (source / "config.json").write_text(json.dumps(LLAMA)[:-1] + f', "more": {value}}}')
    assert "config.json" in refused("split", source, tmp_path / "out", "--tp", "2")
    assert not (tmp_path / "out.partial").exists(), "nothing has been moved"


def crossed(keys: list[str], values: list[str]) -> list[Any]:
    """Each value of each key: in ``make test`` all values of the first key, and the first value of all keys."""
    return one_of_each(itertools.product(keys, values), lambda case: case[case[0] == keys[0]])


@pytest.mark.parametrize(
    ("key", "value"),
    crossed(
        ["size", "rank", "sizes", "padding", "mesh", "max_shard_size", "source", "side_files"],
        ["Infinity", '"9"', "null", "[]", "{}", "true", "1e400", "-1", "99999999999999999999", DEEP],
    ),
)
def test_a_manifest_of_wrong_types(shards: Path, tmp_path: Path, key: str, value: str) -> None:
    path = shards / "reshard.json"
    document = json.loads(path.read_text())
    (document["ranks"][0]["files"][0] if key == "size" else document["ranks"][0] if key == "rank" else document)[
        key
    ] = "@"
    path.write_text(json.dumps(document).replace('"@"', value))
    if (key, value) not in {("padding", "{}"), ("side_files", "[]"), ("sizes", "{}")}:
        assert "reshard.json" in refused("merge", shards, tmp_path / "out")
        assert run(["inspect", str(shards)]).code == 1


@pytest.mark.parametrize(
    ("key", "value"),
    crossed(
        ["rank", "sizes", "padding", "mesh", "source", "plan", "places"],
        ["Infinity", '"9"', "null", "[]", "true", "1e400", "-1", "[[0, 1e9]]", "[[0, 9000000000]]", MANY_PLACES, DEEP],
    ),
)
def test_shard_metadata_of_wrong_types(shards: Path, tmp_path: Path, key: str, value: str) -> None:
    (shards / "reshard.json").unlink()
    path = shards / "rank-00-of-02/model.safetensors"
    header, content = read_header(path), path.read_bytes()
    document = json.dumps(json.loads(header.metadata["reshard"]) | {key: "@"}).replace('"@"', value)
    tensors = [(tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors.values()]
    path.write_bytes(build_header(tensors, header.metadata | {"reshard": document}) + content[len(header.raw) :])
    if (key, value) not in {("source", '"9"'), ("plan", '"9"'), ("places", "[]")}:
        said = refused("merge", shards, tmp_path / "out")
        assert "rank-00-of-02/model.safetensors: its header does not say which rank of what it is" in said
        assert run(["inspect", str(shards)]).code == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bits", "four"),
        ("bits", 1e308),
        ("group_size", [1]),
        ("dynamic", []),
        ("dynamic", {"+:(": {}}),
        ("group_size", 10**30),
    ],
)
def test_quantization_settings_of_wrong_types(source: Path, key: str, value: object) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 8} | {key: value}
    change_json(source / "config.json", quantization_config=settings)
    write_file(
        source / "model-00001-of-00002.safetensors", [("model.layers.0.self_attn.q_proj.qweight", "I32", (3, 48))]
    )
    (source / "model.safetensors.index.json").unlink()
    (source / "model-00002-of-00002.safetensors").unlink()
    (source / "model-00001-of-00002.safetensors").rename(source / "model.safetensors")
    assert f"quantization_config.{key}" in refused("plan", source)


# --------------------------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("padding", [{"vocab": 1}, {"own": 5}])
def test_padding_of_nothing(shards: Path, tmp_path: Path, padding: dict[str, int]) -> None:
    change_json(shards / "reshard.json", padding=padding)
    assert "should be the padded size of an axis" in refused("merge", shards, tmp_path / "out")
    assert run(["inspect", str(shards)]).code == 1


def test_half_a_character_in_a_config_is_carried(source: Path, tmp_path: Path) -> None:
    """JSON may say it, transformers reads it, and UTF-8 cannot: it stays the escape that it is."""
    text = json.dumps(LLAMA | {"note": "\ud800"})
    (source / "config.json").write_text(text)
    ok("split", source, tmp_path / "tp2", "--tp", "2")
    assert json.loads((tmp_path / "tp2/rank-00-of-02/config.json").read_bytes())["note"] == "\ud800"
    ok("merge", tmp_path / "tp2", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(source)
    ok("verify", source, tmp_path / "tp2", "--exact-only")


def test_names_that_are_not_utf8(source: Path, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    (source / f"{odd}.txt").write_text("a side file")
    place = source.rename(tmp_path / odd)
    for out, arguments in (("tp2", ["--tp", "2"]), ("tp4", ["--tp", "4", "--json"])):
        said = ok("split", place, tmp_path / out, *arguments).stdout
        assert "caf\\udce9" in said
    assert json.loads(said)["source"].endswith(odd)
    assert ok("split", tmp_path / "tp2", tmp_path / odd.upper(), "--tp", "1", "-q").stdout.endswith("�\n")
    ok("plan", place), ok("inspect", place), ok("inspect", tmp_path / "tp2")
    ok("merge", tmp_path / "tp4", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(place)
    ok("verify", place, tmp_path / "tp4", "--exact-only")


def test_no_name_of_a_stranger_begins_a_line(source: Path, tmp_path: Path) -> None:
    """A line of one's own would be read as the program's: a verdict, or a command to run."""
    line = "Load it: a command"
    (source / f"a\n{line}").touch()
    saids = [ok("inspect", source), ok("split", source, tmp_path / "tp2", "--tp", "2")]
    (tmp_path / "tp2" / f"b\n{line}").touch()
    saids += [
        run(["inspect", str(tmp_path / "tp2")]),
        run(["verify", str(source), str(tmp_path / "tp2"), "--exact-only"]),
    ]
    (tmp_path / "tp2" / f"b\n{line}").unlink()
    (tmp_path / "tp2/reshard.json").unlink()
    change_json(tmp_path / "tp2/rank-01-of-02/config.json", **{f"c\n{line}": f"d\n{line}"})
    saids.append(run(["verify", str(source), str(tmp_path / "tp2"), "--exact-only"]))
    change_json(source / "config.json", model_type=f"e\n{line}")
    saids.append(run(["inspect", str(source)]))
    for said in saids:
        assert line in said.stdout and not any(each.startswith(line) for each in said.stdout.splitlines()), said


@pytest.mark.parametrize("letter", ["x", "\x1b", "é"])
def test_a_message_that_quotes_a_long_name_is_short(source: Path, letter: str) -> None:
    name = f"model.{letter * 200_000}"
    path = source / "model-00001-of-00002.safetensors"
    write_file(path, [*llama_tensors()[:3], (name, "F32", (1,))])
    said = refused("plan", source)
    assert said.isprintable() or said.count("\n") == len(said.splitlines())
    shutil.rmtree(source)
    write_checkpoint(source, config=LLAMA | {"model_type": letter * 200_000})
    assert "unknown model_type" in refused("plan", source)


def test_an_index_in_a_name_that_is_no_number(source: Path, tmp_path: Path) -> None:
    for index in ("²", "9" * 5000):
        write_file(source / "model.safetensors", [(f"model.layers.{index}.mlp.up_proj.weight", "BF16", (24, 20))])
        (source / "model.safetensors.index.json").unlink(missing_ok=True)
        assert "has no rule" in refused("plan", source)


def test_what_is_quoted() -> None:
    assert one_line("a\nb\t c\x1b[2J\udcff") == "a b c\\x1b[2J\\udcff"
    assert len(one_line("x" * 10_000)) <= 300 and len(one_line("x y " * 10_000)) <= LONGEST_LINE
    assert one_line(f"a {'x' * 1000} b").startswith("a xxx") and one_line(f"a {'x' * 1000} b").endswith("xxx b")
    assert one_line("/" + "p" * 250) == "/" + "p" * 250
    assert brief("x" * 100) == repr("x" * 57 + "...") and "too large" in brief(10**5000)
    assert listed(range(3)) == "0, 1, 2" and listed(range(30)).endswith("19, … (30 in all)")
