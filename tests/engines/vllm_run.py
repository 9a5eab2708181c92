"""Runs vLLM in its own environment, and writes what it answered: greedy tokens and their log-probabilities.

    ENGINES/vllm/bin/python -m tests.engines.vllm_run REQUEST.json

``in_vllm`` writes the request: ``folder``, ``load_format``, ``tp``, ``dtype``, ``prompts`` (lists of token ids),
``tokens`` (how many follow each), ``length`` (the most tokens of a sequence), ``adapter`` (the folder of a LoRA, or
null), ``store`` (where it receives pushes from, or null) and ``out``, where the answers go.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.formats.errors import LiveError
from reshard.live.vllm import Offline, update
from reshard.verify.engine.compare import reason_of
from reshard.verify.engine.vllm_run import DEFAULTS

ROOT = Path(__file__).parents[2]
SETTINGS = {**DEFAULTS, "OMP_NUM_THREADS": "1"}
"""The environment of vLLM on a small machine."""
PATIENCE = 900.0
"""Seconds for one engine."""

RANK = 8
"""vLLM makes room for adapters up to this rank."""


class NotRunError(Exception):
    """vLLM has ended without an answer."""


def in_vllm(
    root: Path, python: str, folder: Path, tp: int, prompts: Any, tokens: int, length: int, *,
    load_format: str = "auto", dtype: str = "auto", adapter: Path | None = None, store: Path | None = None,
) -> Mapping[str, Any]:  # fmt: skip
    """What vLLM answers, in the environment of ``python``. Raises NotRunError with the reason that it gives."""
    request, out = root / "request.json", root / "answer.json"
    out.unlink(missing_ok=True)
    given = {
        "folder": str(folder), "load_format": load_format, "tp": tp, "dtype": dtype, "prompts": prompts,
        "tokens": tokens, "length": length, "adapter": str(adapter) if adapter else None,
        "store": f"file://{store}" if store else None, "out": str(out),
    }  # fmt: skip
    request.write_text(json.dumps(given), encoding="utf-8")
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    before = {*Path("/dev/shm").glob("vllm_dist_*")}
    process = subprocess.Popen([python, "-m", "tests.engines.vllm_run", str(request)], env=environment, cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True)  # fmt: skip
    try:
        said, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for left in {*Path("/dev/shm").glob("vllm_dist_*")} - before:  # vLLM leaves them
            left.unlink(missing_ok=True)
    if not out.exists():
        raise NotRunError(f"vLLM ended with {process.returncode}: {reason_of(said)}")
    found: Mapping[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


class Run:
    """An engine, and what it has answered so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        from vllm import LLM

        self.request, self.found = request, dict[str, Any]()
        further: dict[str, Any] = {"load_format": request["load_format"]}
        if request["adapter"]:
            further |= {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1}
        if request["store"]:
            further |= {"weight_transfer_config": {"backend": "reshard"}, "load_format": "dummy"}
            further |= {"worker_extension_cls": "tests.engines.live_vllm_worker.Extension"}
        self.llm = LLM(
            request["folder"], tensor_parallel_size=request["tp"], dtype=request["dtype"], enforce_eager=True,
            skip_tokenizer_init=True, distributed_executor_backend="mp", max_model_len=request["length"],
            max_num_seqs=1, **further,
        )  # fmt: skip
        self.engine = Offline(self.llm)

    def answer(self, name: str) -> None:
        """Greedy tokens after each prompt, and their log-probabilities."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        request, adapter = self.request, self.request["adapter"]
        sampling = SamplingParams(
            temperature=0, max_tokens=request["tokens"], logprobs=0, ignore_eos=True, detokenize=False
        )
        answers = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling, use_tqdm=False,
            lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
        )  # fmt: skip
        self.found[name] = [
            [[token, step[token].logprob] for token, step in zip(one.token_ids, one.logprobs, strict=True)]
            for one in (answer.outputs[0] for answer in answers)
        ]

    def push(self, version: int, *, resume: bool = True) -> None:
        """Have the engine receive a version; ``resume``: also if that fails."""
        start = time.perf_counter()
        try:
            said = update(lambda of, delta: sent(self.request["store"], of, self.request["tp"]), self.engine, version)
        except LiveError as error:
            said = error.message
            if resume:
                self.engine.resume()
        self.found[f"milliseconds-{version}"] = 1000 * (time.perf_counter() - start)
        self.found[f"said-{version}"] = said

    def live(self) -> None:
        """Two pushes, one that lacks the last rank's shards, one that fails half-way, and one that heals it."""
        last = self.request["tp"] - 1
        self.engine.init({"store": self.request["store"]})
        self.answer("dummy")
        for version in (1, 2, 3):  # of 3 the last rank has no shards
            self.push(version)
            self.answer(f"after-{version}")
        self.found["loader"] = self.llm.collective_rpc("ask_loader", args=(self.request["folder"], self.request["tp"]))
        self.llm.reset_prefix_cache()  # what is answered from it is summed in another order
        self.answer("after-loader")
        self.llm.collective_rpc("break_commit", args=(last, 3))
        self.push(4, resume=False)
        self.llm.collective_rpc("break_commit", args=(-1, 0))
        self.push(5)
        self.answer("after-5")
        self.llm.collective_rpc("break_commit", args=(last, 3))
        self.push(6)
        try:
            self.answer("poisoned")
        except Exception as error:
            self.found["refused"] = f"{type(error).__name__}: {error}"


def sent(store: str, version: int, ranks: int) -> str:
    """Wait until all ranks have said how it went, as a trainer does. Raises LiveError if they failed."""
    paths = [Path(store.removeprefix("file://")) / f"said-{version}-{rank}" for rank in range(ranks)]
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        if time.monotonic() > end:
            raise LiveError("the engine has said nothing")
        time.sleep(0.005)
    said = "; ".join(dict.fromkeys(path.read_text(encoding="utf-8") for path in paths))
    if said != "committed":
        raise LiveError(said)
    return said


def main() -> None:
    """Run what the request says."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    run = Run(request)
    if request["store"]:
        run.live()
    else:
        run.answer("answers")
    Path(request["out"]).write_text(json.dumps(run.found), encoding="utf-8")


if __name__ == "__main__":
    main()
