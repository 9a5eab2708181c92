"""The measured tables of docs/: each has its command, commit and code, and the tool says which are stale."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.measured import ROOT, stale, tables, write

PAGE = "# Speed\n\n<!-- {name}, by {command}, of {paths} -->\nAt {commit}, 1 May 2026.\n\n| a |\n<!-- end -->\n"
IN_MODULES = re.compile(r"python -m (\S+)")


def git(folder: Path, *arguments: str) -> str:
    given = ["-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false", *arguments]
    return subprocess.run(["git", *given], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path, file: str, text: str) -> str:
    path = folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", text)
    return git(folder, "rev-parse", "--short", "HEAD")


def test_each_measured_table_has_its_command_commit_and_code() -> None:
    found = list(tables())
    assert len({table.name for table in found}) == len(found) > 10
    for table in found:
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", table.commit), table
        assert re.fullmatch(r"\d+ \w+ 20\d\d", table.day), table
        assert table.paths and all((ROOT / path).exists() for path in table.paths), table
        for module in IN_MODULES.findall(table.command):
            assert (ROOT / f"{module.replace('.', '/')}.py").exists(), table


@pytest.mark.parametrize("name", ["speed", "evidence"])
def test_no_table_stands_outside(name: str) -> None:
    page = ROOT / "docs" / "explanation" / f"{name}.md"
    outside = re.sub(r"<!-- .*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    assert not re.search(r"^\|", outside, re.MULTILINE)


def test_what_is_stale_and_what_is_written(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    first = commit(tmp_path, "code/a.py", "one")
    (tmp_path / ".gitignore").write_text("*.md")
    page = tmp_path / "speed.md"
    page.write_text(PAGE.format(name="speed", command="make bench", paths="code other", commit=first))
    commit(tmp_path, "beside/b.py", "of no table")
    assert not [*stale([page], tmp_path)]
    commit(tmp_path, "code/a.py", "two")
    later = "later commits to code, other: 1. Again: make bench"
    assert [*stale([page], tmp_path)] == [f"speed.md: 'speed' is of 1 May 2026 ({first}); {later}"]
    page.write_text(page.read_text().replace(first, "0123abcd"))
    assert [each.endswith("a commit that this clone does not have") for each in stale([page], tmp_path)] == [True]
    now = commit(tmp_path, "code/a.py", "three")
    write("speed", "| b |\n", [page], tmp_path)
    (written,) = tables([page])
    assert (written.text.strip(), written.commit, written.paths) == ("| b |", now, ("code", "other"))
    (tmp_path / "code/a.py").write_text("not committed")
    write("speed", "| c |\n", [page], tmp_path)
    assert [table.commit for table in tables([page])] == [f"{now}-dirty"]
