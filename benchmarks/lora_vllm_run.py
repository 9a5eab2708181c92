"""Answers of vLLM with a LoRA adapter loaded, or without: greedy tokens and their log-probabilities.

    python lora_vllm_run.py REQUEST.json

This file runs in vLLM's environment. The request has ``folder``, ``load_format``, ``tp``, ``adapter`` (a folder, or
null), ``prompts`` (lists of token ids), ``tokens`` (how many follow each) and ``out``, where the answer goes: for each
prompt a list of token and log-probability.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

RANK = 8
"""vLLM makes room for adapters up to this rank."""


def run(request: dict[str, Any]) -> list[list[tuple[int, float]]]:
    """What the request asks for."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter = request["adapter"]
    engine = LLM(
        model=request["folder"],
        load_format=request["load_format"],
        dtype="float32",
        tensor_parallel_size=request["tp"],
        distributed_executor_backend="mp" if request["tp"] > 1 else None,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=64,
        max_num_seqs=len(request["prompts"]),
        **({"enable_lora": True, "max_lora_rank": RANK, "max_loras": 1} if adapter else {}),
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=request["tokens"], logprobs=0, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    found = []
    for answer in engine.generate(prompts, sampling, lora_request=lora, use_tqdm=False):
        one = answer.outputs[0]
        found.append([(token, at[token].logprob) for token, at in zip(one.token_ids, one.logprobs, strict=True)])
    return found


def main() -> None:
    """Read the request, run it, and write the answer."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    Path(request["out"]).write_text(json.dumps(run(request)), encoding="utf-8")


if __name__ == "__main__":
    main()
