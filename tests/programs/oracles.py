"""The fixtures of ``tests/oracles``: their checkpoints, made once for a test session, and their checks."""

from __future__ import annotations

import importlib.util
import io
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType
from unittest import mock

from tests import store

ORACLES = Path(__file__).parents[1] / "oracles"


@cache
def module(oracle: str, name: str) -> ModuleType:
    """A script of an oracle's folder, or of what several share, as a module: folders have modules of the same names."""
    folder = next(path for path in (ORACLES / oracle, ORACLES) if (path / f"{name}.py").exists())
    before = {key: sys.modules.pop(key, None) for key in ("fixture", "make_checkpoint", "check", "torchfile")}
    path = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(f"{oracle}_{name}", folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    finally:
        sys.path[:] = path
        for key, value in before.items():
            sys.modules.pop(key, None)
            if value is not None:
                sys.modules[key] = value
    return found


def checkpoint(oracle: str, model: str, *options: str) -> Path:
    """The Hugging Face checkpoint of a fixture, in which each element has its own number, or a ``--random`` one."""
    script, own = module(oracle, "make_checkpoint"), ORACLES / oracle
    which = [model] if (own / "make_checkpoint.py").exists() else [str(own), model]

    def make(path: Path) -> None:
        with (
            mock.patch.object(sys, "argv", [script.__file__, *which, str(path), *options]),
            redirect_stdout(io.StringIO()),
        ):
            script.main()

    return store.made("-".join((oracle, model, *options)), make)


def problem(oracle: str, case: str, folder: Path) -> str | None:
    """What an oracle's ``check.py`` finds wrong with a folder: its line, or None."""
    check = module(oracle, "check")
    with mock.patch.object(sys, "argv", ["check.py", case, str(folder)]), redirect_stdout(io.StringIO()):
        try:
            check.main()
        except SystemExit as end:
            return str(end.code)
    return None
