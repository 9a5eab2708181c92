"""What the forward cannot answer it does not, and with what it answers it says how small a fault it would have seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import split
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.api import verify
from reshard.verify.forward.compare import ForwardOptions, run_forward
from reshard.verify.forward.noise import LIMIT
from reshard.verify.rank.group import RankError
from reshard.verify.report.answer import power_in_words
from tests import store, zoo
from tests.marks import thorough
from tests.support import change_tensor, changed_json, changed_tensors, command
from tests.verify.faults import Shards
from tests.verify.forwards import run_forwards

pytestmark = thorough


def pair(original: Path, tp: int = 2) -> tuple[Source, Source]:
    shards = original.with_name(f"{original.name}-{tp}")
    split(original, shards, tp=tp)
    return open_source(original), open_source(shards)


def changed(original: Path, tensor: str, by: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The checkpoint with one tensor that is another."""
    with changed_tensors(original / "model.safetensors") as tensors:
        tensors[tensor] = by(tensors[tensor])
    return original


def first_element(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.where(torch.arange(x.numel()).reshape(x.shape) == 0, value, x)


# ---------------------------------------------------------------------------------------- originals that are no numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_original_that_is_not_a_number_is_not_checked(value: float, tmp_path: Path) -> None:
    original = changed(
        zoo.save("llama", tmp_path / "full"), "model.layers.1.mlp.down_proj.weight", first_element(value)
    )
    pair(original)
    done = command("verify", original, tmp_path / "full-2")
    assert done.returncode == 2
    said = "the original's own output is not a number from 'model.layers.1.mlp.down_proj' on, in float64"
    assert said in done.stderr and "Hint: --exact-only compares the bytes alone" in done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("UNCHECKED: Every byte is the original's") and said in last


def test_an_original_that_leaves_the_range_of_its_dtype(tmp_path: Path) -> None:
    """Its numbers are finite in higher precision, and so are those of the shards."""
    original = zoo.save("llama", tmp_path / "full", torch.float16)
    for name in ("gate", "up", "down"):
        changed(original, f"model.layers.1.mlp.{name}_proj.weight", lambda x: 200 * x)
    original_and_shards = pair(original)
    with pytest.raises(RankError, match=r"is not a number from 'model\.layers\.1\.\S+' on, in float16") as error:
        run_forward(*original_and_shards)
    assert error.value.hint == 'compute_dtype="float32" has a wider range'
    assert run_forward(*original_and_shards, ForwardOptions(compute_dtype="float32")).is_same


def test_gradients_of_an_original_that_are_not_numbers(tmp_path: Path) -> None:
    """Its logits are small, of large weights and small values; the gradients of these values are large."""
    original = zoo.save("llama", tmp_path / "full", torch.float16)
    changed(original, "lm_head.weight", lambda x: 6e4 * x.sign())
    original_and_shards = pair(changed(original, "model.norm.weight", lambda x: 1e-5 * x))
    options = ForwardOptions(batch=1, seq=2)
    with pytest.raises(
        RankError, match=r"original's own gradient of 'model\.norm\.weight' is not a number, in float16"
    ):
        run_forward(*original_and_shards, replace(options, backward=True))
    assert run_forward(*original_and_shards, options).is_same


def test_shards_that_are_not_numbers_are_different(tmp_path: Path) -> None:
    original, shards = pair(zoo.save("llama", tmp_path / "full"))
    changed(shards.path / "rank-01-of-02", "model.layers.1.mlp.down_proj.weight", first_element(float("nan")))
    report = run_forward(original, shards, ForwardOptions(draws=2))
    assert (report.is_same, report.first) == (False, "model.layers.1.mlp.down_proj")


# ------------------------------------------------------------------------------------------------------------ the power


def loud(folder: Path) -> Path:
    """A gpt_oss of such large weights that bfloat16 rounds away much of what it computes."""
    zoo.save("gpt_oss", folder, torch.bfloat16)
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(1)
    tensors = {name: 0.5 * torch.randn(x.shape, generator=generator) for name, x in sorted(load_file(file).items())}
    save_file({name: x.to(torch.bfloat16) for name, x in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def test_the_power_is_measured_and_said(tmp_path: Path) -> None:
    original, shards = pair(loud(tmp_path / "full"))
    float32 = ForwardOptions(compute_dtype="float32")
    poor, good = run_forward(original, shards), run_forward(original, shards, float32)
    assert poor.is_same and poor.power is not None and good.is_same and good.power is not None
    assert poor.power.is_poor and 0.09 < poor.power.noise < 0.3
    assert poor.power.noise == max(row.noise for row in poor.layers)
    assert poor.power.seen_from == LIMIT * poor.power.noise
    assert poor.power.bias_ratio is not None and poor.power.bias_ratio < 1
    assert not good.power.is_poor and good.power.seen_from < 1e-4
    assert good.power.bias_ratio is not None and good.power.bias_ratio > 1000
    assert power_in_words(poor).endswith("That is a weak test; --compute-dtype float32 sees more.")
    assert "--compute-dtype" not in power_in_words(good)
    # The fault that it says would not be seen is not, and in float32 it is.
    damaged = Shards(shards.path, original)
    bias = f"{poor.power.bias_place}.bias"
    for rank in range(2):
        doubled = (damaged.local(bias, rank).astype("u4") << 16).view("f4") * 2
        damaged.write(bias, rank, (doubled.view("u4") >> 16).astype("u2"))
    assert damaged.damaged == {(bias, 0), (bias, 1)}
    damaged.sign()
    missed, seen = (
        run_forwards([(original, open_source(shards.path))]),
        run_forward(original, open_source(shards.path), float32),
    )
    (row,) = (row for row in missed[0].layers if row.name == poor.power.bias_place)
    assert missed[0].is_same and row.ratio == pytest.approx(poor.power.bias_ratio, rel=0.2)
    assert not seen.is_same and seen.first == good.power.bias_place
    assert max(row.ratio for row in seen.layers if row.name == seen.first) == pytest.approx(
        good.power.bias_ratio, rel=0.05
    )


def test_the_command_says_the_power(tmp_path: Path) -> None:
    pair(zoo.save("llama", tmp_path / "llama", torch.bfloat16))
    done = command("verify", tmp_path / "llama", tmp_path / "llama-2")
    assert "A fault that changes values by " in done.stdout.splitlines()[-1] and "weak test" not in done.stdout
    pair(loud(tmp_path / "loud"))
    report = tmp_path / "report.html"
    done = command("verify", tmp_path / "loud", tmp_path / "loud-2", "--json", "--report", report)
    document = json.loads(done.stdout)
    assert done.returncode == 0 and document["forward"]["power"]["is_poor"]
    assert "--compute-dtype float32 sees more" in document["summary"]
    assert "How small a fault is seen" in report.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------ attention that is exchanged


def test_attention_that_is_sparse_for_long_inputs_alone(tmp_path: Path) -> None:
    """BigBird as saved: what is too short for its blocks, transformers computes with full attention."""
    found = []
    for block in (64, 2):
        original = zoo.save("big_bird", tmp_path / f"blocks-of-{block}")
        with changed_json(original / "config.json") as config:
            config |= {"attention_type": "block_sparse", "block_size": block, "num_random_blocks": 1}
        found.append(pair(original, 4))
    for report in run_forwards(found, ForwardOptions(draws=4)):
        assert report.is_same, report.verdict


# --------------------------------------------------------------------------------------------------- what does not run


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("deepseek_v3-mtp", "model.layers.3.eh_proj.weight"),
        ("qwen2_vl", "visual.blocks.0.mlp.fc1.weight"),
        ("llama", "model.embed_tokens.weight"),
    ],
)
def test_what_does_not_run_has_its_bytes_compared(model: str, name: str, tmp_path: Path) -> None:
    """A layer that predicts a further token, a tower, and a row of the vocabulary that no token reaches."""
    original, out = store.checkpoint(model), tmp_path / "out"
    split(original, out, tp=2)
    file = out / "rank-01-of-02/model.safetensors"
    last = load_file(file)[name].nbytes - 1  # of an exponent, so that whatever it is multiplied with would show it
    change_tensor(file, name, at=last, flip=0x40)
    found = verify(original, out, batch=1, seq=8)
    assert found.verdict == "different" and [damage.tensor for damage in found.exact.damages] == [name]
    assert found.forward.is_same and (name in found.forward.unused) == (model == "deepseek_v3-mtp")
