"""What a wheel holds, and that its commands run without the checkout; and what another module of our name does."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reshard.cli.commands import COMMANDS
from tests.marks import thorough

pytestmark = thorough


ROOT = Path(__file__).parents[1]
FOLDERS = ("formats", "reshard", "verify")
_BUILD = "from setuptools.build_meta import build_wheel; build_wheel({!r})"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of what the packages are made of."""
    work, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, work / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work)
    code = _BUILD.format(str(out))
    done = subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, *arguments: str, cwd: Path, others: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python with the installed packages and those that they depend on; ``-S`` leaves the checkout out."""
    path = [installed, *([others] if others else site.getsitepackages())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONDONTWRITEBYTECODE": "1"}
    line = [sys.executable, "-S", *arguments]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of this environment but those of the extra 'verify'."""
    folder = tmp_path_factory.mktemp("bare")
    for place in map(Path, site.getsitepackages()):
        for path in place.iterdir() if place.is_dir() else ():
            if not path.name.startswith(("transformers", "accelerate")):
                (folder / path.name).symlink_to(path)
    return folder


def test_the_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    there = {
        (Path("reshard") / path.relative_to(ROOT / "reshard" if name == "reshard" else ROOT)).as_posix()
        for name in FOLDERS
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there  # so 'reshard' is the one name in site-packages


def test_each_command_runs_once_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    lines = {
        "demo": "demo d", "plan": "plan d/model --tp 2 --report page.html", "split": "split d/model out --tp 2",
        "diff": "diff d/model out --out delta --report diff.html", "patch": "patch d/model delta patched",
        "live": "live plan d/model --from fsdp2:2 --to vllm:tp2 --report push.html",
        "average": "average d/model out mean", "merge": "merge out merged",
        "inspect": "inspect out --json", "formats": "formats d/model", "models": "models",
        "verify": "verify d/model out --exact-only --report verified.html",
        "profile": "profile d/model --tp 1 --seq 8 --phase decode --seconds 0.01 --report profile.html",
    }  # fmt: skip
    assert lines.keys() == COMMANDS.keys()
    for line in lines.values():
        done = run(installed, "-m", "reshard", *line.split(), cwd=tmp_path)
        assert done.returncode == 0, (line, done.stderr)
    where = run(installed, "-c", "import reshard.formats.store as s, reshard; print(reshard, s)", cwd=tmp_path)
    assert where.stdout.count(str(installed)) == 2


@pytest.fixture(scope="module")
def ranks(installed: Path, bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its ranks and a format of Megatron's, made without the packages of the extra."""
    folder = tmp_path_factory.mktemp("ranks")
    for line in ("demo d", "split d/model out --tp 2", "split d/model vllm --tp 2 --as vllm"):
        done = run(installed, "-m", "reshard", *line.split(), cwd=folder, others=bare)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("verify d/model out", "the forward pass"), ("verify d/model out --prompt hello", "the forward pass"),
        ("verify d/model vllm --exact-only --engine vllm", "the engine's run"), ("profile d/model", "profile"),
        ("plan d/model --tp-plan", "--tp-plan"),
    ],
)  # fmt: skip
def test_what_needs_transformers_says_so(line: str, what: str, ranks: Path, installed: Path, bare: Path) -> None:
    done = run(installed, "-m", "reshard", *line.split(), cwd=ranks, others=bare)
    assert done.returncode == 2
    error = [f"Error: {what} needs transformers and accelerate", "Hint: pip install transformers accelerate"]
    assert done.stderr.splitlines()[-2:] == error, done.stderr
    assert "Every byte is the original's" not in done.stdout  # it is said before anything is read


@pytest.mark.parametrize("form", ["{}.py", "{}/__init__.py"])
def test_modules_of_a_user_hide_nothing(form: str, installed: Path, tmp_path: Path) -> None:
    for name in ("formats", "verify"):
        other = tmp_path / form.format(name)
        other.parent.mkdir(exist_ok=True)
        other.write_text("raise SystemExit('not this one')")
    for line in ("-m reshard models llama", "-m reshard.verify --help"):
        done = run(installed, *line.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_the_function_verify_is_found_after_its_modules(installed: Path, tmp_path: Path) -> None:
    code = "from reshard.verify.command import Answer; import reshard; print(reshard.verify.__name__, reshard.live)"
    done = run(installed, "-c", code, cwd=tmp_path)
    assert done.stdout.startswith("verify <module"), done.stderr
