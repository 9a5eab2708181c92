"""Writes ``formats/heads.json``: which head transformers' classes have, from its Auto classes and their code.

python -m tools.heads

A head for tokens is ``tokens``, whatever its module is called; another one is the name of its module (``score``). What
transformers does not have is known by the end of its name, if nearly all of transformers' classes of this end agree.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from reshard.formats.notation.heads import NO_HEAD, TOKENS
from reshard.formats.notation.tables import HEADS
from tools.tables import text_of

_WITH = ("CAUSAL_LM", "SEQ_TO_SEQ", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "PRETRAINING", "WITH_LM_HEAD", "MULTIMODAL_LM")
_WITHOUT = ("SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "NEXT_SENTENCE")
_MODULE = re.compile(r"self\.(\w+)\s*=\s*[\w.]*(?:Linear|Head)\(")
_ELSEWHERE = {  # of trl and of models with code of their own
    "AutoModelForCausalLMWithValueHead": "v_head",
    "InternLM2ForRewardModel": "v_head",
    "GPT2DoubleHeadsModel": TOKENS,  # of no Auto class
    "OpenAIGPTDoubleHeadsModel": TOKENS,
    "ChatGLMModel": TOKENS,
    "InternVLChatModel": TOKENS,
    "H2OVLChatModel": TOKENS,
    "SkyworkR1VChatModel": TOKENS,
}
_END = re.compile(r".(For[A-Z]\w*)$|([A-Z][a-z]+(Model))$")
_AGREE = 0.9
"""The share of classes with an end that have its head."""


def heads() -> dict[str, str]:
    """The head of each class of transformers' that is for language."""
    from transformers.models.auto import modeling_auto as auto

    def classes(words: tuple[str, ...]) -> Iterator[str]:
        for name in filter(
            lambda name: name.endswith("_MAPPING_NAMES") and any(map(name.__contains__, words)), dir(auto)
        ):
            for value in getattr(auto, name).values():
                yield from [value] if isinstance(value, str) else value

    found = {name: NO_HEAD for value in auto.MODEL_MAPPING_NAMES.values() for name in _listed(value)}
    found |= {name: _module(name) for name in classes(_WITHOUT)}
    return found | dict.fromkeys(classes(_WITH), TOKENS) | _ELSEWHERE


def _listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _module(name: str) -> str:
    """The module of a class that makes labels or spans, by the code that makes it."""
    import transformers

    for cls in getattr(transformers, name).__mro__:
        is_own = cls.__module__.startswith("transformers.mod") and "__init__" in vars(cls)
        if is_own and (modules := _MODULE.findall(inspect.getsource(vars(cls)["__init__"]))):
            return str(modules[-1])
    return "classifier"


def ends(found: Mapping[str, str]) -> dict[str, str]:
    """The head of most classes of each end (``ForCausalLM``, ``HeadModel``), if they agree on whether it is for tokens.

    Ends that a shorter one gives are left out.
    """
    heads_of: dict[str, list[str]] = defaultdict(list)
    for name, head in found.items():
        for end in filter(None, _END.search(name).groups() if _END.search(name) else ()):
            heads_of[end].append(head)
    agreed: dict[str, str] = {}
    for end, all_heads in sorted(heads_of.items(), key=lambda pair: len(pair[0])):
        head, _ = Counter(all_heads).most_common(1)[0]
        count = sum((each == TOKENS) == (head == TOKENS) for each in all_heads)
        shorter = next((agreed[end[at:]] for at in range(1, len(end)) if end[at:] in agreed), None)
        if len(all_heads) > 1 and count >= _AGREE * len(all_heads) and head != shorter:
            agreed[end] = head
    return agreed


def table() -> str:
    """The file's text."""
    import transformers

    of_end = ends(found := heads())
    classes: dict[str, list[str]] = defaultdict(list)
    for name, head in sorted(found.items()):
        classes[head].append(name)
    document: dict[str, Any] = {"classes": dict(sorted(classes.items())), "ends": dict(sorted(of_end.items()))}
    return text_of(document, {"transformers": transformers.__version__})


if __name__ == "__main__":
    HEADS.write_text(table(), encoding="utf-8")
