"""README.md and docs/usage.md against the program: what they show is what it does.

``make docs`` (``python -m tests.test_readme``) writes the generated parts anew.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from formats.notation.architecture import Architecture
from formats.notation.architecture_files import BUILT_IN, load_architecture
from tests import remote, zoo

ROOT = Path(__file__).parents[1]
README, USAGE = ROOT / "README.md", ROOT / "docs" / "usage.md"


def block(text: str, name: str) -> str:
    """What stands between the markers of a generated part."""
    found = re.search(rf"<!-- {name}, by make docs -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found is not None, f"no part '{name}'"
    return found[1]


def replaced(text: str, name: str, content: str) -> str:
    marker = f"<!-- {name}, by make docs -->\n"
    before, after = text.split(marker)
    return f"{before}{marker}{content}<!-- end -->{after.partition('<!-- end -->')[2]}"


def architectures() -> Iterator[Architecture]:
    for path in sorted(BUILT_IN.glob("*.toml")):
        yield load_architecture(path)


def architecture_table() -> str:
    """One line an architecture file: its model types, what is dealt to the ranks, and what the tests try of it."""
    forward: dict[str, set[int]] = defaultdict(set)
    for entry in zoo.ZOO.values():
        forward[entry.model_type].update(entry.degrees)
    by_bytes = {str(entry.config.get("model_type")): set(entry.degrees) for entry in remote.REMOTE.values()}
    lines = ["| rules | `model_type` | dealt to the ranks | `--tp` tried |", "| --- | --- | --- | --- |"]
    count = 0
    for architecture in architectures():
        tried: set[int] = set()
        types = []
        for name in architecture.model_types:
            mark = "" if name in forward else "¹" if name in by_bytes else "²"
            types.append(f"{name}{mark}")
            tried |= forward.get(name, set()) | by_bytes.get(name, set())
        families = ", ".join(" × ".join(family) for family in architecture.families.get("tp", ()))
        listed = ", ".join(map(str, sorted(tried))) or "–"
        lines.append(f"| {architecture.name} | {', '.join(types)} | {families} | {listed} |")
        count += len(types)
    legend = (
        "Each is split, re-split, merged and verified by bytes in the tests at these degrees, and was run forward;\n"
        "¹ by bytes alone: transformers has no code for it, or none that runs on tokens alone;\n"
        "² not on its own: the rules are those of its neighbours."
    )
    return "\n".join([f"{count} model types. {legend}", "", *lines, ""])


def commands() -> Iterator[tuple[str, click.Command]]:
    from reshard.cli.commands import cli

    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command


def usage_text() -> str:
    """The --help of every command."""
    parts = []
    for name, command in commands():
        context = click.Context(command, info_name=f"reshard {name}", terminal_width=90)
        context.help_option_names = ["-h", "--help"]
        parts.append(f"### reshard {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)


def demo_text() -> str:
    """What ``reshard demo`` prints."""
    command = [sys.executable, "-m", "reshard", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return f"```console\n$ reshard demo\n{done.stdout}```\n"


def plan_text(folder: Path) -> str:
    """What ``reshard plan`` prints for the demo's model."""
    from reshard.cli.demo import write_model

    if not (folder / "model").exists():
        write_model(folder / "model")
    shown = []
    for line in ("reshard plan model --tp 8",):
        command = [sys.executable, "-m", *shlex.split(line)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        shown.append(f"$ {line}\n{done.stdout}")
    return "```console\n" + "\n".join(shown) + "```\n"


def still(text: str) -> str:
    """A text without what differs from run to run: seconds and temporary folders."""
    text = re.sub(r"in \d+\.\d\d s", "in 0.00 s", text)
    return re.sub(r"\S*/reshard-demo-\w+", "TEMPORARY", text)


def test_architecture_table() -> None:
    assert block(README.read_text(), "architectures") == architecture_table(), "run make docs"


def test_every_command_and_option_is_documented() -> None:
    documented = README.read_text() + USAGE.read_text()
    for name, command in commands():
        assert f"reshard {name}" in documented, f"run make docs: {name}"
        section = USAGE.read_text().partition(f"### reshard {name}\n")[2].partition("### reshard")[0]
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert re.search(rf"{re.escape(option)}\b", section), f"run make docs: {option} of {name}"


def test_examples_show_what_is_printed(tmp_path: Path) -> None:
    text = README.read_text()
    assert still(block(text, "demo")) == still(demo_text()), "run make docs"
    assert block(text, "plan") == plan_text(tmp_path), "run make docs"


def test_python_example_runs(tmp_path: Path) -> None:
    from reshard.cli.demo import write_model

    write_model(tmp_path / "model")
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    subprocess.run([sys.executable, "-c", example[1]], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("page", [README, USAGE, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        readme = README.read_text()
        for part, content in (
            ("architectures", architecture_table()),
            ("demo", demo_text()),
            ("plan", plan_text(Path(folder))),
        ):
            readme = replaced(readme, part, content)
    README.write_text(readme)
    USAGE.write_text(replaced(USAGE.read_text(), "help", usage_text()))
