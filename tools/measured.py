"""The measured tables of docs/: at which commit each was made, and whether the code that it is about has changed since.

    python -m tools.measured

A table stands between ``<!-- NAME, by COMMAND, of PATH PATH -->`` and ``<!-- end -->``. Its first line is its stamp:
``At COMMIT, DATE.`` Benchmarks that write their tables call ``write``, which makes the stamp; the others' tables are
copied, and stamped by hand. ``make docs`` prints the stale ones: measuring again takes hours, so nothing fails.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = tuple(sorted((ROOT / "docs").rglob("*.md")))
_TABLE = re.compile(r"<!-- (\S+), by ([^>]*), of ([^>]*) -->\n(?:At (\S+), ([^\n]*)\.\n)?(.*?)<!-- end -->", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A measured table: ``paths`` are the code that it is about. ``commit`` and ``day`` are its stamp."""

    page: Path
    name: str
    command: str
    paths: tuple[str, ...]
    commit: str
    day: str
    text: str


def tables(pages: Iterable[Path] = PAGES) -> Iterator[Table]:
    """The measured tables of these pages."""
    for page in pages:
        for name, command, paths, commit, day, text in _TABLE.findall(page.read_text(encoding="utf-8")):
            yield Table(page, name, command, tuple(paths.split()), commit, day, text)


def write(name: str, text: str, pages: Iterable[Path] = PAGES, root: Path = ROOT) -> None:
    """Put what was measured now into the page that has a table of this name."""
    (table,) = (each for each in tables(pages) if each.name == name)
    marker = f"<!-- {name}, by {table.command}, of {' '.join(table.paths)} -->\n"
    before, rest = table.page.read_text(encoding="utf-8").split(marker)
    _, end, after = rest.partition("<!-- end -->")
    today = date.today()
    commit = _git("describe", "--always", "--dirty", "--exclude=*", root=root)
    stamp = f"At {commit}, {today.day} {today:%B %Y}.\n\n"
    table.page.write_text(before + marker + stamp + text + end + after, encoding="utf-8")


def stale(pages: Iterable[Path] = PAGES, root: Path = ROOT) -> Iterator[str]:
    """A sentence for each table whose code has changed since it was measured."""
    for table in tables(pages):
        of = f"{table.page.name}: '{table.name}' is of {table.day} ({table.commit})"
        try:
            since = f"{table.commit.removesuffix('-dirty')}..HEAD"
            commits = _git("rev-list", "--count", since, "--", *table.paths, root=root)
        except subprocess.CalledProcessError:
            yield f"{of}, a commit that this clone does not have"
            continue
        if commits != "0":
            yield f"{of}; later commits to {', '.join(table.paths)}: {commits}. Again: {table.command}"


def _git(*arguments: str, root: Path) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout.strip()


if __name__ == "__main__":
    print("\n".join(stale()))
