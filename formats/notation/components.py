"""The components of a packed tensor: another program may store each as a tensor of its own, or join them in another
order.

In ``(q: kv group head + k: kv head + v: kv head) hidden`` each label names a component. Other factors of the same
dimension may stand before and behind the components (each KV head has its own q, k and v in ``(kv (q: group + k: 1 + v:
1) head) hidden``). A component's own shape has one dimension for each factor, in the order in which the elements are
stored, so that another order is a permutation of dimensions.

Only formats of other programs need components. What a rank owns of a packed tensor follows from ``axes.py`` alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from reshard.formats.errors import NotationError
from reshard.formats.notation.axes import Dim, Factor, Shape, Summand, parse


@dataclass(frozen=True)
class Component:
    """A part of a stored tensor, or all of it. A tensor's components lie one after the other."""

    label: str | None
    """None for all of the tensor."""
    factors: tuple[Dim, ...]
    """The factors of its own shape, slowest first."""
    counts: tuple[int, ...]
    """The number of factors of each dimension of the stored tensor."""
    dim: int = 0
    """The dimension along which the components lie."""
    lead: int = 0
    """The first factors of that dimension, behind which they lie."""
    arrow: int | None = None
    """The arrow of the stored shape."""
    pair: int | None = None
    """The position of the first of the two factors that ``in_two`` makes."""
    index: str | None = None
    """The axis of the first dimension, which is left out: this is the component at one index of it."""

    @property
    def shape(self) -> Shape:
        """Its own shape, a dimension for each factor."""
        return Shape(self.factors)

    def of_dim(self, dim: int) -> range:
        """The positions of the factors of a stored dimension."""
        start = sum(self.counts[:dim])
        return range(start, start + self.counts[dim])

    def in_two(self, axis: str, sizes: Mapping[str, int], *, halves: bool) -> Component:
        """The same component with the factor ``axis`` as two factors: 2 halves, or pairs of 2.

        Raises NotationError if it is not a factor, or of odd size.
        """
        place = next((i for i, factor in enumerate(self.factors) if factor.axis == axis), None)
        if place is None or sizes[axis] % 2:
            raise NotationError(f"'{axis}' is not a factor of '{self.shape}' that can be halved")
        dim = next(dim for dim in range(len(self.counts)) if place in self.of_dim(dim))
        counts = tuple(count + (i == dim) for i, count in enumerate(self.counts))
        two = (_single(2), _single(sizes[axis] // 2))
        factors = (*self.factors[:place], *(two if halves else two[::-1]), *self.factors[place + 1 :])
        return replace(self, factors=factors, counts=counts, pair=place)

    def at_index(self) -> Component:
        """The same component at one index of the first dimension, which must be a single factor."""
        dim, arrow = max(self.dim - 1, 0), None if self.arrow is None else self.arrow - 1
        index, pair = self.factors[0].axis, None if self.pair is None else self.pair - 1
        return Component(self.label, self.factors[1:], self.counts[1:], dim, self.lead, arrow, pair, index)


@lru_cache(maxsize=4096)
def whole(shape: Shape) -> Component:
    """A stored tensor as one component."""
    factors_of = [list(_factors(dim)) for dim in shape.dims]
    factors = tuple(factor for factors in factors_of for factor in factors)
    return Component(None, factors, tuple(map(len, factors_of)), arrow=shape.arrow)


@lru_cache(maxsize=4096)
def components(shape: Shape) -> tuple[Component, ...]:
    """The components of a packed tensor by their labels; none if it has none, or more than one packed dimension."""
    packed = [(dim, summands) for dim in range(len(shape.dims)) if (summands := _packed(shape.dims[dim])) is not None]
    if len(packed) != 1:
        return ()
    ((dim, (lead, owns)),) = packed
    factors_of = [list(_factors(other)) for other in shape.dims]
    parts = []
    for label, part_factors in owns.items():
        factors_of[dim] = [*lead, *part_factors]
        factors = tuple(factor for of_dim in factors_of for factor in of_dim)
        parts.append(Component(label, factors, tuple(map(len, factors_of)), dim, len(lead), shape.arrow))
    return tuple(parts)


_FUSED = re.compile(r"(?P<place>.*experts)\.(?P<name>\w+)_proj(?P<bias>_bias)?")


def unfused(template: str, shape: Shape) -> dict[str, Component]:
    """The matrices of single experts in a tensor that has all experts, by the names that quantizers give them.

    ``experts.gate_up_proj`` with the blocks ``gate`` and ``up`` has ``experts.{expert}.gate_proj.weight`` and
    ``experts.{expert}.up_proj.weight``; ``experts.down_proj_bias`` has ``experts.{expert}.down_proj.bias``. Empty for
    any other tensor. Sources: LLM Compressor, modeling/; ModelOpt, torch/quantization/plugins.
    """
    fused = _FUSED.fullmatch(template)
    if fused is None or shape.is_open or len(shape.dims) != (2 if fused["bias"] else 3) or shape.dims[0].axis is None:
        return {}
    parts = components(shape) or (whole(shape),)
    words = [part.label or fused["name"] for part in parts]
    if "_".join(words) != fused["name"]:
        return {}
    place, end = f"{fused['place']}.{{{shape.dims[0].axis}}}", "bias" if fused["bias"] else "weight"
    return {f"{place}.{word}_proj.{end}": part.at_index() for word, part in zip(words, parts, strict=True)}


def component_names(name: str, shape: Shape) -> tuple[dict[str, Component], ...]:
    """The components of a tensor by the names that lines of formats may have for them, in two ways.

    ``q`` of ``x.qkv_proj.weight`` is ``x.qkv_proj.weight.q``, and has the name that it has in models that do not pack
    it: ``x.q_proj.weight``. So have the matrices of each expert.
    """
    parts, (module, _, leaf) = components(shape), name.rpartition(".")
    parent = module.rpartition(".")[0]
    unpacked = unfused(name, shape) or {f"{parent}.{part.label}_proj.{leaf}": part for part in parts}
    return {f"{name}.{part.label}": part for part in parts}, unpacked


def linear(component: Component) -> Shape:
    """The shape of a component in the dimensions of the stored tensor, output before input, as ``torch.nn.Linear``."""
    dims = []
    for dim in range(len(component.counts)):
        words = [word for place in component.of_dim(dim) if (word := str(component.factors[place])) != "1"]
        dims.append(f"({' '.join(words)})" if len(words) > 1 else "".join(words) or "1")
    return parse(" ".join(dims if component.arrow is None else dims[::-1]))


def _single(factor: Factor) -> Dim:
    return factor if isinstance(factor, Dim) else Dim((Summand((factor,)),))


def _factors(dim: Dim) -> Iterator[Dim]:
    """The factors of a dimension; one that is counted in blocks is one factor."""
    if dim.counted != (1, 1) or len(dim.summands) > 1 or dim.part is not None:
        yield dim
        return
    for factor in dim.summands[0].factors:
        if isinstance(factor, Dim) and len(factor.summands) == 1:
            yield from _factors(factor)
        else:
            yield _single(factor)


def _packed(dim: Dim) -> tuple[list[Dim], dict[str, list[Dim]]] | None:
    """The factors before the labelled summands of a dimension, and the factors of each of them and behind them."""
    lead: Sequence[Factor] = ()
    trail: Sequence[Factor] = ()
    summands = dim.summands
    if len(dim.summands) == 1:
        factors = dim.summands[0].factors
        sums = [i for i, factor in enumerate(factors) if isinstance(factor, Dim) and len(factor.summands) > 1]
        if len(sums) != 1:
            return None
        inner = factors[sums[0]]
        assert isinstance(inner, Dim)
        lead, summands, trail = factors[: sums[0]], inner.summands, factors[sums[0] + 1 :]
    in_blocks = dim.counted != (1, 1)
    if any(summand.label is None for summand in summands) or (in_blocks and lead and dim.part is None):
        return None
    owns: dict[str, list[Dim]] = {}
    for summand in summands:
        component = Dim((Summand((*summand.factors, *trail)),))
        owns[str(summand.label)] = [component.in_blocks(*dim.counted)] if in_blocks else list(_factors(component))
    return [part for factor in lead for part in _factors(_single(factor))], owns


def indices_of(dim: Dim, label: str, sizes: Mapping[str, int]) -> list[int]:
    """The indices of a dimension at which a component lies: of ``(ff (gate: 1 + up: 1))`` each second for ``up``."""
    indices: list[int] = []
    begin = 0
    for summand in dim.summands:
        length = Dim((summand,)).size(sizes)
        last = summand.factors[-1]
        if summand.label == label:
            indices += range(begin, begin + length)
        elif isinstance(last, Dim):
            inner, length_of = indices_of(last, label, sizes), last.size(sizes)
            indices += (at + index for at in range(begin, begin + length, length_of) for index in inner)
        begin += length
    return indices
