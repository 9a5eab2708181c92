"""Build and try what a release would upload, a wheel and a source archive, without the checkout. Nothing is uploaded.

    python -m tools.release PYTHON [PYTHON ...]

Each PYTHON gets an empty environment with the wheel and what it depends on, and does ``tools/installed.py`` there; then
the same with the source archive in the wheel's place. ``make release`` gives it the oldest and the newest Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"


def build(folder: Path) -> list[Path]:
    """Build both files in ``dist/`` and check their metadata."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build", "twine")
    shutil.rmtree(DIST, ignore_errors=True)
    run(python, "-m", "build", "--outdir", DIST, ROOT)
    files = sorted(DIST.iterdir())
    run(python, "-m", "twine", "check", "--strict", *files)
    return files


def try_out(python: str, folder: Path, files: list[Path]) -> None:
    """Install each file with a Python into an empty environment, and use it."""
    run(python, "-m", "venv", "--clear", folder)
    inside = folder / "bin" / "python"
    for file in sorted(files, key=lambda file: file.suffix != ".whl"):
        again = ["--force-reinstall", "--no-deps"] if file.suffix != ".whl" else []
        run(inside, "-m", "pip", "install", "--quiet", *again, f"{file}[verify]")
        print(f"{python}, {file.name}:", flush=True)
        run(inside, "-I", ROOT / "tools" / "installed.py")


def run(*command: str | Path) -> None:
    """Run a program outside the checkout. Raises CalledProcessError."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as elsewhere:
        subprocess.run([*map(str, command)], check=True, cwd=elsewhere, env=environment)


def main(pythons: list[str]) -> None:
    """Build, try, and say what would be uploaded."""
    with tempfile.TemporaryDirectory(prefix="reshard-release-") as folder:
        files = build(Path(folder, "build"))
        for number, python in enumerate(pythons):
            try_out(python, Path(folder, str(number)), files)
    print("A release would upload:")
    for file in files:
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.stat().st_size:9,} bytes  {file.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
