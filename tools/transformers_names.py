"""Writes ``formats/programs/transformers.json``: the names of transformers' own modules, from its rules of conversion.

For each model of ``tests/zoo`` it asks transformers which tensors of a checkpoint become which of the model's own, and
writes those that do not keep their names as lines of a format (see ``formats.notation.format_file``).

python -m tools.transformers_names
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers

from reshard.formats.errors import ReshardError
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import numbers_in, without_numbers
from reshard.formats.notation.architecture_files import HEADS, built_in_architectures, find_architecture, read_document
from reshard.formats.notation.components import component_names, components, whole
from reshard.formats.notation.format import Pattern, Rules, Types, lines_of_types
from reshard.formats.notation.format_file import PROGRAMS, format_of
from reshard.mesh.plan import make_plan
from reshard.model.binding import bind
from reshard.model.model import AxisSizes, FullTensor, Kind, Model
from reshard.placement.arrangement import arrangement_of
from tools.tables import by_reason, text_of

OUTPUT = PROGRAMS / "transformers.json"
LEVELS = {"lines": 3, "published": 3, "refused": 2, "beyond": 2}
_DTYPES = {torch.float32: "F32", torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL", torch.bfloat16: "BF16"}
_LEAST = 3
"""Names that a prefix must explain to be a line."""

Line = dict[str, Any]


class NotExpressibleError(Exception):
    """A conversion that a format cannot express."""


@dataclass(frozen=True)
class Observed:
    """Facts about a model in transformers: its class, its type, the lines for it, or the reason why there can
    be none.
    """

    name: str
    model_type: str
    lines: Mapping[str, Line] = field(default_factory=dict)
    published: Mapping[str, Line] = field(default_factory=dict)
    """Lines for the names in its checkpoints, where they are not those of its architecture file."""
    reason: str | None = None
    beyond: str | None = None
    """Tensors of its modules that its checkpoints lack: buffers, or second names of tensors."""


def checkpoint_of(built: Any) -> tuple[dict[str, Any], list[FullTensor]]:
    """The config.json and the tensors that a model, on the meta device, would be saved as."""
    from transformers.core_model_loading import revert_weight_conversion

    config = json.loads(built.config.to_json_string()) | {"architectures": [type(built).__name__]}
    own = {name: tensor for name, tensor in built.state_dict().items() if name not in built.all_tied_weights_keys}
    saved = revert_weight_conversion(built, own)
    saved = {name: tensor for name, tensor in saved.items() if "*" not in name}  # what it cannot revert
    return config, [FullTensor(name, _DTYPES[t.dtype], tuple(t.shape), "transformers") for name, t in saved.items()]


def bound(built: Any) -> Model:
    """The same, bound to its architecture. Raises ReshardError."""
    config, tensors = checkpoint_of(built)
    return bind(find_architecture(config, OUTPUT), config, tensors)


def observe(model_type: str, built: Any) -> Observed:
    """Observe how transformers converts a model's tensors."""
    name = type(built).__name__
    try:
        model = bound(built)
        own = dict(_templates(model))
        conversions = _Conversions(built, own)
        found = list(conversions.lines(model))
        packed = {own[source][0] for target, line in found for source in line.get("packed", ())}
        parts = {line["from"][0] for _, line in found if "packed" in line}
        lines = list(merged([(target, _public(line)) for target, line in found], packed, parts))
        lines += conversions.of_absent(model, lines, {target for target, _ in found})
        lines += _tied(built, lines, dict(found))
        lines += _of_heads(own, lines)
        again = [Pattern(line["to"]) for line in lines if line.get("also")]
        there = {target for target, _ in found} | {
            name for name in built.state_dict() if any(pattern.match(name) is not None for pattern in again)
        }
        beyond = [name for name in built.state_dict() if name not in there]
        why = f"transformers' modules have '{beyond[0]}', which checkpoints do not have" if beyond else None
        held = {id(each) for key, each in built.named_parameters(remove_duplicate=False) if key in there}
        twice = {
            key
            for key, each in built.named_parameters(remove_duplicate=False)
            if id(each) in held or key in built.all_tied_weights_keys
        }
        if not {*beyond} <= twice | {key for key, _ in built.named_buffers()}:
            raise NotExpressibleError(str(why))
        saved = [(pattern, generalized(saved_as, saved_as, pattern)) for saved_as, (pattern, _) in own.items()]
        published = merged([(to, {"from": [source], "to": to}) for source, to in saved], set())
        observed = Observed(name, model_type, _by_text(lines), _by_text(published), beyond=why)
        _check(observed, model, built)
        return observed
    except ReshardError as error:
        return Observed(name, model_type, reason=error.message)
    except NotExpressibleError as error:
        return Observed(name, model_type, reason=str(error))


def _check(observed: Observed, model: Model, built: Any) -> None:
    """Raise NotExpressibleError unless the lines give the names and shapes of the model itself."""
    lines = lines_of_types(document_of([observed])["lines"])
    classes = frozenset({observed.name})
    format = replace(format_of("transformers"), rules=Rules(lines, keep=True), types=Types(classes=classes))
    stored = {each.name: each.geometry.shape(0) for each in arrangement_of(make_plan(model, Mesh()), format).stored}
    for name, tensor in built.state_dict().items():
        if stored.get(name) != tuple(tensor.shape) and (name in stored or not observed.beyond):
            raise NotExpressibleError(f"transformers' modules have '{name}' of another form")


def _by_text(lines: Iterable[Line]) -> dict[str, Line]:
    return {json.dumps(line, sort_keys=True): line for line in lines}


def _public(line: Line) -> Line:
    return {key: value for key, value in line.items() if key != "packed"}


def _templates(model: Model) -> Iterator[tuple[str, tuple[str, Kind]]]:
    """For each tensor, its name as rules see it, with indices as ``{layer}``, and its kind."""
    for tensor in model.tensors:
        yield tensor.name, (tensor.kind.pattern, tensor.kind)


class _Conversions:
    """Asks transformers' rules of conversion of a model."""

    def __init__(self, built: Any, own: Mapping[str, tuple[str, Kind]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(built)
        self._built, self._own, self._known = built, own, built.state_dict()
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {pattern: entry for entry in self._converters for pattern in entry.source_patterns}

    def lines(self, model: Model) -> Iterator[tuple[str, Line]]:
        """A line for each tensor that transformers has, with its name there. Raises NotExpressibleError."""
        from transformers.core_model_loading import dot_natural_key

        groups: dict[str, tuple[Any, dict[str, str]]] = {}
        self._sizes = AxisSizes(model.architecture, model.config, {})
        self._own_lines = model.architecture.tensors.keys() - model.architecture.derived
        for tensor in sorted(model.tensors, key=lambda tensor: dot_natural_key(tensor.name)):
            target, pattern = self._renamed(tensor.name)
            if pattern is None:
                if target in self._known:
                    yield target, self._line(target, [tensor.name], ())
                continue
            entry, names = groups.setdefault(target, (copy.deepcopy(self._by_pattern[pattern]), {}))
            entry.add_tensor(target, tensor.name, pattern, torch.empty(tensor.shape, device="meta"))
            names[tensor.name] = pattern
        for target, (entry, names) in groups.items():
            yield from self._converted(target, entry, names)

    def of_absent(self, model: Model, lines: Iterable[Line], present: set[str]) -> Iterator[Line]:
        """Lines of tensors that this model does not have and others of its type do, such as a head that is tied here,
        where ``lines`` would give them another name than transformers. ``present`` are the modules' names that it has.
        """
        prefixes = {line["from"][0][:-2]: line["to"][:-2] for line in lines if line["to"].endswith("**")}
        for template in (name for name in model.architecture.tensors if not {*"{*"} & {*name}):
            target, pattern = self._renamed(template)
            if pattern is not None or target not in self._known.keys() - present:
                continue
            if _replaced(template, prefixes) != target:
                yield {"from": [template], "to": target}

    def _renamed(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self._built.base_model_prefix
        target, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self._known)
        if target not in self._known and name in self._known:
            target, pattern = rename_source_key(name, [], [], prefix, self._known)
        return target, pattern

    def _converted(self, target: str, entry: Any, names: Mapping[str, str]) -> Iterator[tuple[str, Line]]:
        operations = [(type(each).__name__, getattr(each, "dim", None)) for each in entry.operations]
        order = list(entry.source_patterns)
        found = entry.convert(target, model=self._built, config=self._built.config)
        targets = [name for name in found if name in self._known]
        sources = sorted(names, key=lambda name: order.index(names[name]))
        match operations:
            case [("MergeModulelist", 0)] | [("MergeModulelist", 0), ("Concatenate", 1)]:
                first = {names[name]: name for name in reversed(sources)}
                yield targets[0], self._line(targets[0], [first[pattern] for pattern in order if pattern in first], ())
            case [("ErnieFuseAndSplitTextVisionExperts", None)]:
                first = {names[name]: name for name in reversed(sources)}
                for number, each in enumerate(targets):
                    line = self._line(each, [first[pattern] for pattern in order], ())
                    yield each, line | {"share": [number, len(targets)]}
            case [("Concatenate", dim)] if self._are_sized(sources):
                line = self._line(targets[0], sources, ())
                if dim or self._own[sources[0]][1].rule.arrow is not None:
                    line["dim"] = dim
                yield targets[0], line
            case [("PermuteForRope", None)] if len(sources) == 1:
                yield targets[0], self._line(targets[0], sources, ()) | {"halves": self._last_factor(sources[0])}
            case [("Interleave", dim)] if len(parts := self._parts(sources[0])) > 1:
                yield targets[0], self._line(targets[0], sources, ()) | {"from": parts, "packed": sources, "dim": dim}
            case _ if len(sources) == 1 and self._takes_apart(operations):
                turned = getattr(entry.operations[-1], "permute_layer_names", ())
                yield from self._apart(sources[0], [*found], turned)
            case [("Transpose", None)]:
                yield targets[0], self._line(targets[0], sources, ("output_first",))
            case _:
                words = ", ".join(name for name, _ in operations)
                raise NotExpressibleError(f"'{sources[0]}' goes through {words} in transformers")

    def _are_sized(self, sources: Iterable[str]) -> bool:
        """Whether config.json gives the sizes of tensors that are joined: they are the only way to part them again."""
        known, kinds = self._sizes.of({}).keys(), [self._own[name][1] for name in sources]
        return all(not kind.template.endswith("*") and kind.rule.axes <= known for kind in kinds)

    def _takes_apart(self, operations: Sequence[tuple[str, int | None]]) -> bool:
        """Whether a tensor becomes the components that its rule has."""
        names = [name for name, _ in operations if name not in {"PermuteForRope", "Interleave"}]
        return names in (["Chunk"], ["Split"])

    def _parts(self, source: str) -> list[str]:
        """The names of a packed tensor's components: those of modules that have them apart, if no tensor has these."""
        template, kind = self._own[source]
        labelled, unpacked = component_names(template, kind.rule)
        is_free = template.endswith((".weight", ".bias")) and not self._own_lines & unpacked.keys()
        return [*(unpacked if is_free else labelled)]

    def _last_factor(self, source: str) -> str:
        """The last axis of a tensor's output, within which positions rotate."""
        rule = self._own[source][1].rule
        part = (components(rule) or (whole(rule),))[0]
        return str(part.factors[part.counts[0] - 1].axis)

    def _apart(self, source: str, targets: Sequence[str], turned: Sequence[str]) -> Iterator[tuple[str, Line]]:
        """A packed tensor, the components of which transformers has as tensors of their own. ``turned`` has words in
        the names of those in which the pairs of each head lie as halves.
        """
        template, parts = self._own[source][0], self._parts(source)
        if len(parts) != len(targets):
            raise NotExpressibleError(f"'{source}' goes apart into {len(targets)} tensors in transformers")
        for own, target in zip(parts, targets, strict=True):
            halves = {"halves": self._last_factor(source)} if any(word in target for word in turned) else {}
            yield target, {"from": [own], "to": generalized(target, source, template), "packed": [source], **halves}

    def _line(self, target: str, sources: Sequence[str], options: Sequence[str]) -> Line:
        templates = [self._own[name][0] for name in sources]
        to = generalized(target, sources[0], templates[0])
        indices, numbers = _INDEX.findall(templates[0]), numbers_in(to)
        if len(indices) == len(numbers) == 1 and not _INDEX.findall(to):
            shift = numbers[0] - numbers_in(sources[0])[-1]
            to = without_numbers(to, indices[0])
            return {"from": templates, "to": to, "shift": shift, **dict.fromkeys(options, True)}
        return {"from": templates, "to": to, **dict.fromkeys(options, True)}


def generalized(target: str, source: str, template: str) -> str:
    """A name of a program's with the indices of a tensor's template, as far as it has them, in their order."""
    values = re.findall(r"(?<=\.)[0-9]+(?=\.)", _aligned(source, template))
    left, segments = [*zip(values, _INDEX.findall(template), strict=False)], target.split(".")
    for place, segment in enumerate(segments):
        for number, (value, index) in enumerate(left):
            if segment == value:
                segments[place] = index
                del left[: number + 1]
                break
    return ".".join(segments)


_INDEX = re.compile(r"\{\w+\}")


def _aligned(source: str, template: str) -> str:
    """The end of a name that has as many segments as its template; only numbers that are indices in the template."""
    segments, pattern = source.split("."), template.split(".")
    ends = zip(reversed(segments), reversed(pattern), strict=False)
    return ".".join(["", *[value if index.startswith("{") else "" for value, index in ends][::-1], ""])


def merged(lines: Iterable[tuple[str, Line]], packed: set[str], parts: Container[str] = ()) -> Iterator[Line]:
    """One line for tensors that differ in indices, with prefixes in the place of many names, and one for each of the
    ``parts`` of ``packed`` tensors.
    """
    found: dict[tuple[object, ...], Line] = {}
    for _, line in lines:
        key = (*line["from"], *line.get("share", ()))
        if found.setdefault(key, line) != line:
            raise NotExpressibleError(f"'{line['from'][0]}' becomes '{found[key]['to']}' and '{line['to']}'")
    plain = {line["from"][0]: line["to"] for line in found.values() if len(line["from"]) == 1 and len(line) == 2}
    plain = {source: to for source, to in plain.items() if _INDEX.findall(source) == _INDEX.findall(to)}
    prefixes = dict(sorted(_prefixes(plain, packed), key=lambda pair: -len(pair[0])))
    for line in found.values():
        source = line["from"][0]
        if source not in plain or source in parts or _replaced(source, prefixes) != line["to"]:
            yield line
    for prefix, new in prefixes.items():
        yield {"from": [f"{prefix}**"], "to": f"{new}**"}


def _replaced(name: str, prefixes: Mapping[str, str]) -> str:
    """A name after the first of its prefixes is replaced."""
    found = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if found is None else prefixes[found] + name[len(found) :]


def _prefixes(plain: Mapping[str, str], packed: set[str]) -> Iterator[tuple[str, str]]:
    """Prefixes that are replaced in most names that begin with them; no ``packed`` one, which goes apart, does."""
    tried: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for source, to in plain.items():
        one, other = source.split("."), to.split(".")
        same = next((i for i, (a, b) in enumerate(zip(one[::-1], other[::-1], strict=False)) if a != b), None)
        count = min(len(one), len(other)) if same is None else same
        for length in range(count, 0, -1):
            prefix, new = (".".join([*words[:-length], ""]) if words[:-length] else "" for words in (one, other))
            tried[prefix][new] += 1
    taken: dict[str, str] = {}
    for prefix in sorted(tried, key=len):
        new, count = max(tried[prefix].items(), key=lambda pair: pair[1])
        covered = [source for source in plain if source.startswith(prefix)]
        right = [source for source in covered if plain[source] == new + source[len(prefix) :]]
        better = [source for source in right if _replaced(source, taken) != plain[source]]
        is_free = not any(_INDEX.sub("{}", name).startswith(_INDEX.sub("{}", prefix)) for name in packed)
        if is_free and len(better) >= _LEAST and 2 * len(right) > len(covered):
            taken = {prefix: new, **taken}
            yield prefix, new


def _tied(built: Any, lines: Sequence[Line], line_of: Mapping[str, Line]) -> Iterator[Line]:
    """The names of tensors that a model has twice; ``line_of`` has the line of each of its tensors."""
    for each in (built.config, built.config.get_text_config()):
        each.tie_word_embeddings = True
    ties = {**built.get_expanded_tied_weights_keys(all_submodels=True), **built.all_tied_weights_keys}
    prefixes = [(line["from"][0][:-2], line["to"][:-2]) for line in lines if line["to"].endswith("**")]
    known = {line["to"]: line["from"][0] for line in lines if len(line["from"]) == 1}
    for target, source in ties.items():
        if numbers_in(target) == numbers_in(source) and [*line_of.get(source, {})] == ["from", "to"]:
            template = line_of[source]["from"][0]
            yield {"from": [template], "to": generalized(target, source, template), "also": True}
        elif not numbers_in(f"{target}.{source}"):
            of = next((old + source[len(new) :] for old, new in prefixes if source.startswith(new)), source)
            yield {"from": [known.get(source, of)], "to": target, "also": True}


def _of_heads(own: Iterable[str], lines: Sequence[Line]) -> Iterator[Line]:
    """The names of heads that fine-tuned models have beside a model, where all other tensors are inside it."""
    if any(line["from"] == ["**"] for line in lines):
        names = ["lm_head.weight", *(name.replace(".*", ".**") for name in read_document(HEADS)["tensors"])]
        taken = {name.partition(".")[0] for name in own}
        yield from ({"from": [name], "to": name} for name in names if name.partition(".")[0] not in taken)


def document_of(observed: Sequence[Observed]) -> dict[str, Any]:
    """The file's content: lines with the classes that they are for, and what a format cannot express.

    The first class of a model type stands for the type, too. Lines of single tensors come before those of prefixes, of
    which the longest is the first, and those that hold only where a tensor is not there before all.
    """
    refused, beyond = dict[str, str](), dict[str, str]()
    first: dict[str, str] = {}
    lines, published = list[tuple[str, Line, str]](), list[tuple[str, Line, str]]()
    for one in observed:
        names = [one.name, one.model_type][: 1 + (first.setdefault(one.model_type, one.name) == one.name)]
        refused |= dict.fromkeys(names, one.reason) if one.reason else {}
        beyond |= dict.fromkeys(names, one.beyond) if one.beyond else {}
        for of, own in ((lines, one.lines), (published, one.published)):
            of += [(key, line, name) for key, line in own.items() for name in names]
    return {
        "classes": sorted({one.name for one in observed}),
        "refused": refused,
        **({"beyond": by_reason(beyond)} if beyond else {}),
        "lines": _of_types(lines),
        **({"published": _of_types(published)} if published else {}),
    }


def _of_types(lines: Iterable[tuple[str, Line, str]]) -> list[dict[str, Any]]:
    """Lines, each with its text and a type that it is for, by their types."""
    types: dict[str, set[str]] = defaultdict(set)
    line_of: dict[str, Line] = {}
    for key, line, name in lines:
        line_of[key] = line
        types[key].add(name)
    groups: list[tuple[tuple[list[str], bool], dict[str, list[Line]]]] = []
    for key in sorted(line_of, key=lambda key: rank_of(line_of[key])):
        line, of = line_of[key], (sorted(types[key]), "without" in line_of[key])
        is_prefix, _ = rank_of(line)
        group = next((tensors for names, tensors in groups if names == of and not is_prefix), None)
        if group is None:
            group = {}
            groups.append((of, group))
        group.setdefault(line["to"], []).append({name: value for name, value in line.items() if name != "to"})
    return [{"tensors": _short(tensors), "types": of} for (of, _), tensors in groups]


def rank_of(line: Line) -> tuple[bool, int]:
    """The place of a line among all: prefixes come last, the longest first."""
    prefix = line["from"][0]
    is_prefix = prefix.endswith("**") and (prefix != line["to"] or "." in prefix.removesuffix(".**"))  # or a head
    return (True, -len(prefix)) if is_prefix else (False, -("without" in line))


def _short(tensors: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
    """The lines of each target in their shortest form."""
    found: dict[str, Any] = {}
    for to, of in tensors.items():
        entries = [line | {"from": line["from"][0] if len(line["from"]) == 1 else line["from"]} for line in of]
        first = entries[0]["from"] if [*entries[0]] == ["from"] else entries[0]
        found[to] = first if len(entries) == 1 else entries
    return found


def zoo() -> Iterator[tuple[str, Any]]:
    """Each model of the zoo with its type, on the meta device."""
    from tests.zoo import ZOO

    for entry in ZOO.values():
        with torch.device("meta"):
            yield entry.model_type, entry.build()


def unobserved(observed: Iterable[str]) -> dict[str, str]:
    """The model types with rules that transformers builds, without the observed ones, and why they are refused."""
    from transformers import CONFIG_MAPPING

    types = {*built_in_architectures()} & {*CONFIG_MAPPING} - {*observed}
    return dict.fromkeys(sorted(types), "what transformers makes of its tensors has not been observed")


def document_of_zoo() -> dict[str, Any]:
    """The content of the file for the models of the zoo."""
    observed = [observe(*each) for each in zoo()]
    document = document_of(observed)
    return {**document, "refused": by_reason(document["refused"] | unobserved(one.model_type for one in observed))}


if __name__ == "__main__":
    made_with = {"transformers": transformers.__version__}
    OUTPUT.write_text(text_of(document_of_zoo(), made_with, LEVELS), encoding="utf-8")
