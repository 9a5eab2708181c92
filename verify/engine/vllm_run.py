"""Runs a model in vLLM and writes the log-probabilities of all next tokens, for prompts of token ids.

    python vllm_run.py REQUEST.json

This file runs in the engine's own environment: it imports vLLM and the standard library, and nothing of reshard. The
request has ``folder``, ``load_format``, ``tp``, ``pp``, ``ep`` and ``etp`` (1: experts over the same ranks), ``dtype``,
``prompts`` (lists of token ids), ``vocabulary`` (how many tokens there are) and ``out``: where the answer goes. It has,
for each prompt and each of its positions but the first, a list with the log-probability of each token.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; on a CPU only
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM wants a NUMA node for each rank
    "HF_HUB_OFFLINE": "1",
}


def run(request: dict[str, Any]) -> list[list[list[float]]]:
    """Run the prompts of a request in vLLM, and return their log-probabilities."""
    from vllm import LLM, SamplingParams

    ranks, size = request["tp"] * request["pp"], request["vocabulary"]
    longest = max(map(len, request["prompts"])) + 8
    engine = LLM(
        model=request["folder"],
        load_format=request["load_format"],
        dtype=request["dtype"],
        tensor_parallel_size=request["tp"],
        pipeline_parallel_size=request["pp"],
        enable_expert_parallel=request["ep"] > 1 and request["etp"] == 1,
        distributed_executor_backend="mp" if ranks > 1 else None,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=longest,
        max_num_seqs=len(request["prompts"]),
        max_logprobs=size,
    )
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=size, detokenize=False, ignore_eos=True)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling)
    return [
        [[position[token].logprob for token in range(size)] for position in answer.prompt_logprobs[1:]]
        for answer in answers
    ]


def main() -> None:
    """Read the request, run it, and write the answer."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(request["out"]).write_text(json.dumps(run(request)), encoding="utf-8")


if __name__ == "__main__":
    main()
