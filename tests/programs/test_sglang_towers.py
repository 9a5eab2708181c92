"""SGLang's format for models with towers: what SGLang 0.5.23 itself holds (``tests/oracles/sglang/zoo.json.xz``)."""

from __future__ import annotations

import json
import lzma
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from reshard.api import diff, merge, split
from reshard.formats.errors import PlanError, ReshardError
from tests import store
from tests.marks import one_of_each
from tests.support import change_json, contents
from tools.engine_names import SGLANG, VLLM, Program, hashes_of, held_in, make

HELD: dict[str, dict[str, list[str]]] = json.loads(lzma.decompress(SGLANG.fixture.read_bytes()))


def _numbered(name: str) -> Path:
    return store.made(f"{name}-sglang-numbered", lambda folder: make(name, folder, SGLANG))


@pytest.mark.parametrize("name", one_of_each(sorted(HELD)))
def test_sglang_holds_what_is_written_and_merge_restores_it(name: str, tmp_path: Path) -> None:
    """Names, dtypes, shapes and each element on each rank, at each degree that SGLang loaded."""
    for degree, hashes in HELD[name].items():
        tp, out = int(degree[2:]), tmp_path / degree
        split(_numbered(name), out, tp=tp, format="sglang")
        assert hashes_of(held_in(out), tp) == hashes
        merge(out, tmp_path / f"merged-{degree}")
        assert contents(tmp_path / f"merged-{degree}") == contents(_numbered(name))


BARE = [(SGLANG, name) for name in sorted(HELD)] + [
    (VLLM, name) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "mistral3")
]
NEEDS = {"glm4v", "mistral3+untied", "qwen3_vl_moe"}
"""SGLang's models that need the manifest: sizes that neither config.json nor one tensor gives."""


@pytest.mark.parametrize(("program", "name"), one_of_each(BARE, lambda case: case[0]))
def test_parts_of_a_tower_are_merged_without_a_manifest(program: Program, name: str, tmp_path: Path) -> None:
    """config.json does not give all sizes of towers: where the format cuts a tensor, a rank has a part of its size."""
    make(name, tmp_path / "source", program)
    split(tmp_path / "source", tmp_path / "out", tp=2, format=program.name)
    (tmp_path / "out/reshard.json").unlink()
    with pytest.raises(ReshardError) if program is SGLANG and name in NEEDS else nullcontext():
        merge(tmp_path / "out", tmp_path / "merged")
        assert diff(tmp_path / "source", tmp_path / "merged").same


REFUSED = {
    "qwen2_5_vl": "to a multiple of 8",
    "qwen3_vl": "to a multiple of 64",
    "llama4": "our small model did not load in SGLang 0.5.23",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_sglang_holds_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=REFUSED[name]):
        split(store.checkpoint(name), tmp_path / "out", tp=1, format="sglang")
    assert not (tmp_path / "out").exists()


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "glm4v": ({"tie_word_embeddings": True}, "a tied head of this model type"),
    "glm4v_moe": ({"use_qk_norm": True}, "and the checkpoint has none"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_were_not_compared_are_refused(name: str, tmp_path: Path) -> None:
    settings, why = SETTINGS[name]
    source = shutil.copytree(_numbered(name), tmp_path / "source")
    text = json.loads((source / "config.json").read_text())["text_config"]
    change_json(source / "config.json", **settings, text_config=text | settings)
    with pytest.raises(PlanError, match=why):
        split(source, tmp_path / "out", tp=1, format="sglang")


def test_a_degree_that_was_not_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="was compared up to tp 4"):
        split(_numbered("qwen3_vl"), tmp_path / "out", tp=8, format="sglang")
