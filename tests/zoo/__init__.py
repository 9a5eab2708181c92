"""Tiny models of every supported architecture, made from their real config classes with random weights.

The numbers are awkward on purpose: no two axes of one model have the same size, the layers are odd in number, most
models share KV heads, many vocabularies do not divide by 8. Norms and biases are not at their initial ones and zeros,
so that a missing one shows.

``<architecture>.toml`` has the models of the types that ``formats/architectures/<architecture>.toml`` is for. A table
is a model, called as its type unless ``type`` says otherwise: ``settings`` for its config class, ``like`` what they
build on (a table of settings.toml or a model above), ``also`` further types with the same. What is not said: degrees
2, 4 and 8 divide it, AutoModelForCausalLM makes it, a rank's folder loads alone.
"""

from __future__ import annotations

import copy
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from reshard.formats.notation.architecture_files import built_in_architectures
from tests.settings import Settings, numbered, read, whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DEGREES = (2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True)
class Entry:
    """A tiny model, and what is true of it."""

    name: str
    build: Callable[..., PreTrainedModel]  # given a number of experts or KV heads, with so many; settings, with these
    model_type: str
    degrees: tuple[int, ...]  # of DEGREES: those that every family of parallel axes divides
    loads_alone: bool  # a rank's folder loads with plain from_pretrained
    notes: str = ""
    # tensors that published checkpoints hold beside what the class saves: masks, frequencies, layers it ignores
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # tied tensors that they hold once more, each with the one that it equals
    copies: Mapping[str, str] = field(default_factory=dict)
    # what their config.json says, where the class says something else
    config: Mapping[str, Any] = field(default_factory=dict)


ZOO: dict[str, Entry] = {}


def save(
    name: str,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    experts: int | None = None,
    settings: Settings | None = None,
    kv: int | None = None,
) -> Path:
    """Write the checkpoint of a model of the zoo into ``folder`` and return it; the same name gives the same bytes.

    ``experts`` and ``kv``: so many experts and KV heads, whatever the model of the zoo has. ``settings``: these in the
    place of those that the model has under the same names.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    entry = ZOO[name]
    seed = zlib.crc32(name.encode())
    with torch.random.fork_rng(devices=[]):  # some classes draw their vectors at random
        torch.manual_seed(seed)
        model = entry.build(experts, settings or {}, kv)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    if entry.config:
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**document, **entry.config}, indent=2) + "\n")
    if entry.extra:
        generator = torch.Generator().manual_seed(seed + 1)
        _add_tensors(
            folder, {key: torch.randn(shape, generator=generator).to(dtype) for key, shape in entry.extra.items()}
        )
    if entry.copies:
        tensors = load_file(folder / "model.safetensors")
        _add_tensors(folder, {second: tensors[first].clone() for second, first in entry.copies.items()})
    return folder


# one of each kind of packing, attention, norm, experts and mixer
KINDS = ("llama-biases", "llama-tied", "qwen3", "olmo2", "phi3", "gpt_neox", "gpt2", "bloom", "falcon-7b",
         "gemma3_text", "stablelm-norms", "mixtral", "gpt_oss", "deepseek_v3", "bert", "bamba", "codegen", "mamba2",
         "qwen3_next", "t5", "llama4_text")  # fmt: skip


@cache
def one_of_each() -> list[str]:
    """The first model of each architecture file."""
    files: dict[str, str] = {}
    built_in = built_in_architectures()
    for name, entry in ZOO.items():
        files.setdefault(built_in[entry.model_type].stem, name)
    return list(files.values())


def class_of(folder: Path) -> Any:
    """The class of transformers that wrote a checkpoint."""
    import transformers

    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def loads(folder: Path) -> bool:
    """Whether plain ``from_pretrained`` fills a model of the checkpoint's class from a folder, a rank's for one."""
    try:
        _, info = class_of(folder).from_pretrained(folder, output_loading_info=True)
    except Exception:  # a shape that config.json cannot say, or a config.json that transformers refuses
        return False
    return not info["missing_keys"]


def _add_tensors(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add tensors to a saved checkpoint: to its one file, or as one more file of its index."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists():
        save_file({**load_file(whole), **tensors}, whole, metadata={"format": "pt"})
        return
    document = json.loads(index.read_text())
    document["weight_map"] |= dict.fromkeys(tensors, "model-extra.safetensors")
    document["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    save_file(dict(tensors), folder / "model-extra.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Give matrices a trained model's scale, and move every vector (norms, biases, decay rates) off its start."""
    generator = torch.Generator().manual_seed(seed)
    saved = model.state_dict(keep_vars=True)
    for key, tensor in sorted({id(tensor): (key, tensor) for key, tensor in saved.items()}.values()):
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() < 2 or key.endswith("A_log"):
            tensor.add_(0.2 * noise)
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)


_EXPERTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"})
_KV_HEADS = frozenset({"num_key_value_heads"})


def _of(settings: Mapping[str, Any], names: frozenset[str], count: int | None) -> dict[str, Any]:
    """The same settings, with another number where they have one under these names."""
    if count is None:
        return {**settings}
    inner = {key: _of(value, names, count) for key, value in settings.items() if isinstance(value, Mapping)}
    return {**settings, **inner, **dict.fromkeys(names & settings.keys(), count)}


# ------------------------------------------------------------------------------------------------------- the files

_FOLDER = Path(__file__).parent
_SETTINGS = "settings"


def _entries() -> Iterator[Entry]:
    shared: dict[str, Settings] = {}
    for name, table in read(_FOLDER / f"{_SETTINGS}.toml").items():
        shared[name] = whole(table, shared.__getitem__)
    for path in sorted(_FOLDER.glob("*.toml")):
        known = dict(shared)
        for name, table in read(path).items() if path.stem != _SETTINGS else ():
            settings = whole(table["settings"], known.__getitem__)
            for each in (name, *table.get("also", ())):
                known[each] = settings
                yield _entry(each, table, settings)


def _entry(name: str, table: Mapping[str, Any], settings: Settings) -> Entry:
    kind, cls = table.get("type", name), table.get("class", "AutoModelForCausalLM")
    extra = {each: tuple(shape) for key, shape in table.get("extra", {}).items() for each in numbered(key)}
    build = partial(_build, kind, cls, settings)
    degrees = tuple(table.get("degrees", (2, 4, 8)))
    more = {key: table.get(key, {}) for key in ("copies", "config")}
    return Entry(name, build, kind, degrees, table.get("loads_alone", True), table.get("notes", ""), extra, **more)


def _replaced(settings: Settings, other: Settings) -> dict[str, Any]:
    """Settings with others in the place of those that they have under the same names, also within parts; a part of
    another type is replaced as a whole.
    """

    def part(old: Any, new: Any) -> Any:
        if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
            return new
        types = {each["model_type"] for each in (old, new) if "model_type" in each}
        return new if len(types) > 1 else _replaced(old, new)

    return {**settings, **{key: part(settings[key], value) for key, value in other.items() if key in settings}}


def _build(
    kind: str,
    cls: str,
    settings: Settings,
    experts: int | None = None,
    other: Settings | None = None,
    kv: int | None = None,
) -> PreTrainedModel:
    import transformers

    given = copy.deepcopy(settings)  # some classes change what they are given
    given = _replaced(given, other or {})
    config = transformers.AutoConfig.for_model(kind, **_of(_of(given, _EXPERTS, experts), _KV_HEADS, kv))
    model = getattr(transformers, cls)
    return model.from_config(config) if cls.startswith("Auto") else model(config)


for _each in _entries():
    assert _each.name not in ZOO, _each.name
    ZOO[_each.name] = _each
