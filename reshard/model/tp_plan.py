"""The ``tp_plan`` of transformers that a model's rules amount to.

transformers splits a model by itself as it loads it: a plan names a style for each module (``layers.*.mlp.up_proj``:
``colwise``). Its styles know linear layers, embeddings and fused experts, and cut a dimension into equal parts, or each
half of it (``packed_colwise``). What a module does between two linear layers stays the model's own code, so

- ``colwise`` and ``rowwise`` leave a part of the output on each rank. That is right where the code between is
  elementwise (an MLP), and in an attention that takes its number of heads from the tensor it is given (transformers'
  own plan says so, or an empty line under ``[modules]`` of the architecture file), if each rank has KV heads of its
  own.
- ``colwise_gather_output`` and ``rowwise_split_input`` give the code between the whole vector: right everywhere.
- what is no linear layer (GPT-2's Conv1D, convolutions, decay rates) stays whole on every rank.

Needs transformers. The model is built without weights.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard as generic

from reshard.formats.errors import PlanError
from reshard.formats.notation.axes import Dim, Split, deal
from reshard.formats.quantization.methods import quantization_settings
from reshard.formats.transformers_internals import (
    get_model_conversion_mapping,
    is_auto,
    model_class,
    placements,
    settings_of,
)
from reshard.model.model import Kind, Model

LOCAL = {"colwise", "rowwise"}
_GRADIENT_ONLY = {"replicated_with_grad_allreduce", "mla_kv_a_proj"}
"""Styles that change nothing on the way forward, and are meant for modules between local ones."""


@dataclass(frozen=True)
class TransformersPlan:
    """A plan as transformers takes it, and the modules that do not lie as the rules say, each with the reason."""

    styles: Mapping[str, str]
    gathered: Mapping[str, str]
    whole: Mapping[str, str]
    degrees_of: tuple[int, ...]
    """The plan is right for degrees that divide these; any degree, if there is none."""


def transformers_plan(model: Model, degree: int | None = None) -> TransformersPlan:
    """The plan for a checkpoint; with ``degree``, for that many ranks.

    Raises PlanError for a type that transformers does not know, and for quantized weights.
    """
    if quantization_settings(model.sizes.settings):
        raise PlanError("transformers' plan for a quantized checkpoint depends on its quantizer", "use its own plan")
    try:
        config = transformers.AutoConfig.for_model(**settings_of(model.config))
        cls = model_class(model.config)
        with torch.device("meta"):
            network = cls.from_config(config) if is_auto(cls) else cls._from_config(config)
    except Exception as error:  # whatever the constructors of transformers raise
        kind, text = model.config.get("model_type"), " ".join(str(error).split())
        raise PlanError(f"transformers cannot build a model of type '{kind}': {text}") from None
    return _Planner(model, network, degree).plan()


class _SplitParameter(NamedTuple):
    """A parameter that the rules split: along its output or its input, and by which family of axes."""

    name: str
    """The name for all layers, with ``*`` for numbers."""
    owner: str
    """Its module, for all layers."""
    kind: Split
    family: int
    tensor: Kind
    shape: tuple[int, ...]
    is_mixed: bool
    """Whether ``kind`` is that of some layers only."""


class _Planner:
    """A plan under construction: the styles, and the modules whose outputs are gathered or whole, by name."""

    def __init__(self, model: Model, network: Any, degree: int | None) -> None:
        self.model, self.network, self.degree = model, network, degree
        self.modules: dict[str, dict[str, nn.Module]] = defaultdict(dict)
        for name, module in network.named_modules():
            self.modules[generic(name)][name] = module
        self.own: dict[str, str] = dict(network.tp_plan or {})
        self.used = frozenset(_used_weights(network))
        self.styles: dict[str, str] = {}
        self.gathered: dict[str, str] = {}
        self.whole: dict[str, str] = {}
        self.degrees: set[int] = set()

    def plan(self) -> TransformersPlan:
        """All of it, in the order of the model's modules."""
        vocabulary, experts, layers = (defaultdict[Any, list[_SplitParameter]](list) for _ in range(3))
        for part in self._parts():
            if part.tensor.rule.axes & {"vocab", *self.model.architecture.pad}:
                vocabulary[part.family].append(part)
            elif len(part.shape) > 2 or part.tensor.rule.dims[0].axis in self.model.architecture.expert_axes:
                experts[part.owner].append(part)
            else:  # what works on one family's axes in a layer
                layers[part.owner.partition("*")[0], part.family].append(part)
        for parts in vocabulary.values():
            self._plan_vocabulary({part.owner for part in parts})
        for owner, parts in experts.items():
            self._plan_experts(owner, parts)
        for parts in layers.values():
            self._plan_layer(parts)
        # transformers merges a plan into the model's own: say what of that does not hold
        local = {name.rpartition(".")[0] for name, style in self.styles.items() if style in {*LOCAL, "packed_colwise"}}
        for name, style in self.own.items():
            keeps = style in _GRADIENT_ONLY and name.rpartition(".")[0] in local
            self.styles.setdefault(name, style if keeps or style == "moe_identity_expert" else "replicate")
        named = ((name, [*dict(m.named_parameters(recurse=False)), ""]) for name, m in self.network.named_modules())
        names = (generic(f"{name}.{key}".removesuffix(".")) for name, keys in named for key in keys)
        order = {name: i for i, name in enumerate(names)}
        styles = dict(sorted(self.styles.items(), key=lambda item: order.get(item[0], len(order))))
        return TransformersPlan(styles, self.gathered, self.whole, tuple(sorted(self.degrees)))

    def _parts(self) -> Iterator[_SplitParameter]:
        """The parameters that the rules split, one for all layers; left out, if some layer's is not split."""
        tensors = self.model.kind_of
        kinds_of: dict[str, set[tuple[Split, int] | None]] = defaultdict(set)
        first: dict[str, tuple[Kind, tuple[int, ...]]] = {}
        shapes = {name: kind.shape for name, kind in tensors.items()}
        for name, parameter in placements(self.network, shapes).items():
            sources = [tensors[source] for source in parameter.sources]
            kinds_of[generic(name)] |= {self._kind(source) for source in sources}
            first.setdefault(generic(name), (sources[0], parameter.shape))
        for name, kinds in kinds_of.items():
            split = sorted(kind for kind in kinds if kind is not None)
            if len(split) == len(kinds) and len({kind for kind, _ in split}) == 1:
                yield _SplitParameter(name, name.rpartition(".")[0], *split[0], *first[name], len(split) > 1)

    def _kind(self, tensor: Kind) -> tuple[Split, int] | None:
        """Return the way in which a tensor is split, and the number of the family that splits it; None if it is
        whole.
        """
        for number, family in enumerate(self.model.architecture.families.get("tp", ())):
            present = [axis for axis in family if axis in tensor.sizes]
            dealt = set(present)
            if self.degree is not None and not set(present) <= set(self.model.architecture.pad):
                parts = deal(present, tensor.sizes, self.degree) or {}
                dealt = {axis for axis in present if parts.get(axis, 1) > 1}
            split = tensor.rule.split(dealt, self.model.architecture.expert_axes)
            if split != "whole":
                return split, number
        return None

    def _are(self, kind: type[nn.Module], owner: str) -> bool:
        return all(isinstance(module, kind) for module in self.modules[owner].values())

    def _plan_vocabulary(self, tables: set[str]) -> None:
        """Embeddings by their rows, LM heads by their outputs; where they are tied, both or neither."""
        users: dict[int, set[str]] = defaultdict(set)
        for name, module in self.network.named_modules():
            for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                users[id(parameter)].add(generic(name))
        groups = [{table} for table in sorted(tables)]
        for sharing in users.values():
            tied = [group for group in groups if group & sharing]
            groups = [group for group in groups if not group & sharing] + [sharing.union(*tied)]
        for owners in (group for group in groups if group & tables):
            styles: dict[str, str] = {}
            for owner in sorted(owners):
                if owner in self.used:
                    self.whole |= dict.fromkeys(owners, f"the model's code uses the weight of {owner} itself")
                elif self._are(nn.Embedding, owner):
                    styles[owner] = "embedding_rowwise"
                elif self._are(nn.Linear, owner):
                    styles[owner] = "colwise_gather_output"
                else:
                    kind = type(next(iter(self.modules[owner].values()))).__name__
                    self.whole |= dict.fromkeys(owners, f"{kind} has a parameter of it, too")
            if styles.keys() == owners:
                self.styles |= styles

    def _plan_experts(self, owner: str, parts: list[_SplitParameter]) -> None:
        """Fused experts: as transformers' own plan has them, else by their shapes."""
        if any(map(self._is_transposed, parts)):
            self.whole[owner] = "transformers does not cut what it transposes as it loads it"
            return
        own = {name: style for name, style in self.own.items() if owner in (name, name.rpartition(".")[0])}
        if own.get(owner) == "moe_tp_experts":
            self.styles |= own
            return
        packed = [next((dim for dim in part.tensor.rule.dims if len(dim.summands) > 1), None) for part in parts]
        fits = all(part.tensor.rule.arrow is None and len(part.shape) == 3 for part in parts)
        # transformers' style calls a module with tokens, experts, weights
        calls = [[*inspect.signature(module.forward).parameters][1:3] for module in self.modules[owner].values()]
        fits &= all(call == ["top_k_index", "top_k_weights"] for call in calls)
        if not fits or not all(dim is None or _is_pair(dim) for dim in packed):
            self.whole[owner] = "transformers has no style for experts of this form"
            return
        self.styles[owner] = "moe_tp_experts"
        for part, dim in zip(parts, packed, strict=True):
            is_pair = dim is not None or ("gate_up" in part.name and "{expert}" in part.tensor.template.split("."))
            self.styles[part.name] = "rowwise" if part.kind == "row" else "packed_colwise" if is_pair else "colwise"

    def _is_transposed(self, part: _SplitParameter) -> bool:
        """Whether transformers transposes a parameter when it loads it."""
        return any(
            type(operation).__name__ == "Transpose"
            and any(str(target).strip("^$") in part.name for target in entry.target_patterns)
            for entry in get_model_conversion_mapping(self.network)
            for operation in getattr(entry, "operations", ())
        )

    def _plan_layer(self, parts: list[_SplitParameter]) -> None:
        """The linear layers of a layer's MLP or attention: with parts of the vector between them, or with the whole."""
        linear: dict[str, list[_SplitParameter]] = defaultdict(list)
        others: list[str] = []
        for part in parts:
            is_linear = self._are(nn.Linear, part.owner)
            if is_linear and part.owner not in self.used:
                linear[part.owner].append(part)
            else:
                others.append(part.owner if part.name.endswith((".weight", ".bias")) else part.name)
                self.whole[others[-1]] = "the model's code uses its weight itself" if is_linear else "no linear layer"
        why = self._why_not_local(linear, others)
        for owner, group in linear.items():
            kind = next((part.kind for part in group if part.kind != "vector"), None)
            if kind is None:
                continue
            if why is not None:
                self.styles[owner] = "rowwise_split_input" if kind == "row" else "colwise_gather_output"
                self.gathered[owner] = why
            elif kind == "row":
                self.styles[owner] = "rowwise"
            else:
                is_packed = any(_is_pair(dim) for part in group for dim in part.tensor.rule.dims)
                self.styles[owner] = "packed_colwise" if is_packed else "colwise"

    def _why_not_local(self, linear: Mapping[str, list[_SplitParameter]], others: list[str]) -> str | None:
        """Return the reason why a rank's part of the vector between linear layers is not enough for the model's code;
        else None.
        """
        parts = [part for group in linear.values() for part in group]
        kinds = {part.kind for part in parts}
        if any(part.is_mixed for part in parts):
            return "it lies differently from layer to layer"
        if others:
            return f"{min(others)} would need its part of what is between"
        if not {"column", "row"} <= kinds:
            return "nothing takes the parts as its input" if "column" in kinds else "nothing gives it parts"
        columns = [part.tensor.rule.dims[part.tensor.rule.output_dim or 0] for part in parts if part.kind == "column"]
        packed = [dim for dim in columns if len(dim.summands) > 1]
        if packed:
            if not all(_is_pair(dim) and len(dim.summands[0].factors) == 1 for dim in packed):
                return "blocks are packed in a way that no style cuts"
            if any(len(part.tensor.rule.dims[0].summands) > 1 for part in parts if part.kind == "vector"):
                return "no style cuts the bias of packed blocks"
            return None if all(dim.axis is not None or dim in packed for dim in columns) else "its blocks are packed"
        own = {owner: self.own[owner] for owner in linear if owner in self.own}
        if not {*own.values()} <= LOCAL:
            return "transformers' own plan gathers here"
        if all(dim.axis is not None for dim in columns):
            return None
        if own.keys() != linear.keys() and not all(map(self._takes_any_heads, linear)):
            return "the model's code counts the heads of the whole model"
        # attention works on parts where each rank has whole KV heads of its own
        family = self.model.architecture.families["tp"][parts[0].family]
        for sizes in self.model.axis_sets():
            axis = next((axis for axis in family if axis in sizes), None)
            if axis is not None and self.degree is None:
                self.degrees.add(sizes[axis])
            elif axis is not None and self.degree is not None and sizes[axis] % self.degree:
                return f"{axis} {sizes[axis]} is not divisible by {self.degree}"
        return None

    def _takes_any_heads(self, owner: str) -> bool:
        """Whether a module around this one works on any number of heads, by the architecture file."""
        path = next(iter(self.modules[owner]), "")
        while path:
            match = self.model.architecture.match_module(path)
            if match is not None:
                return all(not rule.attributes and not rule.split for rule in match[0])
            path = path.rpartition(".")[0]
        return False


def _is_pair(dim: Dim) -> bool:
    """Two equal blocks, as gate and up are packed."""
    return len(dim.summands) == 2 and dim.summands[0].factors == dim.summands[1].factors


def _used_weights(network: nn.Module) -> Iterator[str]:
    """The linear layers and embeddings whose weight the model's code works with, instead of calling them.

    ``self.dt_proj.weight @ x``: a style takes effect where a module is called. What stands in a branch that this model
    does not take counts as well (kernels for a GPU, which no trial run on a CPU would show): such a module stays whole,
    which is right everywhere.
    """
    for name, module in network.named_modules():
        if getattr(module, "slow_but_exact", None) is not False:  # Bloom's, to sum as in training if it is asked for
            for cls in type(module).__mro__:
                yield from (generic(f"{name}.{path}".removeprefix(".")) for path in _weights_read(cls))


_USE = re.compile(r"\bself\.([\w.]+)\.weight\b(?!\.(?:device|dtype|shape|size|ndim)\b| = )")


@cache
def _weights_read(cls: type) -> frozenset[str]:
    """The paths of the submodules whose ``weight`` the methods of a class of transformers use: ``self.a.b.weight``."""
    if not cls.__module__.startswith("transformers.models."):
        return frozenset()
    skipped = {"__init__", "_init_weights", "reset_parameters", "tie_weights"}
    methods = (value for name, value in vars(cls).items() if inspect.isfunction(value) and name not in skipped)
    return frozenset(path for method in methods for path in _USE.findall(inspect.getsource(method)))
