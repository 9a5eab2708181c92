"""transformers' distributed checkpoints: what is written is what transformers' own modules hold, and what it wrote is
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError, MismatchError
from reshard.formats.files.safetensors import read_header
from reshard.profile.processes import run_processes
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import of_ranks, one_of_each, thorough
from tests.support import change_json, command, contents, weights_of
from tests.zoo import class_of

MESHES = [
    ("llama", {"tp": 2}),
    ("llama", {"tp": 1}),
    ("gemma2", {"tp": 4}),
    ("qwen3_moe", {"tp": 2}),
    ("qwen3_moe", {"tp": 1}),
    ("deepseek_v3", {"tp": 2, "ep": 2}),
    ("phi3", {"tp": 4}),
    ("gpt2", {"tp": 2}),
    ("falcon-7b", {"tp": 2}),
    ("gpt_oss", {"tp": 2}),
    ("t5", {"tp": 2}),
]
QUICK = {"qwen3_moe", "phi3", "gpt2"}
"""Experts, packed, and the input first."""


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def _loaded(folder: Path, **more: Any) -> Any:
    return class_of(folder).from_pretrained(folder, dtype=torch.float32, **more)


@pytest.mark.parametrize(("name", "mesh"), one_of_each(MESHES, lambda case: case[0] if case[0] in QUICK else None))
def test_transformers_loads_it_and_the_way_back_restores_every_byte(
    name: str, mesh: dict[str, int], tmp_path: Path
) -> None:
    original = store.checkpoint(name)
    split(original, tmp_path / "out", format="transformers", **mesh)
    found, wanted = _loaded(tmp_path / "out"), _loaded(original)
    assert _equal(found.state_dict(), wanted.state_dict())
    merge(tmp_path / "out", tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(original)
    (tmp_path / "out" / "reshard.json").unlink()
    merge(tmp_path / "out", tmp_path / "without")
    merged, whole = weights_of(tmp_path / "without"), weights_of(original)
    assert _equal({key: merged[key] for key in whole}, whole)
    assert all(torch.equal(merged[key], wanted.state_dict()[key]) for key in merged.keys() - whole.keys())  # tied


@pytest.mark.parametrize(
    "name",
    one_of_each(["llama", "gemma2", "qwen3_moe", "deepseek_v3", "phi3", "gpt2"], lambda n: n if n in QUICK else None),
)
def test_logits_are_the_originals(name: str, tmp_path: Path) -> None:
    original = store.checkpoint(name)
    split(original, tmp_path / "out", tp=2, format="transformers")
    tokens = torch.arange(24).reshape(2, 12) % 30
    with torch.no_grad():
        found, wanted = (_loaded(path).eval()(input_ids=tokens).logits for path in (tmp_path / "out", original))
    assert torch.equal(found, wanted)


def test_each_box_is_written_once_by_the_first_rank_that_has_it(tmp_path: Path) -> None:
    original = store.checkpoint("qwen3_moe")
    split(original, tmp_path / "out", tp=2, format="transformers")
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert [file.name for file in files] == [f"shard-{i:05d}-model-00001-of-00001.safetensors" for i in (1, 2, 3, 4)]
    headers = [read_header(file) for file in files]
    sizes = [sum(info.nbytes for info in header.tensors.values()) for header in headers]
    assert sum(sizes) == sum(tensor.nbytes for tensor in weights_of(original).values())
    norm = "model.norm.weight"
    assert [norm in header.tensors for header in headers] == [True, False, False, False]
    for header in headers:
        offsets = json.loads(header.metadata["DCP_SHARDING_INFO"])
        assert offsets.keys() == header.tensors.keys()
        assert (header.metadata["DCP_VERSION"], header.metadata["format"]) == ("1.0", "pt")


def test_a_rank_reads_its_own_file(tmp_path: Path) -> None:
    """The cut of a dimension is that of torch's chunks, for a vocabulary that does not divide, too."""
    split(store.checkpoint("llama"), tmp_path / "out", tp=4, format="transformers")
    found = {}
    for rank, file in enumerate(sorted(tmp_path.glob("out/*.safetensors"))):
        info = json.loads(read_header(file).metadata["DCP_SHARDING_INFO"])
        found[rank] = info["model.embed_tokens.weight"]["saved_offsets"][0]
    whole = weights_of(store.checkpoint("llama"))["model.embed_tokens.weight"]
    starts = [0, *(part.shape[0] for part in whole.chunk(4))]
    assert [*found.values()] == [sum(starts[: i + 1]) for i in range(4)]


# ------------------------------------------------------------------------------------------------ programs themselves


def _on_two_ranks(folder: Path) -> torch.nn.Module:
    """A checkpoint in transformers' own tensor parallelism, in a rank."""
    from transformers.distributed import DistributedConfig

    return _loaded(folder, distributed_config=DistributedConfig(tp_size=2))


def _same_logits(folder: Path, original: Path) -> bool:
    """Whether transformers computes the same from two folders, in a rank."""
    tokens = torch.arange(24).reshape(2, 12) % 30
    found = []
    for path in (folder, original):
        with torch.no_grad():
            logits = _on_two_ranks(path).eval()(input_ids=tokens).logits
        found.append(logits.full_tensor() if hasattr(logits, "full_tensor") else logits)
    return torch.equal(*found)


def _write(original: Path, folder: Path) -> None:
    """Have transformers write a checkpoint as it does on many ranks, in a rank."""
    _on_two_ranks(original).save_pretrained(folder, distributed_checkpoint=True)


def _unlike(folder: Path, original: Path) -> list[str]:
    """The tensors that torch reads otherwise from a folder than they are in the original, in a rank."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh = dist.init_device_mesh("cpu", (2,))
    whole, state = load_file(original), {}
    for number, (name, tensor) in enumerate(whole.items()):
        places = [Shard(number % tensor.dim()) if tensor.dim() > 1 else Replicate()]
        state[name] = zeros(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=places)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    return [name for name, tensor in whole.items() if not torch.equal(state[name].full_tensor(), tensor)]


@thorough
@of_ranks
def test_tp_2_of_transformers_reads_what_is_for_tp_4(tmp_path: Path) -> None:
    original = store.checkpoint("llama")
    split(original, tmp_path / "out", tp=4, format="transformers")
    assert run_processes(_same_logits, 2, tmp_path / "out", original) == [True, True]


@of_ranks
def test_torch_reads_it_on_a_device_mesh(tmp_path: Path) -> None:
    original = store.checkpoint("phi3")
    split(original, tmp_path / "out", tp=4, format="transformers")
    assert run_processes(_unlike, 2, tmp_path / "out", original / "model.safetensors") == [[], []]


def test_torch_consolidates_it(tmp_path: Path) -> None:
    from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files

    original = store.checkpoint("phi3", "bfloat16")
    split(original, tmp_path / "out", tp=4, format="transformers")
    whole = weights_of(original)
    (tmp_path / "joined").mkdir()
    consolidate_safetensors_files(str(tmp_path / "out"), str(tmp_path / "joined"), dict.fromkeys(whole, 1))
    assert _equal(weights_of(tmp_path / "joined"), whole)


@pytest.fixture(scope="module", params=one_of_each(["llama", "qwen3_moe", "phi3"]))
def written(
    request: pytest.FixtureRequest, fork_server: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """A folder that transformers wrote on two ranks."""
    tmp_path = tmp_path_factory.mktemp("written")
    original = store.checkpoint(request.param)
    run_processes(_write, 2, original, tmp_path / "out")
    yield request.param, tmp_path / "out"


def test_what_transformers_wrote_is_read(written: tuple[str, Path], tmp_path: Path) -> None:
    name, folder = written
    original = store.checkpoint(name)
    assert verify_exact(store.source(name), folder).verdict == "same"
    merge(folder, tmp_path / "merged")
    assert _equal(weights_of(tmp_path / "merged"), weights_of(original))
    split(folder, tmp_path / "vllm", tp=2, format="vllm")
    split(original, tmp_path / "wanted", tp=2, format="vllm")
    for rank in range(2):
        file = f"model-rank-{rank}-part-0.safetensors"
        assert _equal(load_file(tmp_path / "vllm" / file), load_file(tmp_path / "wanted" / file))


# ------------------------------------------------------------------------------------------------------ what is refused


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    original = store.checkpoint("llama")
    copy = tmp_path / "quantized"
    copy.mkdir()
    for file in original.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    change_json(copy / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    done = command("split", copy, tmp_path / "out", "--tp", "2", "--as", "transformers")
    assert done.returncode == 2
    assert "transformers loads no quantized checkpoint from such a folder" in done.stderr
    assert not (tmp_path / "out").exists()


def _spoiled(folder: Path, change: str) -> Path:
    """A folder with another header in its second file."""
    file = sorted(folder.glob("*.safetensors"))[1]
    header = read_header(file)
    info = json.loads(header.metadata["DCP_SHARDING_INFO"])
    name = "model.layers.0.mlp.gate_proj.weight"
    if change == "moved":
        info[name]["saved_offsets"][0] += 1
    elif change == "beyond":
        info[name]["saved_offsets"][0] += 1000
    elif change == "onto":
        info[name]["saved_offsets"][0] = 0
    elif change == "unsaid":
        del info[name]
    else:
        info[name]["saved_offsets"].append(0)
    from safetensors.torch import save_file

    save_file(load_file(file), file, {**header.metadata, "DCP_SHARDING_INFO": json.dumps(info)})
    (folder / "reshard.json").unlink()
    return folder


@pytest.mark.parametrize(
    ("change", "says", "code"),
    [
        ("moved", "chunks of tensor 'model.layers.0.mlp.gate_proj.weight' overlap", 1),
        ("onto", "chunks of tensor 'model.layers.0.mlp.gate_proj.weight' overlap", 1),
        ("beyond", "the chunks of tensor 'model.layers.0.mlp.gate_proj.weight' make", 1),
        ("unsaid", "should have 2 offsets", 2),
        ("longer", "should have 2 offsets", 2),
    ],
)
def test_pieces_that_do_not_fit_are_refused(change: str, says: str, code: int, tmp_path: Path) -> None:
    split(store.checkpoint("llama"), tmp_path / "out", tp=4, format="transformers")
    done = command("merge", _spoiled(tmp_path / "out", change), tmp_path / "merged")
    assert done.returncode == code
    assert says in done.stderr


def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    split(store.checkpoint("phi3"), tmp_path / "out", tp=4, format="transformers")
    sorted(tmp_path.glob("out/*.safetensors"))[2].unlink()
    with pytest.raises(CheckpointError, match=r"is missing, reshard\.json lists it"):
        merge(tmp_path / "out", tmp_path / "merged")
    (tmp_path / "out" / "reshard.json").unlink()
    with pytest.raises(MismatchError, match=r"chunks of tensor|elements of tensor"):
        merge(tmp_path / "out", tmp_path / "merged")
