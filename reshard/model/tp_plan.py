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

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from formats.errors import PlanError, require_transformers
from formats.notation.axes import Dim, Shape, deal
from formats.quantization.methods import quantization_settings
from reshard.model.model import Kind, Model

if TYPE_CHECKING:
    from torch import nn


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


@dataclass(frozen=True)
class _Part:
    """A parameter that the rules split: along its output or its input, and by which family of axes."""

    name: str
    owner: str
    kind: str
    family: int
    tensor: Kind
    shape: tuple[int, ...]
    is_mixed: bool

    @property
    def scope(self) -> tuple[str, int]:
        """The block of a layer that works on one family's axes: by the layer's path and the family."""
        return self.owner.partition("*")[0], self.family


@dataclass
class _Draft:
    """A plan that grows."""

    own: Mapping[str, str]
    used: frozenset[str]
    styles: dict[str, str] = field(default_factory=dict)
    gathered: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    local_parents: set[str] = field(default_factory=set)
    degrees: set[int] = field(default_factory=set)


def transformers_plan(model: Model, degree: int | None = None) -> TransformersPlan:
    """The plan for a checkpoint; with ``degree``, for that many ranks.

    Raises PlanError without transformers, for a type that it does not know, and for quantized weights.
    """
    require_transformers("--tp-plan")
    if quantization_settings(model.sizes.settings):
        raise PlanError("transformers' plan for a quantized checkpoint depends on its quantizer", "use its own plan")
    network = _network(model)
    draft = _Draft(dict(network.tp_plan or {}), frozenset(_used_weights(network)))
    parts = list(_parts(model, network, degree))
    blocks: dict[tuple[str, int], list[_Part]] = defaultdict(list)
    for part in parts:
        if part.tensor.rule.axes & {"vocab", *model.architecture.pad}:
            blocks["vocabulary", part.family].append(part)
        elif len(part.shape) > 2 or _expert_axis_leads(model, part.tensor.rule):
            blocks[part.owner, -1].append(part)
        else:
            blocks[part.scope].append(part)
    for (name, family), block in blocks.items():
        if name == "vocabulary":
            _plan_vocabulary(draft, network, block)
        elif family == -1:
            _plan_experts(draft, network, name, block)
        else:
            _plan_block(draft, model, network, block, degree)
    _override_own(draft)
    order = {name: i for i, name in enumerate(_generic_names(network))}
    styles = dict(sorted(draft.styles.items(), key=lambda item: order.get(item[0], len(order))))
    return TransformersPlan(styles, draft.gathered, draft.whole, tuple(sorted(draft.degrees)))


# ------------------------------------------------------------------------------------------------- the model's parts


def _network(model: Model) -> Any:
    """transformers' model of a checkpoint, without weights."""
    import torch
    import transformers

    from formats.transformers_internals import is_auto, model_class, settings_of

    try:
        config = transformers.AutoConfig.for_model(**settings_of(model.config))
        cls = model_class(model.config)
        with torch.device("meta"):
            return cls.from_config(config) if is_auto(cls) else cls._from_config(config)
    except Exception as error:  # whatever the constructors of transformers raise
        kind, text = model.config.get("model_type"), " ".join(str(error).split())
        raise PlanError(f"transformers cannot build a model of type '{kind}': {text}") from None


def _parts(model: Model, network: Any, degree: int | None) -> Iterator[_Part]:
    """The parameters that the rules split, one for all layers; left out, if some layer's is not split."""
    from formats.transformers_internals import placements

    tensors = {tensor.name: tensor.kind for tensor in model.tensors}
    kinds_of: dict[str, set[tuple[str, int] | None]] = defaultdict(set)
    first: dict[str, tuple[Kind, tuple[int, ...]]] = {}
    for name, parameter in placements(network, {tensor.name: tensor.shape for tensor in model.tensors}).items():
        generic = _generic(name)
        sources = [tensors[source] for source in parameter.sources]
        kinds_of[generic] |= {_kind(model, source, degree) for source in sources}
        first.setdefault(generic, (sources[0], parameter.shape))
    for generic, kinds in kinds_of.items():
        split = sorted(kind for kind in kinds if kind is not None)
        if len(split) == len(kinds) and len({kind for kind, _ in split}) == 1:
            yield _Part(generic, generic.rpartition(".")[0], *split[0], *first[generic], len(split) > 1)


def _kind(model: Model, tensor: Kind, degree: int | None) -> tuple[str, int] | None:
    """Whether a tensor is split along its output, its input, or its only dimension; and the number of the family."""
    sizes = model.sizes.of(dict(tensor.indices))
    for number, family in enumerate(model.architecture.families.get("tp", ())):
        present = [axis for axis in family if axis in sizes]
        dealt = set(present)
        if degree is not None and not set(present) <= set(model.architecture.pad):
            parts = deal(present, sizes, degree) or {}
            dealt = {axis for axis in present if parts.get(axis, 1) > 1}
        split = [i for i, dim in enumerate(tensor.rule.dims) if dim.axes & dealt]
        if not split:
            continue
        matrix = len(tensor.rule.dims) - (1 if _expert_axis_leads(model, tensor.rule) else 0)
        if matrix == 1:
            return "vector", number
        assert tensor.rule.output_dim is not None
        return ("column" if tensor.rule.output_dim in split else "row"), number
    return None


def _expert_axis_leads(model: Model, rule: Shape) -> bool:
    return len(rule.dims) > 1 and rule.dims[0].axis in model.expert_axes


def _generic(name: str) -> str:
    """A name as transformers' plans have it."""
    from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

    return str(replace_layer_number_by_wildcard(name))


def _generic_names(network: nn.Module) -> Iterator[str]:
    for name, module in network.named_modules():
        yield from (_generic(f"{name}.{key}") for key, _ in module.named_parameters(recurse=False))
        yield _generic(name)


def _modules(network: nn.Module, owner: str) -> Iterable[tuple[str, nn.Module]]:
    """The modules of a name with wildcards."""
    return ((name, module) for name, module in network.named_modules() if _generic(name) == owner)


def _is_linear(network: nn.Module, owner: str) -> bool:
    from torch import nn

    return all(isinstance(module, nn.Linear) for _, module in _modules(network, owner))


# --------------------------------------------------------------------------------------------------- the model's code


def _used_weights(network: nn.Module) -> Iterator[str]:
    """The linear layers and embeddings whose weight the model's code works with, instead of calling them.

    ``self.dt_proj.weight @ x``: a style takes effect where a module is called. What stands in a branch that this model
    does not take counts as well: such a module stays whole, which is right everywhere.
    """
    seen: set[tuple[str, type]] = set()
    for name, module in network.named_modules():
        if getattr(module, "slow_but_exact", None) is False:
            continue  # Bloom's layers read weights to sum as in training, if that is asked for
        for cls in type(module).__mro__:
            if cls.__module__.startswith("transformers.models.") and (_generic(name), cls) not in seen:
                seen.add((_generic(name), cls))
                for path in _weights_read(cls):
                    yield _generic(f"{name}.{path}" if name else path)


_NO_FORWARD = {"__init__", "_init_weights", "reset_parameters", "tie_weights"}
_SAYS_WHAT_IT_IS = {"device", "dtype", "shape", "size", "ndim"}


@cache
def _weights_read(cls: type) -> frozenset[str]:
    """The paths of the submodules whose ``weight`` the methods of a class read: ``self.a.b.weight`` in their code."""
    methods = [value for name, value in vars(cls).items() if inspect.isfunction(value) and name not in _NO_FORWARD]
    paths: set[str] = set()
    for method in methods:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
        asked = {id(node.value) for node in nodes if node.attr in _SAYS_WHAT_IT_IS}
        for node in nodes:
            first, *path = ast.unparse(node).split(".")
            if id(node) not in asked and first == "self" and len(path) > 1 and path[-1] == "weight":
                paths.add(".".join(path[:-1]))
    return frozenset(paths)


# ------------------------------------------------------------------------------------------------------- the styles


def _plan_vocabulary(draft: _Draft, network: Any, parts: list[_Part]) -> None:
    """Embeddings by their rows, LM heads by their outputs; where they are tied, both or neither."""
    from torch import nn

    for owners in _tied(network, {part.owner for part in parts}):
        styles: dict[str, str] = {}
        for owner in sorted(owners):
            modules = [module for _, module in _modules(network, owner)]
            if owner in draft.used:
                draft.whole |= dict.fromkeys(owners, f"the model's code uses the weight of {owner} itself")
            elif all(isinstance(module, nn.Embedding) for module in modules):
                styles[owner] = "embedding_rowwise"
            elif _is_linear(network, owner):
                styles[owner] = "colwise_gather_output"
            else:
                draft.whole |= dict.fromkeys(owners, f"{type(modules[0]).__name__} has a parameter of it, too")
        if styles.keys() == owners:
            draft.styles |= styles


def _tied(network: Any, owners: set[str]) -> list[set[str]]:
    """The modules that share parameters with these, in groups."""
    users: dict[int, set[str]] = defaultdict(set)
    for name, module in network.named_modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users[id(parameter)].add(_generic(name))
    groups: list[set[str]] = []
    for owner in sorted(owners):
        group = {owner}
        while new := set().union(*(shared for shared in users.values() if shared & group)) - group:
            group |= new
        if group not in groups:
            groups.append(group)
    return groups


def _plan_experts(draft: _Draft, network: Any, owner: str, parts: list[_Part]) -> None:
    """Fused experts: as transformers' own plan has them, else by their shapes."""
    if any(_is_transposed(network, part.name) for part in parts):
        draft.whole[owner] = "transformers does not cut what it transposes as it loads it"
        return
    styles_of = {name: style for name, style in draft.own.items() if name == owner or name.rpartition(".")[0] == owner}
    if styles_of.get(owner) == "moe_tp_experts":
        draft.styles |= styles_of
        return
    styles: dict[str, str] = {}
    for part in parts:
        dims, rule = part.tensor.rule.dims, part.tensor.rule
        packed = [dim for dim in dims if len(dim.summands) > 1]
        by_name = any(segment == "{expert}" for segment in part.tensor.template.split("."))
        if len(part.shape) != 3 or rule.arrow is not None or (packed and not _is_pair(packed[0])):
            draft.whole[owner] = "transformers has no style for experts of this form"
            return
        if part.kind == "row":
            styles[part.name] = "rowwise"
        else:
            is_pair = bool(packed) or (by_name and "gate_up" in part.name)
            styles[part.name] = "packed_colwise" if is_pair else "colwise"
    if not all(_takes_routes(module) for _, module in _modules(network, owner)):
        draft.whole[owner] = "transformers has no style for experts of this form"
        return
    draft.styles |= {**styles, owner: "moe_tp_experts"}


def _is_transposed(network: Any, name: str) -> bool:
    """Whether transformers turns a parameter around as it loads it."""
    from formats.transformers_internals import get_model_conversion_mapping

    for entry in get_model_conversion_mapping(network):
        turns = any(type(operation).__name__ == "Transpose" for operation in getattr(entry, "operations", ()))
        if turns and any(str(target).strip("^$") in name for target in entry.target_patterns):
            return True
    return False


def _takes_routes(module: Any) -> bool:
    """Whether a module of experts is called as transformers' style for them expects: tokens, experts, weights."""
    return list(inspect.signature(module.forward).parameters)[1:3] == ["top_k_index", "top_k_weights"]


def _is_pair(dim: Dim) -> bool:
    """Two equal blocks, as gate and up are packed."""
    return len(dim.summands) == 2 and dim.summands[0].factors == dim.summands[1].factors


def _plan_block(draft: _Draft, model: Model, network: Any, parts: list[_Part], degree: int | None) -> None:
    """The linear layers of a layer's MLP or attention: with parts of the vector between them, or with the whole."""
    linear: dict[str, list[_Part]] = defaultdict(list)
    rest_parts: dict[str, _Part] = {}
    for part in parts:
        if _is_linear(network, part.owner) and part.owner not in draft.used:
            linear[part.owner].append(part)
        else:
            is_own = part.name.rpartition(".")[2] in {"weight", "bias"}
            rest_parts.setdefault(part.owner if is_own else part.name, part)
    kinds = {owner: next((p.kind for p in group if p.kind != "vector"), "vector") for owner, group in linear.items()}
    why = _why_not_local(draft, model, network, linear, kinds, rest_parts, degree)
    for name in rest_parts:
        used = _is_linear(network, rest_parts[name].owner)
        draft.whole[name] = "the model's code uses its weight itself" if used else "no linear layer"
    for owner, kind in kinds.items():
        if kind == "vector":
            continue
        if why is None:
            packed = any(_is_pair(dim) for part in linear[owner] for dim in part.tensor.rule.dims)
            draft.styles[owner] = "rowwise" if kind == "row" else "packed_colwise" if packed else "colwise"
            draft.local_parents.add(owner.rpartition(".")[0])
        else:
            draft.styles[owner] = "rowwise_split_input" if kind == "row" else "colwise_gather_output"
            draft.gathered[owner] = why


def _why_not_local(
    draft: _Draft, model: Model, network: Any, linear: Mapping[str, list[_Part]], kinds: Mapping[str, str],
    rest_parts: Mapping[str, _Part], degree: int | None,
) -> str | None:  # fmt: skip
    """Why a rank's part of the vector between two linear layers is not enough for the model's code; None if it is."""
    if any(part.is_mixed for parts in linear.values() for part in parts):
        return "it lies differently from layer to layer"
    if rest_parts:
        return f"{min(rest_parts)} would need its part of what is between"
    if {"column", "row"} - set(kinds.values()):
        return "nothing takes the parts as its input" if "column" in kinds.values() else "nothing gives it parts"
    styles = {owner: draft.own[owner] for owner in kinds if owner in draft.own}
    rules = [part.tensor.rule for parts in linear.values() for part in parts if part.kind == "column"]
    columns = [rule.dims[rule.output_dim or 0] for rule in rules]
    is_plain = all(dim.axis is not None for dim in columns)
    packed = [dim for dim in columns if len(dim.summands) > 1]
    if packed:
        if not all(_is_pair(dim) and len(dim.summands[0].factors) == 1 for dim in packed):
            return "blocks are packed in a way that no style cuts"
        vectors = [part.tensor.rule for parts in linear.values() for part in parts if part.kind == "vector"]
        if any(len(rule.dims[0].summands) > 1 for rule in vectors):
            return "no style cuts the bias of packed blocks"
        return None if all(dim.axis is not None or dim in packed for dim in columns) else "its blocks are packed"
    if styles and not set(styles.values()) <= LOCAL:
        return "transformers' own plan gathers here"
    if not is_plain:
        if styles.keys() != kinds.keys() and not all(_needs_nothing(model, network, owner) for owner in kinds):
            return "the model's code counts the heads of the whole model"
        return _why_heads_are_cut(draft, model, linear, degree)
    return None


def _why_heads_are_cut(
    draft: _Draft, model: Model, linear: Mapping[str, list[_Part]], degree: int | None
) -> str | None:
    """Attention works on parts where each rank has whole KV heads of its own."""
    families = model.architecture.families["tp"]
    number = next(part.family for parts in linear.values() for part in parts)
    for sizes in model.axis_sets():
        present = [axis for axis in families[number] if axis in sizes]
        if present:
            count = sizes[present[0]]
            if degree is None:
                draft.degrees.add(count)
            elif count % degree:
                return f"{present[0]} {count} is not divisible by {degree}"
    return None


def _needs_nothing(model: Model, network: nn.Module, owner: str) -> bool:
    """Whether the architecture file says that a module around this one works on any number of heads."""
    for name, _ in _modules(network, owner):
        for path in _ancestors(name):
            match = model.architecture.match_module(path)
            if match is not None:
                return all(not rule.attributes and not rule.split for rule in match[0])
        return False
    return False


def _ancestors(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _override_own(draft: _Draft) -> None:
    """transformers merges a plan into the model's own: say what of that does not hold."""
    for name, style in draft.own.items():
        if name in draft.styles:
            continue
        parent = name.rpartition(".")[0]
        keeps = style in _GRADIENT_ONLY and parent in draft.local_parents
        keeps |= style == "moe_identity_expert"
        draft.styles[name] = style if keeps else "replicate"
