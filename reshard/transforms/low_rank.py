"""The change that a LoRA adapter makes to each weight of its base model: a product of A and B, and its factor.

Merging is arithmetic: ``W + scale * (B A)``, where ``scale`` is alpha / r, or alpha / sqrt(r) if the adapter is
rank-stabilised. Source: peft/tuners/lora/layer.py (``get_delta_weight``), peft/utils/other.py (``get_pattern_key``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from reshard.formats.errors import MismatchError, PlanError
from reshard.formats.files.checkpoint import ADAPTER, ADAPTER_CONFIG
from reshard.formats.notation.adapters import (
    Adapted,
    FactorLayout,
    LoraSettings,
    belongings,
    matrix_sides,
    module_of,
    of_pattern,
    settings_of,
    unlabelled,
)
from reshard.formats.notation.architecture import SETTINGS, Architecture
from reshard.formats.notation.axes import Shape
from reshard.formats.notation.components import indices_of
from reshard.formats.notation.expressions import Expression
from reshard.formats.notation.format import Pattern
from reshard.formats.notation.format_file import ExpertFactor
from reshard.formats.notation.spellings import ModuleTensor, SourcePart, Spellings
from reshard.model.model import BoundTensor, Model
from reshard.transforms.tensors import Tensor

FLOATS = ("BF16", "F16", "F32")
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


LINEAR = FactorLayout(ExpertFactor("A", "rank in"), ExpertFactor("B", "out rank"))
"""A and B of one matrix; of an embedding, the input is the vocabulary."""

T = TypeVar("T", bound=np.generic)


Pairs = list[tuple[str, Adapted, BoundTensor, BoundTensor]]
"""A and B of each parameter, after the prefix of their names and the parameter."""
Others = list[tuple[BoundTensor, Adapted | None, str]]
"""Tensors of an adapter, each with its parameter and the end of its name, if it has one."""


def pairs_of(adapter: Model, lora: LoraSettings, base: Architecture) -> tuple[Pairs, Others]:
    """Each A with its B, and the other tensors of an adapter to a model. Raises MismatchError for one alone."""
    lines = {line: (target, end) for line, target, end, _ in belongings(base, adapter.config, lora)}
    rest = Others()
    factors: dict[tuple[str, Adapted], dict[str, BoundTensor]] = defaultdict(dict)
    for tensor in adapter.tensors:
        target, suffix = lines.get(tensor.template, (None, ""))
        if target is not None and suffix in {*A_ENDS, *B_ENDS}:
            factors[tensor.name.removesuffix(suffix), target]["a" if suffix in A_ENDS else "b"] = tensor
        else:
            rest.append((tensor, target, suffix))
    for (place, _), pair in factors.items():
        if len(pair) == 1:
            raise MismatchError(f"{ADAPTER}: '{place}' has only one of lora_A and lora_B")
    return [(place, target, pair["a"], pair["b"]) for (place, target), pair in factors.items()], rest


class Product(NamedTuple):
    """A scaled product B A, for each of some experts."""

    a: Tensor
    b: Tensor
    form: FactorLayout
    """The axes of ``a`` and ``b``."""
    experts: int
    sides: tuple[str, str]
    """The axes of the weight's rows and columns: ``out`` and ``in``, or the other way round."""
    scale: float

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of expert, rank, in and out."""
        sizes = {"expert": self.experts}
        for tensor, factor in ((self.a, self.form.a), (self.b, self.form.b)):
            for length, axes in zip(tensor.shape, factor.dims, strict=True):
                sizes[axes[-1] if len(axes) == 1 else "rank"] = length if len(axes) == 1 else length // self.experts
        return sizes

    def matrix(self, side: str, expert: int, numbers: Callable[[Tensor], NDArray[T]]) -> NDArray[T]:
        """An expert's A or B, which has this side: the side by the rank. ``numbers`` reads all of a tensor."""
        tensor, factor = (self.a, self.form.a) if self.form.a.side == side else (self.b, self.form.b)
        matrix: NDArray[T] = by_expert(numbers(tensor), factor, self.sizes)[expert]
        return matrix


def by_expert(matrix: NDArray[T], factor: ExpertFactor, sizes: Mapping[str, int]) -> NDArray[T]:
    """A or B with the dimensions expert, side, rank: a view of it."""
    axes = [axis for dim in factor.dims for axis in dim]
    apart = matrix.reshape([sizes[axis] for axis in axes])
    if "expert" not in axes:
        axes, apart = ["expert", *axes], apart[None]
    return apart.transpose([axes.index(axis) for axis in ("expert", factor.side, "rank")])


class Term(NamedTuple):
    """A summand for a matrix of a weight: a part of the output of an expert's product."""

    product: Product
    expert: int
    matrix: int
    """The matrix's number in a weight that is a stack."""
    along: int
    """0: it is added to rows, 1: to columns."""
    rows: range
    """The rows or columns that it is added to."""
    at: int
    """The first of the product's outputs that are added."""


Changes = tuple[Mapping[str, Sequence[Term]], Mapping[str, Tensor]]
"""The terms that an adapter adds to weights, and the weights that it replaces, by name."""


def changes_of(base: Model, adapter: Model, tensors: Mapping[str, Tensor]) -> Changes:
    """Return the changes that an adapter with these tensors makes to a base model.

    Raises PlanError for an adapter that is not plain LoRA, MismatchError for one of another base model.
    """
    settings, rules = adapter.config[SETTINGS], base.architecture
    _refuse(settings)
    lora, terms, replaced = settings_of(settings, ADAPTER), defaultdict[str, list[Term]](list), dict[str, Tensor]()
    matches = ((rules.match(info.name), info) for info in base.tensors)
    names = {(match.template, tuple(sorted(match.indices.items()))): info for match, info in matches if match}
    pairs, rest = pairs_of(adapter, lora, rules)
    shared = tuple(line[:-1] for line, stage in rules.stages.items() if stage.text == "every" and "{" in line)

    def numbered(part: SourcePart, stacked: str | None, indices: Mapping[str, int]) -> Iterator[BoundTensor]:
        """The base model's tensors of a part: one, or those of all indices of a stack from 0 on."""
        for index in count() if stacked else (0,):
            numbers = {**indices, **({stacked: index} if stacked else {})}
            key = tuple(sorted((axis, numbers[axis]) for axis in Pattern(part.source).indices if axis in numbers))
            if (info := names.get((part.source, key))) is None:
                return
            yield info

    def sources_of(target: Adapted, indices: Mapping[str, int]) -> tuple[ModuleTensor, list[list[BoundTensor]]]:
        """Return the base model's tensors that a parameter is made of, for each part by their index in a stack."""
        for tensor in target.tensors:
            sources = [list(numbered(part, tensor.stacked, indices)) for part in tensor.parts]
            if all(sources) and len({len(part) for part in sources}) == 1:
                return tensor, sources
        at = "".join(f", {axis} {index}" for axis, index in indices.items())
        raise MismatchError(f"{ADAPTER} changes '{target.name}'{at}, which the base model lacks", _OTHER_BASE)

    for weight, a, b in _of_open_lines(base, rest):
        scale = scale_of(lora, module_of(a.name), a.shape[0])
        product = Product(tensors[a.name], tensors[b.name], LINEAR, 1, ("out", "in"), scale)
        terms[weight.name].append(Term(product, 0, 0, 0, range(weight.shape[0]), 0))
    for tensor, adapted, suffix in rest:
        if tensor.template.endswith("*"):
            continue
        if adapted is None or suffix not in _OF_BASE:
            raise PlanError(f"{ADAPTER}: tensor '{tensor.name}' is not merged: {_NO_PART}", _WITH_PEFT)
        weight = sources_of(adapted, tensor.indices)[1][0][0]
        if (tensor.dtype, tensor.shape) != (weight.dtype, weight.shape):
            raise MismatchError(
                f"{ADAPTER}: tensor '{tensor.name}' is {tensor.dtype} {list(tensor.shape)}, and "
                f"'{weight.name}' of the base model {weight.dtype} {list(weight.shape)}"
            )
        replaced[weight.name] = tensors[tensor.name]
    for place, target, a, b in pairs:
        indices, is_embedding = a.indices, a.template.endswith(A_ENDS[-1])
        if target.name.startswith(shared):
            raise PlanError(f"{ADAPTER}: '{a.name}' changes in one layer a weight that others have, too, stored once")
        whole, parts = sources_of(target, indices)
        is_crossed = whole.shapes[0][0].arrow is not None
        along = int(is_crossed != whole.turned)  # the output
        if is_embedding and _is_tied(base, adapter, parts[0][0]):
            raise PlanError(f"{ADAPTER}: '{a.name}' changes an embedding that is the head, too (tie_word_embeddings)")
        experts = (len(parts[0]) if whole.stacked else parts[0][0].shape[0]) if target.is_stack else 1
        form = layout_of(target, a, b)
        sides = ("in", "out") if (is_crossed or is_embedding) != whole.turned else ("out", "in")
        product = Product(tensors[a.name], tensors[b.name], form, experts, sides, 1.0)
        sizes, at = product.sizes, 0
        if any(
            math.prod(tensor.shape) != experts * sizes["rank"] * sizes[factor.side]
            for tensor, factor in ((a, form.a), (b, form.b))
        ):
            raise _does_not_fit(a, b, parts[0][0])
        product = product._replace(scale=scale_of(lora, lora.key_of(place, target), sizes["rank"]))
        for part, weights in zip(whole.parts, parts, strict=True):
            rows = rows_of(rules, adapter, part, indices) if part.label is not None else range(0)
            rows = rows or range(weights[0].shape[-2:][along])
            for expert in range(experts):
                number, matrix = (expert, 0) if whole.stacked else (0, indices[part.at] if part.at else expert)
                weight = weights[number]
                if weight.shape[-2:][1 - along] != sizes[sides[1 - along]] or weight.dtype not in FLOATS:
                    raise _does_not_fit(a, b, weight)
                runs = in_halves(rows, adapter.sizes.of(indices)[whole.halves]) if whole.halves else [(rows, 0)]
                terms[weight.name] += (Term(product, expert, matrix, along, run, at + first) for run, first in runs)
            at += len(rows)
        if at != sizes[sides[along]]:
            raise _does_not_fit(a, b, parts[0][0])
    return terms, replaced


def _of_open_lines(base: Model, rest: Others) -> Iterator[tuple[BoundTensor, BoundTensor, BoundTensor]]:
    """Yield each matrix in a part of the model without rules that an adapter changes, with its A and B.

    Raises PlanError for what is not A or B of a matrix that the base model stores as the module has it.
    """
    of_open = {tensor.name: tensor for tensor, _, _ in rest if tensor.template.endswith("*")}
    if not of_open:
        return
    spellings = Spellings(base.architecture, base.config)
    weights = {spellings.tensor(info.name): info for info in base.tensors if info.template.endswith("*")}
    for name, tensor in of_open.items():
        place, dot, _ = name.rpartition(".lora_")
        a, b = (of_open.get(f"{place}{dot}{factor}.weight") for factor in "AB")
        weight = weights.get(spellings.tensor(f"{module_of(name)}.weight"))
        if a is None or b is None or weight is None or not len(a.shape) == len(b.shape) == len(weight.shape) == 2:
            why = "it is no A or B of a matrix that the base model has as its module does"
            raise PlanError(f"{ADAPTER}: tensor '{name}' is not merged: {why}", _WITH_PEFT)
        if (b.shape[0], a.shape[1]) != weight.shape or a.shape[0] != b.shape[1] or weight.dtype not in FLOATS:
            raise _does_not_fit(a, b, weight)
        if tensor is a:
            yield weight, a, b


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


def _is_tied(base: Model, adapter: Model, weight: BoundTensor) -> bool:
    """Whether an embedding is the head too. Then an adapter of it would change only one of the two."""
    rules, tied = base.architecture, adapter.config.get("tie_word_embeddings")
    of_weight = rules.match(weight.name)
    assert of_weight is not None
    shape = of_weight.rules[0].shapes[0]
    if tied is None:
        matches = (rules.match(info.name) for info in base.tensors if info.name != weight.name)
        tied = not any(match is not None and match.rules[0].shapes[0] == shape for match in matches)
    return bool(tied and shape.axes & {"vocab", *rules.pad})  # not of positions


def _does_not_fit(a: BoundTensor, b: BoundTensor, weight: BoundTensor) -> MismatchError:
    if weight.dtype not in FLOATS:
        return MismatchError(
            f"'{weight.name}' is {weight.dtype}: an adapter is merged into {', '.join(FLOATS)} alone",
            "--dequantize makes BF16 of fp8; merge into the model as it was before it was quantized",
        )
    return MismatchError(
        f"{ADAPTER}: '{a.name}' {list(a.shape)} and lora_B {list(b.shape)} do not fit '{weight.name}' "
        f"{list(weight.shape)}", _OTHER_BASE,
    )  # fmt: skip


def alpha_of(lora: LoraSettings, key: str) -> float:
    """Return the alpha for a name. Raises PlanError without one."""
    if lora.alpha is None:
        raise PlanError(f"{ADAPTER_CONFIG} has no lora_alpha")
    return of_pattern(lora.alphas, key, lora.alpha)


def scale_of(lora: LoraSettings, key: str, rank: int) -> float:
    """Return the factor of the product for a name. Raises MismatchError if its rank is not the one in the settings."""
    stated = of_pattern(lora.ranks, key, lora.rank)
    if stated != rank:
        raise MismatchError(f"{ADAPTER}: '{key}' has rank {rank}, and {ADAPTER_CONFIG} says {stated}")
    return alpha_of(lora, key) / divisor_of(lora, rank)


def divisor_of(lora: LoraSettings, rank: int) -> float:
    """Return the number by which alpha is divided."""
    return math.sqrt(rank) if lora.stabilised else rank


def rows_of(base: Architecture, model: Model, part: SourcePart, indices: Mapping[str, int]) -> range:
    """The indices along the output of a checkpoint's tensor that a part has. ``indices`` are those in its name.

    Raises PlanError if they are no range.
    """
    rules = base.tensors[part.source]
    shape = shape_of([(shape, rule.when) for rule in rules for shape in rule.shapes], model, indices)
    out, sizes = shape.dims[-2:][int(shape.arrow is not None)], model.sizes.of(dict(indices))
    rows = [*range(out.size(sizes))] if part.label is None else indices_of(out, part.label, sizes)
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if rows != [*(in_steps := range(rows[0], rows[-1] + 1, step) if rows else range(0))]:
        raise PlanError(f"{ADAPTER}: '{part.label}' is not contiguous in '{part.source}'", _WITH_PEFT)
    return in_steps


def in_halves(rows: range, count: int) -> Iterator[tuple[range, int]]:
    """The first and the second of all pairs among each ``count`` rows, which are halves in the product, and where."""
    for first in range(0, len(rows), count):
        yield rows[first : first + count : 2], first
        yield rows[first + 1 : first + count : 2], first + count // 2


def shape_of(shapes: Sequence[tuple[Shape, Expression | None]], model: Model, indices: Mapping[str, int]) -> Shape:
    """The first shape whose condition holds and all of whose axes have a size."""
    axes = model.sizes.of(dict(indices)).keys()
    holds = (shape for shape, when in shapes if shape.axes <= axes and model.sizes.is_true(when, indices))
    return next(holds, shapes[0][0])


def layout_of(target: Adapted, a: BoundTensor, b: BoundTensor) -> FactorLayout:
    """Return the layout of A and B. Raises PlanError if that of a stack cannot be told."""
    if not target.is_stack:
        return LINEAR
    forms = target.forms
    if len({form.a.axes for form in forms}) > 1:
        is_in = str(a.kind.rule.dims[-1]) == matrix_sides(unlabelled(target.tensors[0].shapes[0][0]))[1]
        forms = tuple(form for form in forms if form.a.side == ("in" if is_in else "out"))
        if not forms or a.shape[-1] == b.shape[0]:
            raise PlanError(f"{ADAPTER}: '{a.name}': which side is the input cannot be told without peft_version")
    return forms[0]


_OTHER_BASE = "give the base model that the adapter was trained on"
