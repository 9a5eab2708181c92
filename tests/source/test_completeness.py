"""What rules and config.json say must be there is there: no part of a checkpoint passes for the whole."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import MODELS, bound_model, published_tensors, read_config
from reshard.api import inspect, merge, plan, split
from reshard.cli.commands import main
from reshard.formats.errors import CheckpointError, PlanError, ReshardError
from reshard.source.completeness import Present, missing
from reshard.source.opening import open_source
from reshard.system import Share
from tests import remote, zoo
from tests.marks import thorough
from tests.model.test_remote_code import saved
from tests.support import LLAMA, Tensor, change_json, changed_json, llama_tensors, write_checkpoint, write_folder
from tests.support import command as run

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 8, "intermediate_size": 4,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 6,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip


def mixtral_tensors() -> list[Tensor]:
    tensors: list[Tensor] = [("model.embed_tokens.weight", "BF16", (6, 8))]
    for layer in range(3):
        at = f"model.layers.{layer}"
        tensors += [(f"{at}.{norm}.weight", "BF16", (8,)) for norm in ("input_layernorm", "post_attention_layernorm")]
        tensors += [
            (f"{at}.self_attn.{name}_proj.weight", "BF16", shape)
            for name, shape in {"q": (16, 8), "k": (8, 8), "v": (8, 8), "o": (8, 16)}.items()
        ]
        tensors.append((f"{at}.block_sparse_moe.gate.weight", "BF16", (8, 8)))
        for expert in range(8):
            here = f"{at}.block_sparse_moe.experts.{expert}"
            tensors += [
                (f"{here}.{name}.weight", "BF16", shape)
                for name, shape in {"w1": (4, 8), "w2": (8, 4), "w3": (4, 8)}.items()
            ]
    return [*tensors, ("model.norm.weight", "BF16", (8,)), ("lm_head.weight", "BF16", (6, 8))]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError, match="missing") as caught:
        open_source(folder)
    return caught.value.message


def without(tensors: Iterable[Tensor], pattern: str) -> list[Tensor]:
    return [tensor for tensor in tensors if not re.search(pattern, tensor[0])]


# --------------------------------------------------------------------------------------------------------- what is cut

CUTS = {
    "half of one file": (LLAMA, lambda t: t[: len(t) // 2], "model.layers.1.mlp.down_proj.weight"),
    "the last layers": (LLAMA, lambda t: without(t, r"layers\.2"), "model.layers.2.input_layernorm.weight"),
    "the first layer": (LLAMA, lambda t: without(t, r"layers\.0"), "model.layers.0.input_layernorm.weight"),
    "all layers": (LLAMA, lambda t: without(t, "layers"), "model.layers.0.input_layernorm.weight"),
    "one tensor": (LLAMA, lambda t: without(t, r"1\.mlp\.up"), "model.layers.1.mlp.up_proj.weight"),
    "one norm": (LLAMA, lambda t: without(t, r"2\.post_att"), "model.layers.2.post_attention_layernorm.weight"),
    "one module": (LLAMA, lambda t: without(t, r"1\.self_attn"), "model.layers.1.self_attn.k_proj.weight"),
    "embedding": (LLAMA, lambda t: without(t, "embed_tokens"), "model.embed_tokens.weight"),
    "final norm": (LLAMA, lambda t: without(t, r"^model\.norm"), "model.norm.weight"),
    "head": (LLAMA, lambda t: without(t, "lm_head"), "lm_head.weight"),
    **{
        f"every {name}": (LLAMA, lambda t, name=name: without(t, name), f"model.layers.0.{module}.{name}.weight")
        for module, names in {"self_attn": "q_proj k_proj v_proj o_proj", "mlp": "gate_proj up_proj down_proj"}.items()
        for name in names.split()
    },
    "one expert": (MIXTRAL, lambda t: without(t, r"experts\.5"), "model.layers.0.block_sparse_moe.experts.5.w1.weight"),
    "one expert of one layer": (
        MIXTRAL, lambda t: without(t, r"1.*experts\.7"), "model.layers.1.block_sparse_moe.experts.7.w1.weight",
    ),
    "one matrix of one expert": (
        MIXTRAL, lambda t: without(t, r"2.*experts\.3\.w2"), "model.layers.2.block_sparse_moe.experts.3.w2.weight",
    ),
    "all experts of one layer": (
        MIXTRAL, lambda t: without(t, r"2.*experts"), "model.layers.2.block_sparse_moe.experts.0.w1.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_a_part_is_refused_with_the_first_tensor_that_is_missing(cut: str, tmp_path: Path) -> None:
    config, part, first = CUTS[cut]
    whole = llama_tensors() if config is LLAMA else mixtral_tensors()
    open_source(write_folder(tmp_path / "whole", config, whole))
    kept = part(whole)
    message = refusal(write_folder(tmp_path / "part", config, kept))
    count = len(whole) - len(kept)
    assert f"tensor '{first}' is missing" in message
    if cut != "all layers":  # of which nothing is left to tell how many
        assert ("more" not in message) if count == 1 else (f"and {count - 1:,} more" in message)


def test_an_index_that_lists_fewer_tensors(tmp_path: Path) -> None:
    """One file of several is gone, and the index written again without it: all that is listed is there."""
    source = write_checkpoint(tmp_path / "model", files=3)
    gone = "model-00002-of-00003.safetensors"
    (source / gone).unlink()
    with changed_json(source / "model.safetensors.index.json") as index:
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone}
    assert "is missing, and" in refusal(source)


def test_every_command_says_so_before_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_checkpoint(tmp_path / "whole")
    split(whole, tmp_path / "shards", tp=2)
    part = write_folder(tmp_path / "part", LLAMA, without(llama_tensors(), r"layers\.2"))
    for command in (
        ["plan", str(part)],
        ["plan", str(part), "--tp", "2"],
        ["split", str(part), str(tmp_path / "out"), "--tp", "2"],
        ["split", str(part), str(tmp_path / "out"), "--tp", "2", "--dry-run"],
        ["verify", str(part), str(tmp_path / "shards"), "--exact-only"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(command)
        error = capsys.readouterr().err
        assert stop.value.code == 2, command
        assert "'model.layers.2.input_layernorm.weight' is missing, and 8 more" in error, command
        assert "Hint: fetch the missing files" in error and "Traceback" not in error
    report = inspect(part)
    assert not report.complete and "model.layers.2.input_layernorm.weight" in report.problems[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part", "shards", "whole"]
    assert inspect(whole).complete


def test_shards_that_all_lack_a_layer(tmp_path: Path) -> None:
    """Shards of a part, which agree with one another and with their manifest."""
    part = write_folder(tmp_path / "part", LLAMA, without(llama_tensors(), r"layers\.2"))
    plan_file = partial_plan(tmp_path)
    split(part, tmp_path / "out", tp=2, plan_file=plan_file)
    (tmp_path / "out" / "reshard.json").unlink()
    assert "is missing" in refusal(tmp_path / "out")


def partial_plan(folder: Path) -> Path:
    """The rules of a whole Llama, for a part."""
    whole = write_checkpoint(folder / "to-save")
    with pytest.raises(SystemExit):
        main(["plan", str(whole), "--save", str(folder / "plan.toml")])
    text = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text("partial = true\n" + text)
    return folder / "plan.toml"


def test_a_plan_may_say_that_it_is_for_a_part(tmp_path: Path) -> None:
    part = write_folder(tmp_path / "part", LLAMA, without(llama_tensors(), r"layers\.2"))
    access = {"plan_file": partial_plan(tmp_path)}
    assert plan(part, tp=2, **access).mesh.size == 2
    split(part, tmp_path / "out", tp=2, **access)
    merge(tmp_path / "out", tmp_path / "merged")  # the manifest keeps what the plan says
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (part / "model.safetensors").read_bytes()
    assert inspect(tmp_path / "out").complete


# ---------------------------------------------------------------------------------------------------------- quantized

FP8 = LLAMA | {"quantization_config": {"quant_method": "fp8"}}


def quantized(tensors: list[Tensor]) -> list[Tensor]:
    """The same model with its layers' matrices in 8 bits, each with a scale."""
    found: list[Tensor] = []
    for name, dtype, shape in tensors:
        is_quantized = "_proj" in name
        found.append((name, "F8_E4M3" if is_quantized else dtype, shape))
        found += [(f"{name}_scale", "F32", (1,))] if is_quantized else []
    return found


def test_a_scale_that_is_missing(tmp_path: Path) -> None:
    whole = quantized(llama_tensors())
    open_source(write_folder(tmp_path / "whole", FP8, whole))
    scale = r"layers\.1\.mlp\.up_proj\.weight_scale"
    message = refusal(write_folder(tmp_path / "scale", FP8, without(whole, scale)))
    assert "'model.layers.1.mlp.up_proj.weight_scale' is missing, by" in message
    message = refusal(write_folder(tmp_path / "weight", FP8, without(whole, r"layers\.1\.mlp\.up_proj\.weight$")))
    assert "'model.layers.1.mlp.up_proj.weight' is missing, by" in message


def test_layers_that_are_left_as_they_were_and_scales_of_the_cache(tmp_path: Path) -> None:
    plain, whole = llama_tensors(), quantized(llama_tensors())
    mixed = [*without(whole, r"layers\.1\."), *(t for t in plain if ".layers.1." in t[0])]
    cache = [(f"model.layers.0.self_attn.{name}_scale", "F32", (1,)) for name in "kv"]
    activations = [("model.layers.2.mlp.up_proj.input_scale", "F32", (1,))]
    open_source(write_folder(tmp_path, FP8, [*mixed, *cache, *activations]))


# ------------------------------------------------------------------------------------------ what may well be missing


def tied(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"tie_word_embeddings": True}


def base(tensors: list[Tensor]) -> list[Tensor]:
    return [(name.removeprefix("model."), *rest) for name, *rest in without(tensors, "lm_head")]


WHOLE: dict[str, tuple[dict[str, Any], Callable[[list[Tensor]], list[Tensor]]]] = {
    "tied head": (tied(LLAMA), lambda t: without(t, "lm_head")),
    "a base model": (LLAMA | {"architectures": ["LlamaModel"]}, lambda t: without(t, "lm_head")),
    "a base model that is said to be a whole one": (LLAMA, base),
    "a reward model": (
        LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
        lambda t: [*without(t, "lm_head"), ("score.weight", "BF16", (1, 20))],
    ),
    "frequencies in some layers": (
        LLAMA, lambda t: [*t, ("model.layers.1.self_attn.rotary_emb.inv_freq", "F32", (3,))],
    ),
    "biases in all layers": (
        LLAMA, lambda t: [*t, *((f"model.layers.{i}.self_attn.q_proj.bias", "BF16", (48,)) for i in range(3))],
    ),
    "no gate": (
        LLAMA | {"model_type": "arcee"}, lambda t: without(t, "gate_proj"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_what_publishers_leave_out_is_not_missing(kind: str, tmp_path: Path) -> None:
    config, change = WHOLE[kind]
    open_source(write_folder(tmp_path, config, change(llama_tensors())))


def test_a_model_with_two_heads_has_that_for_tokens(tmp_path: Path) -> None:
    """As all classes have whose names end as those of models with a head."""
    config = LLAMA | {"architectures": ["LlamaDoubleHeadsModel"]}
    open_source(write_folder(tmp_path / "whole", config, llama_tensors()))
    message = refusal(write_folder(tmp_path / "part", config, without(llama_tensors(), "lm_head")))
    assert "'lm_head.weight' is missing" in message


@pytest.mark.parametrize("name", ["t5", "t5-encoder", "mt5", "marian"])
def test_encoders_and_decoders(name: str, tmp_path: Path) -> None:
    """Positions in the first layer alone, MLPs with and without a gate, no norm at the end; and each without one."""
    whole = zoo.save(name, tmp_path / "whole")
    source = open_source(whole)
    assert list(missing(source.model)) == []
    infos = [(info.name, info.dtype, info.shape) for info in source.ranks[0].values()]
    for part in (r"\.1\.(layer\.0\.SelfAttention\.q|self_attn\.q_proj)\.weight", r"(\.wo|\.wi_1|fc1)\.weight"):
        kept = without(infos, part)
        if len(kept) < len(infos):
            config = json.loads((whole / "config.json").read_text())
            assert "is missing" in refusal(write_folder(tmp_path / f"part{len(kept)}", config, kept))


@thorough
@pytest.mark.parametrize("name", remote.REMOTE)
def test_nothing_is_missing_from_published_layouts(name: str) -> None:
    assert list(missing(open_source(saved(name)).model)) == []


# those whose layers differ the most, and small enough: ``python -m benchmarks.models`` checks all of the table
UNEVEN = ("GLM 5.2", "Gemma 4 31B", "Nemotron Super 49B", "Nemotron 3 Super 120B-A12B", "MiMo V2 Flash", "gpt-oss 20B")


@pytest.mark.parametrize("name", UNEVEN)
@thorough
def test_nothing_is_missing_from_models_at_their_real_size(name: str) -> None:
    (listed,) = (listed for listed in MODELS if listed.name == name)
    config = read_config(listed.config)
    assert list(missing(bound_model(config, published_tensors(listed, config)[0]))) == []


def test_a_config_of_more_layers_than_tensors_is_refused_at_once(tmp_path: Path) -> None:
    """A number in config.json costs nothing: what it makes of time and memory is bounded by the tensors."""
    config = MIXTRAL | {"num_hidden_layers": 2_000_000_000}
    write_folder(tmp_path / "model", config, mixtral_tensors())
    with pytest.raises(CheckpointError, match=r"config\.json: 'layer' is 2,000,000,000, and there are 96 tensors"):
        open_source(tmp_path / "model")
    report = inspect(tmp_path / "model")
    assert [problem.partition(": '")[0] for problem in report.problems] == ["config.json"]


def test_a_config_of_other_experts_than_a_program_stores_is_refused_at_once(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", MIXTRAL, mixtral_tensors())
    split(tmp_path / "model", tmp_path / "vllm", format="vllm")
    (tmp_path / "vllm/reshard.json").unlink()
    (tmp_path / "vllm/config.json").write_text(json.dumps(MIXTRAL | {"num_local_experts": 2_000_000_000}))
    with pytest.raises(CheckpointError, match=r"config\.json|is none that the format"):
        open_source(tmp_path / "vllm")


def test_inspect_reads_a_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from reshard.formats.files import safetensors

    read, plain = [], safetensors._read_usual
    monkeypatch.setattr(safetensors, "_read_usual", lambda *given: read.append(given[1]) or plain(*given))
    source = write_checkpoint(tmp_path / "model")
    assert inspect(source).complete
    assert read == [source / "model.safetensors"]
    split(source, tmp_path / "out", tp=2)
    for _ in range(2):
        read.clear()
        assert inspect(tmp_path / "out").complete
        files = [path for path in read if path.is_absolute()]  # the manifest has those of the source
        assert len(files) == len(set(files)) == 2
        (tmp_path / "out/reshard.json").unlink(missing_ok=True)


def test_a_config_of_more_experts_than_numbers_are_stored_is_refused_at_once(tmp_path: Path) -> None:
    """Where experts are one tensor of Hugging Face's, and one each in another program."""
    split(zoo.save("gpt_oss", tmp_path / "model"), tmp_path / "vllm", format="vllm")
    (tmp_path / "vllm/reshard.json").unlink()
    change_json(tmp_path / "vllm/config.json", num_local_experts=2_000_000_000)
    with pytest.raises(CheckpointError, match=r"config\.json|is none that the format"):
        open_source(tmp_path / "vllm")


@pytest.mark.parametrize(
    "setting",
    [
        {"hidden_size": 24}, {"hidden_size": "16"}, {"num_attention_heads": 3}, {"num_hidden_layers": 2},
        {"num_hidden_layers": 9}, {"vocab_size": 99}, {"intermediate_size": 23},
    ],
)  # fmt: skip
def test_inspect_calls_nothing_complete_that_split_refuses(setting: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    assert inspect(source).complete
    change_json(source / "config.json", **setting)
    with pytest.raises(ReshardError) as refusal:
        split(source, tmp_path / "out", tp=1)
    assert inspect(source).problems == [refusal.value.message]


def test_inspect_says_that_rules_are_needed(tmp_path: Path) -> None:
    """Nothing is missing, and split takes it with --plan."""
    source = write_checkpoint(tmp_path / "source", config=LLAMA | {"model_type": "nobody_knows"})
    done = run("inspect", source)
    assert done.returncode == 0 and "unknown model_type 'nobody_knows'" in done.stdout


def test_inspect_says_that_a_config_is_needed(tmp_path: Path) -> None:
    split(write_checkpoint(tmp_path / "source"), tmp_path / "out", format="dcp")
    for name in ("config.json", "reshard.json"):
        (tmp_path / "out" / name).unlink()
    done = run("inspect", tmp_path / "out")
    assert done.returncode == 0 and "no config.json is there" in done.stdout and "--config DIR" in done.stdout


def test_degrees_and_parts_without_end_cost_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    with pytest.raises(PlanError, match="tp=2000000000 is not possible"):
        split(tmp_path / "model", tmp_path / "out", tp=2_000_000_000)
    summary = split(tmp_path / "model", tmp_path / "out", tp=2, part=Share(1, 2_000_000_000), dry_run=True)
    assert summary.files == 1


def test_a_rank_that_lacks_a_file_is_not_complete(tmp_path: Path) -> None:
    split(write_checkpoint(tmp_path / "model"), tmp_path / "out", tp=2, max_shard_size=5_000)
    rank = tmp_path / "out/rank-00-of-02"
    assert inspect(rank).complete and inspect(rank).hint is None
    gone = sorted(rank.glob("*.safetensors"))[1]
    gone.unlink()
    report = inspect(rank)
    assert (report.kind, report.rank, report.complete) == ("one rank of a split checkpoint", 0, False)
    assert gone.name in report.problems[0] and report.hint


def test_what_is_looked_up_is_let_go(tmp_path: Path) -> None:
    """The places of all tensors: Python may look for garbage much later."""
    present = Present(open_source(write_checkpoint(tmp_path / "model")).model)
    assert present.counts("model.layers.{layer}", ())[0] and present.is_dealt("model.layers.{layer}")
    kept = weakref.ref(present)
    del present
    assert kept() is None
