"""Pipeline stages compute what the original computes; a layer or a norm that is on the wrong stage is seen."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from reshard.api import split
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from reshard.verify.forward.compare import ForwardOptions, run_forward
from tests import store, zoo
from tests.marks import thorough
from tests.support import command
from tests.verify.test_forward import QUICK, WITH_GRADIENTS, run_all, show

pytestmark = thorough


# one of each kind: what stands before and behind the layers, and what goes from one to the next
KINDS = [
    "llama", "llama-tied", "gpt2", "mamba2", "gemma3_text", "deepseek_v3", "gpt_oss", "bert", "bloom", "t5", "whisper",
    "gemma4_text", "blt", "falcon_h1", "mllama", "qwen3_vl", "marian-two-vocabularies", "llama-classifier",
]  # fmt: skip
SPLIT = ["llama-tied", "gpt2", "mamba2", "gemma3_text", "deepseek_v3", "gpt_oss", "t5"]
"""Of these, at two ranks a stage."""


def check(names: list[str], options: ForwardOptions, experts: int | None = None, **mesh: int) -> None:
    found = [store.pair(name, experts=experts, **mesh) for name in names]
    for name, report in zip(names, run_all(found, options), strict=True):
        assert report.is_same, (name, report.verdict, show(report))
        assert report.logits is not None or name in {"llama-classifier"}, name
        assert len(report.layers) >= 4, name


def test_two_stages_of_one_rank() -> None:
    check(KINDS, QUICK, pp=2)


def test_two_stages_of_two_ranks() -> None:
    check(SPLIT, QUICK, pp=2, tp=2)


def test_three_stages_the_middle_one_without_ends() -> None:
    check(["llama-tied", "gpt2", "gemma3_text"], QUICK, pp=3)


def test_gradients_go_back_from_stage_to_stage() -> None:
    check(["llama-tied", "gpt2", "t5", "bamba"], WITH_GRADIENTS, pp=2, tp=2)


@pytest.mark.parametrize("mesh", [{"pp": 2, "ep": 2}, {"pp": 2, "tp": 2, "ep": 2, "same_ranks": True}], ids=str)
def test_with_experts(mesh: dict[str, int]) -> None:
    check(["qwen3_moe", "deepseek_v3"], QUICK, 8, **mesh)


def test_one_block_at_a_time() -> None:
    check(["llama", "gpt2"], ForwardOptions(seq=16, draws=1, streamed=True), pp=2)


def test_each_state_is_compared_on_the_stage_that_has_it() -> None:
    (alone,) = run_all([store.pair("llama", tp=2)], QUICK)
    (staged,) = run_all([store.pair("llama", pp=2, tp=2)], QUICK)
    assert [row.name for row in staged.layers] == [row.name for row in alone.layers]
    assert staged.mesh == {"pp": 2, "tp": 2, "stages": [2, 1]}


def test_layers_with_each_others_numbers_are_seen(tmp_path: Path) -> None:
    """As if a stage counted its layers from another number."""
    original = store.checkpoint("llama")
    tensors = load_file(original / "model.safetensors")
    moved = {re.sub(r"layers\.(\d)", lambda m: f"layers.{(int(m[1]) + 1) % 3}", name): x for name, x in tensors.items()}
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    (wrong / "config.json").write_bytes((original / "config.json").read_bytes())
    save_file(moved, wrong / "model.safetensors", metadata={"format": "pt"})
    split(wrong, tmp_path / "out", pp=2)
    source = open_source(original)
    assert verify_exact(source, tmp_path / "out").verdict == "different"
    report = run_forward(source, open_source(tmp_path / "out"), QUICK)
    assert not report.is_same and report.first == "model.layers.0"


def test_a_plan_that_has_a_norm_on_the_wrong_stage_is_found(tmp_path: Path) -> None:
    """The bytes are where that plan says; the last stage misses it where it is needed."""
    original, rules = store.checkpoint("llama"), tmp_path / "mine.toml"
    assert command("plan", original, "--save", rules).returncode == 0
    text = rules.read_text()
    assert '"model.norm.*" = "last"' in text
    rules.write_text(text.replace('"model.norm.*" = "last"', '"model.norm.*" = "first"'))
    split(original, tmp_path / "out", pp=2, plan_file=rules)
    done = command("verify", original, tmp_path / "out", "--plan", rules, "--seq", "16", "--json")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["verdict"]) == (1, "different")
    assert answer["exact"]["verdict"] == "same"
    assert answer["forward"]["failure"]["place"] == "model.norm"
    assert any("other pipeline stages" in difference for difference in answer["plan"]["differences"])


def test_the_command_verifies_stages(tmp_path: Path) -> None:
    done = command("verify", store.checkpoint("llama"), store.shards("llama", pp=2), "--seq", "16")
    assert done.returncode == 0 and "SAME" in done.stdout
    assert "float32 on 2 ranks (pp 2" in done.stdout


def test_all_names_are_of_the_zoo() -> None:
    assert {*KINDS, *SPLIT} <= zoo.ZOO.keys()
