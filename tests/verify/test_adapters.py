"""An adapter is run as PEFT runs it, and what was written of it is compared: with the sum in the weights, or alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG
from reshard.source.opening import open_source
from reshard.verify.forward.compare import ForwardOptions, ForwardReport
from reshard.verify.run_settings import Unmerged
from tests import peft_adapters, store
from tests.marks import one_of_each, thorough
from tests.support import command
from tests.verify.forwards import run_forwards

QUICK = ForwardOptions(seq=16, draws=1)
STABILISED = {"use_rslora": True, "rank_pattern": {"q_proj": 2, "down_proj": 4}, "alpha_pattern": {"q_proj": 3}}
CASES = [
    ("llama", "linear", STABILISED, {"tp": 2}), ("mixtral", "experts", {}, {"tp": 2}),
    ("llama", "embeddings", {}, {"tp": 2}), ("llama", "linear", {}, {"tp": 1, "pp": 2}),
    ("gpt_oss", "experts", {}, {"tp": 2}), ("qwen3_moe", "experts", {}, {"tp": 2}),
    ("deepseek_v3", "experts", {}, {"tp": 2}), ("qwen3_5_moe_text", "experts", {}, {"tp": 2}),
    ("phi3", "linear", {}, {"tp": 2}), ("mixtral", "linear", {}, {"tp": 2}),
]  # fmt: skip


def written(root: Path, name: str, source: Path, mesh: Mapping[str, Any], dtype: str = "float32") -> dict[str, Path]:
    """What is written of an adapter: its own shards, and the base model's with it."""
    base = store.checkpoint(name, dtype)
    split(source, root / "alone", config=base, **mesh)
    split(base, root / "split", adapter=source, **mesh)
    return {"alone": root / "alone", "split": root / "split"}


def compared(name: str, source: Path, outs: Mapping[str, Path], options: ForwardOptions = QUICK) -> list[ForwardReport]:
    """An adapter that runs beside its base model against what was written; ``alone`` is without the base model."""
    base = open_source(store.checkpoint(name, "bfloat16" if "bfloat16" in source.name else "float32"))
    pairs = [(Unmerged(base, source, kind.startswith("alone")), open_source(out)) for kind, out in outs.items()]
    return run_forwards(pairs, options)


@pytest.mark.parametrize(("name", "kind", "settings", "mesh"), one_of_each(CASES))
def test_what_was_written_is_the_adapter_beside_its_base_model(
    name: str, kind: str, settings: dict[str, Any], mesh: dict[str, int], tmp_path: Path
) -> None:
    source = peft_adapters.made(name, kind, **settings)
    for report in compared(name, source, written(tmp_path, name, source, mesh)):
        assert report.is_same, report.verdict
        assert report.effect is not None and report.effect.ratio > 1000
        assert all(row.effect is not None for row in report.layers)


@thorough
def test_the_sum_is_rounded_once_and_that_is_noise(tmp_path: Path) -> None:
    """In float32 the rounding of weights in bfloat16 is all that differs; a full checkpoint is one rank."""
    source, base = peft_adapters.made("llama", "linear", "bfloat16"), store.checkpoint("llama", "bfloat16")
    merge(base, tmp_path / "merged", adapter=source)
    options = ForwardOptions(seq=16, draws=1, compute_dtype="float32")
    (report,) = compared("llama", source, {"merged": tmp_path / "merged"}, options)
    assert report.is_same and report.effect is not None and report.effect.is_seen
    assert max(row.noise for row in report.layers) > 1e-3


def dropped(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        if "layers.1." in name and "lora_B" in name:
            tensor.zero_()


def transposed(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    """B as if it lay the other way round."""
    for name, tensor in tensors.items():
        if "q_proj.lora_B" in name:
            tensors[name] = tensor.T.reshape(tensor.shape).contiguous()


def scaled(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    settings["lora_alpha"] += 1


def another(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.roll(1, 0)


FAULTS = (dropped, transposed, scaled, another)


def damaged(source: Path, folder: Path, fault: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
    """A copy of an adapter with a fault."""
    shutil.copytree(source, folder)
    tensors, settings = load_file(folder / ADAPTER), json.loads((folder / ADAPTER_CONFIG).read_text())
    fault(tensors, settings)
    save_file(tensors, folder / ADAPTER, {"format": "pt"})
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings))
    return folder


@thorough
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_another_adapter_is_different(name: str, tmp_path: Path) -> None:
    kind, faults = ("linear", FAULTS) if name == "llama" else ("experts", (dropped, scaled, another))
    source, outs = peft_adapters.made(name, kind), {}
    for fault in faults:
        wrong = damaged(source, tmp_path / fault.__name__, fault)
        (tmp_path / f"{fault.__name__}-out").mkdir()
        found = written(tmp_path / f"{fault.__name__}-out", name, wrong, {"tp": 2})
        outs |= {f"{kind} {fault.__name__}": out for kind, out in found.items()}
    reports = dict(zip(outs, compared(name, source, outs), strict=True))
    assert not [kind for kind, report in reports.items() if report.is_same]
    assert reports["split dropped"].first == "model.layers.1.self_attn.o_proj" or name != "llama"


def test_a_ranks_part_belongs_to_that_ranks_part_of_the_base(tmp_path: Path) -> None:
    """Two ranks have each other's part of the adapter: the sums are of the right shapes, and wrong."""
    source = peft_adapters.made("llama", "linear")
    out = written(tmp_path, "llama", source, {"tp": 2})["alone"]
    one, other = (load_file(out / rank / ADAPTER) for rank in ("rank-00-of-02", "rank-01-of-02"))
    assert any(not torch.equal(one[name], other[name]) for name in one)
    opened = open_source(out)
    first, second = (next(iter(rank.values())).file for rank in opened.ranks)
    spare = tmp_path / "spare"
    for old, new in ((first, spare), (second, first), (spare, second)):
        shutil.move(str(old), str(new))
    base = open_source(store.checkpoint("llama"))
    (report,) = run_forwards([(Unmerged(base, source, is_alone=True), opened)], QUICK)
    assert not report.is_same


@thorough
def test_an_adapter_that_does_nothing_is_without_effect(tmp_path: Path) -> None:
    def nothing(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            tensor *= "lora_B" not in name

    base, source = store.checkpoint("llama"), damaged(peft_adapters.made("llama", "linear"), tmp_path / "a", nothing)
    split(base, tmp_path / "out", tp=2, adapter=source)
    run = ["verify", base, tmp_path / "out", "--adapter", source, "--seq", "8", "--json"]
    done = command(*run)
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (3, "without effect")
    effect = document["forward"]["effect"]
    assert (effect["is_seen"], effect["place"]) == (False, "logits") and effect["ratio"] < 4
    assert "no effect that is more than rounding" in document["summary"]
    shown = command(*run[:-1])
    assert shown.returncode == 3 and "without it" in shown.stdout and "\nWITHOUT EFFECT: " in shown.stdout
    right = peft_adapters.made("llama", "linear")
    split(right, tmp_path / "alone", tp=2, config=base)
    assert "\nSAME: " in command("verify", right, tmp_path / "alone", "--config", base, "--seq", "8").stdout
    split(source, tmp_path / "nothing", tp=2, config=base)
    assert command("verify", right, tmp_path / "nothing", "--config", base, "--seq", "8").returncode == 1


def test_what_is_not_run_with_an_adapter(tmp_path: Path) -> None:
    base, source = store.checkpoint("llama"), peft_adapters.made("llama", "linear")
    split(source, tmp_path / "out", tp=2, config=base)
    opened, unmerged = open_source(tmp_path / "out"), Unmerged(open_source(base), source, is_alone=True)
    for name in ("backward", "streamed"):
        with pytest.raises(ReshardError, match="an adapter is not run so"):
            run_forwards([(unmerged, opened)], ForwardOptions(**{name: True}))
    with pytest.raises(CheckpointError, match="it runs beside the model that it changes, not alone"):
        run_forwards([(open_source(source, config=base), opened)])
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    done = command("verify", source, tmp_path / "out", "--config", tmp_path)
    assert done.returncode == 2 and "an adapter runs beside its base model" in done.stderr
    assert done.stdout == "UNCHECKED\n"


def changed_version(tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    settings["peft_version"] = "0.18.0"


@thorough
def test_what_peft_would_misread_is_not_run(tmp_path: Path) -> None:
    old = damaged(peft_adapters.made("qwen3_moe", "down"), tmp_path / "old", changed_version)
    split(store.checkpoint("qwen3_moe"), tmp_path / "out", tp=2)
    with pytest.raises(ReshardError, match=r"was written by PEFT 0\.18\.0, and PEFT \S+ reads its experts otherwise"):
        compared("qwen3_moe", old, {"out": tmp_path / "out"})
    odd = damaged(peft_adapters.made("llama", "linear"), tmp_path / "odd", lambda tensors, _: tensors.popitem())
    split(store.checkpoint("llama"), tmp_path / "llama", tp=2)
    with pytest.raises(ReshardError, match="PEFT misses"):
        compared("llama", odd, {"out": tmp_path / "llama"})
