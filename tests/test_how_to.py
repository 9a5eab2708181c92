"""Every command and every snippet of the how-tos: it runs on the model of the demo, in the order of its page.

The capitals and ids of a page are folders, repositories and buckets here. What starts another program, or takes
minutes, is parsed: its options exist, and have such values. Calls of Python are bound to the functions' arguments.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import save_file

from reshard.tiny_model import CONFIG, write_model
from tests.marks import of_ranks, thorough
from tests.programs import test_trainers as trainers
from tests.stores.hub_server import HubServer
from tests.stores.store_server import StoreServer
from tests.support import command, command_named, ok
from tests.test_cli import in_one_process

HOW_TO = Path(__file__).parents[1] / "docs" / "how-to"
PAGES = sorted(page for page in HOW_TO.glob("*.md") if page.stem != "errors")
"""All but the one whose commands are refused, which tests/test_readme.py runs."""
TRAINING = HOW_TO / "from-training-to-vllm.md"
PARSED = re.compile(r"--engine-python|^profile\b|--memory|^live check")
"""Needs vLLM, or times."""
MESSAGE_OF_ITS_OWN = {"reshard plan strange": 2}
LAUNCHED = re.compile(r"^(srun|torchrun --\S+ \d+ --no-python) ")
SMALL = CONFIG | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 16,
                  "num_key_value_heads": 8, "head_dim": 4}  # fmt: skip
"""Divides by 8 and by 16: the degrees of the pages."""
ONE_PROCESS = {"JOB_COMPLETION_INDEX": "0", "RESHARD_PROCESSES": "1"}


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The blocks of a page in one of these languages, without their indentation."""
    for indent, language, text in re.findall(r"^( *)```(\w+)\n(.*?)^ *```", page.read_text(), re.M | re.S):
        if language in languages:
            yield textwrap.dedent(text) if indent else text


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of each command of reshard, as a shell takes its line apart."""
    for block in blocks(page, "sh", "console", "yaml"):
        for line in block.splitlines():
            line = re.sub(r"^(\$|run:) ", "", line.strip())
            if listed := re.match(r"command: \[reshard, (.*)\]", line):
                yield [word.strip(' "') for word in listed[1].split(",")]
            elif (line := LAUNCHED.sub("", line)).startswith("reshard "):
                yield shlex.split(line, comments=True)[1:]
            else:
                assert "reshard" not in line.partition("#")[0] or not re.match(r"\S*reshard ", line), line


def test_the_pages_are_read() -> None:
    assert sum(len([*commands(page)]) for page in PAGES) >= 40
    assert sum(len([*blocks(page, "python")]) for page in PAGES) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_option_is_there(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ONE_PROCESS.items():
        monkeypatch.setenv(name, value)
    for arguments in commands(page):
        found = command_named(arguments[0])
        with click.Context(found, info_name=arguments[0]) as context:
            found.parse_args(context, arguments[1:])


def _adapter(folder: Path) -> None:
    """Of one projection, as PEFT saves it."""
    chance, tensors = np.random.default_rng(0), {}
    hidden = SMALL["hidden_size"]
    for layer in range(SMALL["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = chance.standard_normal((2, 64)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = chance.standard_normal((hidden, 2)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], tuple[Path, dict[str, str]]]]:
    """For a page, a folder with what it names, and the environment in which the Hub and buckets are servers of ours."""
    root = tmp_path_factory.mktemp("how-to")
    model = write_model(root / "model", SMALL)
    _adapter(root / "adapter")
    hub, store = root / "hub", root / "store"
    for name in ("org/model", "Qwen/Qwen3-8B"):
        shutil.copytree(model, hub / name)
    shutil.copytree(model, store / "llama")

    def made(page: Path) -> tuple[Path, dict[str, str]]:
        folder = root / page.stem
        (folder / "shared").mkdir(parents=True)
        for name in ("MODEL", "SOURCE", "BASE", "model"):
            shutil.copytree(model, folder / name)
        shutil.copytree(root / "adapter", folder / "ADAPTER")
        if page.stem == "verify":
            assert command("split", "MODEL", "OUT", "--tp", "2", cwd=folder).returncode == 0
        if page.stem == TRAINING.stem:
            megatron_run(folder / "MODEL", folder / "RUN")
        return folder, hub_server.environment(root / "home") | store_server.environment | ONE_PROCESS

    with ExitStack() as stack:
        hub_server, store_server = stack.enter_context(HubServer(hub)), stack.enter_context(StoreServer(store))
        yield made


def megatron_run(model: Path, run: Path) -> None:
    """As Megatron-Core leaves it."""
    assert command("split", model, run, "--as", "megatron").returncode == 0
    (run / "release").rename(run / "iter_0001000")
    (run / "latest_checkpointed_iteration.txt").write_text("1000")
    for file in run.glob("*.json"):
        file.unlink()


@pytest.mark.parametrize("run", ["trainer-fsdp2-qwen2-w2", "verl-fsdp2-llama-w2", "zero3-llama-w3", "megatron"])
def test_a_run_of_each_trainer_goes_to_vllm(run: str, tmp_path: Path) -> None:
    """By the first commands of the page; what comes out needs neither RUN nor MODEL."""
    if run == "megatron":
        given = {"MODEL": write_model(tmp_path / "model", SMALL), "RUN": tmp_path / "run"}
        megatron_run(given["MODEL"], given["RUN"])
    else:
        given = {"RUN": (folder := trainers.copied(run, tmp_path)), "MODEL": trainers.config_of(run)}
        given["MODEL"] = shutil.copytree(given["MODEL"] or folder / "huggingface", tmp_path / "config")
    first = next(blocks(TRAINING, "sh")).replace("--tp 8", "--tp 2").splitlines()
    for line in first[:3]:
        arguments = shlex.split(line, comments=True)[1:]
        done = ok(*(given.get(word, word) for word in arguments), cwd=tmp_path)
    assert done.stdout.startswith("SAME: ")
    for path in given.values():
        shutil.rmtree(path)
    assert command("merge", "OUT", "merged", cwd=tmp_path).returncode == 0


@thorough
@of_ranks
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_run(page: Path, world: Callable[[Path], tuple[Path, dict[str, str]]]) -> None:
    folder, environment = world(page)
    lines = []
    for arguments in commands(page):
        if not PARSED.search(" ".join(arguments)):
            lines.append([re.sub(r"^/shared/", "shared/", word) for word in arguments])
    if page.stem == "model-without-rules":
        shutil.copytree(folder / "model", folder / "strange")
        text = (folder / "strange/config.json").read_text()
        (folder / "strange/config.json").write_text(text.replace("llama", "strange"))
    ended = in_one_process(*lines, cwd=folder, **environment, PYTHONPATH=str(HOW_TO.parents[1]))
    for line, done in zip(lines, ended, strict=True):
        expected = MESSAGE_OF_ITS_OWN.get(f"reshard {' '.join(line)}", 0)
        assert done.returncode == expected, (line, done.stdout, done.stderr)


# --------------------------------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_calls_fit_the_functions(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith("reshard."):
                module, _, function = name.rpartition(".")
                signature = inspect.signature(getattr(importlib.import_module(module), function))
                keywords = {str(keyword.arg): None for keyword in node.keywords}
                signature.bind(*node.args, **keywords)
                values = [*signature.parameters.values()]
                assert any(value.kind is value.VAR_KEYWORD for value in values) or keywords.keys() <= {
                    value.name for value in values
                }


STAND_INS = """
import torch
from transformers import AutoModelForCausalLM
model, rank, served = AutoModelForCausalLM.from_pretrained("model"), 0, {}
def upload(name, tensor): served[name] = tensor
"""


@thorough
def test_embedding_runs(world: Callable[[Path], tuple[Path, dict[str, str]]]) -> None:
    """The page's snippets, on a CPU."""
    page = HOW_TO / "embed.md"
    folder, environment = world(page.with_stem("embed-python"))
    (folder / "global_step_500").mkdir()
    shutil.copytree(folder / "model", folder / "global_step_500/actor")
    code = STAND_INS + "\n".join(blocks(page, "python")).replace('"cuda"', '"cpu"')
    code += "\nassert served and weights and config['model_type'] == 'llama'\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "hf/config.json").exists() and (folder / "served/config.json").exists()
