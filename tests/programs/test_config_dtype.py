"""A config.json that is given says the dtype of the weights, or a loader rounds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from reshard.api import split
from reshard.formats.documents import json_bytes
from reshard.formats.files.safetensors import TensorInfo, read_header
from reshard.model.config_dtype import dtype_of, with_dtype
from tests import store
from tests.support import command, ok


def _config(folder: Path, original: Path, **changes: Any) -> Path:
    """A folder with the config.json of a model alone, with some settings changed; None takes one away."""
    folder.mkdir()
    config = json.loads((original / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def _run(folder: Path, original: Path, form: str) -> Path:
    """What a program saved of a model: no config.json, no manifest."""
    split(original, folder, tp=1, format=form)
    for name in ("reshard.json", "config.json"):
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("form", ["dcp", "megatron", "megatron-legacy", "vllm"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_config_of_a_run_in_float32_says_float32(form: str, key: str, tmp_path: Path) -> None:
    original = store.checkpoint("qwen3")
    run = _run(tmp_path / "run", original, form)
    given = _config(tmp_path / "given", original, **{"dtype": None, key: "bfloat16"})
    done = ok("merge", run, tmp_path / "merged", "--config", given)
    assert "onfig.json says float32, as the weights are; the one that was given says bfloat16" in done.stdout
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config == json.loads((given / "config.json").read_text()) | {key: "float32"}
    weights = load_file(original / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("command_", ["merge", "split"])
def test_what_is_said_of_the_config_is_true_after_a_cast(command_: str, tmp_path: Path) -> None:
    """Weights in float32, a config.json that says bfloat16."""
    original = store.checkpoint("qwen3")
    run = _run(tmp_path / "run", original, "dcp")
    given = _config(tmp_path / "given", original, dtype="bfloat16")
    for word, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        out = tmp_path / word
        options = ["--dtype", word, *(["--tp", "2", "--as", "vllm"] if command_ == "split" else [])]
        done = command(command_, run, out, "--config", given, *options, "--json")
        assert done.returncode == 0 and json.loads((out / "config.json").read_text())["dtype"] == dtype
        said = f"config.json says {dtype}, as the weights are; the one that was given says bfloat16"
        assert (said in json.loads(done.stdout)["note"]) == (dtype != "bfloat16"), done.stdout
        assert ("config.json says" in done.stdout) == (dtype != "bfloat16"), done.stdout


def test_what_agrees_is_kept_byte_for_byte(tmp_path: Path) -> None:
    original = store.checkpoint("qwen3")
    run = _run(tmp_path / "run", original, "dcp")
    for number, changes in enumerate(({"dtype": "float32"}, {"dtype": None})):
        given = _config(tmp_path / f"given{number}", original, **changes)
        assert "as the weights are" not in ok("merge", run, tmp_path / f"merged{number}", "--config", given).stdout
        copied = (tmp_path / f"merged{number}" / "config.json").read_bytes()
        assert copied == (given / "config.json").read_bytes()
    shutil.copy(_config(tmp_path / "beside", original, dtype="bfloat16") / "config.json", run)  # it is the run's own
    done = command("merge", run, tmp_path / "own")
    assert done.returncode == 0 and json.loads((tmp_path / "own" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_split_for_a_program_has_the_dtype_too(tmp_path: Path) -> None:
    original = store.checkpoint("qwen3", "bfloat16")
    run = _run(tmp_path / "run", original, "dcp")
    given = _config(tmp_path / "given", original, dtype="float32")
    done = ok("split", run, tmp_path / "out", "--tp", "2", "--as", "vllm", "--config", given, "--json")
    assert json.loads(done.stdout)["note"] == (
        "the config.json says bfloat16, as the weights are; the one that was given says float32"
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    split(original, tmp_path / "direct", tp=2, format="vllm")
    for file in sorted((tmp_path / "direct").glob("*.safetensors")):
        found = read_header(tmp_path / "out" / file.name).tensors
        assert {n: (i.dtype, i.shape) for n, i in found.items()} == {
            n: (i.dtype, i.shape) for n, i in read_header(file).tensors.items()
        }


def _held(**counts: int) -> list[dict[str, TensorInfo]]:
    return [{name: TensorInfo(name, name, (count,), Path(), 0, 0) for name, count in counts.items()}]


def test_the_dtype_is_that_of_the_most_elements() -> None:
    assert dtype_of(_held(BF16=90, F32=10)) == "bfloat16"
    assert dtype_of([*_held(BF16=40), *_held(F32=50)]) == "float32"
    assert dtype_of(_held(F8_E4M3=90, BF16=10)) is None  # quantized: config.json says how
    assert dtype_of([]) is None


def test_the_section_of_the_text_says_it_too_and_a_tower_keeps_its_own() -> None:
    config = {
        "dtype": "bfloat16", "text_config": {"dtype": "bfloat16", "torch_dtype": "float16"},
        "vision_config": {"dtype": "float16"},
    }  # fmt: skip
    found, others = with_dtype(config, ("text_config",), "float32")
    assert found == {
        "dtype": "float32", "text_config": {"dtype": "float32", "torch_dtype": "float32"},
        "vision_config": {"dtype": "float16"},
    }  # fmt: skip
    assert others == {"bfloat16", "float16"} and json_bytes(config) != json_bytes(found)
    assert with_dtype(config, ("text_config",), None) == (config, set())
    assert with_dtype({"dtype": "auto"}, (), "float32") == ({"dtype": "auto"}, set())
