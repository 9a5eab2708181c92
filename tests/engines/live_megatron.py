"""What ranks of Megatron-Core hold, by ``reshard.live.parameters``, against what ``--as megatron`` writes, on a CPU.

    python -m tests.engines.live_megatron --python ENGINES/megatron/bin/python

Each small model is split once. Megatron-Core loads the folder on several meshes, also with an interleaved pipeline,
wrapped by its DDP, and with experts of its older kinds. Each part that a rank holds must have the elements of the
stored tensor at its indices, be a view of a parameter, and with the other ranks' parts be the whole; what is written
through the parts must fill each parameter. Some then push to two receivers, once more after all weights were changed in
place: these must hold the bytes that ``reshard split --as`` writes of the same checkpoint, and of the changed one.
Prints a line for each. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from reshard.api import split
from reshard.formats.mesh import mesh_of
from reshard.live.meshes import Target, arranged, target_of
from reshard.mesh.stages import with_stages
from reshard.source.opening import open_source
from tests import zoo
from tests.engines.in_megatron import settings_for
from tests.engines.live_megatron_rank import FACTOR, VERSIONS


class Case(NamedTuple):
    """A model, a mesh, and how Megatron-Core builds the model there.

    ``form`` is what differs from the format's, ``stages`` are the layers of each chunk, first those of the first chunk
    of each rank; ``ddp``: wrapped as for training. ``push`` is whose ranks
    receive a push.
    """

    model: str
    mesh: Mapping[str, int]
    format: str = "megatron"
    form: Mapping[str, bool] = {}
    stages: Sequence[int] = ()
    ddp: bool = False
    push: str = ""

    @property
    def shown(self) -> str:
        """The case in words."""
        mesh = " ".join(f"{key} {degree}" for key, degree in self.mesh.items())
        further = [*(["interleaved"] if self.stages else []), *(["DDP"] if self.ddp else []), *self.form]
        further += [f"push to {self.push}"] if self.push else []
        return ", ".join([self.model, mesh, self.format, *further])


CASES = (
    Case("llama", {"tp": 2, "pp": 2}, push="vllm:tp2"),
    Case("llama", {"tp": 4}),
    Case("llama", {"pp": 2}, stages=(1, 1, 1, 0), push="vllm:tp2"),
    Case("llama", {"tp": 2}, ddp=True),
    Case("llama", {"tp": 2}, "megatron-local"),
    Case("llama-kv2", {"tp": 4}),
    Case("qwen2-tied", {"tp": 2, "pp": 2}, push="vllm:tp2"),
    Case("qwen3_moe", {"tp": 2}),
    Case("mixtral", {"ep": 2}, push="vllm:tp2"),
    Case("mixtral", {"tp": 2, "ep": 2, "pp": 2}, push="vllm:tp2"),
    Case("mixtral", {"ep": 2}, "megatron-local"),
    Case("mixtral", {"tp": 2, "ep": 2}, "megatron-local", {"grouped": True}),
    Case("deepseek_v3", {"tp": 2, "ep": 2}),
    Case("deepseek_v3-mtp", {"tp": 2, "pp": 2}),
)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a distributed checkpoint, whole."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, dcp.FileSystemReader(folder / "release"), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def check(case: Case, original: Path, folder: Path, whole: Mapping[str, torch.Tensor], python: str) -> str:
    """Run a case: how many parts of how many tensors are right. Raises RuntimeError if any is not."""
    source = open_source(folder)
    settings = settings_for(source.model, source.format)
    settings["form"] |= case.form
    tp = case.mesh.get("tp", 1)
    request = {
        "folder": str(folder), "tp": tp, "pp": case.mesh.get("pp", 1), "ep": case.mesh.get("ep", 1), "etp": tp,
        "dtype": "float32", "vocabulary": source.model.sizes.of({})["vocab"], "prompts": [[0] * 8], "save": None,
        "stages": case.stages or with_stages(source.model, mesh_of(**case.mesh)).stages, "settings": settings,
        "ddp": case.ddp, "push": None, "config": json.loads((original / "config.json").read_text()),
    }  # fmt: skip
    target = target_of(case.push) if case.push else None
    if target:
        with socket.create_server(("127.0.0.1", 0)) as server:
            store = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        request["push"] = {"to": case.push, "receivers": target.ranks, "store": store}
    with tempfile.TemporaryDirectory() as out:
        torch.save(whole, Path(out) / "whole")
        (Path(out) / "request").write_text(json.dumps(request), encoding="utf-8")
        ended = subprocess.run(
            [python, "-m", "tests.engines.live_megatron_rank", out], capture_output=True, text=True, timeout=300
        )
        if ended.returncode:
            raise RuntimeError(ended.stderr[-1500:])
        pushed = compare(Path(out), original, target) if target else ""
        ranks = [json.loads(path.read_text()) for path in sorted(Path(out).glob("rank-*"))]
    for name, tensor in whole.items():
        missing = np.ones(tensor.shape, bool)
        for part in (part for parts in ranks for part in parts if part["name"] == name):
            indices = [[i for at, length in dim for i in range(at, at + length)] for dim in part["runs"]]
            missing[
                np.ix_(*([i for i in dim if i < size] for dim, size in zip(indices, tensor.shape, strict=True)))
            ] = False
        if missing.any():
            raise RuntimeError(f"{name}: nobody holds {missing.sum()} of {missing.size} elements")
    return f"{sum(map(len, ranks))} parts of {len(whole)} tensors on {len(ranks)} ranks{pushed}"


def compare(out: Path, original: Path, target: Target) -> str:
    """Compare what receivers had after each push with the shards of the checkpoint as it then was. Raises RuntimeError
    if a byte differs.
    """
    nbytes, rules = 0, arranged(open_source(original).model, target)
    for version in VERSIONS:
        changed, shards = out / f"changed-{version}", out / f"shards-{version}"
        shutil.copytree(original, changed)
        for path in changed.glob("*.safetensors") if version > 1 else ():
            save_file({name: tensor * FACTOR for name, tensor in load_file(path).items()}, path, {"format": "pt"})
        split(changed, shards, tp=target.tp, format=target.program)
        for rank in range(target.ranks):
            wanted = load_file(shards / f"model-rank-{rank}-part-0.safetensors")
            for each in rules.stored:
                if each.constant is not None:  # which no push sends
                    del wanted[each.name_on(rank)]
            found = torch.load(out / f"received-{version}-{rank}", weights_only=True)
            if found.keys() != wanted.keys():
                raise RuntimeError(f"receiver {rank} has other tensors: {sorted(found.keys() ^ wanted.keys())[:5]}")
            for name, tensor in wanted.items():
                if tensor.dtype != found[name].dtype or not np.array_equal(_bytes(tensor), _bytes(found[name])):
                    raise RuntimeError(f"{name} differs on receiver {rank} after push {version}")
                nbytes += tensor.nbytes
    return f"; {len(VERSIONS)} pushes to {target}: {nbytes:,} bytes are those of split --as {target.program}"


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().view(torch.uint8).numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", required=True, help="of an environment with Megatron-Core")
    python, failed = parser.parse_args().python, 0
    with tempfile.TemporaryDirectory() as work:
        for case in CASES:
            original, folder = Path(work) / case.model, Path(work) / f"{case.model}-{case.format}"
            if not original.exists():
                settings = {"num_key_value_heads": 2} if case.model == "llama-kv2" else {}
                zoo.save(case.model.removesuffix("-kv2"), original, settings=settings)
            if not folder.exists():
                split(original, folder, tp=1, format=case.format)
            try:
                said = check(case, original, folder, stored(folder), python)
            except RuntimeError as error:
                said, failed = f"FAILED: {error}", failed + 1
            print(f"{case.shown}: {said}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
