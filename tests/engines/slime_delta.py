"""Deltas between reshard and slime (https://github.com/THUDM/slime), each read by the other, with slime's own code.

    python -m tests.engines.slime_delta SLIME [--record FOLDER]

SLIME is a checkout (tried: 624b824a). The writer is its class ``UpdateWeightFromDiskDelta``, on one process of gloo:
ray, Megatron and the gather of the weights are stubs. The reader is what its patch adds to SGLang,
``local_checkpoint.py``. ``--record tests/oracles/slime`` keeps what slime wrote, and the sums of what comes of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import types
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import load_file

from reshard.api import diff, patch
from reshard.formats.files.safetensors import read_header
from tests.support import contents, write_checkpoint

PATCH = "docker/patch/latest/sglang-pull_weights.patch"
ENCODINGS = [("xor", "xxh3-128"), ("overwrite", "adler32"), ("xor", "blake3")]


def reader(slime: Path) -> Any:
    """The module that SGLang has after slime's patch."""
    _, _, rest = (slime / PATCH).read_text().partition("+++ b/python/sglang/srt/weight_sync/local_checkpoint.py\n")
    lines = rest.partition("\ndiff --git")[0].splitlines()
    module = types.ModuleType("local_checkpoint")
    exec("\n".join(line[1:] for line in lines if line.startswith("+")), module.__dict__)
    return module


def writer(slime: Path) -> Any:
    """The class that publishes deltas; what it imports of a cluster is a stub."""

    def stub(name: str, **members: Any) -> None:
        module = types.ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module

    class Base:
        def __init__(self, args: Any, *given: Any, **more: Any) -> None:
            self.args = args

    folder = "slime.backends.megatron_utils.update_weight"
    stub("ray", get=lambda found: found)
    stub("ray.actor", ActorHandle=object)
    stub("megatron")
    stub("megatron.core", mpu=None)
    stub("slime.utils.distributed_utils", get_gloo_group=lambda: dist.group.WORLD)
    stub(f"{folder}.update_weight_from_distributed", UpdateWeightFromDistributed=Base)
    for name in ("slime", "slime.utils", "slime.backends", "slime.backends.megatron_utils", folder):
        stub(name)
        sys.modules[name].__path__ = [str(slime / name.replace(".", "/"))]
    sys.modules["slime.utils"].accelerator = types.SimpleNamespace(  # type: ignore[attr-defined]
        current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None), current_device=lambda: "cpu"
    )
    from importlib import import_module

    return import_module(f"{folder}.update_weight_from_disk_delta").UpdateWeightFromDiskDelta


def publish(kind: Any, base: Path, versions: list[Path], out: Path, encodings: list[tuple[str, str]]) -> None:
    """Have slime publish a version of each checkpoint."""
    given = types.SimpleNamespace(
        update_weight_disk_dir=str(out), update_weight_delta_encoding="", update_weight_delta_checksum="",
        custom_update_weight_post_write_path=None, hf_checkpoint=str(base),
    )  # fmt: skip
    made = kind(given, None, None, model_name="", quantization_config=None)
    made._is_pp_src_rank, made.rollout_engines, made.weight_version = True, [], 0
    for folder, (encoding, checksum) in zip([base, *versions], [encodings[0], *encodings], strict=True):
        tensors = {
            name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()
        }
        made._iter_hf_tensors = tensors.items
        made.delta_encoding, made.checksum_algorithm = encoding, checksum
        if folder == base:
            made._capture_baseline()
        else:
            made.weight_version += 1
            made._publish()


def stepped(base: Path, folder: Path, seed: int) -> Path:
    """One element of ten is a neighbouring number of bfloat16."""
    shutil.copytree(base, folder)
    chance = np.random.default_rng(seed)
    for file in folder.glob("*.safetensors"):
        content = np.fromfile(file, np.uint8)
        for info in read_header(file).tensors.values():
            codes = content[info.offset : info.offset + info.nbytes].view("<u2")
            codes[chance.random(codes.size) < 0.1] ^= 1
        content.tofile(file)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("slime", type=Path)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29876"}
    dist.init_process_group("gloo", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        base = write_checkpoint(root / "base", files=2)
        versions = [stepped(base, root / f"after-{number}", number) for number in (1, 2, 3)]
        publish(writer(arguments.slime), base, versions, root / "theirs", ENCODINGS)
        for number, (folder, how) in enumerate(zip(versions, ENCODINGS, strict=True), 1):
            deltas = [root / "theirs" / f"weight_v{version:06d}" for version in range(1, number + 1)]
            patch(base, root / f"patched-{number}", delta=deltas[0], patch=deltas[1:])
            assert contents(root / f"patched-{number}") == contents(folder)
            print(f"slime's version {number} ({', '.join(how)}) is put on its base by reshard: the same bytes")
        before = base
        (root / "ours").mkdir()
        for number, folder in enumerate(versions, 1):
            diff(before, folder, out=root / "ours" / f"weight_v{number:06d}", compress=True)
            before = folder
        reader(arguments.slime).pull(str(root / "local"), str(base), str(root / "ours"), 3)
        found = {name: data for name, data in contents(root / "local").items() if not name.startswith(".")}
        assert found == contents(versions[-1])
        print("reshard's three versions are pulled by SGLang's code of slime's: the same bytes")
        if arguments.record:
            shutil.rmtree(arguments.record, ignore_errors=True)
            shutil.copytree(root / "theirs", arguments.record)
            sums = [{name: sha256(data).hexdigest() for name, data in contents(folder).items()} for folder in versions]
            (arguments.record / "sums.json").write_text(json.dumps(sums, indent=1) + "\n")


if __name__ == "__main__":
    main()
