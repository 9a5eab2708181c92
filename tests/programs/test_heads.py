"""What is written is read: models with a head of another kind, from a checkpoint and from a training folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.api import inspect, merge, split
from reshard.formats.errors import ReshardError
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import store
from tests.marks import one_of_each
from tests.routes import FORMS
from tests.support import bytes_of

HEADS = {
    "score": {"score.weight": (2, None), "score.bias": (2,)},
    "reward": {"score.weight": (1, None), "score.bias": (1,)},
    "value": {"v_head.summary.weight": (1, None), "v_head.summary.bias": (1,)},
    "regression": {"regression_layer.weight": (19, None), "reward_transform_matrix": (19, 19)},
}
MODELS = ("llama", "gpt2", "qwen3_moe", "phi3")
QUICK = ("vllm-2", "dcp-2", "deepspeed-universal-1")
REFUSALS = ("has no place in the format", "is not possible", "cannot be written as")


def headed(model: str, head: str, folder: Path) -> Path:
    """A small model with a head."""
    folder.mkdir()
    config = json.loads((store.checkpoint(model, "bfloat16") / "config.json").read_text())
    hidden = config.get("hidden_size") or config["n_embd"]
    (folder / "config.json").write_text(json.dumps(config))
    files = store.checkpoint(model, "bfloat16").glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, shape in HEADS[head].items():
        tensors[name] = torch.randn([size or hidden for size in shape]).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "form", one_of_each((form for form in FORMS if "-" in form), lambda form: form if form in QUICK else "dcp-2")
)
@pytest.mark.parametrize("head", one_of_each(HEADS))
@pytest.mark.parametrize("model", one_of_each(MODELS))
def test_what_is_written_is_read(model: str, head: str, form: str, tmp_path: Path) -> None:
    source = headed(model, head, tmp_path / "source")
    split(source, tmp_path / "run", tp=1, format="dcp")
    (tmp_path / "run" / "reshard.json").unlink()
    for kind, given in (("checkpoint", source), ("run", tmp_path / "run")):
        out, merged = tmp_path / f"of {kind}", tmp_path / f"merged {kind}"
        try:
            split(given, out, **FORMS[form])
        except ReshardError as error:
            assert any(text in str(error) for text in REFUSALS), error
            continue
        assert inspect(out).problems == []
        merge(out, merged)
        found, expected = bytes_of(merged), bytes_of(source)
        assert found == expected or (found.keys() == expected.keys() and "universal" in form)  # its masters are F32
        assert verify_exact(open_source(source), out).verdict == "same"
