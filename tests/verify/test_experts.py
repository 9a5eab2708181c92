"""Forward and backward where experts are dealt to the ranks: alone, beside tensor parallelism, over the same ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardOptions, ForwardReport, run_forward
from reshard.verify.rank.group import RankError
from tests import store
from tests.marks import thorough
from tests.verify.faults import LAYER, Shards, inject
from tests.verify.forwards import run_forwards
from tests.verify.test_forward import run_all

pytestmark = thorough


EXPERTS = 8
"""As many in each model, so that every mesh here has some on each rank."""
MESHES = {
    "ep2": {"ep": 2},
    "ep4": {"ep": 4},
    "ep2-tp2": {"ep": 2, "tp": 2},
    "same2": {"ep": 2, "tp": 2, "same_ranks": True},
}
# by name; beside a shared expert; fused, with biases; latent attention; all tokens to all experts; stacked in a matrix
# that the module around reads; in the attention too; fused in another order, or under other names, than in memory
KINDS = {
    "ep2-tp2": ["mixtral", "gpt_oss", "deepseek_v3", "dbrx", "jetmoe", "nemotron_h-latent"],
    "same2": ["qwen2_moe", "gpt_oss", "deepseek_v3", "llama4_text", "qwen3_vl_moe", "granitemoe"],
}
"""Each on one of the meshes, and on both those whose experts have biases, or a correction of the routing."""
# experts between other kinds of layers and attention, in models of images, and with modules of their own
OTHERS = ["minimax_m3_vl_text", "deepseek_v4", "internvl-gpt_oss", "jamba", "kimi_linear", "gemma4_text-experts",
          "inkling_text", "glm4_moe"]  # fmt: skip
QUICK = ForwardOptions(seq=16, draws=1)
WITH_GRADIENTS = ForwardOptions(seq=16, draws=1, backward=True)


def pairs(names: Iterable[str], mesh: str, dtype: str) -> list[tuple[Source, Source]]:
    """Models of the zoo and their shards."""
    return [store.pair(name, dtype, EXPERTS, **MESHES[mesh]) for name in names]


def wrong(report: ForwardReport) -> list[tuple[str, float]]:
    return [(row.name, row.ratio) for row in (*report.layers, *report.gradients) if not row.is_same]


@pytest.mark.parametrize(
    ("names", "mesh", "dtype"),
    [(OTHERS, "ep2", "float32"), (["mixtral", "gpt_oss", "dbrx", "jetmoe"], "ep4", "bfloat16")],
    ids=["others-ep2", "kinds-ep4"],
)
def test_correct_shards_are_the_same_model(names: list[str], mesh: str, dtype: str) -> None:
    for name, report in zip(names, run_all(pairs(names, mesh, dtype), QUICK), strict=True):
        assert report.is_same, (name, wrong(report))
        assert report.dtype == dtype
        assert_experts_are_summed(name, report)


def assert_experts_are_summed(name: str, report: ForwardReport) -> None:
    places = [row.name for row in report.layers]
    assert any(place.endswith(("experts", "experts.mlp", "output_linear")) for place in places), (name, places)


@pytest.mark.parametrize(("mesh", "dtype"), [("ep2-tp2", "bfloat16"), ("same2", "float32")])
def test_gradients_are_those_of_the_original(mesh: str, dtype: str) -> None:
    found = pairs(KINDS[mesh], mesh, dtype)
    for name, (original, _), report in zip(KINDS[mesh], found, run_all(found, WITH_GRADIENTS), strict=True):
        assert report.is_same, (name, wrong(report))
        assert_experts_are_summed(name, report)
        tensors = original.model.tensors
        without = {tensor.name for tensor in tensors} - {row.name for row in report.gradients}
        assert all("correction_bias" in tensor or ".visual." in tensor for tensor in without), (name, without)


def test_experts_that_two_modules_share() -> None:
    """DiffusionGemma's encoder and decoder have the same experts, stored once."""
    (report,) = run_all(pairs(["diffusion_gemma"], "ep2", "float32"), QUICK)
    assert report.is_same, wrong(report)
    places = {row.name for row in report.layers}
    assert {"model.encoder.language_model.layers.1", "model.decoder.layers.1.experts"} <= places


def test_streamed() -> None:
    names = ["mixtral", "gpt_oss"]
    for name, report in zip(
        names, run_forwards(pairs(names, "ep2", "bfloat16"), ForwardOptions(draws=4, streamed=True)), strict=True
    ):
        assert report.is_same, (name, wrong(report))


def expert_of_another_rank(name: str, shards: Path, original: Source) -> bool:
    """One expert of the first rank, and one of the last, have changed places."""
    broken = Shards(shards, original)
    here, there = 0, broken.degree - 1
    for entry in list(broken.entries()):
        numbers = [broken.experts(rank) for rank in (here, there)]
        index = broken.indices(entry.name).get("expert")
        if index is not None and index == numbers[0][0]:
            other = entry.name.replace(f".experts.{index}.", f".experts.{numbers[1][0]}.")
            mine, theirs = broken.local(entry.name, here), broken.local(other, there)
            broken.write(entry.name, here, theirs)
            broken.write(other, there, mine)
        elif "expert" in entry.layout.rule.axes:
            mine, theirs = broken.local(entry.name, here).copy(), broken.local(entry.name, there).copy()
            mine[0], theirs[0] = theirs[0].copy(), mine[0].copy()
            broken.write(entry.name, here, mine)
            broken.write(entry.name, there, theirs)
    broken.sign()
    return bool(broken.damaged)


def the_fault(fault: str) -> Callable[[str, Path, Source], bool]:
    return lambda name, shards, original: bool(inject(fault, shards, original))


@pytest.mark.parametrize("mesh", ["ep2", "same2"])
def test_wrong_experts_and_routers_are_seen_and_named(mesh: str, tmp_path: Path) -> None:
    faults = {"expert_of_another_rank": expert_of_another_rank, "one_expert": the_fault("one_expert"),
              "router": the_fault("router")}  # fmt: skip
    places = {"router": {"mixtral": "mlp.gate choice 1", "gpt_oss": "mlp.router choice 1",
                         "deepseek_v3": "mlp.gate choice 0"}}  # fmt: skip
    cases, jobs = [], []
    for name in ("mixtral", "gpt_oss", "deepseek_v3"):
        ((original, shards),) = pairs([name], mesh, "bfloat16")
        for fault, damage in faults.items():
            damaged = tmp_path / f"{name}-{fault}"
            shutil.copytree(shards.path, damaged)
            assert damage(name, damaged, original), (name, fault)
            cases.append((name, fault, f"model.layers.{LAYER}.{places.get(fault, {}).get(name, 'mlp.experts')}"))
            jobs.append((original, open_source(damaged)))
    for (name, fault, place), report in zip(cases, run_forwards(jobs, QUICK), strict=True):
        assert not report.is_same, (name, fault)
        assert report.first == place, (name, fault, report.verdict)
        row = next(row for row in report.layers if row.name == place)
        assert fault != "router" or row.rank == 1, "the router of that rank alone"


def test_a_layout_that_cannot_be_run() -> None:
    """Over the same ranks JetMoe's experts make all query heads, while keys and values are cut."""
    ((original, shards),) = pairs(["jetmoe"], "same2", "float32")
    with pytest.raises(RankError, match=r"no forward of tp 2 = ep 2 is known: '.*kv_proj.weight' is cut, but no"):
        run_forward(original, shards)
