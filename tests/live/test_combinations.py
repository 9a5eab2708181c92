"""A sample of ``python -m tests.live.combinations``: what a push brings is what the disk has, byte for byte."""

from __future__ import annotations

import itertools
import re
import zlib
from pathlib import Path

import pytest

from reshard.formats.errors import MismatchError, PlanError, ReshardError
from reshard.formats.notation.axes import Run
from reshard.formats.notation.format_file import format_of, in_modules
from reshard.live import document, placements, routes
from reshard.live.meshes import target_of, trainer_state
from reshard.live.page import page as page_of
from reshard.live.routing import plan_push
from reshard.live.sides import LiveState
from reshard.pages.markup import WIDTHS
from reshard.source.opening import open_source
from reshard.text import human_bytes
from tests import zoo
from tests.live.combinations import SOURCES, TARGETS, walk, wrong
from tests.marks import one_of_each
from tests.support import LLAMA, command, write_checkpoint

MODELS = (
    "llama", "mixtral", "llama-tied", "qwen3_moe", "deepseek_v3", "gpt_oss", "phi3", "gpt_neox", "falcon-7b", "bloom",
    "gpt2", "mamba2", "qwen3_next", "gemma3", "glm4_moe", "qwen2-tied", "olmo2", "granitemoehybrid", "nemotron_h",
    "llama4_text", "llava_onevision", "bert", "qwen2_moe", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("model", one_of_each(MODELS, lambda model: model in ("llama", "mixtral")))
def test_combinations(model: str) -> None:
    pairs = list(itertools.product(SOURCES, TARGETS))
    possible = (each for each in walk([model], pairs, zlib.crc32(model.encode())) if not each[-1].startswith("refused"))
    found = list(itertools.islice(possible, 8))
    assert found and [each for each in found if each[-1] != "same"] == []


@pytest.mark.parametrize(
    ("model", "dtype", "source", "target"),
    [
        ("deepseek_v3", "bfloat16", "torchtitan:3", "vllm:tp2"),  # numbers of 4 bytes beside an odd number of 2
        ("mamba2", "float32", "fsdp2:2", "vllm:tp2"),  # a function of numbers whose dtype stays
    ],
)
def test_what_one_model_has(tmp_path: Path, model: str, dtype: str, source: str, target: str) -> None:
    assert wrong(zoo.save(model, tmp_path / "model", dtype=getattr(zoo.torch, dtype)), source, target) == []


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    return zoo.save("llama", tmp_path_factory.mktemp("live") / "model", dtype=torch.bfloat16)


def test_the_digest_is_of_the_plan_alone(llama: Path) -> None:
    one, same, other = (
        routes(llama, source="fsdp2:2", target=target) for target in ("vllm:tp2", "vllm:tp2", "vllm:tp4")
    )
    assert one.digest == same.digest != other.digest


def test_replicas_share_the_sending(llama: Path) -> None:
    plan = routes(llama, source="fsdp2:x4", target="vllm:tp1", bucket=1 << 14)
    assert max(plan.sent) - min(plan.sent) <= 1 << 14
    assert sum(plan.sent) == plan.received[0]


def test_the_same_host_sends_first(llama: Path) -> None:
    model = open_source(llama).model
    hosts = ["a", "b", "b", "a"]
    plan = plan_push(model, trainer_state(model, target_of("fsdp2:x2")), target_of("vllm:tp2"), hosts=hosts)
    assert plan.pairs().keys() == {(1, 0), (0, 1)}


@pytest.mark.parametrize(
    ("source", "target"), [("fsdp2:2", "vllm:tp1"), ("fsdp2:3", "vllm:tp2"), ("fsdp2:2x2", "fsdp2:3x3")]
)
def test_no_step_is_larger_than_a_bucket(llama: Path, source: str, target: str) -> None:
    """Where a rank has several pieces of a tensor, or all of what a step takes of it, or sends it to many, too."""
    plan = routes(llama, source=source, target=target, bucket=1 << 12)
    for rank in range(plan.source.ranks):
        assert max(sum(part.nbytes for part in parts) for parts in plan.parts(rank)) <= 1 << 12


def test_no_step_is_larger_than_a_bucket_where_ranks_have_rows_in_turns(llama: Path) -> None:
    """Many small pieces of one tensor on a rank: none is as large as a bucket, all together are."""
    model, name = open_source(llama).model, "model.embed_tokens.weight"
    (parts,) = trainer_state(model, target_of("fsdp2:1")).ranks
    ranks = [
        [
            each._replace(runs=(tuple(Run(row, 1) for row in range(rank, each.shape[0], 2)), *each.runs[1:]))
            if each.name == name
            else each
            for each in parts
        ]
        for rank in range(2)
    ]
    plan = plan_push(model, LiveState(in_modules(format_of("dcp")), ranks), target_of("fsdp2:8"), bucket=1 << 12)
    for process in range(10):
        assert max(sum(part.nbytes for part in parts) for parts in plan.parts(process)) <= 1 << 12


def test_receivers_that_have_a_tensor_in_two_dtypes(llama: Path) -> None:
    model, (trainer, target) = open_source(llama).model, map(target_of, ("fsdp2:1", "fsdp2:2"))
    receivers = trainer_state(model, target)
    wider = [part._replace(dtype="F32") if "norm" in part.name else part for part in receivers.ranks[1]]
    with pytest.raises(
        MismatchError, match=r"norm\.weight' is F32 \[\d+\] on rank 1, and BF16 \[\d+\] on a rank before"
    ):
        plan_push(model, trainer_state(model, trainer), receivers._replace(ranks=[receivers.ranks[0], wider]))


def test_a_bucket_has_room(llama: Path) -> None:
    for bucket in (0, -1, 4095, 6.4e7):
        with pytest.raises(PlanError, match=rf"bucket={bucket} should be a number of bytes, at least 4,096"):
            routes(llama, source="fsdp2:2", target="vllm:tp1", bucket=bucket)  # type: ignore[arg-type]


def test_larger_elements_come_first(tmp_path: Path) -> None:
    """So that all lie at multiples of their size, without room between them."""
    folder = zoo.save("deepseek_v3", tmp_path / "model", dtype=zoo.torch.bfloat16)
    plan = routes(folder, source="torchtitan:3", target="vllm:tp2")
    for rank in range(5):
        for parts in plan.parts(rank):
            dtypes = [part.move.dtype for part in parts]
            assert dtypes == sorted(dtypes, key=["F32", "BF16"].index)
    assert {part.move.dtype for part in next(plan.parts(0))} == {"F32", "BF16"}


def test_blocks_as_views(llama: Path) -> None:
    plan = routes(llama, source="fsdp2:3", target="vllm:tp2")
    blocks = list(document(plan))
    sizes = [zoo.torch.Size(each["shape"]).numel() * 2 for each in blocks]
    assert sum(sizes) == plan.nbytes
    assert {each["to"] for each in blocks} == {0, 1}


def test_placements(llama: Path) -> None:
    found = placements(llama, "vllm:tp2")
    assert found["model.layers.0.mlp.gate_up_proj.weight"] == "_StridedShard(0, split_factor=2)"
    assert found["model.layers.0.mlp.down_proj.weight"] == "Shard(1)"
    assert found["model.norm.weight"] == "Replicate()"


@pytest.mark.parametrize(
    "text", ["vllm:", "vllm", "vllm:1", "fsdp2:tp2", "fsdp2:8", "megatron:tp2pp2ep2", "fsdp2:4x2tp2"]
)
def test_targets(text: str) -> None:
    assert target_of(str(target_of(text))) == target_of(text)


@pytest.mark.parametrize(
    "text", ["vllm:tp0", "vllm:tp", "vllm:xx2", "vllm:tp2tp2", "vllm:2-2", "vllm: tp2", "fsdp2:" + "9" * 5000]
)
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(PlanError, match="is not a program and its degrees"):
        target_of(text)


@pytest.mark.parametrize("text", ["fsdp2:100001", "fsdp2:4096x4096", "fsdp2:99999999999", "transformers:tp2x99999999"])
def test_more_ranks_than_a_plan_ends_for_are_refused(text: str, llama: Path) -> None:
    assert target_of("fsdp2:50000x2").ranks == 100_000
    for ends in ((text, "vllm:tp1"), ("fsdp2:2", text)):
        done = command("live", "plan", llama, "--from", ends[0], "--to", ends[1])
        assert (done.returncode, "ranks\nHint: give degrees of at most 100,000 ranks" in done.stderr) == (2, True)


def test_more_parts_than_a_plan_ends_for_are_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", config=LLAMA | {"num_hidden_layers": 5})
    done = command("live", "plan", model, "--from", "fsdp2:100000", "--to", "vllm:tp2")
    assert (done.returncode, *done.stderr.splitlines()) == (
        2, "Error: 'fsdp2:100000': 100,000 ranks would hold 4,800,000 parts of tensors",
        "Hint: a push is planned for at most 4,194,304, here of 87,381 ranks",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target", "why"),
    [
        ("vllm:tp2", "vllm:tp2", "vllm is not a trainer"),
        ("fsdp2:2", "vllm:2", "vllm is not a trainer"),
        ("fsdp2:2", "vllm:tp5", "heads do not divide by 5"),
        ("fsdp2:2", "nonsense:tp2", "no program is called"),
    ],
)
def test_what_cannot_be_pushed(llama: Path, source: str, target: str, why: str) -> None:
    with pytest.raises(ReshardError, match=why):
        routes(llama, source=source, target=target)


def test_the_picture(llama: Path) -> None:
    plan = routes(llama, source="fsdp2:3", target="vllm:tp2")
    page = page_of(plan, "a push", 50e9)
    for (sender, receiver), nbytes in plan.pairs().items():
        assert f"trainer {sender} to receiver {receiver}: {human_bytes(nbytes)}" in page
        assert f">{human_bytes(nbytes)}</text>" in page  # it stands in the cell
    assert "<script" not in page
    for plot, width in zip(page.split('<svg class="')[1:], WIDTHS.values(), strict=True):
        ends = [float(x) + float(w) for x, w in re.findall(r'class="hit" x="([\d.]+)" [^>]*width="([\d.]+)"', plot)]
        assert max(ends) == pytest.approx(width - 8, abs=0.2)  # the cells take the whole width


def test_ranks_are_drawn_in_groups(llama: Path) -> None:
    page = page_of(routes(llama, source="fsdp2:70", target="vllm:tp1"), "a push", 50e9)
    assert "trainers 0 to 1 to receiver 0" in page
