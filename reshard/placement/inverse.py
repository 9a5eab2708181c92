"""The way back: which Hugging Face tensors a program's tensors are made of, from names alone.

A manifest records it. Without one, each stored name is looked up among the lines of the program's format: the first
line whose sources are all known to the model's architecture is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from reshard.formats.errors import CheckpointError, PlanError
from reshard.formats.notation.architecture import Architecture, filled
from reshard.formats.notation.components import component_names
from reshard.formats.notation.format import Format, Line, Renaming
from reshard.formats.notation.format_file import format_of
from reshard.formats.notation.spellings import Spellings
from reshard.formats.notation.tables import newer_than_tables
from reshard.model.model import AxisSizes, check_members


class NameInverse:
    """Finds the Hugging Face tensors that stored tensors are made of."""

    def __init__(self, format: Format, architecture: Architecture, config: Mapping[str, object]) -> None:
        self._format, self.architecture = format.of(config), architecture
        self.has_chunks = format.container.chunks
        self._sizes, self._newer = AxisSizes(architecture, config, {}), newer_than_tables(config)
        self._packed = {  # for the name of each component of a packed tensor the packed tensor's
            name: template
            for template, rules in architecture.tensors.items()
            for shape in rules[0].shapes
            for name in itertools.chain(*component_names(template, shape))
            if name not in architecture.tensors or name in architecture.derived
        }
        constants = (constant for constant in self._format.rules.constants if self._sizes.is_true(constant.when))
        self._constants = [pattern for constant in constants for pattern in constant.names]
        is_of_any = format.takes_any_names and not format.plain  # a run has tied tensors under each name of modules
        self._spellings = Spellings(architecture, config) if format.modules or is_of_any else None
        modules = format_of("transformers").of(config) if self._spellings is not None else self._format
        self._again = [line for line in modules.rules.lines if line.also and self._sizes.is_true(line.when)]
        self._of_stages = [line for line in self._format.rules.lines if line.stage_names]
        self._present: set[str] = set()
        self._lengths: Mapping[str, int] = {}
        self.unchanged: set[str] = set()
        """The Hugging Face tensors of which a stored tensor has the dimensions."""
        self.origins: dict[str, str] = {}
        """The Hugging Face tensors, each with a stored tensor that has a part of it."""
        self.again: dict[str, str] = {}
        """The names that the format also gives as the second name of another tensor, each with that tensor."""

    def of(self, stored: Iterable[str], lengths: Mapping[str, int] = {}) -> dict[str, str]:
        """The Hugging Face tensors that stored tensors of these names are made of, each with a stored tensor that has a
        part of it. A stack has as many as its length among ``lengths`` or, if it is not there, by config.json.

        Raises CheckpointError for a name that no line of the format gives.
        """
        stored, self._lengths = list(stored), lengths
        firsts = dict[str, list[str]]()
        self._present = {old for name in stored for old in self._old_names(name)}
        for name in stored:
            if self._is_constant(name):
                continue
            sources = next((sources for old in self._old_names(name) if (sources := self._sources(old))), None)
            if sources is None and self._is_copy(name):
                continue
            if sources is None:
                raise self._unknown(name, stored)
            for source in sources:
                self.origins.setdefault(source, name)
            if self._again and (again := [self._published(first) or first for first in self._firsts(name)]):
                firsts[sources[0]] = again
        places = (
            (name, next((each for each in again if each in self.origins), None)) for name, again in firsts.items()
        )
        self.again = {name: first for name, first in places if first is not None}
        return self.origins

    def cut_of(self, name: str) -> int | None:
        """The dimension of a stored tensor that a line of the format cuts over ``tp``, if not as the model's rules."""
        lines = (line for line in self._format.rules.lines if line.cut is not None and self._sizes.is_true(line.when))
        return next((line.cut.dim for line in lines if line.cut and line.target.match(name) is not None), None)

    def _unknown(self, name: str, stored: Sequence[str]) -> CheckpointError:
        """The error for a stored tensor of a name that no line of the format gives."""
        what = f"tensor '{name}' is none that the format '{self._format.name}' has for '{self.architecture.name}'"
        what += f"; {self._newer}" if self._newer else ""
        count = sum(not self.knows(each) for each in stored)
        if 2 * count <= len(stored):
            return CheckpointError(what)
        return CheckpointError(
            f"{what}; {count:,} of {len(stored):,} are none", "is config.json that of these tensors?"
        )

    def knows(self, name: str) -> bool:
        """Whether the format can have a tensor of this name, whatever else is stored."""
        return self._is_constant(name) or any(map(self._sources, self._old_names(name))) or self._is_copy(name)

    def _is_constant(self, name: str) -> bool:
        return any(pattern.match(name) is not None for pattern in self._constants)

    def _is_copy(self, name: str) -> bool:
        """Whether a name is the second name of a tied tensor of the architecture."""
        return any(True for _ in self._firsts(name))

    def _firsts(self, name: str) -> Iterator[str]:
        """The tensors of which a name may be the second name."""
        matches = ((line, line.target.match(name)) for line in self._again)
        sources = (self._sources_of(line, words) for line, words in matches if words is not None)
        return (first for (first, *_) in filter(None, sources))

    def _old_names(self, name: str) -> Iterator[str]:
        """The names that a tensor may have had before it was renamed, as one of a later layer or by ``[names]``."""
        rules = self._format.rules
        later = ((layers, layers.new.match(name), self._sizes.evaluate(layers.beyond, {})) for layers in rules.further)
        earlier = (
            layers.old.fill({**words, layers.index: str(int(words[layers.new_index]) + end)})
            for layers, words, end in later
            if words is not None and end is not None
        )
        for earlier_name in (*earlier, name):
            for renaming in rules.names:
                words = renaming.new.match(earlier_name)
                if words is not None and self._renaming(old := renaming.old.fill(words)) is renaming:
                    yield old
            if self._renaming(earlier_name) is None:
                yield earlier_name

    def _renaming(self, name: str) -> Renaming | None:
        """The renaming of a tensor's name."""
        names = (renaming for renaming in self._format.rules.names if renaming.old.match(name) is not None)
        return next((renaming for renaming in names if self._sizes.is_true(renaming.when)), None)

    def _sources(self, name: str) -> list[str] | None:
        for line in self._format.rules.lines:
            words = line.words_of(name)
            if words is None or line.also or not self._sizes.is_true(line.when):
                continue
            sources = self._sources_of(line, words, self._lengths.get(name))
            if sources is not None:
                is_whole = line.keeps_shape and sources == [line.sources[0].fill(words)]
                sources = [self._spelled(source, name) for source in sources]
                self.unchanged.update(sources if is_whole else ())
                return sources
        for line in self._of_stages:
            if name in line.stage_names.values() and (sources := self._sources_of(line, {})) is not None:
                return sources
        if not self._format.rules.keep or not self.is_known(name):
            return None
        source = self._spelled(name, name)
        if not any(pattern.match(name) is not None for pattern in self._format.rules.vectors):  # stored as one number
            self.unchanged.add(source)
        return [source]

    def _sources_of(self, line: Line, words: Mapping[str, str], length: int | None = None) -> list[str] | None:
        """The sources of a line, if the architecture has a line for each of them, packed or not."""
        names: dict[str, None] = {}
        if line.without is not None and any(source.fill(words) in self._present for source in line.sources):
            return None
        for source in line.sources:
            (stacked,) = source.indices - line.target.indices or {None}
            general = source.fill({**words, stacked: f"{{{stacked}}}"} if stacked else words)
            first = general.replace(f"{{{stacked}}}", "0")
            packed = self._packed.get(self.architecture.in_general(first))
            if packed is None and not (self.is_known(first) and self.architecture.stated(first) == first):
                return None
            indices = self.architecture.indices_in(first)
            axis = indices.popitem()[0] if stacked else None
            members = range(1)
            if packed is not None:
                names[filled(packed, indices)] = None
                continue
            if axis is not None:
                members = line.members(self._sizes.counts.get(axis, 0))
                size = len(members) if axis in self._sizes.counts else None
                if size is not None and length is not None and length < size:
                    which = f"a stack of {length:,} has no numbers, and config.json says {size:,} of axis '{axis}'"
                    hint = "is config.json that of these tensors?"
                    raise CheckpointError(f"tensor '{line.target.fill(words)}': {which}", hint)
                size = size if length is None else length
                check_members(axis, size, len(self._present))
                if size is None:
                    return None
                members = range(members.start, members.start + size)
            names.update(dict.fromkeys(general.replace(f"{{{stacked}}}", str(i)) for i in members))
        return list(names)

    def _published(self, source: str) -> str | None:
        return self._spellings.published(source) if self._spellings is not None else None

    def _spelled(self, source: str, name: str) -> str:
        """A source's name in published checkpoints or, where it is not known, with the prefix of the stored one."""
        if not self._format.modules:
            return source
        if (published := self._published(source)) is not None:
            return published
        first, *others = self.architecture.prefixes or ("",)
        there = max((prefix for prefix in (first, *others) if name.startswith(prefix)), key=len, default=first)
        return there + source.removeprefix(first) if first and source.startswith(first) else source

    def is_known(self, name: str) -> bool:
        """Whether the checkpoint can have a tensor of this name, or a quantized weight a companion of this name."""
        module, _, leaf = name.rpartition(".")
        if self._is_covered(name) or (leaf != "weight" and self._is_covered(f"{module}.weight")):
            return True
        try:
            belonging = self._sizes.scheme.companion(name)
        except PlanError:  # of a method that cannot be split: whoever binds it says so
            return True
        return belonging is not None and self._is_covered(belonging.weight)

    def _is_covered(self, name: str) -> bool:
        match = self.architecture.match(name)
        return match is not None and not (match.template.endswith("*") and self._sizes.holds(match) is None)
