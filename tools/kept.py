"""Writes ``verify/bytes/kept.json``: the weights that stay float32 in 16 bits, by transformers and publishers.

python -m tools.kept

``reshard verify --dtype`` judges by this table, and ``reshard split --dtype`` decides by ``[float32]`` of architecture
files: a fault in one of the two is a difference. Each model of tests/zoo is asked which of its parameters
``from_pretrained`` would keep. Names are the ends of those on disk, with ``*`` for numbers; an entry is of all model
types that a config names, because a class keeps what its parts name.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from transformers.core_model_loading import build_glob_alternation

from reshard.formats.transformers_internals import placements
from reshard.source.opening import open_source
from reshard.verify.bytes.kept import KEPT, types_of
from tests import zoo
from tools.tables import text_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PUBLISHED: dict[str, dict[str, list[str]]] = {
    "*": {
        "bf16": ["e_score_correction_bias", "expert_bias", "router_bias"],  # of routers, in each published checkpoint
        "fp16": ["masked_bias"],  # -1e9
    },
    "audioflamingo3": {"bf16": ["audio_tower.embed_positions.weight"]},  # sines, as in Whisper's checkpoints
    "musicflamingo": {"bf16": ["audio_tower.embed_positions.weight"]},
    "moss_transcribe_diarize": {"bf16": ["audio_tower.embed_positions.weight"]},
    "qwen2_audio": {"bf16": ["audio_tower.embed_positions.weight"]},
    "deepseek_v4": {"bf16": ["hc_head_base", "hc_head_fn", "hc_head_scale"]},  # deepseek-ai/DeepSeek-V4-Flash
    "inkling2": {"bf16": ["_sconv.static_w", "_sconv.weight_proj"]},
    "inkling2_text": {"bf16": ["_sconv.static_w", "_sconv.weight_proj"]},
    "kimi_linear": {"bf16": ["A_log", "dt_bias"]},  # moonshotai/Kimi-Linear-48B-A3B-Instruct
    "instructblip": {"fp16": ["qformer.*"]},  # BLIP-2's, whose class says so
    "instructblipvideo": {"fp16": ["qformer.*"]},
    "longt5": {"fp16": ["DenseReluDense.wo.weight"]},  # T5's, whose class says so
    "nemo_speechlm": {"bf16": ["_fp32_params.A_log", "_fp32_params.D", "_fp32_params.dt_bias"]},
}
"""Names that publishers store in float32, and no class of transformers names."""


def kept_by(name: str) -> tuple[str, dict[str, set[str]]]:
    """The types of a small model, and the names of the tensors that its class keeps, for each dtype."""
    with torch.device("meta"):
        model = zoo.ZOO[name].build(None, {}, None)
    types, plans = types_of(model.config.to_dict()), {word: model._get_dtype_plan(of) for word, of in DTYPES.items()}
    if not any(plans.values()):
        return types, {}
    with tempfile.TemporaryDirectory() as folder:
        zoo.save(name, Path(folder, "model"))
        tensors = open_source(Path(folder, "model")).model.tensors
        placed = placements(model, {tensor.name: tensor.shape for tensor in tensors})
    kept = dict[str, set[str]]()
    for word, plan in plans.items():
        keeps = build_glob_alternation([*plan])[0].search if plan else lambda _: None
        here = {disk for parameter, place in placed.items() if keeps(parameter) for disk in place.sources}
        others = [tensor.name for tensor in tensors if tensor.name not in here]
        kept[word] = {_end(re.sub(r"\b\d+\b", "*", name), others) for name in here}
    return types, kept


def _end(name: str, others: Iterable[str]) -> str:
    """The end of a name that no other tensor has: what follows the last number, or else all but the root."""
    end = name.rpartition("*.")[2].removeprefix("model.")
    return name if any(fnmatchcase(other, f"*{end}") for other in others) else end


def table() -> str:
    """The file's text."""
    import transformers

    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in zoo.ZOO:
        types, kept = kept_by(name)
        of_types = found[types]
        for word, names in kept.items():
            of_types[word] |= names
    for types, published in PUBLISHED.items():
        for word, ends in published.items():
            found[types][word] |= {*ends}
    for words in found.values():
        words["fp16"] |= words["bf16"]
    table = {types: {word: sorted(names) for word, names in words.items()} for types, words in sorted(found.items())}
    document = {
        "some": {types: words for types, words in table.items() if any(words.values())},
        "none": [types for types, words in table.items() if not any(words.values())],
    }
    return text_of(document, {"transformers": transformers.__version__})


if __name__ == "__main__":
    KEPT.write_text(table(), encoding="utf-8")
