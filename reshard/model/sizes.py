"""The size of each axis of an architecture: from config.json, or as measured on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from formats.documents import LARGEST
from formats.errors import CheckpointError, NotationError, PlanError, brief
from formats.notation.architecture import Architecture, Match, Rule
from formats.notation.expressions import Expression
from formats.quantization.companions import Scheme
from formats.quantization.methods import scheme_of

_DEEPEST, _MOST_STEPS = 30, 10_000
"""Limits for sizes that refer to other sizes: the length of a chain, and the number of look-ups. Built-in plans need 2
and 43.
"""


FEW = 10_000
"""By how much a count of layers or experts may exceed that of the tensors: some tensors hold all layers or experts."""


def check_members(axis: str, count: int | None, tensors: int) -> None:
    """Raise CheckpointError for a count of layers or experts that is impossible with so few tensors.

    Later work takes time and memory for each of them, and anyone can write a large number into config.json.
    """
    if count is not None and count > tensors + FEW:
        raise CheckpointError(
            f"config.json: '{axis}' is {count:,}, and there are {tensors:,} tensors",
            "it is not the config.json of these tensors, or is damaged",
        )


class _UnknownError(Exception):
    """An index was asked for that is not known."""


class _Unknown(dict[str, int]):
    """Indices that nobody knows."""

    def get(self, *_: object) -> NoReturn:
        """Raise an error."""
        raise _UnknownError


class AxisSizes:
    """The size of every axis for a tensor's indices: from the config, else measured on disk."""

    def __init__(self, architecture: Architecture, config: Mapping[str, Any], measured: Mapping[str, int]) -> None:
        self._architecture = architecture
        self.settings = architecture.settings(config)
        self.measured: dict[str, int] = dict(measured)
        self._named = frozenset(
            segment[1:-1] for name in architecture.tensors for segment in name.split(".") if segment.startswith("{")
        )
        layers = {architecture.layers.text} & architecture.sizes.keys()
        self._index_names = self._named | layers  # also where no line has it: of an adapter to an embedding
        self._cache: dict[tuple[tuple[str, int], ...], dict[str, int]] = {}
        self._steps = 0

    @cached_property
    def scheme(self) -> Scheme:
        """The quantization scheme that the config states."""
        return scheme_of(self.settings)

    @cached_property
    def _used_indices(self) -> frozenset[str]:
        expressions = list(self._architecture.sizes.values())
        expressions += [r.when for rules in self._architecture.tensors.values() for r in rules if r.when is not None]
        return self._index_names & frozenset().union(*(expression.names for expression in expressions))

    def indices_for(self, rules: Sequence[Rule]) -> frozenset[str]:
        """The axes in names whose index decides which of a line's rules holds, or how the tensors are split.

        The sizes of all axes of a family matter, because they are split together.
        """
        axes = frozenset().union(*(shape.axes for rule in rules for shape in rule.shapes))
        families = (family for families_of in self._architecture.families.values() for family in families_of)
        axes = axes.union(*(family for family in families if axes & {*family}))
        names = frozenset().union(*(rule.when.names for rule in rules if rule.when and self._asks_for_index(rule.when)))
        while True:
            sizes = [self._architecture.sizes[axis] for axis in axes if axis in self._architecture.sizes]
            names = names.union(*(expression.names for expression in sizes))
            further = names - self._index_names - axes
            if not further & self._architecture.sizes.keys():
                return names & self._index_names
            axes |= further

    def _asks_for_index(self, condition: Expression) -> bool:
        """Whether its value may depend on an index: that of ``draft and layer == 0`` does not, of what is no draft."""
        try:
            self.evaluate(condition, _Unknown())
        except (_UnknownError, NotationError):
            return True
        return False

    @cached_property
    def varying(self) -> frozenset[str]:
        """The axes whose size depends on an index in the tensor's name."""
        sizes, axes = self._architecture.sizes, frozenset[str]()
        while True:
            wider = frozenset(axis for axis, e in sizes.items() if e.names & (self._index_names | axes))
            if wider == axes:
                return axes
            axes = wider

    @cached_property
    def counts(self) -> dict[str, int]:
        """The size that the config gives to each axis in names."""
        named = {axis: self._config_size(axis, {}, ()) for axis in self._named & self._architecture.sizes.keys()}
        return {axis: size for axis, size in named.items() if size is not None}

    def key(self, indices: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """The indices of a tensor on which sizes depend."""
        if not self._used_indices:
            return ()
        return tuple((name, indices[name]) for name in sorted(self._used_indices) if name in indices)

    def of(self, indices: Mapping[str, int]) -> dict[str, int]:
        """The size of each axis for a tensor with these indices; an axis of unknown size is absent."""
        key = self.key(indices)
        if key not in self._cache:
            self._steps = 0
            values = {axis: self._config_size(axis, dict(key), ()) for axis in self._architecture.sizes}
            self._cache[key] = {axis: value for axis, value in values.items() if value is not None}
        return {**self.measured, **self._cache[key]}

    def holds(self, match: Match) -> Rule | None:
        """The first rule of a line whose condition holds."""
        self._steps = 0
        for rule in match.rules:
            if rule.when is None or self.evaluate(rule.when, match.indices):
                return rule
        return None

    def evaluate(self, expression: Expression, indices: Mapping[str, int]) -> Any:
        """The value of an expression for a tensor with these indices; raises NotationError if it has none."""
        return expression.evaluate(lambda name: self._look_up(name, indices, ()))

    def look_up(self, name: str) -> Any:
        """The size of an axis, or else a setting of the config; None if there is neither."""
        return self._look_up(name, {}, ())

    def count(
        self, axis: str, indices: Mapping[str, int], *, without: Callable[[str], bool] = lambda _: False
    ) -> int | None:
        """The size that the config gives to an axis, or None; settings for which ``without`` holds are ignored."""
        expression = self._architecture.sizes.get(axis)
        if expression is None:
            return None
        try:
            value = expression.evaluate(lambda name: None if without(name) else self._look_up(name, indices, (axis,)))
        except NotationError:
            return None
        return int(value) if isinstance(value, (int, float)) else None

    def _config_size(self, axis: str, indices: Mapping[str, int], below: tuple[str, ...]) -> int | None:
        expression = self._architecture.sizes[axis]
        self._steps += 1
        if len(below) > _DEEPEST or self._steps > _MOST_STEPS:
            raise PlanError(f"plan '{self._architecture.name}': the sizes refer to each other without end")
        try:
            value = expression.evaluate(lambda name: self._look_up(name, indices, (*below, axis)))
        except NotationError as error:
            plan = self._architecture.name
            raise PlanError(
                f"config.json does not fit the plan '{plan}': axis '{axis}' = {error.message}", error.hint
            ) from None
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # a width times a factor
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise PlanError(f"config.json: axis '{axis}' = '{expression.text}' is {brief(value)}, not a size")
        return value

    def _look_up(self, name: str, indices: Mapping[str, int], below: tuple[str, ...]) -> Any:
        if name in self._index_names:
            return indices.get(name)
        if name in self._architecture.sizes and name not in below:
            return self._config_size(name, indices, below)
        return self.settings.get(name)
