"""What a LoRA adapter adds to each weight of its base model: which product of A and B, times what.

Merging is arithmetic: ``W + scale * (B A)``, where ``scale`` is alpha / r, or alpha / sqrt(r) if the adapter is
rank-stabilised. Source: peft/tuners/lora/layer.py (``get_delta_weight``), peft/utils/other.py (``get_pattern_key``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from formats.errors import MismatchError, PlanError
from formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG
from formats.files.safetensors import TensorInfo
from formats.notation.adapters import (
    Adapted,
    FactorLayout,
    ModuleTensor,
    Part,
    Settings,
    adapter_architecture,
    belongings,
    form_of,
    module_of,
    of_pattern,
    settings_of,
)
from formats.notation.architecture import SETTINGS, Architecture
from formats.notation.axes import Shape
from formats.notation.components import indices_of
from formats.notation.expressions import Expression
from formats.notation.format import Pattern
from formats.notation.format_file import Factor
from reshard.model.binding import bind
from reshard.model.model import BoundTensor, FullTensor, Model

FACTORS = ("BF16", "F16", "F32", "F64")
FLOATS = FACTORS[:3]
"""The dtypes of weights that something is added to."""
_UNREAD = (
    "use_dora", "lora_bias", "use_qalora", "layer_replication", "alora_invocation_tokens", "arrow_config",
    "kasa_config", "velora_config", "monteclora_config", "use_bdlora", "trainable_token_indices", "modules_to_save",
)  # fmt: skip
"""Settings of PEFT's with which a merge is something else, or more, than this sum."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mifa")
"""Ways to begin the training that change the base model."""
_NO_PART, _WITH_PEFT = "it is no part of plain LoRA", "merge it with PEFT (merge_and_unload)"
_OF_BASE = ("base_layer.weight", "base_layer.bias")
A_ENDS, B_ENDS = (
    ("lora_A.weight", "A.weight", "A", "lora_embedding_A"),
    ("lora_B.weight", "B.weight", "B", "lora_embedding_B"),
)


LINEAR = FactorLayout(Factor("A", "rank in"), Factor("B", "out rank"))
"""A and B of one matrix; of an embedding, the input is the vocabulary."""

_Names = Mapping[tuple[str, tuple[tuple[str, int], ...]], BoundTensor]
"""A checkpoint's tensors by their lines and indices."""


class Product(NamedTuple):
    """``scale`` times B A, for each of ``experts``: the axes of ``a`` and ``b`` are those of ``form``.

    It has the output as rows; with ``crossed``, the input. ``turned``: the weight has the rows as columns.
    """

    a: TensorInfo
    b: TensorInfo
    form: FactorLayout
    experts: int
    crossed: bool
    turned: bool
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns, before they are turned."""
        sizes = self.sizes
        return (sizes["in"], sizes["out"]) if self.crossed else (sizes["out"], sizes["in"])

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of expert, rank, in and out."""
        return factor_sizes(self.a.shape, self.b.shape, self.form, self.experts)


def factor_sizes(a: Sequence[int], b: Sequence[int], form: FactorLayout, experts: int) -> dict[str, int]:
    """The sizes of expert, rank, in and out, given the shapes of A and B."""
    sizes = {"expert": experts}
    for shape, factor in ((a, form.a), (b, form.b)):
        for length, axes in zip(shape, factor.dims, strict=True):
            sizes[axes[-1] if len(axes) == 1 else "rank"] = length if len(axes) == 1 else length // experts
    return sizes


class Term(NamedTuple):
    """What is added to a matrix of a weight: rows (``along`` is 0) or columns ``at`` to ``at + length`` of a product.

    They are added to those from ``begin`` on along the same dimension, as it is in the product, to each ``step``-th.
    ``matrix`` is the matrix's number in a weight that is a stack, ``expert`` that of the product.
    """

    product: Product
    expert: int
    matrix: int
    along: int
    begin: int
    at: int
    length: int
    step: int = 1


Changes = tuple[Mapping[str, Sequence[Term]], Mapping[str, TensorInfo]]
"""What an adapter adds to weights, and the weights that it has itself, by their names."""


def changes_of(base: Model, settings: Any, tensors: Mapping[str, TensorInfo]) -> Changes:
    """What an adapter with these settings and tensors changes of a base model.

    Raises PlanError for an adapter that is not plain LoRA, MismatchError for one of another base model.
    """
    config = {**base.config, SETTINGS: settings}
    lora = settings_of(settings, ADAPTER)
    check_tensors(lora, tensors)
    _refuse(settings)
    architecture = adapter_architecture(base.architecture, config, ADAPTER)
    factors = [FullTensor(info.name, info.dtype, info.shape, info.file.name) for info in tensors.values()]
    model = bind(architecture, config, factors)
    merging = _Merging(base.architecture, base.tensors, lora, Scales(lora), model, tensors)
    return merging.changes(belongings(base.architecture, config, lora))


def check_tensors(lora: Settings, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise PlanError if an adapter has no tensors, or an A or B that is of no module it names, or no float."""
    if not tensors:
        raise PlanError(f"{ADAPTER} has no tensors: the adapter changes nothing")
    for name, info in tensors.items():
        if ".lora_" not in name:
            continue
        if info.dtype not in FACTORS:
            raise PlanError(f"{ADAPTER}: tensor '{name}' is {info.dtype}; A and B are read in {', '.join(FACTORS)}")
        if len(info.shape) < 3 and not lora.names(module_of(name)):
            raise PlanError(
                f"{ADAPTER}: tensor '{name}' is of a module that {ADAPTER_CONFIG} does not name (target_modules)",
                "give the adapter_config.json that was saved with these tensors",
            )


def _refuse(settings: Mapping[str, Any]) -> None:
    """Raise PlanError for settings with which a merge is not this sum."""
    asked = next((name for name in _UNREAD if settings.get(name)), None)
    begun = settings.get("init_lora_weights")
    if asked is None and isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        asked = f"init_lora_weights={begun}"
    if asked is None and settings.get("bias") not in (None, "none"):
        asked = f"bias={settings['bias']}"
    if asked is not None:
        raise PlanError(f"{ADAPTER_CONFIG}: an adapter with '{asked}' is not merged, only plain LoRA", _WITH_PEFT)


class Scales:
    """The factor of each module's product."""

    def __init__(self, lora: Settings) -> None:
        if lora.alpha is None:
            raise PlanError(f"{ADAPTER_CONFIG} has no lora_alpha")
        self._lora, self._alpha = lora, lora.alpha

    def of(self, key: str, rank: int) -> float:
        """The factor for what a name covers. Raises MismatchError if its rank is not that of the settings."""
        stated = of_pattern(self._lora.ranks, key, self._lora.rank)
        if stated != rank:
            raise MismatchError(f"{ADAPTER}: '{key}' has rank {rank}, and {ADAPTER_CONFIG} says {stated}")
        return self.alpha(key) / self._root(rank)

    def alpha(self, key: str) -> float:
        """The alpha of what a name covers."""
        return of_pattern(self._lora.alphas, key, self._alpha)

    def alpha_for(self, scale: float, rank: int) -> float | None:
        """The alpha with which the factor is ``scale`` to the last bit; None if there is none."""
        near = scale * self._root(rank)
        tried = (self._alpha, round(near), near, math.nextafter(near, 0), math.nextafter(near, math.inf))
        return next((alpha for alpha in tried if alpha / self._root(rank) == scale), None)

    def _root(self, rank: int) -> float:
        return math.sqrt(rank) if self._lora.stabilised else rank


@dataclass(frozen=True)
class _Merging:
    base: Architecture
    weights: Sequence[BoundTensor]
    lora: Settings
    scales: Scales
    model: Model
    tensors: Mapping[str, TensorInfo]

    def changes(self, lines: Mapping[str, tuple[Adapted, str]]) -> Changes:
        pairs: dict[str, dict[str, tuple[BoundTensor, Adapted]]] = {}
        replaced: dict[str, TensorInfo] = {}
        matches = ((self.base.match(info.name), info) for info in self.weights)
        names: _Names = {
            (match.template, tuple(sorted(match.indices.items()))): info for match, info in matches if match
        }
        for tensor in self.model.tensors:
            target, suffix = lines.get(tensor.template, (None, ""))
            if target is None or suffix not in {*A_ENDS, *B_ENDS, *_OF_BASE}:
                why = "it is in a part of the model without rules" if tensor.template.endswith("*") else _NO_PART
                raise PlanError(f"{ADAPTER}: tensor '{tensor.name}' is not merged: {why}", _WITH_PEFT)
            if suffix in _OF_BASE:
                weight = self._sources_of(target, tensor.indices, names)[1][0][0]
                if (tensor.dtype, tensor.shape) != (weight.dtype, weight.shape):
                    raise MismatchError(
                        f"{ADAPTER}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}, and "
                        f"'{weight.name}' of the base model {weight.dtype} {list(weight.shape)}"
                    )
                replaced[weight.name] = self.tensors[tensor.name]
            else:
                place = tensor.name.removesuffix(suffix)
                pairs.setdefault(place, {})["A" if suffix in A_ENDS else "B"] = tensor, target
        terms: dict[str, list[Term]] = {}
        for place, pair in pairs.items():
            if pair.keys() != {"A", "B"}:
                raise MismatchError(f"{ADAPTER}: '{place}' has only one of lora_A and lora_B")
            for name, term in self._terms(place, pair["A"][0], pair["B"][0], pair["A"][1], names):
                terms.setdefault(name, []).append(term)
        return terms, replaced

    def _sources_of(
        self, target: Adapted, indices: Mapping[str, int], names: _Names
    ) -> tuple[ModuleTensor, list[list[BoundTensor]]]:
        """The base model's tensors that a parameter is made of: those of each part, by their index in a stack."""
        for tensor in target.tensors:
            sources = [list(_numbered(part, tensor.stacked, indices, names)) for part in tensor.parts]
            if all(sources) and len({len(part) for part in sources}) == 1:
                return tensor, sources
        at = "".join(f", {axis} {index}" for axis, index in indices.items())
        raise MismatchError(f"{ADAPTER} changes '{target.name}'{at}, which the base model lacks", _OTHER_BASE)

    def _terms(
        self, place: str, a: BoundTensor, b: BoundTensor, target: Adapted, names: _Names
    ) -> Iterator[tuple[str, Term]]:
        """The terms of a pair of A and B, each with the name of the weight to which it is added."""
        indices, is_embedding = a.indices, a.template.endswith(A_ENDS[-1])
        tensor, parts = self._sources_of(target, indices, names)
        form = stack_form(target, a, b) if target.is_stack else LINEAR
        crossed = is_embedding or tensor.shapes[0][0].arrow is not None
        if is_embedding:
            self._check_untied(parts[0][0], a)
        experts = (len(parts[0]) if tensor.stacked else parts[0][0].shape[0]) if target.is_stack else 1
        product = Product(self.tensors[a.name], self.tensors[b.name], form, experts, crossed, tensor.turned, 1.0)
        rank = product.sizes["rank"]
        if math.prod(a.shape) != experts * rank * product.sizes[form.a.side] or (
            math.prod(b.shape) != experts * rank * product.sizes[form.b.side]
        ):
            raise self._does_not_fit(a, b, parts[0][0])
        product = product._replace(scale=self.scales.of(self.lora.key_of(place, target), rank))
        along, at = int(tensor.shapes[0][0].arrow is not None), 0  # the output
        for part, weights in zip(tensor.parts, parts, strict=True):
            begin, length, step = self._extent(part, weights[0], along ^ tensor.turned, indices)
            for expert in range(experts):
                number, matrix = (expert, 0) if tensor.stacked else (0, indices[part.at] if part.at else expert)
                weight = weights[number]
                sides = weight.shape[-2:][:: -1 if tensor.turned else 1]
                if sides[1 - along] != product.shape[1 - along] or weight.dtype not in FLOATS:
                    raise self._does_not_fit(a, b, weight)
                yield weight.name, Term(product, expert, matrix, along, begin, at, length, step)
            at += length
        if at != product.shape[along]:
            raise self._does_not_fit(a, b, parts[0][0])

    def _extent(self, part: Part, weight: BoundTensor, dim: int, indices: Mapping[str, int]) -> tuple[int, int, int]:
        """The rows (``dim`` is 0) or columns of a weight's matrices that a part has: the first, their number, and the
        distance between them.
        """
        length = weight.shape[-2:][dim]
        if part.label is None:
            return 0, length, 1
        rows = rows_of(self.base, self.model, part, indices)
        if not rows:
            return 0, length, 1
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        if rows != [*range(rows[0], rows[-1] + 1, step)]:
            raise PlanError(f"{ADAPTER}: '{part.label}' lies in several pieces in '{weight.name}'", _WITH_PEFT)
        return rows[0], len(rows), step

    def _check_untied(self, weight: BoundTensor, a: BoundTensor) -> None:
        """Raise PlanError if the embedding is the head too: the adapter changes one of them alone."""
        of_weight = self.base.match(weight.name)
        matches = (self.base.match(info.name) for info in self.weights if info.name != weight.name)
        assert of_weight is not None
        shape, tied = of_weight.rules[0].shapes[0], self.model.config.get("tie_word_embeddings")
        if tied is None:
            tied = not any(match is not None and match.rules[0].shapes[0] == shape for match in matches)
        if tied and shape.axes & {"vocab", *self.base.pad}:  # not of positions
            raise PlanError(f"{ADAPTER}: '{a.name}' changes an embedding that is the head, too (tie_word_embeddings)")

    def _does_not_fit(self, a: BoundTensor, b: BoundTensor, weight: BoundTensor) -> MismatchError:
        if weight.dtype not in FLOATS:
            return MismatchError(
                f"'{weight.name}' is {weight.dtype}: an adapter is merged into {', '.join(FLOATS)} alone",
                "--dequantize makes BF16 of fp8; merge into the model as it was before it was quantized",
            )
        return MismatchError(
            f"{ADAPTER}: '{a.name}' {list(a.shape)} and lora_B {list(b.shape)} do not fit '{weight.name}' "
            f"{list(weight.shape)}", _OTHER_BASE,
        )  # fmt: skip


def _numbered(part: Part, stacked: str | None, indices: Mapping[str, int], names: _Names) -> Iterator[BoundTensor]:
    """The base model's tensors of a part: one, or those of all indices of a stack from 0 on."""
    for index in count():
        numbers = {**indices, **({stacked: index} if stacked else {})}
        key = tuple(sorted((axis, numbers[axis]) for axis in Pattern(part.source).indices if axis in numbers))
        info = names.get((part.source, key))
        if info is None:
            return
        yield info
        if stacked is None:
            return


def rows_of(base: Architecture, model: Model, part: Part, indices: Mapping[str, int]) -> list[int]:
    """The indices along the output of a checkpoint's tensor that a part has. ``indices`` are those in its name."""
    rules = base.tensors[part.source]
    shape = shape_of([(shape, rule.when) for rule in rules for shape in rule.shapes], model, indices)
    out, sizes = shape.dims[-2:][int(shape.arrow is not None)], model.sizes.of(dict(indices))
    return [*range(out.size(sizes))] if part.label is None else indices_of(out, part.label, sizes)


def shape_of(of: Sequence[tuple[Shape, Expression | None]], model: Model, indices: Mapping[str, int]) -> Shape:
    """The first shape whose condition holds and all of whose axes have a size."""
    axes = model.sizes.of(dict(indices)).keys()
    holds = (
        shape
        for shape, when in of
        if shape.axes <= axes and (when is None or model.sizes.evaluate(when, dict(indices)))
    )
    return next(holds, of[0][0])


def stack_form(target: Adapted, a: BoundTensor, b: BoundTensor) -> FactorLayout:
    """How the A and B of a stack lie. Raises PlanError if that cannot be told."""
    form = form_of(target, a.kind.rule, (a.shape[-1], b.shape[0]))
    if form is None:
        raise PlanError(f"{ADAPTER}: '{a.name}': which side is the input cannot be told without peft_version")
    return form


_OTHER_BASE = "give the base model that the adapter was trained on"
