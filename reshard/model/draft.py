"""A first version of an architecture file, for a model without rules: inferred, to be checked by a person.

A tensor's purpose comes from transformers' own ``base_model_tp_plan`` of the model type, if transformers is installed
and has one, and from the tensor's name. Its dimensions come from the numbers in ``config.json``. It is split only if
name and numbers agree; otherwise it is replicated, with a comment that says so. A draft takes effect only when it is
passed with ``--plan``.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import tomli_w

from formats.errors import CheckpointError, PlanError
from formats.files.checkpoint import open_checkpoint
from formats.files.sharded import is_sharded
from formats.notation.architecture import is_index
from formats.notation.architecture_document import architecture_from_document
from formats.notation.axes import parse
from formats.quantization.methods import scheme_of
from formats.quantization.settings import quantization_settings
from formats.store import FilePath
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model


@dataclass(frozen=True)
class Draft:
    """The text of a file, the model that it fits, and how many of its lines are marked to be checked."""

    text: str
    model: Model
    checks: int


def draft_of(path: FilePath) -> Draft:
    """A draft for a checkpoint's folder. Raises CheckpointError and PlanError."""
    if is_sharded(path):
        raise CheckpointError(f"{path} is split already", "a draft is made from a full checkpoint")
    checkpoint = open_checkpoint(path)
    tensors = dict(checkpoint.tensors)
    if checkpoint.config.get("tie_word_embeddings") is False:
        tensors |= {alias: tensors[kept]._replace(name=alias) for alias, kept in checkpoint.aliases.items()}
    return draft(checkpoint.config, [FullTensor(t.name, t.dtype, t.shape, t.file.name) for t in tensors.values()])


def draft(config: Mapping[str, Any], tensors: Sequence[FullTensor]) -> Draft:
    """A draft for tensors of these names and shapes. Raises PlanError where a quantized weight hides its shape."""
    sizes = _Sizes(config, tensors)
    lines = _consistent(list(_lines(config, tensors, sizes)))
    text = _text(config, sizes, lines)
    name = str(config.get("model_type") or "draft")
    model = bind(architecture_from_document(tomllib.loads(text), name, "draft"), config, tensors, every_rule=True)
    return Draft(text, model, text.count("# CHECK:"))


# ------------------------------------------------------------------------------------------------------------ sizes

_KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed", "dim", "model_dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "head": ("head_dim", "kv_channels", "attention_head_dim", "head_size", "d_head"),
    "ff": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "hidden_dim", "d_inner"),
    "moe_ff": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "shared_ff": (
        "shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size",
    ),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "expert": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "layer": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "shared": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
}  # fmt: skip
_SECTIONS = ("text_config", "llm_config", "language_config")


class _Sizes:
    """The sizes of the axes: an expression over the config, and what it is here."""

    def __init__(self, config: Mapping[str, Any], tensors: Sequence[FullTensor]) -> None:
        inner = {key: config[key] for key in _SECTIONS if isinstance(config.get(key), dict)}
        self.section = next((key for key in inner if not self._key_in(config, "hidden")), None)
        self.settings = {**config, **inner[self.section]} if self.section else dict(config)
        self.scheme = scheme_of(self.settings)
        self.names = {tensor.name for tensor in tensors}
        self.keys = {axis: key for axis in _KEYS if (key := self._key_in(self.settings, axis)) is not None}
        self.texts: dict[str, str] = {}
        self.values: dict[str, int] = {}
        self._seen = {size for tensor in tensors for size in tensor.shape or ()}
        self._attention()
        self._rest()

    @staticmethod
    def _key_in(settings: Mapping[str, Any], axis: str) -> str | None:
        known = (key for key in _KEYS[axis] if isinstance(settings.get(key), int) and settings[key] is not True)
        return next((key for key in known if settings[key] > 0), None)

    def _set(self, axis: str, text: str, value: int) -> None:
        self.texts[axis], self.values[axis] = text, value

    def _attention(self) -> None:
        for axis in ("hidden", "layer", "vocab", "expert"):
            if axis in self.keys:
                self._set(axis, self.keys[axis], self.settings[self.keys[axis]])
        heads, hidden = self.settings.get(self.keys.get("heads", "")), self.values.get("hidden")
        if not heads or not hidden or "kv_lora_rank" in self.settings:
            return  # latent attention has sizes of its own
        named = self.keys["heads"]
        is_single = "kv" not in self.keys and self.settings.get("multi_query") is True
        kv = self.settings[self.keys["kv"]] if "kv" in self.keys else 1 if is_single else heads
        if heads % kv or ("head" not in self.keys and hidden % heads):
            return
        self._set("kv", f"{self.keys['kv']} or {named}" if "kv" in self.keys else "1" if is_single else named, kv)
        self._set("group", f"{named} / kv", heads // kv)
        fallback = f"{self.keys.get('hidden')} / {named}"
        known = self.settings[self.keys["head"]] if "head" in self.keys else hidden // heads
        self._set("head", f"{self.keys.get('head', 'head_dim')} or {fallback}", known)

    def _rest(self) -> None:
        for axis in ("ff", "moe_ff", "shared_ff"):
            if axis in self.keys:
                size = self.settings[self.keys[axis]]
                if {size, 2 * size} & self._seen:
                    self._set(axis, self.keys[axis], size)
        hidden, moe = self.values.get("hidden", 0), self.values.get("moe_ff", 0)
        if "ff" not in self.values and 4 * hidden in self._seen:
            self._set("ff", "4 * hidden", 4 * hidden)
        if "shared_ff" not in self.values and "shared" in self.keys and moe:
            self._set("shared_ff", f"{self.keys['shared']} * moe_ff", self.settings[self.keys["shared"]] * moe)

    def value(self, text: str) -> int | None:
        """What a shape of these axes is, None where an axis is unknown."""
        shape = parse(text)
        return math.prod(shape.sizes(self.values)) if shape.axes <= self.values.keys() else None


# ------------------------------------------------------------------------------------------------- what a tensor is


@dataclass(frozen=True)
class _Role:
    """What a weight is for: on which side it is split, and the shapes that this side may have, likelier ones first."""

    side: str
    shapes: tuple[str, ...]
    check: str | None = None


_QUERY, _KEY = "(kv group head)", "(kv head)"
_BLOCKS = "(q: kv group head + k: kv head + v: kv head)"
_BY_HEAD = "(kv (q: group + k: 1 + v: 1) head)"
_PACKED = "q, k and v are packed: in blocks, in another order, or head by head?"
_PAIR = "gate and up are packed: in this order, or interleaved?"
_ATTENTION = re.compile(r"attn|attention|mixer")
_TOWER = re.compile(r"vision|visual|audio|multi_modal|image|projector|tower")
_NAMES: tuple[tuple[str, str], ...] = (
    ("q", r"q|wq|q_proj|query|q_lin|q_attn|query_proj"),
    ("k", r"k|v|wk|wv|[kv]_proj|key|value|[kv]_lin|key_proj|value_proj"),
    ("qkv", r"qkv|wqkv|qkv_proj|query_key_value|c_attn|in_proj_qkv|w_pack|att_proj"),
    ("o", r"o|wo|o_proj|out_proj|out_lin|dense|c_proj|attn_out|o_attn"),
    ("gate_up", r"gate_up_proj|gate_and_up_proj|w12|wi|gate_up|gate_up_projs"),
    ("up", r"gate_proj|up_proj|w1|w3|fc1|fc_in|c_fc|c_fc_0|c_fc_1|dense_h_to_4h|lin1|fc_up|ff_proj|up|intermediate"),
    ("down", r"down_proj|w2|fc2|fc_out|c_proj|dense_4h_to_h|lin2|fc_down|ff_out|down"),
    ("vocab", r"embed_tokens|wte|word_embeddings|embed_in|embeddings?|tok_embeddings|lm_head|embed_out|output|decoder"),
)


def _named_role(path: Sequence[str]) -> str | None:
    """What the last word of a module's name stands for, with the words before it."""
    last, before = path[-1].lower(), ".".join(path[:-1]).lower()
    if last == "dense" and before.endswith("intermediate"):
        return "up"
    if last == "dense" and before.endswith("output"):
        return "o" if _ATTENTION.search(before) else "down"
    for role, pattern in _NAMES:
        if not re.fullmatch(pattern, last):
            continue
        if role in {"q", "k", "qkv", "o"} and not _ATTENTION.search(before):
            continue
        if role in {"up", "gate_up", "down"} and re.search("attn|attention", before):
            continue
        if role == "vocab" and "{layer}" in path:
            continue
        return role
    return None


def _role(path: Sequence[str], style: str | None) -> _Role | None:
    """The role of a module's weight by its name, as far as transformers' plan (``style``) does not say otherwise."""
    named = _named_role(path)
    width = _widths(path)
    roles = {
        "q": _Role("column", (_QUERY,)),
        "k": _Role("column", (_KEY,)),
        "qkv": _Role("column", (_BY_HEAD if path[-1] == "query_key_value" else _BLOCKS,), _PACKED),
        "o": _Role("row", (_QUERY,)),
        "gate_up": _Role("column", tuple(f"(gate: {ff} + up: {ff})" for ff in width), _PAIR),
        "up": _Role("column", width),
        "down": _Role("row", width),
        "vocab": _Role("column", ("vocab",)),
    }
    role = roles.get(named or "")
    splits = style is not None and not style.startswith("embedding")
    side = "column" if splits and "colwise" in str(style) else "row" if splits and "rowwise" in str(style) else None
    if side is None or (role is not None and role.side == side):
        return role
    shapes = (_QUERY, _KEY, *width) if side == "column" else (_QUERY, *width)
    return _Role(side, shapes, "transformers' plan splits it, its name does not say along which axis")


def _widths(path: Sequence[str]) -> tuple[str, ...]:
    """The axes that may be the width of an MLP, likelier ones first."""
    if any("shared" in part for part in path):
        return ("shared_ff", "ff", "moe_ff")
    if any("experts" in part for part in path):
        return ("moe_ff", "ff")
    return ("ff",)


def _transformers_styles(config: Mapping[str, Any], section: str | None) -> Mapping[str, str]:
    """transformers' ``base_model_tp_plan`` of a model type."""
    if find_spec("transformers") is None:
        return {}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    inner = config[section].get("model_type") if section else None
    for model_type in map(str, (inner, config.get("model_type"))):
        if model_type in CONFIG_MAPPING:
            return dict(CONFIG_MAPPING[model_type].base_model_tp_plan or {})
    return {}


def _style(template: str, styles: Mapping[str, str]) -> str | None:
    """The style of transformers' plan for a module."""
    generic = re.sub(r"\{\w+\}", "*", template)
    return next((style for key, style in styles.items() if f".{generic}".endswith(f".{key}")), None)


# ------------------------------------------------------------------------------------------------------------ lines


@dataclass
class _Line:
    """A rule: its shapes, each with the layers (or what else ``index`` counts) that it holds for, and what to check."""

    template: str
    index: str
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], str]]
    """Layers, shape on disk, shape in axes."""
    check: str | None = None
    is_named: bool = False
    """Whether its name says that it is a weight that is split."""

    @property
    def axes(self) -> set[str]:
        """The names in its shapes."""
        return {word for _, _, text in self.shapes for word in re.findall(r"[a-z_]+\b(?!:)", text)}

    def make_whole(self, why: str) -> None:
        """Give it to every rank."""
        self.shapes = [(layers, shape, _plain(shape)) for layers, shape, _ in self.shapes]
        self.check = why


def _plain(shape: Sequence[int]) -> str:
    return " ".join(map(str, shape))


def _lines(config: Mapping[str, Any], tensors: Sequence[FullTensor], sizes: _Sizes) -> Iterator[_Line]:
    styles = _transformers_styles(config, sizes.section)
    groups: dict[str, list[tuple[dict[str, int], tuple[int, ...]]]] = defaultdict(list)
    for tensor in tensors:
        if not _belongs_to_a_weight(tensor, sizes):
            template, indices = _template(tensor.name)
            groups[template].append((indices, tensor.shape or ()))
    for template, group in groups.items():
        index = _telling_index(template, group)
        shapes: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for indices, shape in group:
            shapes[shape].add(indices.get(index, -1))
        yield _line(template, index, {shape: sorted(found) for shape, found in shapes.items()}, styles, sizes)


def _telling_index(template: str, group: Sequence[tuple[Mapping[str, int], tuple[int, ...]]]) -> str:
    """The number in a tensor's name that says which shape it has."""
    for index in group[0][0]:
        if len({(indices[index], shape) for indices, shape in group}) == len({indices[index] for indices, _ in group}):
            return index
    if len({shape for _, shape in group}) == 1:
        return ""
    raise PlanError(f"no draft: the shapes of '{template}' follow none of the numbers in its name")


def _belongs_to_a_weight(tensor: FullTensor, sizes: _Sizes) -> bool:
    """Whether a tensor goes by the rule of a quantized weight."""
    if not quantization_settings(sizes.settings):
        return False
    weight = sizes.scheme.companion(tensor.name)
    if weight is None:
        return False
    if not weight.of_attention and weight.weight not in sizes.names:
        raise PlanError(
            f"no draft for '{tensor.name}': its weight is packed, so that its shape does not show",
            "make the draft from the model before it was quantized, and use that",
        )
    return True


def _template(name: str) -> tuple[str, dict[str, int]]:
    """The line of a tensor's name, with braces for numbers, and the numbers."""
    words: list[str] = []
    indices: dict[str, int] = {}
    for word in name.split("."):
        if not is_index(word):
            words.append(word)
            continue
        before = re.sub(r"\W", "", words[-1]) if words else "part"
        is_layer = not indices and not _TOWER.search(".".join(words))
        index = "layer" if is_layer else "expert" if before == "experts" else f"{before}_index"
        words.append(f"{{{index}}}")
        indices[index] = int(word)
    return ".".join(words), indices


def _in_tower(template: str) -> bool:
    return bool(_TOWER.search(template.partition("{layer}")[0]))


def _line(
    template: str, index: str, shapes: Mapping[tuple[int, ...], list[int]], styles: Mapping[str, str], sizes: _Sizes
) -> _Line:
    *around, last = template.split(".")
    path = [*(around or [last]), last]  # a parameter at the top is taken for its own module's
    module = path[:-1] if last in {"weight", "bias"} else path
    line = _Line(template, index, [(tuple(layers), shape, _plain(shape)) for shape, layers in shapes.items()])
    if _in_tower(template):
        return line
    role = _role(module, _style(".".join(module), styles))
    line.is_named = role is not None and "{layer}" in path and max(map(len, shapes)) > 1
    found = [_shape(shape, path, role, sizes) for shape in shapes]
    if all(text is not None for text, _ in found):
        entries = zip(line.shapes, found, strict=True)
        line.shapes = [(layers, shape, text or "") for (layers, shape, _), (text, _) in entries]
        line.check = next((check for _, check in found if check is not None), None)
    else:
        line.check = next(check for text, check in found if text is None)
    return line


def _shape(
    shape: tuple[int, ...], path: Sequence[str], role: _Role | None, sizes: _Sizes
) -> tuple[str | None, str | None]:
    """A tensor's shape in axes (None where they are not clear), and what is to be checked."""
    hidden = sizes.values.get("hidden")
    rest = list(shape)
    lead = ""
    if len(rest) == 3 and any("experts" in word for word in path) and rest[0] == sizes.values.get("expert"):
        lead, rest = "expert ", rest[1:]
    if len(rest) <= 1 or path[-1] == "bias" or "norm" in path[-2]:
        return _vector(rest, lead, path, role, sizes)
    if len(rest) != 2 or hidden is None:
        return None, "no axis is known to be split"
    output, width = rest
    if role is None:
        return _by_numbers(output, width, lead, sizes)
    for text in role.shapes:
        size = sizes.value(text)
        if size is None:
            continue
        stored = (text, "hidden") if role.side == "column" else ("hidden", text)
        wanted = (size, hidden) if role.side == "column" else (hidden, size)
        input_first = (width, output) == wanted
        if (output, width) == wanted and not (input_first and path[-2].startswith("c_")):
            return f"{lead}{stored[0]} {stored[1]}", role.check
        if input_first:
            return f"{lead}{stored[1]} -> {stored[0]}", role.check
    wanted_text = " or ".join(text for text in role.shapes if sizes.value(text) is not None) or "sizes"
    return None, f"by its name a {role.side}-parallel weight, but its numbers are not those of {wanted_text}"


def _vector(
    rest: Sequence[int], lead: str, path: Sequence[str], role: _Role | None, sizes: _Sizes
) -> tuple[str | None, str | None]:
    """Biases, norms, and other small things."""
    values = sizes.values
    if len(rest) == 2 and "norm" in path[-2]:
        for first in ("(kv group)", "kv"):
            if (sizes.value(first), values.get("head")) == tuple(rest):
                return f"{first} head", "a norm with a weight for each head"
    if len(rest) != 1:
        return (_plain(rest), None) if not rest else (None, "no axis is known to be split")
    [size] = rest
    if path[-1] == "sinks" and sizes.value("(kv group)") == size:
        return "(kv group)", None
    if "norm" in path[-2]:
        own = {"q": _QUERY, "k": _KEY}.get(path[-2][:1]) if "_" in path[-2] else None
        if own and sizes.value(own) == size != values.get("head"):
            return own, "a norm over all heads at once"
    elif role is not None and role.side == "column":
        for text in role.shapes:
            if sizes.value(text) == size:
                return lead + text, role.check
        return None, "the bias of a column-parallel weight, by its name, but of another size"
    elif path[-1] == "bias" and role is None and values.get("vocab") == size:
        return "vocab", "by its numbers alone"
    is_inside = "norm" in path[-2] and "{layer}" in path[:-3] and size != values.get("head")
    check = "a norm in the midst of what may be split" if is_inside else None
    for axis in ("hidden", "head"):
        if values.get(axis) == size:
            return lead + axis, check
    if check is not None:
        return None, check
    whole = any(word in ".".join(path) for word in ("norm", "rotary", "inv_freq"))
    return (lead + str(size), None) if whole else (None, "no axis is known to be split")


def _by_numbers(output: int, width: int, lead: str, sizes: _Sizes) -> tuple[str | None, str | None]:
    """A matrix whose name says nothing: split, if its numbers leave one way to read them."""
    hidden = sizes.values["hidden"]
    if output == sizes.values.get("expert") and width == hidden:
        return f"{output} hidden", None  # a router
    if (output == hidden) == (width == hidden):
        return None, "neither name nor numbers say what it is"
    known = (_QUERY, _KEY, "ff", "moe_ff", "shared_ff", "vocab")
    packed = {_BLOCKS: _PACKED, "(gate: ff + up: ff)": _PAIR}
    found = {text for text in (*known, *packed) if sizes.value(text) == (output if width == hidden else width)}
    if len(found) != 1 or (output == hidden and found & packed.keys()):
        return None, "neither name nor numbers say what it is"
    [text] = found
    check = packed.get(text) or "by its numbers alone"
    return lead + (f"{text} hidden" if width == hidden else f"hidden {text}"), check


def _consistent(lines: list[_Line]) -> list[_Line]:
    """Nothing is split along an axis unless all that by its name belongs to it is, and something gives and takes it."""
    blocks: dict[tuple[str, str], list[_Line]] = defaultdict(list)
    for line in lines:
        for axis in ("kv", "ff", "moe_ff", "shared_ff"):
            if axis in line.axes:
                blocks[line.template.partition("{")[0], axis].append(line)
    unclear = {_part(line.template) for line in lines if line.is_named and not line.axes & _SPLIT}
    for (_, axis), block in blocks.items():
        sides = {_is_row(text, axis) for line in block for _, shape, text in line.shapes if len(shape) > 1}
        for line in block:
            if len(sides) != 2:
                line.make_whole(f"no weight {'gives' if True in sides else 'takes'} what this one has of '{axis}'")
    for line in lines:
        if _part(line.template) in unclear and line.axes & (_SPLIT - {"vocab"}):
            line.make_whole("the numbers of a weight beside it are not clear")
    return lines


_SPLIT = {"kv", "group", "ff", "moe_ff", "shared_ff", "vocab"}


def _part(template: str) -> str:
    """The part of a layer that a tensor belongs to: its attention, its MLP."""
    before, _, after = template.partition("}.")
    return f"{before}.{after.partition('.')[0]}"


def _is_row(text: str, axis: str) -> bool:
    """Whether a weight has an axis in its input."""
    rule = parse(text)
    return rule.output_dim is not None and axis not in rule.dims[rule.output_dim].axes


# ------------------------------------------------------------------------------------------------------------- text


def _text(config: Mapping[str, Any], sizes: _Sizes, lines: Sequence[_Line]) -> str:
    used = {axis for line in lines for axis in line.axes} & sizes.values.keys()
    used |= {"kv", "group", "head"} & sizes.values.keys() if used & {"kv", "group"} else set()
    used |= {"hidden"} & sizes.values.keys() if "hidden" in " ".join(sizes.texts[axis] for axis in used) else set()
    used |= {"moe_ff"} if "shared_ff" in used and "moe_ff" in sizes.texts["shared_ff"] else set()
    for index in ("layer", "expert"):
        if any(f"{{{index}}}" in line.template for line in lines) and index in sizes.values:
            used.add(index)
    numbers = [layer for line in lines if line.index == "layer" for layers, _, _ in line.shapes for layer in layers]
    if numbers and max(numbers) >= sizes.values.get("layer", 0):
        used.discard("layer")  # more layers on disk than the config counts
    model_type = config.get("model_type")
    source = "names and shapes" if not _transformers_styles(config, sizes.section) else "transformers' plan and names"
    head = [
        f"# DRAFT, inferred from {source}: to be checked, passed with --plan, and its result verified.",
        "# CHECK marks what was not clear. A line of plain numbers is whole on every rank.",
        "# A rule names what each dimension of a tensor means, the output first: a dimension of two axes is (kv head).",
        "# [sizes] says where config.json has the length of an axis, [parallel] which axes are divided over the ranks.",
    ]
    if any(_in_tower(line.template) for line in lines):
        head.append("# CHECK: what belongs to a tower (vision, audio) is whole on every rank.")
    document = {
        "model_types": [model_type] if isinstance(model_type, str) and model_type.isprintable() else [],
        **({"section": sizes.section} if sizes.section else {}),
        "sizes": {axis: text for axis, text in sizes.texts.items() if axis in used},
        "parallel": _parallel(lines, used),
        "config": _config(sizes, used),
        "tensors": {line.template: _rules(line) for line in lines},
    }
    return _with_marks("\n".join([*head, tomli_w.dumps(document)]), lines)


def _with_marks(text: str, lines: Sequence[_Line]) -> str:
    """A draft's text with what is to be checked behind the first line of each rule."""
    checks = {tomli_w.dumps({line.template: ""}).removesuffix(' = ""\n'): line.check for line in lines if line.check}
    marks = {start: check for key, check in checks.items() for start in (f"{key} = ", f"[[tensors.{key}]]")}
    found = []
    for row in text.split("\n"):
        key = re.match(r"\[\[.*\]\]|.*? = ", row)
        check = marks.pop(key[0], None) if key else None
        found.append(f"{row}  # CHECK: {check}" if check else row)
    return "\n".join(found)


def _parallel(lines: Sequence[_Line], used: set[str]) -> dict[str, Any]:
    split = {axis for line in lines for axis in line.axes}
    families = [["kv", "group"]] if {"kv", "group"} & split else []
    families += [[axis] for axis in ("ff", "moe_ff", "shared_ff", "vocab") if axis in split & used]
    experts = {"ep": [["expert"]]} if "expert" in used else {}
    return {"tp": families, **experts, **({"pad": ["vocab"]} if "vocab" in split else {})}


def _config(sizes: _Sizes, used: set[str]) -> dict[str, str]:
    """What a rank's own config.json has."""
    config = {}
    if "kv" in used:
        config[sizes.keys["heads"]] = "kv * group"
        if "kv" in sizes.keys:
            config[sizes.keys["kv"]] = "kv"
        config[sizes.keys.get("head", "head_dim")] = "head"
    for axis in ("ff", "moe_ff", "shared_ff", "vocab"):
        if axis in used and sizes.texts[axis] == sizes.keys.get(axis):
            config[sizes.keys[axis]] = axis
    if "vocab" in used:
        config["pad_token_id"] = "pad_token_id if (pad_token_id or 0) < vocab else None"
    return config


def _rules(line: _Line) -> str | list[dict[str, str]]:
    by_text: dict[str, list[int]] = defaultdict(list)
    for layers, _, text in line.shapes:
        by_text[text] += layers
    *some, (rest, _) = sorted(by_text.items(), key=lambda item: len(item[1]))
    rules = [{"when": f"{line.index} in {sorted(found)}", "shape": text} for text, found in some]
    return [*rules, {"shape": rest}] if rules else rest
