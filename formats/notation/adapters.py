"""The rules of an adapter (LoRA), which follow from those of the weights that it changes.

Beside a weight ``out in`` PEFT keeps ``lora_A``, ``r in``, and ``lora_B``, ``out r``: their product is added to the
weight. So A is cut if the weight is cut along its input, B if it is cut along its output; otherwise they are
replicated. How A and B lie beside experts that are one tensor stands in ``formats/adapters/``. Names are those of
transformers' modules or of the checkpoint. Sources: peft/tuners/lora/layer.py (``ParamWrapper``),
peft/tuners/tuners_utils.py (``_inject_parameters``), peft/utils/save_and_load.py of PEFT 0.17 to 0.21.

``spellings`` says what a module's tensor is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, product
from typing import Any, NamedTuple, TypeVar

from reshard.formats.documents import Reader, Record, Unfit, items, json_object, mapping, number, structure, text, whole
from reshard.formats.errors import PlanError, brief
from reshard.formats.notation.architecture import PREFIX, SETTINGS, Architecture, Rule, with_experts, with_first_indices
from reshard.formats.notation.axes import Dim, Shape, Summand, parse
from reshard.formats.notation.components import linear, unfused
from reshard.formats.notation.format import Pattern
from reshard.formats.notation.format_file import (
    AdapterFormat,
    ExpertFactor,
    adapter_format,
    adapter_format_names,
    versions,
)
from reshard.formats.notation.spellings import ModuleTensor, SourcePart, module_tensors, shapes_in
from reshard.formats.notation.tables import version_of


def tensors_of_modules(base: Architecture, config: Mapping[str, Any]) -> Iterator[ModuleTensor]:
    """The tensors of transformers' modules, in the architecture's own spelling."""
    for tensor in module_tensors(base, config):
        is_same = tensor.name == tensor.parts[0].source
        name = tensor.name if is_same else _spelled(base, tensor.name)
        if name is not None:
            yield replace(tensor, name=name)


def _spelled(base: Architecture, name: str) -> str | None:
    """A name in the architecture's own spelling: that of its line, or with its first prefix in place of another.

    None if it would be another line's name with another prefix.
    """
    prefixes = sorted(base.prefixes, key=len, reverse=True)
    tail = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), None)
    spelled = [name] if tail is None else [name, *(prefix + tail for prefix in base.prefixes)]
    covered = (base.match(with_first_indices(spelling)) for spelling in spelled[:2])
    template = next((match.template for match in covered if match and not match.template.endswith("*")), None)
    if template is not None or tail is None:
        return template or name
    is_free = all(base.match(with_first_indices(spelling)) is None for spelling in spelled)
    return spelled[1] if is_free else None


def of_experts(stack: ModuleTensor) -> Iterator[ModuleTensor]:
    """The matrices of each expert, under names of their own, of a tensor that a checkpoint has for all of them."""
    whole = stack.parts[0]
    if not stack.shapes or len(stack.parts) > 1 or whole.label is not None or stack.stacked is not None:
        return
    shape, when = stack.shapes[0]
    for name, matrix in unfused(stack.name, shape).items():
        if name.endswith(".weight"):
            part = SourcePart(whole.source, matrix.label, matrix.index)
            turned = stack.turned != (shape.arrow is not None)
            yield ModuleTensor(name, (part,), ((linear(matrix), when),), turned=turned)


def in_halves(tensor: ModuleTensor) -> ModuleTensor:
    """A stack that joins components index by index, with these one after the other; else the same."""
    matrices = [matrix for matrix in of_experts(tensor) if matrix.parts[0].label is not None]
    stack = tensor.shapes[0][0] if matrices else Shape(())
    one_after_another = {summand.label for dim in stack.dims for summand in dim.summands}
    if all(matrix.parts[0].label in one_after_another for matrix in matrices):
        return tensor
    outs = [matrix.shapes[0][0].dims[0] for matrix in matrices]
    joined = Dim(tuple(Summand((dim,), f"part{place}") for place, dim in enumerate(outs)))
    dims = (stack.dims[0], joined, matrices[0].shapes[0][0].dims[1])
    parts = tuple(replace(matrix.parts[0], at=None) for matrix in matrices)
    return ModuleTensor(tensor.name, parts, ((Shape(dims), tensor.shapes[0][1]),), turned=matrices[0].turned)


Number = TypeVar("Number", int, float)
MERGE_IT = "'reshard split BASE OUT --adapter ADAPTER' writes its base model with the adapter in it"
"""The hint for a command that an adapter alone cannot do."""
_RANK = whole(1, 1 << 20)
_WHOLE = ("whole",)
_LINES = {
    "lora_A.weight": ("rank in",),
    "lora_B.weight": ("out rank",),
    "lora_B.bias": ("out",),
    "lora_magnitude_vector": ("out",),
    "lora_magnitude_vector.weight": ("out",),
    "lora_embedding_A": ("rank out",),
    "lora_embedding_B": ("in rank",),
    "base_layer.weight": _WHOLE,
}
"""Endings of the tensors that PEFT keeps beside a matrix, each with its axes."""
_ANY = (Rule((parse("..."),)),)
_BIAS = "base_layer.bias"
_GROUPED, _LAYOUTS = "grouped_by_expert", {"grouped_by_expert", "rank_major"}
"""Orders of B's columns that Unsloth notes as ``lora_B_layout``: those of an expert together, or as PEFT has them."""
_KEY = re.compile(r"(?:\w|-|\(\?:|\\[.d]|\.\*|\.|[|()^$+])+")
_MOST_REPEATS = 4


def _names(value: object, where: str) -> tuple[str, ...] | re.Pattern[str] | None:
    """Ends of names, or a pattern; None for "all-linear", and for a pattern that might be slow."""
    if not isinstance(value, str):
        return items(text)(value, where)
    return None if value.lower() == "all-linear" or not _is_quick(value) else _compiled(value, where)


def _is_quick(pattern: str) -> bool:
    """Whether a regular expression is matched in little time, whatever the name."""
    is_read = len(pattern) <= 1000 and _KEY.fullmatch(pattern) is not None and not re.search(r"\)[*+]", pattern)
    return is_read and pattern.count("*") + pattern.count("+") <= _MOST_REPEATS


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise Unfit(f"{where}: {brief(pattern)}: {error}") from None


def _patterns(reader: Reader[Number]) -> Reader[Mapping[str, Number]]:
    """A table of numbers by patterns of names, regular expressions."""

    def read(value: object, where: str) -> Mapping[str, Number]:
        table = mapping(reader)(value, where)
        for key in table:
            if not _is_quick(key):
                raise Unfit(f"{where} has the pattern {brief(key)}, which is not read")
            _compiled(key, where)
        return table

    return read


def _is_grouped(value: object, where: str) -> bool:
    if text(value, where) not in _LAYOUTS:
        raise Unfit(f"{where} is {brief(value)}, which is not known")
    return value == _GROUPED


@dataclass(frozen=True)
class LoraSettings:
    """The settings in ``adapter_config.json``."""

    rank: int = field(metadata={"key": "r", "read": _RANK})
    """The rank for names that no pattern has."""
    ranks: Mapping[str, int] = field(default_factory=dict, metadata={"key": "rank_pattern", "read": _patterns(_RANK)})
    """Ranks by patterns of names."""
    targets: tuple[str, ...] = field(default=(), metadata={"key": "target_parameters", "read": items(text)})
    """Parameters that are adapted."""
    version: tuple[int, ...] | None = field(
        default=None, metadata={"key": "peft_version", "read": lambda value, where: version_of(str(value))}
    )
    grouped: bool = field(default=False, metadata={"key": "lora_B_layout", "read": _is_grouped})
    """Whether, in the B of a stack, the columns of an expert lie together."""
    alpha: float | None = field(default=None, metadata={"key": "lora_alpha"})
    """The alpha for names that no pattern has."""
    alphas: Mapping[str, float] = field(
        default_factory=dict, metadata={"key": "alpha_pattern", "read": _patterns(number)}
    )
    """Alphas by patterns of names."""
    stabilised: bool = field(default=False, metadata={"key": "use_rslora"})
    """Whether alpha is divided by the root of the rank."""
    modules: tuple[str, ...] | re.Pattern[str] | None = field(
        default=None, metadata={"key": "target_modules", "read": _names}
    )
    """Ends of names, or a pattern of whole names; None if nothing names modules."""
    excluded: tuple[str, ...] | re.Pattern[str] | None = field(
        default=None, metadata={"key": "exclude_modules", "read": _names}
    )
    """The same, of modules that are left out."""
    layers: tuple[int, ...] = field(default=(), metadata={"key": "layers_to_transform"})
    """The only layers that change; empty: all."""

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Return the rank for a name, by the first pattern that fits; several, if an earlier one may hold for some
        indices alone.
        """
        first, ranks = with_first_indices(name), list[int]()
        for key, value in self.ranks.items():
            if any(character.isdecimal() for character in key) and first != name:
                ranks.append(value)
            elif of_pattern({key: value}, first, 0):
                return tuple(dict.fromkeys([*ranks, value]))
        return tuple(dict.fromkeys([*ranks, self.rank]))

    def formats(self) -> Sequence[AdapterFormat]:
        """PEFT's formats that its stacks may have: one, if it says its version."""
        if self.version is None:
            return versions()
        return [format for format in versions() if (format.since or ()) <= self.version][:1] or versions()[-1:]

    def is_target(self, name: str) -> bool:
        """Whether a parameter's name ends as one of ``target_parameters``, which may have an index in place of a
        number.
        """
        words = name.split(".")
        ends = ((target, ".".join(words[-target.count(".") - 1 :])) for target in self.targets)
        return any(Pattern(end).match(target) is not None for target, end in ends)

    def names(self, module: str) -> bool:
        """Whether PEFT wraps a module of this name."""
        if self.excluded is not None and _fits(module, self.excluded):
            return False
        if self.modules is None or (not isinstance(self.modules, re.Pattern) and module in self.modules):
            return True
        of_targets = (f".{target}".rpartition(".")[0] for target in self.targets)
        of_layer = not self.layers or not {*map(str, self.layers)}.isdisjoint(module.split("."))
        return of_layer and (_fits(module, self.modules) or any(f"{prefix}." in f".{module}." for prefix in of_targets))

    def key_of(self, place: str, target: Adapted) -> str:
        """The name that ``rank_pattern`` and ``alpha_pattern`` are matched against; ``place``: prefix of A and B."""
        module = module_of(place.rstrip("."))
        leaf = target.name.rpartition(".")[2]
        return f"{module}.{leaf}" if self.is_target(target.name) and not module.endswith(f".{leaf}") else module


def settings_of(content: object, where: object) -> LoraSettings:
    """Read ``adapter_config.json``. Raises PlanError for an adapter that is not LoRA, or of another form."""
    try:
        document = {key: value for key, value in json_object(content, SETTINGS).items() if value is not None}
        if (kind := document.get("peft_type")) != "LORA":
            raise PlanError(
                f"{where}: the adapter is {brief(kind)}; only LORA is read", "merge it into its base model first"
            )
        return structure(LoraSettings, Record(document, ""))
    except Unfit as error:
        raise PlanError(f"{where}: adapter_config.json: {error}") from None


def of_pattern(patterns: Mapping[str, Number], name: str, otherwise: Number) -> Number:
    """The number for a name: by the first pattern that fits, as PEFT's get_pattern_key."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), otherwise)


def module_of(name: str) -> str:
    """The name of the module that a tensor of an adapter belongs to."""
    return re.sub(r"(\.base_layer)*(\.lora_.*)?$", "", name.removeprefix(PREFIX))


def _fits(name: str, names: Sequence[str] | re.Pattern[str]) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(name) is not None
    return any(f".{name}".endswith(f".{end}") for end in names)


class FactorLayout(NamedTuple):
    """A and B of a stack: the ends of their names, and their axes, which are expert, rank, in and out."""

    a: ExpertFactor
    b: ExpertFactor


@dataclass(frozen=True)
class Adapted:
    """A parameter that PEFT may have wrapped."""

    tensors: tuple[ModuleTensor, ...]
    """The ways in which a checkpoint may have it: with each expert by name or not."""
    place: str
    """The beginning of the names of its tensors."""
    forms: tuple[FactorLayout, ...] = ()
    """The forms of A and B, if it is a stack of matrices."""

    @property
    def is_stack(self) -> bool:
        """Whether the parameter is a stack of matrices, whose A and B are joined."""
        return bool(self.forms)

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.tensors[0].name

    @property
    def module(self) -> str:
        """The name of the module that has it."""
        return self.name.rpartition(".")[0]


def parameters(base: Architecture, config: Mapping[str, Any]) -> Mapping[str, tuple[ModuleTensor, ...]]:
    """The tensors of a model by the names of modules, and by those of checkpoints, which are modules' elsewhere."""
    tensors_of: dict[str, tuple[ModuleTensor, ...]] = {}
    named = (ModuleTensor(name, (SourcePart(name),), tuple(shapes_in(rules))) for name, rules in base.tensors.items())
    tensors = [*tensors_of_modules(base, config), *named]
    for tensor in (*tensors, *chain.from_iterable(map(of_experts, tensors))):
        if tensor not in (earlier := tensors_of.get(tensor.name, ())):
            tensors_of[tensor.name] = (*earlier, tensor)
    return tensors_of


def wrapped(base: Architecture, config: Mapping[str, Any], settings: LoraSettings) -> Iterator[Adapted]:
    """The parameters that an adapter to a model may change."""
    of_module: dict[str, list[tuple[ModuleTensor, ...]]] = {}
    for name, tensors in parameters(base, config).items():
        module, _, leaf = name.rpartition(".")
        if tensors[0].dims == 2 and leaf == "weight" and "*" not in name:
            yield Adapted(tensors, f"{module}.")
        elif tensors[0].dims == 3 and settings.is_target(name):
            of_module.setdefault(module, []).append(tensors)
    for stacks in of_module.values():  # PEFT wraps a module once for each of its tensors, in their order
        inputs = {matrix_sides(tensors[0].shapes[0][0])[1] for tensors in stacks}
        stacks.sort(key=lambda tensors: matrix_sides(tensors[0].shapes[0][0])[0] in inputs)
        for depth, tensors in enumerate(reversed(stacks)):
            forms = dict.fromkeys(
                _form(format, tensors[0], config, depth, grouped=settings.grouped) for format in settings.formats()
            )
            yield Adapted(tensors, next(iter(forms))[0], tuple(form for _, form in forms))


def other_stacks(
    base: Architecture, config: Mapping[str, Any], names: Sequence[str] | None = None
) -> Iterator[tuple[AdapterFormat, Adapted]]:
    """The stacks of experts as programs other than PEFT name their A and B; of these ``names`` of formats, if given."""
    experts = base.expert_axes | {tensor.stacked for tensor in tensors_of_modules(base, config) if tensor.stacked}
    every = parameters(base, config).values()
    for format in map(adapter_format, adapter_format_names() if names is None else names):
        for tensors in every if format.factors and format.since is None else ():
            stacks = tuple(map(in_halves, tensors)) if format.halves else tensors
            if tensors[0].dims == 3 and tensors[0].shapes[0][0].dims[0].axis in experts:
                place, form = _form(format, stacks[0], config)
                yield format, Adapted(stacks, place, (form,))


def _form(
    format: AdapterFormat, stack: ModuleTensor, config: Mapping[str, Any], depth: int = 0, *, grouped: bool = False
) -> tuple[str, FactorLayout]:
    """Return the beginning of the names of A and B of a stack in a format, and their ends and axes. ``depth`` counts
    PEFT's wrappers around the stack.
    """
    assert format.factors is not None
    module, _, leaf = stack.name.removesuffix(".weight").rpartition(".")
    words = {"module": module, "leaf": leaf, "word": format.words.get(leaf, leaf), "wrapped": "base_layer." * depth}
    second = format.takes_second(config.get("model_type"))
    x, y = ("in", "out") if second == (stack.shapes[0][0].arrow is None) else ("out", "in")
    axes = {"x": x, "y": y}
    names = [factor.name.format(**words) for factor in format.factors]
    place = names[0].rpartition("A")[0]
    a, b = (
        ExpertFactor(name.removeprefix(place), re.sub(r"\b[xy]\b", lambda match: axes[match[0]], factor.axes))
        for name, factor in zip(names, format.factors, strict=True)
    )
    return place, FactorLayout(a, replace(b, axes=b.axes.replace("(rank expert)", "(expert rank)")) if grouped else b)


def matrix_sides(shape: Shape) -> tuple[str, str]:
    """The output and the input of a matrix, or of each of a stack, as texts."""
    first, second = (str(dim) for dim in shape.dims[-2:])
    return (second, first) if shape.arrow is not None else (first, second)


def adapter_architecture(base: Architecture, config: Mapping[str, Any], where: object) -> Architecture:
    """The architecture of an adapter to a model, by the model's config.json with ``adapter_config.json`` in it.

    A module that is saved whole (``modules_to_save``, an embedding) has the model's own rule. Raises PlanError for an
    adapter that is not LoRA.
    """
    lines = {PREFIX + name: rules for name, rules in base.tensors.items()}
    stages = {key if key == "layers" else PREFIX + key: stage for key, stage in base.stages.items()}
    for name, tensors in parameters(base, config).items():
        is_open = "*" not in name and any(shape.is_open for shape, _ in tensors[0].shapes)
        if is_open or tensors[0].dims > 3:  # what belongs to it has any shape
            lines.setdefault(f"{PREFIX}{name.rpartition('.')[0]}.*", _ANY)
        if (source := tensors[0].parts[0].source) != name:
            lines[PREFIX + name] = _rules(tensors, _WHOLE)
            if (stage := base.stage_of(with_first_indices(source))) is not None:
                stages[f"{PREFIX}{name.rpartition('.')[0]}.*"] = stage
    settings = settings_of(config[SETTINGS], where)
    lines |= {line: rules for line, _, _, rules in belongings(base, config, settings)}
    lines = {name: rules for name, rules in lines.items() if rules}
    every, prefixes = with_experts(lines), tuple(PREFIX + prefix for prefix in base.prefixes)
    derived = frozenset(every.keys() - lines.keys())
    return replace(base, prefixes=prefixes, tensors=every, stages=stages, modules={}, partial=True, derived=derived)


def belongings(
    base: Architecture, config: Mapping[str, Any], settings: LoraSettings
) -> Iterator[tuple[str, Adapted, str, tuple[Rule, ...]]]:
    """Yield the lines of the tensors that belong to each parameter: the parameter, the end of the line's name, and its
    rules.
    """
    for name, tensors in parameters(base, config).items():
        if name.endswith(".bias"):
            target = Adapted(tensors, name.removesuffix("bias"))
            yield f"{PREFIX}{target.place}{_BIAS}", target, _BIAS, _rules(tensors, _WHOLE)
    for target in (*(target for _, target in other_stacks(base, config)), *wrapped(base, config, settings)):
        ranks = settings.ranks_of(settings.key_of(target.place, target))
        factors = zip(*target.forms, strict=True)
        axes_of = (
            {group[0].name: tuple(factor.axes for factor in group) for group in factors} if target.is_stack else _LINES
        )
        for end, axes in axes_of.items():
            yield f"{PREFIX}{target.place}{end}", target, end, _rules(target.tensors, axes, ranks)


def _rules(tensors: Sequence[ModuleTensor], axes: Sequence[str], ranks: Sequence[int] = (1,)) -> tuple[Rule, ...]:
    """Return rules for tensors that belong to another: these axes for each shape that it may have, under its
    conditions.
    """
    rules = []
    every = [(shape, when) for tensor in tensors for shape, when in tensor.shapes]
    for when, pairs in groupby(every, key=lambda pair: pair[1]):
        shapes = dict[Shape, None]()
        for shape in (unlabelled(shape) for shape, _ in pairs if axes == _WHOLE or len(shape.dims) == tensors[0].dims):
            words = {"whole": str(shape)}
            if len(shape.dims) > 1:
                words |= dict(zip(("out", "in"), matrix_sides(shape), strict=True)) | {"expert": str(shape.dims[0])}
            for rank, line in product(ranks, axes):
                shapes[parse(re.sub(r"\w+", r"{\g<0>}", line).format_map({**words, "rank": rank}))] = None
        rules.append(Rule(tuple(shapes), when))
    return tuple(rule for rule in rules if rule.shapes)


def unlabelled(shape: Shape) -> Shape:
    """The same shape without the names of components: a tensor may be known under several."""
    return parse(re.sub(r"\w+: ", "", str(shape)))
