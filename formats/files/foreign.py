"""Folders that hold weights in a form that is not read here: what each is, and how to make a checkpoint of it."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from formats.errors import CheckpointError
from formats.store import FilePath, name_in, walk

DELTA = "delta.json"
"""The file by which a delta is known (``delta.py``)."""
_MOST = 10_000
"""Names that are looked at."""


@dataclass(frozen=True)
class Foreign:
    """What a folder is, in words that go on after its name and "is", and what to do about it."""

    what: str
    hint: str


_PART_OF_BIN = r"pytorch_model-\d+-of-\d+\.bin"
_KINDS: Sequence[tuple[str, Foreign]] = (
    (
        re.escape(DELTA),
        Foreign(
            "a delta ({}), which changes a model and is none itself",
            "'reshard patch BASE DELTA OUT' puts it on its base, 'reshard split BASE OUT --patch DELTA' too",
        ),
    ),
    (
        r"adapter_config\.json",
        Foreign(
            "a PEFT adapter ({}), which changes a model and is none itself",
            "merge it into its base model first (AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload()"
            ".save_pretrained(FOLDER)), then split FOLDER",
        ),
    ),
    (
        r"model_index\.json",
        Foreign(
            "a diffusers pipeline ({}), whose models lie in folders of their own",
            "give the folder of one language model in it, such as its text_encoder",
        ),
    ),
    (
        r"(.*/)?(zero_to_fp32\.py|zero_pp_rank_\d+_.*\.pt|(.*_)?mp_rank_\d+_(model|optim)_states\.pt)",
        Foreign(
            "a training checkpoint of DeepSpeed ({})",
            "join it with DeepSpeed's own script ('python zero_to_fp32.py FOLDER OUT'), put config.json and the "
            "tokenizer beside what it writes, and give that folder",
        ),
    ),
    (
        r"(iter_\d+|release)/(mp_rank_\d+(_\d+)*/model_optim_rng\.pt|\.metadata)",
        Foreign(
            "a folder of Megatron-LM's checkpoints ({}) without latest_checkpointed_iteration.txt, which names one",
            "give the folder of one of them (iter_… or release), or bring the file back",
        ),
    ),
    (
        r"latest_checkpointed_iteration\.txt|(iter_\d+/|release/)?(mp_rank_\d+(_\d+)*/.*|common\.pt)|iter_\d+/.*",
        Foreign(
            "an unfinished checkpoint of Megatron-LM ({}): the save ended before the weights were complete",
            "give an earlier iteration; or fetch the rest of this one: .metadata and the .distcp files, or "
            "mp_rank_*/model_optim_rng.pt",
        ),
    ),
    (
        r"(.*/)?(\.metadata|[^/]*\.distcp)",
        Foreign(
            "a folder with a distributed checkpoint of PyTorch in it ({})",
            "give the folder that holds .metadata and the .distcp files",
        ),
    ),
    (
        r"[^/]*\.gguf",
        Foreign("GGUF, the format of llama.cpp ({})", "give the safetensors checkpoint that it was made from"),
    ),
    (
        r"(tf_model|flax_model).*\.(h5|msgpack)",
        Foreign(
            "a checkpoint of TensorFlow or Flax ({})",
            "load it with transformers 4 (from_pretrained(…, from_tf=True) or from_flax=True), and save it again with "
            "save_pretrained",
        ),
    ),
    (
        _PART_OF_BIN,
        Foreign(
            "a checkpoint of several files ({}) whose pytorch_model.bin.index.json is missing",
            "fetch pytorch_model.bin.index.json too: it says which tensor lies in which file",
        ),
    ),
)


def refuse_foreign(where: FilePath | str, names: Iterable[str]) -> None:
    """Raise CheckpointError if files of these names are of a known kind that is not read here."""
    kind = foreign(names)
    if kind is not None:
        raise CheckpointError(f"{where} is {kind.what}", kind.hint)


def foreign(names: Iterable[str]) -> Foreign | None:
    """What files of these names (relative, with ``/``) are, if they are of a known kind that is not read here."""
    names = sorted(names)
    for pattern, kind in _KINDS:
        name = next((name for name in names if re.fullmatch(pattern, name)), None)
        if name is not None:
            return Foreign(kind.what.format(name), kind.hint)
    return None


def is_usable(name: str, names: Container[str]) -> bool:
    """Whether a file of weights can be read, with what stands beside it."""
    needs_index = re.fullmatch(_PART_OF_BIN, name) is not None
    return not is_adapter(name) and (not needs_index or "pytorch_model.bin.index.json" in names)


def is_adapter(name: str) -> bool:
    """Whether a file holds the weights of a PEFT adapter, which are no checkpoint."""
    return name.startswith("adapter_model.")


def names_in(folder: FilePath) -> list[str]:
    """The names of files in a folder and up to two levels below it, as far as they can be read."""
    found: list[str] = []
    for root, folders, files in walk(folder):
        here = name_in(root, folder)
        if here.count("/") == 1:
            folders.clear()
        found += [name if here == "." else f"{here}/{name}" for name in files]
        if len(found) > _MOST:
            break
    return found[:_MOST]
