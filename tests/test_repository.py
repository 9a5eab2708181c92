"""What stands around the code: workflows, templates, the Makefile, and what a release has.

The workflows run at GitHub alone. Here they are held against ``.ci/run``, the Makefile and pyproject.toml.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.floors import floors

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = re.compile(r"actions/[\w-]+@[0-9a-f]{40}")


def jobs(path: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load(path.read_text())["jobs"].values()


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def pythons() -> list[str]:
    """Those that pyproject.toml names, the oldest first."""
    named = re.findall(r"Programming Language :: Python :: (\d+\.\d+)", "\n".join(PROJECT["classifiers"]))
    return sorted(named, key=lambda version: [*map(int, version.split("."))])


def test_the_workflow_does_what_ci_does() -> None:
    in_ci = re.findall(r"^make .*", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    test, floor = jobs(GITHUB / "workflows/test.yml")
    assert commands(test) == in_ci and len(in_ci) > 1
    assert commands(floor) == ["make floors"]
    tried = {(each["os"].partition("-")[0], each["python"]) for each in test["strategy"]["matrix"]["include"]}
    assert tried == {("ubuntu", pythons()[0]), ("ubuntu", pythons()[-1]), ("macos", pythons()[-1])}
    assert PROJECT["requires-python"] == f">={pythons()[0]}"


def test_a_release_is_tried_on_the_oldest_and_the_newest_python() -> None:
    (job,) = jobs(GITHUB / "workflows/release.yml")
    assert commands(job) == ["make release"]
    ends = [pythons()[0], pythons()[-1]]
    (versions,) = (step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert versions.split() == ends
    assert f"\nPYTHONS ?= {' '.join(f'python{each}' for each in ends)}\n" in MAKEFILE


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_lines_of_the_makefile_with_pinned_actions_and_few_rights(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in jobs(path):
        assert "permissions" not in job and job["timeout-minutes"]
        for step in job["steps"]:
            if "run" in step:
                target = re.fullmatch(r"make ([\w-]+)", step["run"])
                assert target is not None and re.search(rf"^{target[1]}:", MAKEFILE, re.MULTILINE), step
            else:
                assert PINNED.fullmatch(step["uses"]), step
        (checkout,) = (step for step in job["steps"] if "actions/checkout@" in step.get("uses", ""))
        assert checkout["with"] == {"persist-credentials": False}


@pytest.mark.parametrize("path", sorted(GITHUB.rglob("*.yml")), ids=lambda path: path.stem)
def test_a_file_for_github_can_be_read(path: Path) -> None:
    assert yaml.safe_load(path.read_text())


def test_a_report_has_what_is_asked_for() -> None:
    form = (GITHUB / "ISSUE_TEMPLATE/bug.yml").read_text()
    assert "--debug" in form and "reshard inspect SOURCE" in form and "reshard --version" in form


def test_a_citation_says_what_pyproject_says() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert (citation["license"], citation["abstract"]) == (PROJECT["license"], PROJECT["description"])
    assert (citation["authors"], citation["keywords"]) == (PROJECT["authors"], PROJECT["keywords"])


def test_hooks_are_a_part_of_make_check() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    recipe = MAKEFILE.partition("\ncheck: ")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        words = hook["entry"].replace("--force-exclude", "").split()
        line = next(
            line for line in recipe.splitlines() if words[1] in line and words[-1 if "-m" in words else 1] in line
        )
        assert {*words[1:]} <= {*line.replace("$(BIN)", ".venv/bin").split()}


def test_every_package_is_typed() -> None:
    for package in ("formats", "reshard", "verify"):
        assert (ROOT / package / "py.typed").exists()


def test_the_floors_are_those_of_the_project(tmp_path: Path) -> None:
    found = floors()
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["verify"]]
    assert {f"{name}>={version}" for name, version in found.items()} >= {*wanted}
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["click"]\n')
    with pytest.raises(ValueError, match="click: a name and its oldest version"):
        floors(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("is_made", [True, False])
def test_clean_leaves_an_environment_that_make_did_not_make(is_made: bool, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    environment = tmp_path / ".venv"
    environment.mkdir()
    (environment / ("made" if is_made else "mine")).touch()
    (tmp_path / "build").mkdir()
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    assert environment.exists() != is_made and not (tmp_path / "build").exists()


PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p .venv/bin && echo made >> venvs && printf '#!/bin/sh\\n' > .venv/bin/pip && chmod +x .venv/bin/pip
"""
"""Stands in for a Python: notes each environment that it makes."""


@pytest.mark.parametrize("is_mine", [True, False])
def test_an_environment_of_yours_is_taken_as_it_is(is_mine: bool, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    if is_mine:
        subprocess.run([python, "-m", "venv"], cwd=tmp_path, check=True)
    done = subprocess.run(["make", ".venv/ready", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "venvs").read_text() == "made\n"
    assert (tmp_path / ".venv/made").exists() != is_mine and (tmp_path / ".venv/ready").exists()
