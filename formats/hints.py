"""Hints for unknown words: the nearest known word, a synonym, or the tool that does such a task; and the names of
options and commands in Python.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

_WORDS = {
    # formats
    "huggingface": "hf safetensors",
    "dcp": "fsdp fsdp2",
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
"""Words of other tools, each with reshard's word for it. Leading dashes and capitals make no difference."""

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
"""Advice for words that ask for something that reshard does not do."""


def synonym(word: str) -> str:
    """Return reshard's word for a synonym; an unknown word is returned as it is."""
    return SYNONYMS.get(_key(word), word)


def meaning(word: str, words: Iterable[str]) -> str:
    """``did you mean '--as'?``, or the tool that does such a task; "" if neither table has the word."""
    match = {_key(candidate): candidate for candidate in words}.get(_key(synonym(word)))
    return f"did you mean '{match}'?" if match is not None else ELSEWHERE.get(_key(word), "")


def nearest(word: str, words: Iterable[str]) -> str:
    """Return a hint with a word's meaning, or else with the known words of similar spelling; "" if there are none."""
    by_key = {_key(candidate): candidate for candidate in words}
    near = difflib.get_close_matches(_key(word), by_key, n=3, cutoff=0.6)
    similar = f"did you mean {' or '.join(repr(by_key[candidate]) for candidate in near)}?" if near else ""
    return meaning(word, by_key.values()) or similar


def with_hint(hint: str, further: str) -> str:
    """Two things to do in one line; either may be empty."""
    return f"{hint}{' ' if hint.endswith('?') else '; '}{further}" if hint and further else hint or further


def _key(word: str) -> str:
    return word.lower().lstrip("-").replace("_", "-")


# ------------------------------------------------------------------------------------------------------------ in Python


FUNCTIONS, FLAGS, VALUED = (
    frozenset(words.split())
    for words in (
        "average diff inspect merge patch plan profile split verify",
        "backward compress dequantize download dry-run exact-only fsync overwrite quiet same-ranks streamed uneven",
        "adapter as batch cache-dir compute-dtype config device dtype engine engine-python ep flops link loader "
        "max-shard-size memory names out pad-vocab-to part patch phase plan pp pp-layers predict-tp prompt quantize "
        "rank ranks revision seconds seed seq timeout token tp weights workers",
    )
)
OTHERS = {"no-pad-vocab": "pad_vocab=False", "no-checksum": "checksum=False"}
"""The commands that are functions and the options that are their arguments, as flags and with a value."""

_RENAMED = {"as": "format", "plan": "plan_file", "rank": "ranks"}
_IN_ORDER = FUNCTIONS - {"average", "patch"}
"""The functions that take a command's places in the same order."""
_TYPED = re.compile(
    r"'reshard (?P<command>[a-z]+)(?P<words>(?: [^' ]+)*)'|(?<![\w-])--(?P<option>[a-z][a-z-]*)(?![\w-])"
    r"(?P<value>[ =][^\s'(;,:.)]+(?:[:.][^\s';,:.)]+)*)?"
)


def in_python(text: str) -> str:
    """The text with ``overwrite=True`` for ``--overwrite``, and ``reshard.split(A, B, tp=4)`` for a command in quotes.

    What no function takes stays as one types it.
    """
    return _TYPED.sub(lambda typed: _call(typed) if typed["command"] else _argument(typed), text)


def _call(typed: re.Match[str]) -> str:
    words = typed["words"].split()
    if typed["command"] not in (_IN_ORDER if words else FUNCTIONS):
        return typed[0]
    arguments, words = list[str](), words[::-1]
    while words:
        word = words.pop()
        option = word.removeprefix("--")
        if option == word:
            arguments.append("..." if word == "…" else _value(word))
        elif option in VALUED:
            arguments.append(f"{_name(option)}={_value(words.pop()) if words else '...'}")
        elif option in FLAGS or option in OTHERS:
            arguments.append(OTHERS.get(option, f"{_name(option)}=True"))
        else:
            return typed[0]
    return f"reshard.{typed['command']}" + (f"({', '.join(arguments)})" if arguments else "")


def _argument(typed: re.Match[str]) -> str:
    option, value = typed["option"], typed["value"] or ""
    if option in VALUED:
        return _name(option) + (f"={_value(value[1:])}" if value else "")
    return OTHERS.get(option, f"{_name(option)}=True") + value if option in FLAGS or option in OTHERS else typed[0]


def typed(name: str, value: object, options: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a field of a request and its value as one types them on the command line: ``--tp 4``."""
    other = next((option for option, field in _RENAMED.items() if field == name), name.replace("_", "-"))
    flag = options.get(name, f"--{'no-' if value is False else ''}{other}")
    if value is None or isinstance(value, bool):
        return flag
    return f"{flag} {','.join(map(str, value)) if isinstance(value, tuple) else value}"


def _name(option: str) -> str:
    return _RENAMED.get(option, option.replace("-", "_"))


def _value(word: str) -> str:
    """A number and a word in capitals, which stands for a value, as they are; any other word as a text."""
    return word if re.fullmatch(r"[A-Z]+|\d+", word) else json.dumps(word, ensure_ascii=False)
