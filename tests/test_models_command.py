"""``reshard models``, and how commands are found."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from reshard.cli.commands import COMMANDS, cli
from reshard.cli.coverage import coverage
from reshard.formats.errors import PlanError
from reshard.formats.notation.architecture_files import built_in_architectures


def models(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["models", *arguments])


def document(*arguments: str) -> list[dict[str, Any]]:
    done = json.loads(models(*arguments, "--json").stdout)
    assert (done["schema_version"], done["command"]) == (1, "models")
    return done["models"]


def test_all_types_are_listed() -> None:
    *lines, empty, last = models().stdout.splitlines()
    known = built_in_architectures()
    assert {line.split()[0]: line.split()[1] for line in lines[1:]} == {name: path.stem for name, path in known.items()}
    assert (empty, last.split(".")[0]) == ("", f"{len(known)} model types")
    assert {found["model_type"] for found in document()} == known.keys()


def test_what_is_verified_is_told() -> None:
    (phi3,), (baichuan,), (kimi,) = document("phi3"), document("baichuan"), document("kimi_k2")
    assert phi3 == {
        "model_type": "phi3", "rules": "phi3", "families": {"tp": [["kv", "group"], ["ff"], ["vocab"]]},
        "padded": ["vocab"], "verified": "forward", "tp_tried": [2, 4, 8],
    }  # fmt: skip
    assert (baichuan["verified"], kimi["verified"], kimi["tp_tried"]) == ("bytes", None, [])
    assert kimi["families"]["ep"] == [["expert"]]
    for name, words in (
        ("phi3", "bytes and forward"),
        ("baichuan", "bytes, not forward"),
        ("kimi_k2", "not by itself"),
    ):
        assert words in models(name).stdout
    assert "not possible: the rules name no experts" in models("phi3").stdout
    assert "splits expert\n" in models("kimi_k2").stdout


def test_a_name_is_a_type_or_a_part_of_one_or_of_its_rules() -> None:
    assert models("qwen3").stdout.startswith("qwen3\n")
    assert "qwen3_moe, " in models("qwen3").stdout
    assert [found["model_type"] for found in document("QWEN3_V")] == [
        "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_text"
    ]  # fmt: skip
    by_rules = {name for name, path in built_in_architectures().items() if "multimodal" in f"{name} {path.stem}"}
    assert len(by_rules) > 10 and {found["model_type"] for found in document("multimodal")} == by_rules


def test_an_unknown_name_is_refused_with_near_ones() -> None:
    done = models("lamma")
    assert isinstance(done.exception, PlanError) and done.stdout == ""
    assert "'lamma'" in done.exception.message
    assert "llama" in str(done.exception.hint) and "--draft" in str(done.exception.hint)


def test_coverage_names_no_unknown_type() -> None:
    assert coverage().keys() <= built_in_architectures().keys()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name: str) -> None:
    context = click.Context(cli)
    command = cli.get_command(context, name)
    assert command is not None and command.name == name
    assert command.get_short_help_str(200) == COMMANDS[name][1]


def test_help_of_commands_loads_nothing_heavy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from reshard.cli.commands import COMMANDS, cli\n"
        "for name in COMMANDS: assert CliRunner().invoke(cli, [name, '--help']).exit_code == 0\n"
        "assert CliRunner().invoke(cli, ['models']).exit_code == 0\n"
        "print(*{'numpy', 'torch', 'transformers', 'huggingface_hub', 'safetensors', 'tqdm'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
