"""Which files of a place belong to no checkpoint: nobody but the user can bring them back, so they are not removed.

A manifest names the files of its checkpoint. Without one, the names are those that Hugging Face and the formats of
other programs give to their files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from formats.errors import CheckpointError
from formats.files.checkpoint import ADAPTER_CONFIG
from formats.files.dcp import METADATA
from formats.files.sharded import MANIFEST
from formats.mesh import RANK_FOLDER
from formats.notation.format import Format
from formats.notation.format_file import all_formats
from reshard.storage.bucket import UNFINISHED
from reshard.storage.marks import STATE
from reshard.storage.names import modules
from reshard.storage.program_source import named_like
from reshard.storage.source import KEPT

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = re.compile(
    r"(model|adapter_model|pytorch_model)(-\d{5,}-of-\d{5,})?\.(safetensors|bin)|consolidated\.\d+\.pth"
)
_OF_A_RANK = {"config.json", ADAPTER_CONFIG, *_INDICES}
_OF_A_MODEL = re.compile(
    r"(generation_|preprocessor_|video_preprocessor_|processor_|tokenizer_|adapter_|hf_quant_|quantize_|quant_)?"
    r"config\.json|tokenizer\.json|tokenizer[\w.]*\.model|[\w.]*\.tiktoken|special_tokens_map\.json|added_tokens\.json"
    r"|vocab\.(json|txt)|merges\.txt|spiece\.model|sentencepiece\.bpe\.model|bpe\.codes"
    r"|chat_template\.(jinja|json)|additional_chat_templates/[^/]+\.jinja"
    r"|(LICENSE|NOTICE|README|USE_POLICY)(\.md|\.txt)?|\.gitattributes|\.cache/huggingface/.+"
)
"""What lies beside the weights on the Hub, and what its client puts there."""

_FOLDER = r"(release|iter_\d{7,})/"
"""The folders of weights that a tracker names."""

Read = Callable[[str], bytes | None]
"""The content of a file of a place; None, if it is not there."""


def refuse_strangers(place: str, names: Iterable[str], read: Read, same: Mapping[str, bytes] = {}) -> None:
    """Raise CheckpointError if any of the files ``names`` of a place belongs to no checkpoint.

    Those that are written again with the ``same`` content are no loss.
    """
    found = [name for name in strangers(names, read) if name not in same or read(name) != same[name]]
    if found:
        more = f" and {len(found) - 1} more files" if len(found) > 1 else ""
        raise CheckpointError(
            f"{place} holds '{found[0]}'{more}, no part of the checkpoint there, so it is not overwritten",
            "move away what is yours, or choose another place",
        )


def strangers(names: Iterable[str], read: Read) -> list[str]:
    """The files of a place that neither its manifest nor a format knows, sorted.

    In a place that is marked as unfinished, files of several outputs may lie.
    """
    names = {*names}
    left = {name for name in names if not name.startswith(STATE) and name != MANIFEST and not _is_of_a_rank(name)}
    manifest = _document(read(MANIFEST))
    if manifest.get("format") == "reshard" and UNFINISHED not in names:
        left -= {*_listed(manifest)}
        known = [format for name, format in all_formats().items() if name == manifest.get("layout")]
    else:
        left -= {name for name in left if _WEIGHTS.fullmatch(name) or _OF_A_MODEL.fullmatch(name) or name in _INDICES}
        left -= {*_named(read)}
        known = [*all_formats().values()]
    return sorted(name for name in left if not any(_is_of(format, name) for format in known))


def _is_of_a_rank(name: str) -> bool:
    """Whether this is the name of a file in a rank's folder."""
    folder, _, file = name.partition("/")
    return RANK_FOLDER.fullmatch(folder) is not None and (file in _OF_A_RANK or _WEIGHTS.fullmatch(file) is not None)


def _listed(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The files that a manifest says the checkpoint has."""
    with suppress(KeyError, TypeError):
        yield from (file["name"] for rank in manifest["ranks"] for file in rank["files"])
        yield from (file["name"] for file in manifest["side_files"])


def _named(read: Read) -> Iterator[str]:
    """The files that an index, or the configs as custom code, name."""
    for index in _INDICES:
        named = _document(read(index)).get("weight_map")
        yield from (str(file) for file in (named.values() if isinstance(named, dict) else ()))
    for config in ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        yield from (f"{module}.py" for module in modules(_document(read(config)).get("auto_map")))


def _is_of(format: Format, name: str) -> bool:
    """Whether this is the name of a file of a program's format."""
    own = {KEPT, format.files.tracker, format.files.index, format.settings.file if format.settings else None}
    inside = re.sub(f"^{_FOLDER}", "", name) if format.files.tracker is not None else name
    beside = {*format.container.documents} | ({METADATA} if format.files.is_distributed else set())
    return name in own or inside in beside or named_like(format, inside)


def _document(content: bytes | None) -> dict[str, Any]:
    """A JSON object; empty, if it is none."""
    with suppress(ValueError, RecursionError):
        document = json.loads(content or b"")
        return document if isinstance(document, dict) else {}
    return {}
