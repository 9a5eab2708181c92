"""Nothing of a model's old weights goes with its new ones, whatever the command; what is not copied is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests import peft_adapters, store
from tests.formats.test_checkpoint import SIDE_FILES, STRAYS
from tests.marks import one_of_each
from tests.support import command, contents, ok

DOCUMENTS: dict[str, Any] = {
    "config.json": {"auto_map": {"AutoModel": "code/modeling_y.Y"}, "weights_file": "model.nemo"},
    "modules.json": [{"path": "1_Pooling"}],
    "tokenizer_config.json": {"ngram_file": "ngrams.dat"},
}
NAMED = ("presharded/", "model.tensors", "model.nemo", "READY", "training_args.bin", ".gitattributes", "empty/")
COMMANDS = {
    "split": ("split", "model", "out", "--tp", "2"),
    "vllm": ("split", "model", "out", "--tp", "2", "--as", "vllm"),
    "dtype": ("merge", "model", "out", "--dtype", "bf16"),
    "average": ("average", "model", "model", "out"),
    "adapter": ("split", "model", "out", "--tp", "2", "--adapter", "lora"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside all that engines and trainers leave there."""
    path = Path(shutil.copytree(store.checkpoint("llama"), tmp_path_factory.mktemp("sides") / "model"))
    for name in (SIDE_FILES | STRAYS) - DOCUMENTS.keys():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("{}")
    (path / "empty").mkdir()
    for name, document in DOCUMENTS.items():
        (path / name).write_text(json.dumps(document))
    config = json.loads((store.checkpoint("llama") / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | DOCUMENTS["config.json"]))
    shutil.copytree(peft_adapters.made("llama", "embeddings"), path.parent / "lora")
    return path


@pytest.mark.parametrize("case", one_of_each(COMMANDS, lambda case: COMMANDS[case][0]))
def test_a_changed_model_has_nothing_of_the_old_weights(model: Path, tmp_path: Path, case: str) -> None:
    places = {"model": model, "out": tmp_path / "out", "lora": model.parent / "lora"}
    done = ok(*(places.get(argument, argument) for argument in COMMANDS[case]), "--json")
    written = contents(tmp_path / "out")
    assert not {name for name in written if name in STRAYS or name.startswith(("presharded", "empty"))}
    assert written.keys() >= SIDE_FILES
    left = json.loads(done.stdout)["left_behind"]
    assert {*NAMED} <= {*left} and not {*left} & written.keys(), left


def test_what_was_a_side_file_is_restored(model: Path, tmp_path: Path) -> None:
    command("split", model, tmp_path / "out", "--tp", "2")
    said = command("merge", tmp_path / "out", tmp_path / "merged").stdout
    before, after = contents(model), contents(tmp_path / "merged")
    assert "left behind" not in said.lower() and after.keys() >= SIDE_FILES
    assert all(before[name] == content for name, content in after.items())


def test_outputs_do_not_say_where_the_model_was(model: Path, tmp_path: Path) -> None:
    for arguments in (("split", model, tmp_path / "out", "--tp", "2"), *(
        ("split", model, tmp_path / f"out{number}", "--tp", "2", *options)
        for number, options in enumerate((["--dtype", "bf16"], ["--adapter", str(model.parent / "lora")]))
    )):  # fmt: skip
        assert command(*arguments).returncode == 0
    files = [content for path in tmp_path.iterdir() for content in contents(path).values()]
    assert files and not any(str(model.parent).encode() in content for content in files)
