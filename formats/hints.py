"""What is meant by a word that is not known here: the nearest known one, a synonym of one, or another tool's task."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_WORDS = {
    # formats
    "huggingface": "hf safetensors",
    "dcp": "fsdp",
    "dcp-transformers": "fsdp2",
    "megatron": "mcore megatron-core torch-dist nemo",
    "peft": "lora",
    # dtypes
    "bf16": "bfloat16 torch.bfloat16",
    "fp16": "float16 half torch.float16 torch.half f16",
    "fp32": "float32 float torch.float32 torch.float f32",
    # options
    "--dtype": "torch-dtype cast cast-dtype",
    "--as": "to format target-format output-format",
    "--tp": "tensor-parallel-size tp-size world-size num-shards",
    "--ep": "expert-parallel-size",
    "--pp": "pipeline-parallel-size",
    "--max-shard-size": "shard-size",
    "--out": "output",
    "--overwrite": "force",
    # commands
    "split": "convert shard reshard export",
    "merge": "unshard join consolidate",
    "verify": "check",
    "diff": "compare",
    "patch": "apply",
    "inspect": "info",
    "profile": "benchmark",
}
SYNONYMS = {word: meant for meant, words in _WORDS.items() for word in words.split()}
"""A word of other tools, and what has its meaning here. Dashes before a word, and capitals, make no difference."""

_QUANTIZE = "'reshard split --quantize fp8-block' does, to fp8; for another form llm-compressor does, say"
_HUB = "'hf upload ORG/NAME OUT' puts a folder on the Hub"
_GGUF = "convert_hf_to_gguf.py of llama.cpp makes GGUF of a Hugging Face folder, which 'reshard merge' writes"
_OUT = "the output is an argument: reshard split SOURCE OUT"
_ADVICE = {
    _QUANTIZE: "quantize quantization",
    _HUB: "upload push-to-hub",
    f"reshard.live pushes weights between running programs (see 'reshard live --help'); {_HUB}": "push",
    "'hf download ORG/NAME' does; every command takes the id itself, too": "download",
    _GGUF: "gguf to-gguf",
    "'mlx_lm.convert' makes MLX of a Hugging Face folder, which 'reshard merge' writes": "mlx",
    "'reshard models' and 'reshard formats' list what is known, 'reshard inspect PATH' what is there": "list ls",
    "reshard.load('model', tp=4, rank=0) gives a rank's tensors, in Python": "load",
    "'reshard --version' says it": "version",
    _OUT: "out output output-dir o",
}
ELSEWHERE = {word: advice for advice, words in _ADVICE.items() for word in words.split()}
"""What a word asks for, where no word of reshard has its meaning."""


def synonym(word: str) -> str:
    """What has the meaning of a word here; the word itself, if the table does not have it."""
    return SYNONYMS.get(_key(word), word)


def meaning(word: str, words: Iterable[str]) -> str:
    """``did you mean '--as'?``, or what else does it; nothing, if neither table has the word."""
    match = {_key(candidate): candidate for candidate in words}.get(_key(synonym(word)))
    return f"did you mean '{match}'?" if match is not None else ELSEWHERE.get(_key(word), "")


def nearest(word: str, words: Iterable[str]) -> str:
    """What a word means; else the known words that are written nearly so, if there are any."""
    by_key = {_key(candidate): candidate for candidate in words}
    near = difflib.get_close_matches(_key(word), by_key, n=3, cutoff=0.6)
    similar = f"did you mean {' or '.join(repr(by_key[candidate]) for candidate in near)}?" if near else ""
    return meaning(word, by_key.values()) or similar


def with_hint(hint: str, further: str) -> str:
    """Two things to do in one line; either may be empty."""
    return f"{hint}{' ' if hint.endswith('?') else '; '}{further}" if hint and further else hint or further


def _key(word: str) -> str:
    return word.lower().lstrip("-").replace("_", "-")
