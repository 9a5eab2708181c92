"""Every place that takes a checkpoint takes a folder, a Hub id or a URL."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import reshard
from reshard.cli.commands import COMMANDS
from reshard.cli.options import LocalPath, NewFile
from tests.marks import thorough
from tests.stores.hub_server import HubServer
from tests.stores.store_server import StoreServer
from tests.support import command, command_named, contents, ok, write_checkpoint
from tests.test_cli import in_one_process

LOCAL = {"plan_file", "cache_dir", "python", "engine_python", "folder"}
"""What is read or kept on this machine, and is no checkpoint."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_option_takes_a_folder_alone(name: str) -> None:
    for param in command_named(name).params:
        if isinstance(param.type, LocalPath) and not isinstance(param.type, NewFile):
            assert param.name in LOCAL, f"{name} {param.opts[0]}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a trainer saves, without a config, and a repository that has nothing but a config and a tokenizer."""
    model = write_checkpoint(tmp_path / "model")
    assert command("split", model, tmp_path / "run", "--as", "dcp").returncode == 0
    for file in (tmp_path / "run").glob("*.json"):
        file.unlink()
    assert command("merge", tmp_path / "run", tmp_path / "expected", "--config", model).returncode == 0
    (tmp_path / "hub/org/cfg").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(model / name, tmp_path / "hub/org/cfg")
    return tmp_path / "run"


def test_a_config_at_a_url(run: Path) -> None:
    root = run.parent
    with StoreServer(root / "hub") as store:
        for number, url in enumerate((f"{store.url}/bucket/org/cfg", "s3://bucket/org/cfg")):
            given = ("--config", url, "--cache-dir", root / "cache")
            merge, split = ("merge", run, root / f"merged{number}"), ("split", run, root / f"two{number}", "--tp", "2")
            for line in (merge, (*split, "--as", "vllm")):
                ok(*line, *given, **store.environment)
            assert contents(root / f"merged{number}") == contents(root / "expected")
            assert {"config.json", "tokenizer.json"} <= contents(root / f"two{number}").keys()
        url = f"{store.url}/bucket/org/cfg"
        reshard.merge(run, root / "python", config=url, cache_dir=root / "cache")
    assert contents(root / "python") == contents(root / "expected")


@thorough
def test_a_config_on_the_hub(run: Path) -> None:
    """The revision is that of the source; what the cache has is enough without a network."""
    root = run.parent
    shutil.copytree(run, root / "hub/org/run")
    with HubServer(root / "hub") as hub:
        env = hub.environment(root / "home")
        merge = ["merge", "org/run", root / "merged", "--revision", "main", "--config", "org/cfg"]
        split = ["split", run, root / "two", "--tp", "2", "--as", "vllm", "--config", "org/cfg"]
        unknown = ["merge", run, root / "no", "--config", "org/unknown"]
        merged, two, no = in_one_process(merge, split, unknown, **env)
        assert merged.returncode == two.returncode == 0, merged.stderr + two.stderr
        assert no.returncode == 2 and "no repository of that name" in no.stderr
    (offline,) = in_one_process(["merge", run, root / "again", "--config", "org/cfg"], **env, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert contents(root / "merged") == contents(root / "again") == contents(root / "expected")
    assert json.loads((root / "two/config.json").read_text())["model_type"] == "llama"
