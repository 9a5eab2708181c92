"""One engine of ``benchmarks.live_vllm``: runs in vLLM's environment, and writes what it answered.

ENGINES/vllm/bin/python -m benchmarks.live_vllm_run REQUEST.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from formats.errors import LiveError
from reshard.live.vllm import Offline, update

PROMPTS = ([5, 9, 2, 31], [*range(3, 135)], [*range(40, 100)] * 2, [77, 3])
"""Two are longer than a block of the cache (128 tokens on a CPU): the second time, they are answered from it."""
TOKENS = 24


class Run:
    """An engine, and what it has answered so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        from vllm import LLM

        self.request, self.found = request, dict[str, Any]()
        further: dict[str, Any] = {"worker_extension_cls": "benchmarks.live_vllm_worker.Extension"}
        if request["store"]:
            further |= {"weight_transfer_config": {"backend": "reshard"}, "load_format": "dummy"}
        self.llm = LLM(
            request["folder"], tensor_parallel_size=request["tp"], enforce_eager=True, skip_tokenizer_init=True,
            distributed_executor_backend="mp", max_model_len=256, max_num_seqs=1, **further,
        )  # fmt: skip
        self.engine = Offline(self.llm)

    def answer(self, name: str) -> None:
        """Greedy tokens after each prompt, and their log-probabilities."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
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
        run.answer("fresh")
    Path(request["out"]).write_text(json.dumps(run.found), encoding="utf-8")


if __name__ == "__main__":
    main()
