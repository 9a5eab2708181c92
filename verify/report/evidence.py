"""The grounds of a verdict: the rules, the programs and the earlier comparisons without which it says nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from reshard.formats.notation.heads import class_of
from reshard.source.source import Source
from reshard.verify.loader.ask import PROGRAMS

if TYPE_CHECKING:
    from reshard.verify.report.answer import Answer


def evidence_of(
    answer: Answer, original: Source, shards: Source, chosen: str | None = None, sizes: Collection[str] = ()
) -> Iterator[str]:
    """Each part of the proof with what it takes for true, in words that go on after 'It rests on'.

    ``chosen`` is the setting by which split alone says what it leaves alone, ``sizes`` are the settings of ranks that
    split alone knows.
    """
    name = original.model.architecture.name
    by = f"the plan {answer.plan.name}" if answer.plan is not None else f"the built-in rules of '{name}'"
    yield f"the bytes, by {by}"
    if original.is_split:
        yield "the original, put together by reshard's merge"
    if chosen is not None:
        yield f"split's choice of the weights that '{chosen}' leaves alone"
    if answer.forward is not None:
        version = answer.forward.versions["transformers"]
        yield f"the forward pass, by transformers {version} on {answer.forward.device}"
    else:
        yield "no forward pass"
        if shards.stated is not None:
            yield f"ranks' sizes {'from split' if sizes else 'by their tensors'}"
    if not shards.format.plain or answer.loader is not None:
        yield f"the format '{shards.format.name}' {_of_format(answer, original, shards)}"


def _of_format(answer: Answer, original: Source, shards: Source) -> str:
    """Return the evidence that the program reads the format as assumed."""
    if answer.loader is not None and answer.loader.unchecked is None:
        return answer.loader.evidence
    if answer.engine is not None:
        return f"as {answer.engine.engine} computes with it"
    types, config = shards.format.types, original.model.config
    if {types.name_of(config), class_of(config)} & types.compared:
        tried = " and ".join(f"{PROGRAMS.get(name, name)} {version}" for name, version in types.made_with.items())
        return f"as compared with {tried} for this model type earlier: no program was asked now"
    return "by reshard's lines alone: no program was asked"
