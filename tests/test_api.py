"""The Python API: what the commands call, with the same options, and refusals as data."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any

import click
import pytest
import torch

import reshard
import reshard.live
from reshard.cli.commands import COMMANDS
from reshard.cli.options import with_option_names
from reshard.delta.differences import Diff
from reshard.formats.errors import MismatchError
from reshard.system import Share
from tests.store import checkpoint, shards
from tests.support import change_tensor, command, contents

OF_THE_TERMINAL = {"as_json", "report", "debug"}
"""What says how a command prints, and no function takes."""
MORE = {
    "split": {"moves", "progress", "quiet"},
    "merge": {"into", "moves", "progress", "quiet"},
    "plan": {"save_file", "draft_file", "tp_plan", "trainer", "receiver", "link"},
    "verify": {"quiet", "dry_run"},
}
ROLES = ["split", "merge", "plan", "inspect", "verify", "profile"]


def command_of(name: str) -> click.Command:
    module, _, attribute = COMMANDS[name][0].partition(":")
    found: click.Command = getattr(import_module(module), attribute)
    return found


@pytest.mark.parametrize("name", ROLES)
def test_an_option_is_a_field_with_the_same_default(name: str) -> None:
    fields = inspect.signature(getattr(reshard, name)).parameters
    for param in command_of(name).params:
        if param.name in OF_THE_TERMINAL | MORE.get(name, set()):
            continue
        assert param.name in fields, param.name
        default, given = fields[param.name].default, param.default
        if isinstance(default, bool):
            assert default == (param.secondary_opts != [] or param.opts[0].startswith("--no-")), param.name
        elif given is not None and not isinstance(default, tuple) and "UNSET" not in repr(given):
            assert given == default, param.name


@pytest.mark.parametrize("name", [name for name in reshard.__all__ if isfunction(getattr(reshard, name))])
def test_help_lists_each_argument_with_what_it_is(name: str) -> None:
    function: Callable[..., Any] = getattr(reshard, name)
    parameters = inspect.signature(function).parameters
    text = pydoc.plain(pydoc.render_doc(function))
    assert "<factory>" not in text and "<function" not in text and "'Path" not in text and "Taken" not in text
    for each in parameters.values() if name != "state_dict" else ():
        assert re.search(rf"\n        {each.name}: .*\n            \S", text), each.name


def test_the_round(tmp_path: Path) -> None:
    model = checkpoint("llama")
    reshard.split(model, tmp_path / "out", tp=2, quiet=True)
    assert reshard.inspect(tmp_path / "out").complete
    answer = reshard.verify(model, tmp_path / "out", exact_only=True)
    assert answer.verdict == "same" and answer.error is None
    reshard.merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(model)
    assert reshard.verify(tmp_path / "out", tmp_path / "merged", exact_only=True).verdict == "same"


def test_a_result_is_shown_as_the_command_prints_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``repr`` is one short line, also for a model of many tensors; ``str`` is the text of the command."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint("llama"), "model")
    results = {
        "split model out --tp 2": reshard.split("model", "out", tp=2, quiet=True),
        "merge out merged": reshard.merge("out", "merged", quiet=True),
        "inspect out": reshard.inspect("out"),
        "plan model --tp 2": reshard.plan("model", tp=2),
        "plan model": reshard.plan("model"),
        "diff model out": reshard.diff("model", "out"),
        "verify model out --exact-only": reshard.verify("model", "out", exact_only=True, quiet=True),
    }
    for line, result in results.items():
        overwrite = ["--overwrite"] if line.startswith(("split", "merge")) else []
        printed = command(*line.split(), *overwrite, cwd=tmp_path).stdout
        name = type(result).__name__
        shown = repr(result)
        assert shown.startswith(f"<{name}: ") and "\n" not in shown and len(shown) < 200, shown
        expected = printed.replace("model: ", "tp 2, ", 1) if name == "PlanAnswer" else printed
        assert without_times(f"{result}\n", tmp_path) == without_times(expected, tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux lists a process's open files")
def test_no_file_stays_open(tmp_path: Path) -> None:
    """A process that goes on would keep the space of checkpoints that are removed meanwhile."""
    one, other = (Path(shutil.copytree(checkpoint("llama"), tmp_path / name)) for name in ("one", "other"))
    reshard.diff(one, other)
    reshard.load(one, quantize="fp8-block")
    with pytest.raises(reshard.ReshardError):
        reshard.average(one, tmp_path / "out", others=[other], weights=[1.0, 1.0])
    descriptors = [*Path("/proc/self/fd").iterdir()]
    paths = [descriptor.readlink() for descriptor in descriptors if descriptor.is_symlink()]
    assert not [path for path in paths if path.is_relative_to(tmp_path)]


def test_a_plan_is_refused_as_the_split_is() -> None:
    for function in (reshard.plan, partial(reshard.split, out="out", dry_run=True)):
        with pytest.raises(reshard.ReshardError, match=r"k_proj.weight' has no place in the format 'deepseek'"):
            function(checkpoint("llama"), tp=2, format="deepseek")


def test_a_push_is_shown_as_plan_prints_it(tmp_path: Path) -> None:
    model = checkpoint("llama")
    found = reshard.live.routes(model, source="fsdp2:2", target="vllm:tp2")
    printed = command("live", "plan", model, "--from", "fsdp2:2", "--to", "vllm:tp2", cwd=tmp_path).stdout
    assert printed == f"{model}: fsdp2:2 -> vllm:tp2, {found}\n"
    assert repr(found) == f"<Routes: {str(found).splitlines()[0]}>" and "from 2 ranks to 2 ranks in 1 step" in printed


def without_times(text: str, folder: Path) -> str:
    """Without the last line either, of what took long."""
    return re.sub(r"in \d+\.\d+ s|\nTime: .*", "", text.replace(f"{folder.resolve()}/", ""))


def test_a_plan_of_a_push_takes_what_other_commands_take(tmp_path: Path) -> None:
    model = str(checkpoint("llama"))
    places = {"source": "fsdp2:2", "target": reshard.live.Target("vllm", tp=2)}
    for call in (partial(reshard.live.routes, **places), partial(reshard.live.placements, target="vllm:tp2")):
        assert call(model, dtype=torch.float16)
        for checkpoint_, fields in ((model, {"plan_file": "x.toml"}), (None, {}), (model, {"config": 3})):
            with pytest.raises(reshard.ReshardError, match=r"x\.toml|source is not possible|config=3 is not possible"):
                call(checkpoint_, **fields)
        with pytest.raises(TypeError, match="nope"):
            call(model, nope=1)
    with pytest.raises(reshard.ReshardError, match="'fsdp2:4' has ranks along other dimensions than tp"):
        reshard.live.placements(model, "fsdp2:4")
    with pytest.raises(reshard.ReshardError, match="no program is called 'None'"):
        reshard.live.placements(model, None)  # type: ignore[arg-type]
    for fields in ({"tp": 0}, {"tp": "2"}, {"fsdp": -1}, {"replicas": 1.5}, {"pp": True}, {"program": 3}):
        with pytest.raises(reshard.ReshardError, match=r"is not possible: .* is expected"):
            reshard.Target(**{"program": "vllm", **fields})  # type: ignore[arg-type]


def test_a_password_is_not_shown() -> None:
    result = Diff("s3://me:secret@host/a", "b", (), 0)
    assert "secret" not in f"{result!r} {result}"


def test_the_package_offers_its_public_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert dir(reshard.live) == sorted(reshard.live.__all__)
    assert dir(reshard) == sorted([*reshard.__all__, "__version__"])
    pydoc.doc(reshard)
    text = capsys.readouterr().out
    assert "__getattr__" not in text and "find_spec" not in text
    assert all(f"\n    {name}(" in text for name in reshard.__all__ if isfunction(getattr(reshard, name)))


class OfBytes:
    def __fspath__(self) -> bytes:
        return b"x"


def refusal_of(call: Callable[[], object]) -> reshard.SettingError:
    with pytest.raises(reshard.SettingError) as error:
        call()
    return error.value


def test_a_refusal_is_data_and_words() -> None:
    error = refusal_of(lambda: reshard.plan(checkpoint("llama"), tp=3, ep=1))
    refusal = error.refusal
    assert (refusal.name, refusal.value, refusal.tensor) == ("tp", 3, None)
    assert "kv" in refusal.axes and 2 in refusal.valid and 3 not in refusal.valid
    assert error.message.startswith("tp=3 is not possible: ") and "--" not in f"{error.message}{error.hint}"
    assert with_option_names(error, command_of("split")).message.startswith("--tp 3 is not possible: ")
    again = pickle.loads(pickle.dumps(error))
    assert (again.refusal, again.message, again.hint) == (refusal, error.message, error.hint)


def test_a_path_may_be_text(tmp_path: Path) -> None:
    with pytest.raises(reshard.ReshardError, match=r"x\.toml"):
        reshard.plan(checkpoint("llama"), plan_file="x.toml")
    with pytest.raises(reshard.ReshardError, match="not a name for a new folder"):
        reshard.split(checkpoint("llama"), ".", tp=2)


def test_a_single_value_is_no_list_of_letters(tmp_path: Path) -> None:
    with pytest.raises(reshard.ReshardError, match=r"^no such folder: /.*/tuned\n"):
        reshard.average(checkpoint("llama"), tmp_path / "out", others=f"{tmp_path}/tuned")
    assert refusal_of(lambda: reshard.profile("m", phase="decode,sleep")).refusal.value == "sleep"  # type: ignore[arg-type]


def test_what_the_system_refuses_is_an_error_of_reshard(tmp_path: Path) -> None:
    model, long = checkpoint("llama"), "a" * 300
    with pytest.raises(reshard.ReshardError, match="aaa: File name too long"):
        reshard.split(model, tmp_path / long, tp=2)
    with pytest.raises(reshard.ReshardError, match="aaa: File name too long"):
        next(reshard.tensors(model, plan_file=long))  # type: ignore[arg-type]
    with pytest.raises(reshard.ReshardError, match="aaa: File name too long"):
        reshard.verify(model, shards("llama", tp=2), plan_file=long, exact_only=True)


def test_an_uncaught_error_shows_its_hint_in_pythons_words(tmp_path: Path) -> None:
    out = shutil.copytree(shards("llama", tp=2), tmp_path / "out")
    script = f"import reshard; reshard.split({str(checkpoint('llama'))!r}, {str(out)!r}, tp=2)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stderr.endswith(
        f"CheckpointError: {out} exists\nHint: remove it, choose another place, or pass overwrite=True\n"
    )
    typed = command("split", checkpoint("llama"), out, "--tp", "2")
    assert typed.stderr.endswith("Hint: remove it, choose another place, or pass --overwrite\n")
    with pytest.raises(reshard.ReshardError) as error:
        reshard.split(checkpoint("llama"), out, tp=2)
    again = pickle.loads(pickle.dumps(error.value))
    assert again.__notes__ == error.value.__notes__ == [f"Hint: {error.value.hint}"]


def test_an_error_of_a_function_that_is_given_is_raised_as_it_is(tmp_path: Path) -> None:
    def show(*_: int) -> None:
        raise ConnectionError("the one who watches has gone")

    for call in (reshard.load, reshard.split, reshard.diff):
        places = () if call is reshard.load else (checkpoint("llama"),) if call is reshard.diff else (tmp_path / "out",)
        with pytest.raises(ConnectionError, match="the one who watches"):
            call(checkpoint("llama"), *places, progress=show)  # type: ignore[operator]
    assert not (tmp_path / "out").exists()


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    assert (
        refusal_of(lambda: reshard.split(checkpoint("llama"), tmp_path / "out", tp=2, ranks=[9])).refusal.name
        == "ranks"
    )
    assert refusal_of(lambda: reshard.load(checkpoint("llama"), tp=2, rank=9)).refusal.name == "rank"


def test_the_layers_of_each_stage_say_how_many_there_are() -> None:
    assert reshard.plan(checkpoint("llama"), pp_layers=[1, 2]).mesh.pp == 2
    with pytest.raises(reshard.SettingError, match=r"pp_layers=\(1, 1, 1\) is not possible with pp=2"):
        reshard.plan(checkpoint("llama"), pp=2, pp_layers=[1, 1, 1])


@pytest.mark.parametrize(
    ("call", "fields", "message"),
    [
        ("plan m", {"pad_vocab": False, "pad_vocab_to": 8}, "--pad-vocab-to 8 is not possible with --no-pad-vocab"),
        ("plan m", {"tp": 2, "pad_vocab_to": 0}, "--pad-vocab-to 0 is not possible: a multiple is at least 1"),
        ("split m o", {"format": "dcp", "ranks": [0]}, "--rank is not possible with the format 'dcp'"),
        ("split m o", {"tp": 2, "ranks": [0], "part": Share(0, 2)}, "--part is not possible with --rank"),
        ("verify m o", {"exact_only": True, "seed": 3}, "--seed is not possible with --exact-only"),
        ("verify m o", {"prompt": "x", "batch": 3}, "--batch is not possible with --prompt"),
        ("verify m o", {"engine_python": "python"}, "--engine-python is not possible"),
        ("verify m o", {"engine": "megatron"}, "--engine megatron is not possible: the engine is vllm"),
        ("verify m o", {"dequantize": True}, "--dequantize is not possible"),
        ("verify m o", {"patch": "d"}, "--patch is not possible"),
        ("verify m o", {"streamed": True, "backward": True}, "--streamed is not possible with --backward"),
        ("profile m", {"link": 1e9}, "--link is not possible"),
        ("profile m", {"link": "1GB/s"}, "--link is not possible"),
        ("profile m", {"phase": ("sleep",)}, "--phase sleep is not possible"),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_before_anything_is_read(call: str, fields: dict[str, Any], message: str) -> None:
    name, *places = call.split()
    error = refusal_of(lambda: getattr(reshard, name)(*places, **fields))
    assert with_option_names(error, command_of(name)).message.startswith(message) and error.refusal.name in fields


@pytest.mark.parametrize(
    ("call", "fields", "expected"),
    [
        ("split m o", {"tp": 2.0}, "tp=2.0 is not possible: a whole number is expected"),
        ("split m o", {"tp": True}, "tp=True is not possible: a whole number is expected"),
        ("split m o", {"max_shard_size": "1XB"}, "max_shard_size=1XB is not possible: '1XB' is not a size such as 5GB, 500MB or 2GiB"),  # noqa: E501
        ("split m o", {"part": (2, 2)}, "one of several processes, such as (0, 2) is expected"),
        ("split m o", {"ranks": ["x"]}, "a whole number or one of several processes, such as (0, 2) is expected"),
        ("split m o", {"adapter": 4}, "adapter=4 is not possible: a text or a path is expected"),
        ("split m o", {"out": "o\0"}, "a text or a path is expected"),
        ("split m o", {"plan_file": OfBytes()}, "a path is expected"),
        ("merge m o", {"fsync": 1}, "fsync=1 is not possible: True or False is expected"),
        ("load m", {"format": "vllm", "pad_vocab_to": 64}, "it says itself what is padded"),
        ("rank_config m", {"format": "vllm"}, "ranks of programs read the config.json of the whole model"),
        ("merge m o", {"progress": 3}, "progress=3 is not possible: True or a function is expected"),
        ("load m", {"rank": None}, "rank is not possible: a whole number is expected"),
        ("profile m", {"link": "50"}, "link=50 is not possible: '50' is not a speed such as 450GB/s"),
        ("verify m o", {"timeout": "1.2.3"}, "timeout=1.2.3 is not possible: a number is expected"),
        ("verify m o", {"timeout": "soon"}, "timeout=soon is not possible: a number is expected"),
    ],
)  # fmt: skip
def test_a_value_that_a_field_cannot_have(call: str, fields: dict[str, Any], expected: str) -> None:
    name, *places = call.split()
    with pytest.raises(reshard.SettingError) as error:
        getattr(reshard, name)(*places[: len(places) - ("out" in fields)], **fields)
    assert error.value.message.endswith(expected)


def test_what_the_command_line_takes_is_taken(tmp_path: Path) -> None:
    model, texts = checkpoint("llama"), {"tp": "2", "max_shard_size": "5MB", "workers": "1", "part": "0/2"}
    values: dict[str, Any] = {"tp": 2, "max_shard_size": 5_000_000, "workers": 1, "part": (0, 2)}
    plans = [reshard.split(str(model), tmp_path / "out", dry_run=True, **fields) for fields in (texts, values)]  # type: ignore[arg-type]
    assert plans[0] == plans[1] and plans[0].part == Share(0, 2)
    assert reshard.split(model, tmp_path / "out", tp=2, ranks="1").ranks == (1,)  # type: ignore[arg-type]
    tensors = reshard.load(model, device=torch.device("meta"), dtype=torch.float16)  # type: ignore[arg-type]
    assert {(tensor.device.type, tensor.dtype) for tensor in tensors.values()} == {("meta", torch.float16)}


def test_a_launcher_says_which_process_this_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, out = checkpoint("llama"), tmp_path / "out"
    assert reshard.split(model, out, tp=2, part="auto", dry_run=True).part == Share(1, 2)  # type: ignore[arg-type]
    assert reshard.split(model, out, tp=4, ranks="auto", dry_run=True).ranks == (2, 3)  # type: ignore[arg-type]
    monkeypatch.delenv("RANK")
    with pytest.raises(reshard.ReshardError, match="'auto' needs a launcher's variable"):
        reshard.split(model, out, tp=2, part="auto")  # type: ignore[arg-type]


def test_a_bar_in_a_notebook_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = checkpoint("llama"), tmp_path / "out"
    calls = {
        "split": partial(reshard.split, model, out, tp=2),
        "merge": partial(reshard.merge, out, tmp_path / "merged"),
        "load": partial(reshard.load, model),
        "diff": partial(reshard.diff, model, out),
        "verify": partial(reshard.verify, model, out, exact_only=True),
    }
    for name, call in calls.items():
        call(progress=True)
        assert f"{name}: 100%" in capsys.readouterr().err
    reshard.load(model, progress=False)
    assert not capsys.readouterr().err


def test_tensors_in_memory_are_told_how_they_are_given(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    for thing in (module, module.state_dict()):
        for call in (
            reshard.inspect,
            partial(reshard.split, out=tmp_path / "o"),
            partial(reshard.diff, checkpoint("llama")),
        ):
            error = refusal_of(lambda call=call, thing=thing: call(thing))
            assert error.message.endswith("tensors in memory are given as reshard.state_dict(model)"), error
            assert len(error.message) < 120
    assert repr(reshard.state_dict(module)) == "<StoredPath: Linear in memory>"


@pytest.mark.parametrize(("degrees", "hint"), [({"tp": 2}, "give tp=2;"), ({"tp": 2, "pp": 3}, "give pp=3 tp=2;")])
def test_a_rank_of_a_folder_wants_its_degrees(degrees: dict[str, int], hint: str, tmp_path: Path) -> None:
    reshard.split(checkpoint("llama"), tmp_path / "out", **degrees, quiet=True)  # type: ignore[arg-type]
    for call in (reshard.load, reshard.rank_config):
        error = refusal_of(lambda call=call: call(tmp_path / "out", rank=1))
        assert error.message.startswith("rank=1 is not possible: ") and str(error.hint).startswith(hint)
    assert refusal_of(lambda: reshard.load(tmp_path / "out", rank=99)).hint is None


def test_progress_of_what_writes_is_one_value(tmp_path: Path) -> None:
    states: list[Any] = []
    total = reshard.split(checkpoint("llama"), tmp_path / "out", tp=2, progress=states.append).nbytes
    assert [*map(tuple, states)][-1] == (total, total, 0) and states[-1]._fields == ("written", "to_write", "again")


def test_an_answer_is_true_only_if_it_is_yes(tmp_path: Path) -> None:
    model, out = checkpoint("llama"), tmp_path / "out"
    reshard.split(model, out, tp=2, quiet=True)
    answer, found = reshard.verify(model, out, exact_only=True), reshard.diff(model, out)
    assert answer and found and reshard.inspect(out)
    answer.raise_if_different()
    found.raise_if_different()
    change_tensor(out / "rank-01-of-02" / "model.safetensors", "model.layers.0.self_attn.q_proj.weight", at=0)
    (out / "reshard.json").unlink()
    other = reshard.merge(out, tmp_path / "other", quiet=True, max_shard_size="1GB")
    for result in (reshard.verify(model, other.out, exact_only=True), reshard.diff(model, other.out)):
        assert not result
        with pytest.raises(MismatchError, match=re.escape(result.headline[:40])):
            result.raise_if_different()
    shutil.rmtree(out / "rank-00-of-02")
    assert not reshard.inspect(out)


@pytest.mark.parametrize(
    ("places", "fields", "message"),
    [
        ("model none", {"exact_only": True}, "none"),
        ("none out", {"exact_only": True}, "none"),
        ("model out", {"device": "gpu"}, "device=gpu is not possible"),
        ("model out", {"compute_dtype": "foo"}, "compute_dtype=foo is not possible"),
        ("model out", {"plan_file": "none.toml", "exact_only": True}, r"none\.toml"),
        ("model out", {"prompt": "hello"}, "no tokenizer for a prompt"),
        ("model out", {"dtype": "foo", "exact_only": True}, "foo"),
        ("model out", {"engine": "vllm", "exact_only": True}, "engine_python=.* is not possible: it has no vLLM"),
        (
            "model out",
            {"engine": "vllm", "engine_python": "/none/python"},
            "/none/python is not possible: No such file",
        ),
        ("model partial", {"exact_only": True}, "the files of rank 1 of 2 are missing"),
    ],
)
def test_what_cannot_be_verified_raises(
    places: str, fields: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(checkpoint("llama"))
    (tmp_path / "out").symlink_to(shards("llama", tp=2))
    shutil.copytree(shards("llama", tp=2), "partial")
    shutil.rmtree("partial/rank-01-of-02")
    command_ = import_module("reshard.verify.command")
    monkeypatch.setattr(command_, "compare_bytes", lambda *_: pytest.fail("bytes were read"))
    with pytest.raises(reshard.ReshardError, match=message):
        reshard.verify(*places.split(), **fields)


def test_what_a_run_lacks_is_said_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints that are named are not there, and nobody looks."""
    monkeypatch.chdir(tmp_path)
    for call in (partial(reshard.verify, "no/model", "no/out"), partial(reshard.profile, "no/model")):
        with pytest.raises(reshard.SettingError, match="device=gpu is not possible"):
            call(device="gpu")
    with pytest.raises(reshard.ReshardError, match="/none: no such folder"):
        reshard.diff(
            checkpoint("llama"), shards("llama", tp=2), out="/none/delta", progress=lambda *_: pytest.fail("read")
        )
    monkeypatch.setattr("reshard.formats.errors.find_spec", lambda _: None)
    for call in (partial(reshard.verify, "no/model", "no/out"), partial(reshard.profile, "no/model")):
        with pytest.raises(reshard.ReshardError, match="needs transformers and accelerate"):
            call()


def test_an_unknown_name_is_no_name() -> None:
    assert not hasattr(reshard, "Padding")
    with pytest.raises(TypeError, match="tpp"):
        reshard.split("m", "o", tpp=2)
