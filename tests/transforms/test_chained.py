"""Deltas, adapters and dequantizing on a source in any form: what comes of it is what comes of the full checkpoint."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from reshard.api import diff, load, merge, split
from reshard.formats.errors import MismatchError, ReshardError
from reshard.source.access import Access
from reshard.source.opening import open_source
from reshard.store.range_store import remote_of
from reshard.transforms.opening import open_any, open_converted
from tests import peft_adapters, store
from tests.marks import one_of_each, thorough
from tests.stores.store_server import StoreServer
from tests.support import change_tensor, command, contents
from tests.transforms.test_dequantize import quantized

ONE = {"workers": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 8-bit floats, one in bfloat16 with a delta, and an adapter to both."""
    folder = tmp_path_factory.mktemp("transforms")
    plain = store.checkpoint("deepseek_v3", "bfloat16")
    quantized(plain, folder / "fp8")
    for name in ("fp8", "bf16"):
        base = folder / name
        if name == "bf16":
            shutil.copytree(plain, base)
        after = shutil.copytree(base, folder / f"{name}-after")
        for file in after.glob("*.safetensors"):
            tensors = load_file(file)
            for number, (key, tensor) in enumerate(tensors.items()):
                if number % 3 == 0 and tensor.dtype == torch.bfloat16 and "norm" in key:
                    tensor.view(-1)[1::5] = 0.75
            save_file(tensors, file, {"format": "pt"})
        diff(base, after, out=folder / f"{name}-delta")
    return folder


def options(folder: Path, name: str, transforms: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "patch": folder / f"{name}-delta",
        "dequantize": True,
        "adapter": peft_adapters.made("deepseek_v3", "experts"),
    }
    return {key: found[key] for key in transforms.split()}


FORMS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "vllm": {"tp": 2, "ep": 2, "same_ranks": True, "format": "vllm"},
    "pp": {"pp": 2},
    "megatron": {"format": "megatron"},
    "legacy": {"tp": 2, "format": "megatron-legacy"},
    "dcp": {"tp": 2, "format": "dcp"},
    "ep": {"ep": 2},
}
CASES = [
    ("bf16", "adapter", "vllm", "tp"), ("bf16", "patch", "dcp", "vllm"), ("fp8", "dequantize", "ep", "megatron"),
    ("fp8", "patch dequantize adapter", "ep", "tp"), ("bf16", "patch adapter", "megatron", "tp"),
    ("fp8", "dequantize adapter", "pp", "vllm"), ("bf16", "adapter", "legacy", "legacy"),
    ("bf16", "patch adapter", "tp", "dcp"), ("fp8", "patch", "ep", "pp"), ("bf16", "adapter", "pp", "ep"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "transforms", "before", "after"), one_of_each(CASES, lambda case: case[1].partition(" ")[0])
)
def test_a_split_source_is_as_good_as_the_full_one(
    name: str, transforms: str, before: str, after: str, made: Path, tmp_path: Path
) -> None:
    """Byte for byte, with the headers of all files; the manifest differs in what it says of the source's files."""
    base, given = made / name, options(made, name, transforms)
    split(base, tmp_path / "shards", **FORMS[before], **ONE)
    split(tmp_path / "shards", tmp_path / "out", **given, **FORMS[after], **ONE)
    split(base, tmp_path / "should", **given, **FORMS[after], **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    mine, theirs = (json.loads(of.pop("reshard.json")) for of in (found, should))
    assert found == should
    assert mine["ranks"] == theirs["ranks"] and mine["source"]["id"] == theirs["source"]["id"]
    merge(tmp_path / "shards", tmp_path / "one", **given, **ONE)
    split(base, tmp_path / "two", format="huggingface", **given, **ONE)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert contents(tmp_path / "one") != contents(base)


@pytest.mark.parametrize("form", one_of_each(["bin", "dcp", "tp"], lambda form: form == "bin"))
def test_a_source_that_does_not_know_the_original_files(form: str, made: Path, tmp_path: Path) -> None:
    """Without a manifest, and of pickles: the tensors are the same."""
    base, source = made / "bf16", tmp_path / "source"
    if form == "bin":
        shutil.copytree(base, source, ignore=shutil.ignore_patterns("model*"))
        torch.save(load_file(base / "model.safetensors"), source / "pytorch_model.bin")
    else:
        split(base, source, **FORMS[form], **ONE)
        (source / "reshard.json").unlink()
    given = options(made, "bf16", "patch adapter")
    found, should = load(source, tp=2, rank=1, **given), load(base, tp=2, rank=1, **given)
    assert found.keys() == should.keys() and all(torch.equal(found[name], should[name]) for name in should)
    with pytest.raises(MismatchError, match="another base"):
        load(made / "bf16-after", **given)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("bf16", {"patch"}),
        ("bf16", {"adapter"}),
        ("fp8", {"dequantize"}),
        ("bf16", {"quantize"}),
        ("fp8", {"patch", "dequantize", "adapter", "quantize", "dtype"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(sorted(value)),
)
@pytest.mark.parametrize("is_split", [False, True])
def test_a_computed_source_has_the_rules_and_the_facts_of_its_source(
    name: str, given: set[str], is_split: bool, made: Path, tmp_path: Path
) -> None:
    """The rules of a user's plan, or of a manifest, and what lies beside the weights."""
    base, plan = shutil.copytree(made / name, tmp_path / "base"), tmp_path / "mine.toml"
    plan.write_text(tomli_w.dumps(open_source(base).rules | {"name": "mine"}))
    access = Access(plan_file=plan)
    if is_split:
        split(base, tmp_path / "shards", ep=2, plan_file=plan, **ONE)
        base, access = tmp_path / "shards", Access()
    (base / "optimizer.pt").write_bytes(b"x")
    found = {**options(made, name, "patch dequantize adapter"), "quantize": "fp8-block", "dtype": "fp16"}
    opened = open_any(base, replace(access, **{key: found[key] for key in given}))
    assert opened.model.architecture.name == "mine"
    assert opened.strays == ("optimizer.pt",) and opened.is_split == is_split and opened.location == str(base)


def test_a_converted_adapter_has_the_facts_of_its_source(tmp_path: Path) -> None:
    adapter = shutil.copytree(peft_adapters.made("mixtral", "experts"), tmp_path / "adapter")
    (adapter / "optimizer.pt").write_bytes(b"x")
    opened = open_converted(adapter, Access(config=store.checkpoint("mixtral")), "peft-per-expert")
    assert opened.strays == ("optimizer.pt",)


def test_the_command(made: Path, tmp_path: Path) -> None:
    """Of a split source, with all that is chained, and its proof."""
    base, given = made / "fp8", options(made, "fp8", "patch dequantize adapter")
    split(base, tmp_path / "shards", ep=2, **ONE)
    chain = "--patch", given["patch"], "--dequantize", "--adapter", given["adapter"]
    done = command("split", tmp_path / "shards", tmp_path / "out", "--tp", "2", "--as", "vllm", *chain)
    assert done.returncode == 0, done.stderr
    split(base, tmp_path / "should", tp=2, format="vllm", **given, **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    assert found.pop("reshard.json") != should.pop("reshard.json") and found == should
    assert command("patch", tmp_path / "shards", given["patch"], tmp_path / "full", "-q").returncode == 0
    assert diff(tmp_path / "full", made / "fp8-after").same
    done = command("verify", tmp_path / "shards", tmp_path / "out", "--exact-only", *chain)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("SAME"), done.stdout


def test_no_bit_depends_on_the_range_that_is_read(made: Path, tmp_path: Path) -> None:
    """Of a source that is gathered from ranks: rows, columns and experts of several."""
    split(made / "bf16", tmp_path / "shards", tp=2, ep=2, same_ranks=True, format="vllm", **ONE)
    given = options(made, "bf16", "patch adapter")
    opened = open_any(tmp_path / "shards", Access(**given))
    (file,) = [remote_of(path) for path in opened.files]
    assert file is not None
    read, chance = file.read, np.random.default_rng(0)
    whole = bytes(read(0, file.size))
    merge(made / "bf16", tmp_path / "full", **given, **ONE)
    assert whole == (tmp_path / "full" / "model.safetensors").read_bytes()
    for _ in range(300):
        start = int(chance.integers(0, file.size))
        stop = min(file.size, start + int(chance.integers(1, 20000)))
        assert bytes(read(start, stop)) == whole[start:stop]


def test_an_adapter_is_converted_from_its_ranks(tmp_path: Path) -> None:
    base, adapter = store.checkpoint("mixtral"), peft_adapters.made("mixtral", "experts")
    split(adapter, tmp_path / "ranks", tp=2, config=base)
    split(tmp_path / "ranks", tmp_path / "out", format="peft-per-expert")
    split(adapter, tmp_path / "should", format="peft-per-expert", config=base)
    assert contents(tmp_path / "out") == contents(tmp_path / "should")


def test_ranks_that_differ_are_refused(made: Path, tmp_path: Path) -> None:
    split(made / "bf16", tmp_path / "shards", tp=2, **ONE)
    change_tensor(tmp_path / "shards" / "rank-01-of-02" / "model.safetensors", "model.norm.weight")
    with pytest.raises(ReshardError, match=r"should be the same in .* but differs"):
        merge(tmp_path / "shards", tmp_path / "out", **options(made, "bf16", "adapter"))
    assert not (tmp_path / "out").exists()


@thorough
def test_shards_in_a_bucket(made: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    split(made / "bf16", tmp_path / "store/shards", tp=2, **ONE)
    given = options(made, "bf16", "adapter")
    with StoreServer(tmp_path / "store") as server:
        options_ = "--adapter", given["adapter"], "--tp", "4", "--cache-dir", tmp_path / "cache"
        done = command("split", "s3://bucket/shards", tmp_path / "out", *options_, **server.environment)
    assert done.returncode == 0, done.stderr
    split(made / "bf16", tmp_path / "should", tp=4, **given, **ONE)
    found, should = contents(tmp_path / "out"), contents(tmp_path / "should")
    assert found.pop("reshard.json") != should.pop("reshard.json") and found == should
