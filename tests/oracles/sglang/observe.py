#!/usr/bin/env python3
"""Let SGLang build and load checkpoints of many model types, and save what each rank holds before any processing.

    SGLANG_PYTHON -m tests.oracles.sglang.observe FOLDER DUMPS [CASE ...]

FOLDER is that of ``python -m tools.engine_names make --program sglang``, and DUMPS gets what vLLM's ``observe.py`` writes:
``built.json``, ``tp1``, ``tp2``, ``tp4``, ``done``, ``registry.json``. The ranks are those of ``reshard verify --loader``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from reshard.verify.loader import in_sglang
from reshard.verify.loader.program import Request

DEGREES = (1, 2, 4)


def run(case: Path, out: Path, tp: int, dtype: str, *, load: bool) -> str | None:
    """Build, and with ``load`` also load and save, all ranks in a process of their own; the error, if one failed."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log"
    child = os.fork()
    if child == 0:
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(to, 1)
        os.dup2(to, 2)
        status = 1
        try:
            be_ranks(case, out, tp, dtype, load=load)
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    _, status = os.waitpid(child, 0)
    said = log.read_text()
    log.unlink()
    if status == 0:
        return None
    (out / "said").write_text(said)
    return (re.findall(r"^[\w.]*(?:Error|Exception)(?:: .*)?$", said, re.MULTILINE) or ["no error was printed"])[-1]


def be_ranks(case: Path, out: Path, tp: int, dtype: str, *, load: bool) -> None:
    """Be each rank, one after the other; what the loader leaves untouched is NaN."""
    request = Request("sglang", str(case), str(out), str(out), dtype, tp)
    for number, rank in enumerate(in_sglang.ranks(request)):
        if load:
            for parameter in rank.model.parameters():
                if parameter.is_floating_point():
                    parameter.data.fill_(float("nan"))
            rank.load()
            held = {name: of.detach().clone().contiguous() for name, of in rank.held().items()}
            save_file(held, out / f"model-rank-{number}-part-0.safetensors")
            continue
        tensors = {name: [str(of.dtype).removeprefix("torch."), [*of.shape]] for name, of in rank.held().items()}
        (out / "built.json").write_text(json.dumps({"module": module_of(type(rank.model)), "tensors": tensors}))


def module_of(model: type) -> str:
    """The module and the name of a class of SGLang's."""
    return f"{model.__module__.removeprefix('sglang.srt.models.')}:{model.__qualname__}"


def observe(case: Path, out: Path) -> Mapping[str, str]:
    """What failed, of building one model and loading it at each degree."""
    shutil.rmtree(out, ignore_errors=True)
    failed = dict[str, str]()
    for name, tp in (("built", 1), *((f"tp{tp}", tp) for tp in DEGREES)):
        load = name != "built"
        error = run(case, out / name if load else out, tp, "float32" if load else "bfloat16", load=load)
        if error is not None:
            failed[name] = error
            if name in {"built", "tp1"}:
                break
    return failed


def main() -> None:
    """Observe each case that is not done, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("dumps", type=Path)
    parser.add_argument("cases", nargs="*")
    arguments = parser.parse_args()
    version = in_sglang.prepare(Request("sglang", "", "", "")).removeprefix("SGLang ")
    import sglang.srt.server_args  # noqa: F401  imported once, before the fork
    from sglang.srt.models.registry import ModelRegistry

    modules = {name: module_of(model) for name, model in ModelRegistry.models.items()}
    arguments.dumps.mkdir(parents=True, exist_ok=True)
    (arguments.dumps / "registry.json").write_text(json.dumps({"version": version, "modules": modules}))
    torch.set_num_threads(1)
    for case in sorted(path for path in arguments.folder.iterdir() if path.is_dir()):
        out = arguments.dumps / case.name
        if (case.name not in arguments.cases) if arguments.cases else (out / "done").exists():
            continue
        failed = observe(case, out)
        (out / "done").write_text(json.dumps(failed))
        print(f"{case.name} {failed or ''}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
