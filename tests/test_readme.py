"""README.md and docs/ against the program: what they show is what it does.

``make docs`` (``python -m tests.test_readme``) writes the generated parts and reshard/cli/coverage.json anew.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
import pytest

import reshard
from reshard.cli.coverage import FILE as COVERAGE
from reshard.cli.coverage import coverage
from reshard.formats.notation.architecture import Architecture
from reshard.formats.notation.architecture_files import BUILT_IN, built_in_architectures, load_architecture
from reshard.formats.notation.format_file import ExpertFactor, adapter_format, adapter_format_names
from tests import remote, support, zoo
from tests.marks import of_ranks, thorough
from tools.api_text import api_text, live_text
from tools.versions import versions_text

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README, REFERENCE = ROOT / "README.md", DOCS / "reference"
TUTORIAL = DOCS / "tutorial.md"
ADAPTERS, ERRORS = (DOCS / "how-to" / f"{name}.md" for name in ("adapters", "errors"))
WITHOUT_RULES = DOCS / "how-to" / "model-without-rules.md"
COMMANDS, ARCHITECTURES, FORMATS = (REFERENCE / f"{name}.md" for name in ("commands", "architectures", "formats"))
PYTHON, JSON, MANIFEST, VERSIONS = (REFERENCE / f"{name}.md" for name in ("python", "json", "manifest", "versions"))
MOST_WORDS = 20_000
BESIDE = [
    ROOT / name
    for name in (
        "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md",
        "tests/README.md", "benchmarks/README.md",
    )
]  # fmt: skip
PAGES = [README, *BESIDE, *sorted(DOCS.rglob("*.md"))]


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


def coverage_text() -> str:
    """coverage.json: the model types that the tests have a model of, and the degrees at which they try it."""
    forward: dict[str, set[int]] = defaultdict(set)
    for entry in zoo.ZOO.values():
        forward[entry.model_type].update(entry.degrees)
    by_bytes: dict[str, set[int]] = defaultdict(set)
    for entry in remote.REMOTE.values():
        by_bytes[str(entry.config.get("model_type"))].update(entry.degrees)
    known = built_in_architectures()
    found = {
        "forward": {name: sorted(forward[name] | by_bytes.get(name, set())) for name in sorted(forward)},
        "bytes": {name: sorted(by_bytes[name]) for name in sorted(by_bytes.keys() & known.keys() - forward.keys())},
    }
    return "{\n" + ",\n".join(_kind(kind, types) for kind, types in found.items()) + "\n}\n"


def _kind(kind: str, types: dict[str, list[int]]) -> str:
    lines = ",\n".join(f"    {json.dumps(name)}: {degrees}" for name, degrees in types.items())
    return f'  "{kind}": {{\n{lines}\n  }}'


def architecture_table() -> str:
    """One line an architecture file: its model types, what is dealt to the ranks, and what the tests try of it."""
    tested = coverage()
    lines = ["| rules | `model_type` | dealt to the ranks | `--tp` tried |", "| --- | --- | --- | --- |"]
    count = 0
    for architecture in architectures():
        tried: set[int] = set()
        types = []
        for name in architecture.model_types:
            found = tested.get(name)
            types.append(name + ("²" if found is None else "" if found.forward else "¹"))
            tried.update(found.degrees if found else ())
        families = ", ".join(" × ".join(family) for family in architecture.families.get("tp", ()))
        listed = ", ".join(map(str, sorted(tried))) or "–"
        lines.append(f"| {architecture.name} | {', '.join(types)} | {families} | {listed} |")
        count += len(types)
    return "\n".join([f"{count} model types.", "", *lines, ""])


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


class Terminal:
    """Runs the commands that pages show, each once, in one folder and in the order of the pages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: dict[str, str] = {}

    def run(self, line: str, *, code: int = 0, errors: bool = False) -> str:
        """What a command prints: on stdout, and with ``errors`` on stderr. ``code`` is how it should end."""
        if line not in self.shown:
            first, *arguments = shlex.split(line)
            if first == "reshard":
                done = support.command(*arguments, cwd=self.folder)
            else:
                done = subprocess.run(line, shell=True, cwd=self.folder, capture_output=True, text=True, check=False)
            assert done.returncode == code, (line, done.stdout, done.stderr)
            text = done.stdout + (done.stderr if errors else "")
            self.shown[line] = text.replace(f"{self.folder.resolve()}/", "~/demo/")
        return self.shown[line]

    def console(self, *lines: str, code: int = 0, errors: bool = False) -> str:
        """A block of commands and what they print."""
        shown = "\n".join(f"$ {line}\n{self.run(line, code=code, errors=errors)}" for line in lines)
        return f"```console\n{shown}```\n"

    def refusals(self, setup: str, lines: Iterable[str]) -> str:
        """A block of commands that are refused, after one that is not shown."""
        self.run(setup)
        return self.console(*lines, code=2, errors=True)

    def after(self, before: str, line: str) -> str:
        """A block of a command, after another that is not shown."""
        self.run(f"{sys.executable} -m {before}")
        return self.console(line)

    def excerpt(self, line: str, *starts: str) -> str:
        """A command, and of what it prints the lines that begin in one of these ways, each with two sentences."""
        printed = [
            re.sub(r"^(.*?\. .*?\w\.) [A-Z].*", r"\1 …", each)
            for each in self.run(line).splitlines()
            if each.startswith(starts)
        ]
        assert len(printed) == len(starts), printed
        return "\n".join(["```console", f"$ {line}", *printed, "```", ""])


REFUSED = {
    "refused": (
        "true",
        [
            "reshard split model new --tp 3",
            "reshard split mdel new --tp 2",
            "reshard split model out --tp 2",
            "reshard split model new --tensor-parallel-size 2",
            "reshard split model out2 --tp 2 --rank 9",
        ],
    ),
    "incomplete": (
        "cp -r out lost && rm -r lost/rank-02-of-04 && cp -r model cut && rm cut/model-00002-of-00002.safetensors && "
        "cp -r model short && truncate -s -1000 short/model-00002-of-00002.safetensors",
        [
            "reshard merge lost new",
            "reshard split cut new --tp 2",
            "reshard split short new --tp 2",
            "reshard verify model lost --exact-only",
        ],
    ),
    "unfit": (
        "true",
        [
            "reshard split run new --tp 2",
            "reshard split model new --tp 2 --as deepseek",
            "reshard split strange new --tp 2",
        ],
    ),
}
"""Commands that are refused, by the part of the page; before them, one that is not shown."""


def adapter_table() -> str:
    """How A and B of experts lie in each format of adapters."""
    rows = ["| `--as` | A | B | read by | tried |", "|---|---|---|---|---|"]
    for each in map(adapter_format, adapter_format_names()):
        a, b = each.factors or (ExpertFactor("0.gate_proj.lora_A.weight", "rank in"), ExpertFactor("", "out rank"))
        end = a.name.removeprefix("{module}.").replace("{wrapped}", "").format(leaf="down_proj", word="down")
        x, y = ("in", "out") if each.second or each.since is None else ("out", "in")
        axes = [re.sub(r"\bx\b", x, re.sub(r"\by\b", y, factor.axes)) for factor in (a, b)]
        rows.append(f"| `{each.name}` | `experts.{end}`: `{axes[0]}` | `{axes[1]}` | {each.loaded_by} | {each.tried} |")
    return "\n".join([*rows, ""])


def examples(folder: Path) -> Iterator[tuple[Path, str, Callable[[], str]]]:
    """The parts that show a command: the page, the part, and what makes it. In this order, in one folder."""
    outside, inside = Terminal(folder), Terminal(folder / "demo")
    show = inside.console
    split, verify, convert = "reshard split model out --tp 4", "reshard verify model out", "reshard split out engine"
    yield TUTORIAL, "demo", lambda: outside.console("reshard demo demo")
    yield TUTORIAL, "inspect", lambda: show("reshard inspect model")
    yield TUTORIAL, "degrees", lambda: show("reshard plan model")
    yield TUTORIAL, "refused", lambda: show("reshard split model out --tp 3", code=2, errors=True)
    yield TUTORIAL, "report", lambda: show("reshard plan model --tp 8 --report plan.html", errors=True)
    yield TUTORIAL, "split", lambda: show(split, "ls out out/rank-02-of-04")
    yield README, "split", lambda: show(split)
    yield TUTORIAL, "verify", lambda: show(verify)
    yield README, "proof", lambda: inside.excerpt(verify, "bytes:", "SAME:")
    yield TUTORIAL, "convert", lambda: show(f"{convert} --tp 2 --as vllm", "reshard inspect engine")
    trained = "reshard split model run --as dcp && rm run/*.json"  # as a trainer saves it
    yield README, "convert", lambda: inside.after(trained, "reshard split run served --tp 2 --as vllm --config model")
    yield TUTORIAL, "merge", lambda: show("reshard merge engine back", "diff -r model back && echo the same")
    yield (
        TUTORIAL,
        "damage",
        lambda: show(
            "printf X | dd of=out/rank-02-of-04/model.safetensors bs=1 seek=1000000 conv=notrunc 2> /dev/null"
        ),
    )
    yield TUTORIAL, "different", lambda: show(f"{verify} --exact-only", code=1)
    another_type = "cp -r model strange && sed s/llama/strange/ model/config.json > strange/config.json"
    yield WITHOUT_RULES, "type", lambda: show(another_type)
    yield WITHOUT_RULES, "unknown", lambda: show("reshard plan strange", code=2, errors=True)
    yield WITHOUT_RULES, "draft", lambda: show("reshard plan strange --draft mine.toml", errors=True)
    yield ARCHITECTURES, "models", lambda: show("reshard models phi3")
    yield FORMATS, "formats", lambda: show("reshard formats")
    yield ADAPTERS, "adapters", adapter_table
    for part, (setup, lines) in REFUSED.items():
        yield ERRORS, part, lambda setup=setup, lines=lines: inside.refusals(setup, lines)


def still(text: str) -> str:
    """A text without what differs from run to run or from processor to processor: seconds, and numbers of rounding."""
    text = re.sub(r"in \d+\.\d\d s", "in 0.00 s", text)
    text = re.sub(r"^Time: .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r" *\b\d\.\d\de[-+]\d\d\b| +\d+\.\d\d(?=\n)", " #", text)
    text = re.sub(r"\d+\.\d+%", "#%", text)
    text = re.sub(r"exceeds \d\.\d+ times", "exceeds # times", text)
    return re.sub(r"  position \d+: .*\n", "", text)


def test_coverage_is_what_the_tests_have() -> None:
    assert COVERAGE.read_text() == coverage_text(), "run make docs"


def test_architecture_table() -> None:
    table = architecture_table()
    assert block(ARCHITECTURES.read_text(), "architectures") == table, "run make docs"
    assert table.partition(".")[0] in README.read_text()


def test_every_command_and_option_is_documented() -> None:
    usage = COMMANDS.read_text()
    for name, command in commands():
        section = usage.partition(f"### reshard {name}\n")[2].partition("### reshard")[0]
        assert section, f"run make docs: {name}"
        for parameter in command.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert re.search(rf"{re.escape(option)}\b", section), f"run make docs: {option} of {name}"
    assert block(usage, "help") == usage_text(), "run make docs"


def test_pages_show_the_same_run_of_a_command() -> None:
    """Numbers of rounding differ from run to run, but not on two pages."""
    ratio = re.search(r"has (\S+) times", block(README.read_text(), "proof"))
    assert ratio is not None and ratio[0] in block(TUTORIAL.read_text(), "verify"), "run make docs"


@of_ranks
@thorough
def test_examples_show_what_is_printed(tmp_path: Path) -> None:
    for page, part, made in examples(tmp_path):
        assert still(block(page.read_text(), part)) == still(made()), f"run make docs: {part}"


def test_the_api_is_in_the_page() -> None:
    assert block(PYTHON.read_text(), "api") == api_text(), "run make docs"
    assert block(PYTHON.read_text(), "live") == live_text(), "run make docs"


def test_versions_are_those_that_are_recorded() -> None:
    assert block(VERSIONS.read_text(), "versions") == versions_text(), "run make docs"


def test_each_argument_of_a_function_is_in_the_page() -> None:
    """At the function, or at what its text links to, and once."""
    text = block(PYTHON.read_text(), "api")
    sections = dict(re.findall(r"^### (\S+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    anchors = {name.lower().replace(".", ""): name for name in sections}

    def listed(name: str) -> list[str]:
        links = [anchors[link] for link in re.findall(r"\(#(\w+)\)", sections[name].split("Returns [")[0])]
        own = re.findall(r"^- `(\w+): [^`]+`(?:: |$)", sections[name], re.MULTILINE)
        return own + [each for link in links for each in listed(link)]

    functions = [name for name in reshard.__all__ if inspect.isfunction(getattr(reshard, name))]
    assert functions
    for name in functions:
        found = listed(f"reshard.{name}")
        assert {*found} == {*inspect.signature(getattr(reshard, name)).parameters}, name
        assert len(found) == len({*found}) or name == "average", name  # whose weights are others


DEMO = {
    "split": ["split model out --tp 4", "split model other --tp 4 --moves", "split out engine --tp 2 --as vllm"],
    "merge": ["merge out merged"],
    "average": ["average model out mean"],
    "plan": ["plan model", "plan model --tp 8", "plan model --tp 2 --as vllm", "plan model --tp-plan"],
    "live": ["live plan model --from fsdp2:2 --to vllm:tp2"],
    "diff": ["diff model out --out delta"],
    "patch": ["patch model delta patched"],
    "inspect": ["inspect model", "inspect out", "inspect engine"],
    "formats": ["formats", "formats model"],
    "models": ["models phi"],
    "demo": ["demo"],
    "profile": ["profile model --tp 1,2 --seq 8 --seconds 0.01 --predict-tp 4"],
    "verify": ["verify model out --seq 8", "verify model damaged --exact-only"],
}
"""Commands on the demo's model, which print each key that ``--json`` has there."""


@thorough
@of_ranks
def test_each_key_of_json_is_in_the_page(tmp_path: Path) -> None:
    from reshard.tiny_model import write_model

    write_model(tmp_path / "model")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", JSON.read_text(), re.MULTILINE | re.DOTALL))
    assert sections.keys() == DEMO.keys() == {name for name, _ in commands()}
    sections["merge"] = sections["patch"] = sections["average"] = sections["split"]
    for command, lines in DEMO.items():
        for line in lines:
            if "damaged" in line:
                shutil.copytree(tmp_path / "out", tmp_path / "damaged")
                support.change_tensor(tmp_path / "damaged/rank-01-of-04/model.safetensors", "lm_head.weight")
            done = support.command(*line.split(), "--json", cwd=tmp_path)
            missing = unnamed(json.loads(done.stdout), words_of(sections[command]) | {"schema_version", "command"})
            assert not missing, (line, missing)


def test_each_key_of_the_manifest_is_in_the_page(tmp_path: Path) -> None:
    from reshard.tiny_model import write_model

    assert support.command("split", write_model(tmp_path / "model"), tmp_path / "out", "--tp", "4").returncode == 0
    manifest = json.loads((tmp_path / "out/reshard.json").read_text())
    manifest["plan"] = {}  # it is an architecture file
    assert not unnamed(manifest, words_of(MANIFEST.read_text()))


def words_of(page: str) -> set[str]:
    """What stands in backquotes, and the names in a path: ``rows`` and ``tensor`` of ``rows[].tensor``."""
    found = set(re.findall(r"`([\w.*\[\]]+)`", page))
    return found | {name for path in found for name in re.split(r"\.|\[\]", path)}


def unnamed(value: object, words: set[str], at: str = "") -> set[str]:
    """The keys of a document that are not among the words. ``sizes.*`` says that the keys of ``sizes`` are data."""
    if isinstance(value, list):
        return {key for item in value for key in unnamed(item, words, at)}
    if not isinstance(value, dict):
        return set()
    missing = set() if f"{at}.*" in words else value.keys() - words
    return missing.union(*(unnamed(item, words, key) for key, item in value.items()))


@thorough
def test_python_examples_run(tmp_path: Path) -> None:
    from reshard.tiny_model import write_model

    write_model(tmp_path / "model")
    found = re.findall(r"```python\n(.*?)```", PYTHON.read_text(), re.DOTALL)
    assert found
    for example in found:
        subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "merged" / "model.safetensors.index.json").exists()


OF_THE_READER = """
import torch

model = torch.nn.Linear(2, 2)
rank = step = 0
MODEL = local_path = "model"


def upload(name: str, tensor: torch.Tensor) -> None: ...
"""
"""What the pages' Python takes from its reader's program."""
ALSO_TAKEN = """
from pathlib import Path

import reshard
import torch

reshard.split(Path("model"), "out", max_shard_size="1GB", part=(0, 1), dtype=torch.bfloat16, progress=True)
reshard.split("model", "out", plan_file="mine.toml", config="model", cache_dir="cache", ranks=0, part="auto")
reshard.load("model", device=torch.device("cpu"), progress=lambda done, total: None)
answer = reshard.verify("model", "out", device=torch.device("cpu"), compute_dtype=torch.float32, progress=True)
assert answer and reshard.diff("model", "out") and reshard.inspect("out")
answer.raise_if_different()
reshard.profile("model", tp=[1, 2], batch=1, phase="decode", memory="78GB", link="450GB/s", dtype=torch.bfloat16)
print(reshard.plan("model").valid_degrees)
"""


@thorough
def test_pythons_types_are_those_that_the_pages_show(tmp_path: Path) -> None:
    pages = {page.stem: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in DOCS.rglob("*.md")}
    scripts = {page: "\n".join(["import reshard", OF_THE_READER, *found]) for page, found in pages.items() if found}
    assert len(scripts) > 2
    for page, script in {**scripts, "also": ALSO_TAKEN}.items():
        (tmp_path / f"{page}.py").write_text(script)
    files = [str(file) for file in tmp_path.iterdir()]
    ended = subprocess.run([sys.executable, "-m", "mypy", "--strict", *files], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout
    (tmp_path / "also.py").write_text(ALSO_TAKEN.replace('"1GB"', "b'1GB'"))
    assert subprocess.run([sys.executable, "-m", "mypy", "--strict", *files], cwd=ROOT, capture_output=True).returncode


def test_the_pages_are_short() -> None:
    """What a person wrote: without what is generated, and without the changelog."""
    pages = [README, *DOCS.rglob("*.md")]
    pages.remove(REFERENCE / "models.md")  # by benchmarks/models.py
    words = sum(
        len(re.sub(r"<!-- [^>]*, by .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL).split()) for page in pages
    )
    assert words <= MOST_WORDS
    assert len(README.read_text().splitlines()) <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in anchors, f"{target}#{heading}"


def test_every_page_is_looked_at_and_the_readme_leads_to_those_of_docs() -> None:
    """Links to other places are whole addresses, of which nothing is asked: tests have no network."""
    here = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    outside = {ROOT / name for name in here} - {*PAGES}
    assert all("tests/oracles" in str(page) for page in outside), outside
    links = {(README.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)", README.read_text())}
    assert {*DOCS.rglob("*.md")} <= links
    for page in PAGES:
        for address in re.findall(r"\]\(([^)]*:[^)]*)\)", page.read_text()):
            assert re.fullmatch(r"https://[\w.-]+\.\w+/\S*", address), (page, address)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_are_there(page: Path) -> None:
    """``reshard/publishing/staging.py`` in backquotes is a file of this repository, and so is a folder with a slash."""
    for name in re.findall(r"`((?:formats|reshard|verify|tests|benchmarks|tools)/[\w./-]*)`", page.read_text()):
        assert (ROOT / name).exists(), name


def main() -> None:
    import tempfile

    COVERAGE.write_text(coverage_text())
    coverage.cache_clear()
    with tempfile.TemporaryDirectory() as folder:
        made: list[tuple[Path, str, Callable[[], str]]] = [
            (ARCHITECTURES, "architectures", architecture_table),
            (COMMANDS, "help", usage_text),
            (PYTHON, "api", api_text),
            (PYTHON, "live", live_text),
            (VERSIONS, "versions", versions_text),
            *examples(Path(folder)),
        ]
        for page, part, content in made:
            page.write_text(replaced(page.read_text(), part, content()))


if __name__ == "__main__":
    main()
