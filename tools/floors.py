"""The oldest packages that ``pyproject.toml`` allows, exactly, as constraints for pip.

    python -m tools.floors > constraints

``make floors`` installs them. A requirement that is no lower bound (``name>=version``) is an error.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
EXTRAS = ("verify", "compress")


def floors(project: Path = PROJECT) -> dict[str, str]:
    """The oldest version of each package that users may have. Raises ValueError."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    found = {}
    extras = table.get("optional-dependencies", {})
    for wanted in [*table["dependencies"], *(each for name in EXTRAS for each in extras.get(name, ()))]:
        if (bound := re.fullmatch(r"([\w.-]+)>=([\d.]+)", wanted)) is None:
            raise ValueError(f"{wanted}: a name and its oldest version are expected")
        found[bound[1]] = bound[2]
    return found


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in floors().items()))
