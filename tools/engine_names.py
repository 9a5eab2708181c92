"""Writes ``formats/programs/vllm.json`` and ``sglang.json``: what an engine makes of the tensors of each model type,
from the engine itself.

Here for vLLM; with ``--program sglang`` it is SGLang, its model classes with towers alone, and
``SGLANG_PYTHON -m tests.oracles.sglang.observe FOLDER DUMPS`` observes. All else is the same.

    python -m tools.engine_names make FOLDER
    VLLM_PYTHON tests/oracles/vllm/observe.py FOLDER DUMPS
    python -m tools.engine_names more FOLDER DUMPS      # and observe again
    python -m tools.engine_names write FOLDER DUMPS
    python -m tools.engine_names registry FILE VERSION  # the classes in FILE, registry.py of a release of vLLM
    python -m tools.engine_names count                  # how many types of each kind

FOLDER gets a checkpoint for each model of ``tests/zoo`` in which each element has a number of its own. vLLM loads them
on 1, 2 and 4 ranks, and DUMPS gets what each rank holds. A model type whose shards, written by the general rules of
``vllm.toml``, are equal to that element for element is ``compared``. For each other one, lines are made from where the
numbers are found, and it is compared again: then it is ``described``. What still differs is ``refused``, with the
tensor. A model that did not load says nothing of vLLM, but that it was not compared; only of a class that is not in
``registry.json`` it says that vLLM has none. What only tests and this tool read stands in ``tests/oracles/vllm``:
``zoo.json.xz`` has a hash for each rank, ``observed.json`` has vLLM's module for each class of Hugging Face's, the
modules that were compared, and vLLM's errors.

Some tensors vLLM holds in bfloat16 whatever the model's dtype, and there numbers that lie near each other become one.
``more`` adds checkpoints of such a model in which the elements have the *digits* of their numbers, one digit a
checkpoint, which bfloat16 holds exactly. Elements that agree in every digit are the same element.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import lzma
import operator
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from reshard.api import split
from reshard.formats.errors import ReshardError
from reshard.formats.files.safetensors import build_header, read_header
from reshard.formats.notation.architecture_files import built_in_architectures, find_architecture
from reshard.formats.notation.components import components
from reshard.formats.notation.format import Format
from reshard.formats.notation.format_file import PROGRAMS, READ, format_of, read_format
from reshard.formats.notation.spellings import Spellings
from reshard.formats.notation.tables import HEADS
from reshard.mesh.plan import Degrees
from reshard.model.model import Model
from reshard.placement.arrangement import arrangement_of
from reshard.placement.portions import dropped_of
from reshard.placement.program_plan import plan_for
from reshard.source.opening import open_source
from tools.tables import MADE_WITH, by_reason, text_of
from tools.transformers_names import NotExpressibleError, document_of, generalized, merged, rank_of
from tools.transformers_names import Observed as Lines


@dataclass(frozen=True)
class Program:
    """A program that is observed, and the files of what it holds. ``models`` are the models of the zoo; empty: all."""

    name: str
    title: str
    models: tuple[str, ...] = ()

    @property
    def output(self) -> Path:
        """The table of model types."""
        return PROGRAMS / f"{self.name}.json"

    @property
    def oracles(self) -> Path:
        """The folder of what only tests and this tool read."""
        return Path(__file__).parents[1] / "tests" / "oracles" / self.name

    @property
    def fixture(self) -> Path:
        """A hash of what each rank holds."""
        return self.oracles / "zoo.json.xz"

    @property
    def observed(self) -> Path:
        """Modules and errors."""
        return self.oracles / "observed.json"


VLLM = Program("vllm", "vLLM")
SGLANG = Program("sglang", "SGLang", (
    "qwen2_vl", "qwen2_vl+tied", "qwen2_5_vl", "qwen2_5_vl+tied", "qwen3_vl", "qwen3_vl+tied", "qwen3_vl_moe",
    "internvl+untied", "internvl:qwen3+untied", "llava", "llava_onevision",
    "llava_next_video", "gemma3", "mistral3+untied", "glm4v", "glm4v_moe", "llama4", "qwen3_5", "qwen3_5_moe",
    "deepseek_vl", "janus", "lfm2_vl", "mllama", "paddleocr_vl", "step3p7", "gemma4", "minimax_m3_vl",
    "qwen3_omni_moe_thinker", "idefics2", "ernie4_5_vl_moe",
))  # fmt: skip
"""Models with towers: those of text alone are described by ``sglang.toml``."""
OUTPUT, ORACLES, FIXTURE, OBSERVED = VLLM.output, VLLM.oracles, VLLM.fixture, VLLM.observed
REGISTRY = ORACLES / "registry.json"
UNCOMPARED = "not compared with vLLM yet"
LEVELS = {"lines": 3, "seen": 3, "refused": 2, "lacking": 0}
PUBLISHED = json.loads((ORACLES / "published.json").read_text())
FIRST = 0x3F000000
"""The first number: as a float32, 0.5. All others are as bits one more than the one before."""
LAST = 0x3F800000
DEGREES = (1, 2, 4)
REFUSED = "refused: "
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL", "uint8": "U8"}

Line = dict[str, Any]
Held = Mapping[tuple[int, str], tuple[str, tuple[int, ...], bytes]]
"""Tensors of ranks: for a rank and a name, dtype, shape and bytes."""


# -- checkpoints


UNTIED = "+untied"
"""The ending of the name of a second model: one whose head is tied becomes the same with a head of its own."""
TIED = "+tied"
"""The ending of the name of a second model: the same whose head is the table of the vocabulary."""
TEXT = ":"
"""The text between the names of two models: that with towers has the second as its language model."""
ALONE = ("internvl-gpt_oss",)
"""Models that vLLM is not asked about: what it makes of them holds for no other model of their class, which one verdict
is for. They stay refused.
"""
HEAD, TABLES = "lm_head.weight", ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")


DIGIT = "+digit"
"""The ending of the name of a second model: one that vLLM holds in bfloat16 becomes the same with one digit a
number.
"""
DIGITS = re.compile(re.escape(DIGIT) + r"([0-9]+)$")
BITS = 7
"""The bits of a digit: as many as bfloat16's mantissa has."""


def digits_of(numbers: Any, place: int) -> Any:
    """The digit of numbers at a place, from 0, as float32 numbers from ``FIRST`` on that bfloat16 holds exactly."""
    return (FIRST + (((numbers - FIRST) >> (BITS * place) & (2**BITS - 1)) << 16)).astype("<u4")


def places_of(checkpoint: Path) -> int:
    """Return the number of digits that the numbers of a checkpoint need."""
    infos = [i for file in checkpoint.glob("*.safetensors") for i in read_header(file).tensors.values()]
    return -(-sum(int(np.prod(i.shape, dtype=int)) for i in infos if i.dtype == "F32").bit_length() // BITS)


def number(checkpoint: Path, out: Path, *, untied: bool = False, tied: bool = False, digit: int | None = None) -> None:
    """Write a checkpoint again, in float32, in which each element has a number of its own; ``untied`` with a head,
    ``tied`` without.

    With ``digit``, each element has this digit of its number instead. Names begin, and matrices lie, as in published
    ones of its type, and the config says also what only those say (``tests/oracles/vllm/published.json``).
    """
    config = json.loads((checkpoint / "config.json").read_text())
    begins = PUBLISHED["names"].get(config["model_type"], {})
    infos = sorted(i for file in checkpoint.glob("*.safetensors") for i in read_header(file).tensors.values())
    turned = tuple(PUBLISHED["turned"].get(config["model_type"], ()))  # whose published form has the input first
    infos = [i._replace(shape=(*i.shape[:-2], *i.shape[:-3:-1])) if i.name.endswith(turned) else i for i in infos]
    infos = [info._replace(name=_published(info.name, begins)) for info in infos]
    if untied:
        table = next(info for info in infos if info.name.endswith(TABLES) and len(info.shape) == 2)
        spellings = Spellings(find_architecture(config, checkpoint), config)
        infos.append(table._replace(name=_published(spellings.published(HEAD) or HEAD, begins)))
    tensors, data, first = [], [], FIRST
    for info in (info for info in infos if not (tied and info.name.endswith(HEAD))):
        if info.dtype in {"F32", "BF16", "F16"}:
            count = int(np.prod(info.shape, dtype=int))
            tensors.append((info.name, "F32", info.shape))
            numbers = np.arange(first, first + count, dtype="<u4")
            data.append((numbers if digit is None else digits_of(numbers, digit)).tobytes())
            first += count
        else:
            tensors.append((info.name, info.dtype, info.shape))
            data.append(info.file.read_bytes()[info.offset : info.offset + info.nbytes])
    if first > LAST:
        raise ValueError(f"{checkpoint} has more elements than there are numbers")
    out.mkdir(parents=True)
    (out / "model.safetensors").write_bytes(build_header(tensors, {"format": "pt"}) + b"".join(data))
    config = _filled(config, PUBLISHED["config"].get(config["model_type"], {}))
    config = _with_head(config, tied=tied) if tied or untied else config
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _published(name: str, begins: Mapping[str, str]) -> str:
    """A tensor's name with a published beginning in the place of that in modules."""
    begin = next(filter(name.startswith, begins), "")
    return begins.get(begin, "") + name.removeprefix(begin)


def _filled(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A config with more settings, also in its parts; a text is the name of the setting that has the value."""
    filled = dict(config)
    for key, value in more.items():
        if isinstance(value, Mapping):
            filled[key] = _filled(filled.get(key, {}), value)
        else:
            filled.setdefault(key, config.get(value, value) if isinstance(value, str) else value)
    return filled


def _joined(settings: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others in their place, also within their parts."""
    parts = {key: _joined(settings.get(key, {}), value) if isinstance(value, Mapping) else value
             for key, value in more.items()}  # fmt: skip
    return {**settings, **parts}


def _with_head(config: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    found = {k: _with_head(value, tied=tied) if isinstance(value, dict) else value for k, value in config.items()}
    return found | ({"tie_word_embeddings": tied} if "tie_word_embeddings" in found or "text_config" in found else {})


def is_tied(checkpoint: Path) -> bool:
    """Whether a checkpoint has a table of the vocabulary and no head."""
    names = {name for file in checkpoint.glob("*.safetensors") for name in read_header(file).tensors}
    return not any(name.endswith(HEAD) for name in names) and any(name.endswith(TABLES) for name in names)


def make(name: str, folder: Path, program: Program = VLLM) -> None:
    """Write the checkpoint of a model of the zoo; of some, with sizes that the program takes for granted."""
    from tests import zoo

    digit, whole = DIGITS.search(name), DIGITS.sub("", name)
    plain = whole.removesuffix(UNTIED)
    towers, _, text = plain.removesuffix(TIED).partition(TEXT)
    settings = _joined(PUBLISHED["sizes"].get(towers, {}), PUBLISHED.get(program.name, {}).get(towers, {}))
    if text:
        model_type, _, own = zoo.ZOO[text].build.args
        sizes = {**PUBLISHED["sizes"].get(text, {}), **settings.get("text_config", {})}
        settings = {**settings, "text_config": {**own, **sizes, "model_type": model_type}}
    with tempfile.TemporaryDirectory() as scratch:
        zoo.save(towers, Path(scratch) / plain, settings=settings)
        tied, place = plain.endswith(TIED), int(digit[1]) if digit else None
        number(Path(scratch) / plain, folder, untied=plain != whole, tied=tied, digit=place)


# -- what was observed


@dataclass(frozen=True)
class Case:
    """A model of the zoo, and what vLLM makes of it. ``failed`` has what vLLM could not do, and why.

    ``digits`` are the same model with a digit of each number, from the lowest.
    """

    name: str
    checkpoint: Path
    dump: Path
    failed: Mapping[str, str]
    digits: tuple[Case, ...] = ()
    program: Program = VLLM

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        found: dict[str, Any] = json.loads((self.checkpoint / "config.json").read_text())
        return found

    @cached_property
    def model(self) -> Model:
        """The checkpoint, bound to its rules."""
        return open_source(self.checkpoint).model

    @cached_property
    def built(self) -> dict[str, Any]:
        """vLLM's module, and the dtype and shape of each of its tensors in a bfloat16 model."""
        found: dict[str, Any] = json.loads((self.dump / "built.json").read_text())
        return found

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees at which vLLM loaded it."""
        if {"built", "tp1"} & {*self.failed}:
            return ()
        return tuple(tp for tp in DEGREES if f"tp{tp}" not in self.failed)

    def held(self, tp: int) -> Held:
        """Return the tensors that each rank of vLLM holds."""
        return held_in(self.dump / f"tp{tp}")


def held_in(folder: Path) -> Held:
    """Return the tensors in the files of each rank."""
    found = {}
    for file in sorted(folder.glob("model-rank-*.safetensors")):
        content, rank = file.read_bytes(), int(file.name.split("-")[2])
        for info in read_header(file).tensors.values():
            found[rank, info.name] = info.dtype, info.shape, content[info.offset : info.offset + info.nbytes]
    return found


def difference(vllm: Held, ours: Held) -> str | None:
    """The first thing in which two differ."""
    lacking, more = sorted(vllm.keys() - ours.keys()), sorted(ours.keys() - vllm.keys())
    if lacking:
        return f"vLLM has '{lacking[0][1]}', which would not be written"
    if more:
        return f"vLLM has no '{more[0][1]}'"
    for key in sorted(vllm):
        (dtype, shape, data), (other, form, bytes_) = vllm[key], ours[key]
        if (dtype, other) == ("BF16", "F32") and shape == form and data:
            bytes_ = _cast(bytes_)  # vLLM's loader casts what it reads to its own dtype; ``digits`` show the order
        elif dtype != other:
            return f"'{key[1]}' is {dtype} in vLLM, and would be {other}"
        if shape != form:
            return f"'{key[1]}' is {list(shape)} on a rank of vLLM's, and would be {list(form)}"
        if data != bytes_ and not _is_rounded(dtype, data, bytes_):
            return f"'{key[1]}' has other elements in vLLM"
    return None


def _cast(content: bytes) -> bytes:
    """float32 numbers as bfloat16, rounded to the nearest."""
    bits = np.frombuffer(content, "<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _is_rounded(dtype: str, one: bytes, other: bytes) -> bool:
    """Whether two float32 arrays are negative and differ only by rounding: both sides compute ``-exp``."""
    if dtype != "F32":
        return False
    a, b = np.frombuffer(one, "<f4"), np.frombuffer(other, "<f4")
    return bool((a < 0).all() and np.allclose(a, b, rtol=2.0**-22, atol=0))


def written(case: Case, format: Format, tp: int) -> Held:
    """Return the tensors that a format writes for these ranks. Raises ReshardError."""
    name = case.program.name
    with mock.patch.dict(READ, {name: format}), tempfile.TemporaryDirectory() as folder:
        split(case.checkpoint, Path(folder) / "out", tp=tp, format=name)
        return held_in(Path(folder) / "out")


def compare(case: Case, format: Format) -> str | None:
    """The first difference between what vLLM holds and what is written by a format; None: there is none."""
    try:
        arranged = arrangement_of(plan_for(case.model, format, Degrees()), format)
        ours = {(0, each.name): (_as_bfloat16(each.dtype, each), shape, b"") for each, shape in arranged.tensors_of(0)}
        built = case.built["tensors"]
        late = {key for key in case.held(1) if key[1] not in built}  # what vLLM registers as it loads
        want = {(0, name): (_DTYPES[dtype], (*shape,), b"") for name, (dtype, shape) in built.items()}
        found = difference(want, {key: value for key, value in ours.items() if key not in late})
    except ReshardError as error:
        return f"{REFUSED}{error.message}"
    found = found or _compare_held(case, format)
    if found is not None or not case.degrees or not is_narrowed(case):
        return found
    if len(case.digits) < places_of(case.checkpoint) or any(digit.degrees != case.degrees for digit in case.digits):
        return f"{REFUSED}vLLM holds numbers of it in bfloat16, and not all of their digits were observed"
    return next((why for digit in case.digits if (why := _compare_held(digit, format)) is not None), None)


def _compare_held(case: Case, format: Format) -> str | None:
    """The first difference between what ranks of vLLM hold and what is written for them."""
    for tp in case.degrees:
        try:
            found = difference(case.held(tp), written(case, format, tp))
        except ReshardError as error:
            if tp == 1 or "possible" not in f"{error.message} {error.hint}":
                return f"{REFUSED}{error.message}"  # else a degree that is refused
            continue
        if found is not None:
            return f"{found} (tp {tp})"
    return None


def _as_bfloat16(dtype: str, stored: Any) -> str:
    """The dtype that a tensor of a float32 model has in a bfloat16 one."""
    if dtype != "F32":
        return dtype
    if stored.constant is not None:
        return "F32" if stored.constant.dtype == "F32" else "BF16"
    lines = {portion.line.dtype for portion in stored.geometry.portions}
    return "F32" if "F32" in lines else "BF16"


# -- lines, from where the numbers are


@dataclass(frozen=True)
class Found:
    """Findings about one model in vLLM: lines, constants, and the tensors it leaves out. ``templates`` are its
    tensors.
    """

    lines: Sequence[tuple[str, Line]]
    constants: Sequence[Mapping[str, Any]]
    dropped: Sequence[str]
    templates: frozenset[str]


@cache
def general_rules(program: Program = VLLM) -> Format:
    """The rules that hold for all types without lines of their own."""
    return read_format(PROGRAMS / f"{program.name}.toml", {})


class Reading:
    """Finds the numbers of a checkpoint in what vLLM holds on one rank."""

    def __init__(self, case: Case, splits: Mapping[str, Line] | None = None) -> None:
        self._case, self._splits = case, splits or {}
        self._own = {t.name: (t.kind.pattern, t.kind) for t in case.model.tensors}
        format = general_rules(case.program)
        rules = format.rules
        beyond = replace(rules, dropped=tuple(each for each in rules.dropped if each.beyond is not None))
        for name in dropped_of(case.model, replace(format, rules=beyond)):
            del self._own[name]
        self._sources = {name: np.frombuffer(data, "<u4").reshape(shape)
                         for (_, name), (dtype, shape, data) in _stored(case.checkpoint)
                         if dtype == "F32" and name in self._own}  # fmt: skip
        self._integers = {name: (shape, data) for (_, name), (dtype, shape, data) in _stored(case.checkpoint)
                          if dtype != "F32"}  # fmt: skip
        filled = sorted((int(of.flat[0]), name) for name, of in self._sources.items() if of.size)
        self._starts, self._names = np.array([start for start, _ in filled]), [name for _, name in filled]
        self._end = max((int(of.flat[-1]) for of in self._sources.values() if of.size), default=FIRST) + 1
        self._parts: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._used: set[str] = set()
        self._seen = np.zeros(self._end - FIRST, dtype=bool)

    @cached_property
    def left_out(self) -> str | None:
        """A tensor of which vLLM has some elements, but not all: it reads the config in another way."""
        for _, (dtype, _, data) in self._case.held(1).items():
            if dtype == "F32":
                there = np.frombuffer(data, "<u4")
                self._seen[there[(there >= FIRST) & (there < self._end)] - FIRST] = True
        for name, of in self._sources.items():
            seen = self._seen[of.ravel() - FIRST]
            if seen.any() and not seen.all():
                return name
        return None

    def all(self) -> Found:
        """All lines. Raises NotExpressibleError."""
        held, lines, plain = self._case.held(1), list[tuple[str, Line]](), list[str]()
        constants: dict[str, tuple[str, tuple[int, ...], float]] = {}
        for (_, name), (dtype, shape, data) in sorted(held.items()):
            value = self._constant(dtype, data)
            if value is not None:
                constants[name] = (dtype, shape, value)
                continue
            lines += [(name, line) for line in self._line(name, dtype, shape, data)]
            plain.append(name)
        for source, parts in self._parts.items():
            lines += list(self._apart(source, [target for _, target in sorted(parts)]))
        dropped = sorted({template for name, (template, _) in self._own.items() if name not in self._used})
        kept = {template for name, (template, _) in self._own.items() if name in self._used}
        both = kept & {*dropped}
        if both:
            raise NotExpressibleError(f"vLLM has '{min(both)}' of some layers alone")
        return Found(lines, list(self._constants(constants, plain)), dropped, frozenset(kept | {*dropped}))

    def _constant(self, dtype: str, data: bytes) -> float | None:
        """The one value of all elements, if it is no number of the checkpoint's."""
        if dtype != "F32" or not data:
            return None
        values = np.frombuffer(data, "<f4")
        if not (values == values[0]).all() or FIRST <= values[:1].view("<u4")[0] < self._end:
            return None
        return float(values[0])

    def _same_integers(self, target: str, shape: tuple[int, ...], data: bytes) -> str | None:
        """The checkpoint's tensor of these integers; of several, the one whose name ends most as the target's."""
        same = [name for name, found in self._integers.items() if found == (shape, data)]
        return max(same, key=lambda name: len(_shared(_backwards(name), _backwards(target))), default=None)

    def _line(self, target: str, dtype: str, shape: tuple[int, ...], data: bytes) -> Iterator[Line]:
        if dtype != "F32":
            source = self._same_integers(target, shape, data)
            if source is None:
                raise NotExpressibleError(f"vLLM has '{target}' ({dtype}), which is in no checkpoint")
            self._used.add(source)
            yield self._made(target, [source], {})
            return
        there = np.frombuffer(data, "<u4").reshape(shape)
        inside = (there >= FIRST) & (there < self._end)
        if not inside.any():
            yield self._computed(target, there.view("<f4"))
            return
        if not (there[~inside] == 0).all():
            raise NotExpressibleError(f"vLLM computes '{target}'")
        numbers = there[inside]
        owners = np.searchsorted(self._starts, numbers, "right") - 1
        _, firsts = np.unique(owners, return_index=True)
        names = [self._names[owners[at]] for at in sorted(firsts)]
        self._used.update(names)
        yield from self._joined(target, there, numbers, names)

    def _joined(self, target: str, there: Any, numbers: Any, names: Sequence[str]) -> Iterator[Line]:
        if len(names) > 1:
            templates = list(dict.fromkeys(self._own[name][0] for name in names))
            first = {self._own[name][0]: name for name in reversed(names)}
            if len(templates) not in {len(names), 1} and len(names) % len(templates):
                raise NotExpressibleError(f"vLLM has '{target}' of unequal parts")
            yield self._made(target, [first[template] for template in templates], self._turned(there, names))
            return
        (name,) = names
        source = self._sources[name]
        if numbers.size < source.size:
            self._parts[name].append((int(numbers.min()), target))
        elif (numbers == source.ravel()).all():
            yield self._made(target, names, _ones(there.shape, source.shape))
        elif there.ndim > 1 and there.shape == (*source.shape[:-2], *source.shape[:-3:-1]) and (
            there == source.swapaxes(-1, -2)
        ).all():  # fmt: skip
            yield self._made(target, names, {"output_first": True})
        else:
            labels = [str(part.label) for part in components(self._own[name][1].rule)]
            if not labels:
                raise NotExpressibleError(f"vLLM has '{target}' in another order")
            yield self._made(target, names, {}, labels)

    def _turned(self, there: Any, names: Sequence[str]) -> dict[str, Any]:
        """Return ``output_first`` if stacked tensors lie output first where Hugging Face has the input first."""
        source = self._sources[names[0]]
        at = np.argwhere(there == source.flat[0])[0]
        is_turned = source.ndim > 1 and source.shape[-1] > 1 and there.ndim > 1 and (
            at[-1] + 1 >= there.shape[-1] or there[(*at[:-1], at[-1] + 1)] != source.flat[1]
        )  # fmt: skip
        return {"output_first": True} if is_turned else {}

    def _computed(self, target: str, there: Any) -> Line:
        for name, source in self._sources.items():
            if source.size == there.size and np.allclose(-np.exp(source.view("<f4").ravel()), there.ravel(), 1e-6, 0):
                self._used.add(name)
                return self._made(target, [name], {"function": "-exp", "dtype": "F32"})
        raise NotExpressibleError(f"vLLM has '{target}', which is in no checkpoint")

    def _apart(self, source: str, targets: Sequence[str]) -> Iterator[tuple[str, Line]]:
        """A packed tensor, the components of which vLLM has as tensors of their own."""
        template, kind = self._own[source]
        parts, (module, _, leaf) = components(kind.rule), template.rpartition(".")
        if len(parts) != len(targets):
            raise NotExpressibleError(f"'{source}' goes apart into {len(targets)} tensors in vLLM")
        for part, target in zip(parts, targets, strict=True):
            own = f"{module.rpartition('.')[0]}.{part.label}_proj.{leaf}"
            line: Line = {"from": [own], "to": generalized(target, source, template), "packed": [source]}
            yield target, line

    def _made(
        self, target: str, sources: Sequence[str], options: Mapping[str, Any], labels: Sequence[str] = ()
    ) -> Line:
        templates = [self._own[name][0] for name in sources]
        to, more = generalized(target, sources[0], templates[0]), dict(options)
        if self._case.built["tensors"].get(target, [""])[0] == "float32" and templates and sources[0] in self._sources:
            more["dtype"] = "F32"
        more |= self._splits.get(to, {})
        ends = {name.rpartition(".")[2] for name in (*templates, to)}
        if len(templates) > 1 and len(ends) == 1 and ends <= {"weight", "bias"} and not more:
            templates, to = [_any_leaf(name) for name in templates], _any_leaf(to)
        of_parts = [f"{name}.{label}" for name in templates for label in labels]
        return {"from": of_parts or templates, "to": to, **more}

    def _constants(
        self, found: Mapping[str, tuple[str, tuple[int, ...], float]], stored: Sequence[str]
    ) -> Iterator[Mapping[str, Any]]:
        """Constants beside a tensor that is there as often, in the module nearest to them."""
        general = {name: re.sub(r"(?<=\.)[0-9]+(?=\.)", "{}", name) for name in [*found, *stored]}
        groups: dict[str, list[str]] = defaultdict(list)
        for name in found:
            groups[general[name]].append(name)
        places: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for name in stored:
            places[general[name]].add(_numbers(name))
        for template, names in groups.items():
            wanted = {_numbers(name) for name in names}
            fits = [other for other, at in places.items() if at == wanted]
            values = {found[name] for name in names}
            if not fits or len(values) != 1:
                raise NotExpressibleError(f"vLLM has '{names[0]}', which is in no checkpoint")
            beside = max(fits, key=lambda other: (len(_shared(other, template)), other))
            ((dtype, shape, value),) = values
            model = (
                "model" if dtype == "F32" and self._case.built["tensors"].get(names[0], [""])[0] != "float32" else dtype
            )
            yield {"beside": _indexed(beside), "names": [_indexed(template)], "dtype": model, "shape": list(shape),
                   "value": value}  # fmt: skip


def _ones(there: Sequence[int], source: Sequence[int]) -> dict[str, Any]:
    """Return the places of dimensions of length 1 if two shapes differ in nothing else."""
    if tuple(there) == tuple(source) or [n for n in there if n != 1] != [n for n in source if n != 1]:
        return {}
    return {"ones": [place for place, length in enumerate(there) if length == 1]}


def _any_leaf(name: str) -> str:
    """``*`` in the place of ``weight`` and ``bias``: what is joined is joined with its bias."""
    return f"{name.rpartition('.')[0]}.*"


def _stored(folder: Path) -> Iterator[tuple[tuple[int, str], tuple[str, tuple[int, ...], bytes]]]:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for info in read_header(file).tensors.values():
        yield (0, info.name), (info.dtype, info.shape, content[info.offset : info.offset + info.nbytes])


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"(?<=\.)[0-9]+(?=\.)", name))


def _shared(one: str, other: str) -> list[str]:
    """The segments with which two names begin."""
    found = []
    for a, b in zip(one.split("."), other.split("."), strict=False):
        if a != b:
            break
        found.append(a)
    return found


def _backwards(name: str) -> str:
    return ".".join(reversed(name.split(".")))


def _indexed(template: str) -> str:
    """``{}`` as ``{index0}``, ``{index1}``."""
    count = iter(range(9))
    return re.sub(r"\{\}", lambda _: f"{{index{next(count)}}}", template)


# -- the file


@dataclass
class Verdict:
    """Findings about one of Hugging Face's classes."""

    names: list[str]
    module: str
    lines: Mapping[str, Line] = field(default_factory=dict)
    constants: Sequence[Mapping[str, Any]] = ()
    dropped: Sequence[str] = ()
    seen: frozenset[str] = frozenset()
    is_described: bool = False
    largest: int = 1
    """The largest degree at which vLLM loaded a model of it."""
    reason: str | None = None
    error: str | None = None
    """vLLM's error for a model that it did not load."""


def judge(cases: Sequence[Case], names: list[str], format: Format) -> Verdict:
    """Combine the findings about a class, from all models of it that vLLM loads."""
    loaded = [case for case in cases if case.degrees]
    if not loaded:
        return Verdict(names, "", error=next(iter(cases[0].failed.values()))[:160])
    module, left = loaded[0].built["module"], {case.name: Reading(case).left_out for case in loaded}
    loaded = [case for case in loaded if left[case.name] is None]
    if not loaded:
        return Verdict(names, module, reason=f"vLLM leaves out elements of '{next(iter(left.values()))}'")
    found = [compare(case, format) for case in loaded]
    if None in found and all(why is None or why.startswith(REFUSED) for why in found):
        return Verdict(names, module)
    splits: dict[str, Line] = {}
    for _ in range(2):
        try:
            verdict = describe(loaded, names, splits)
            table, _ = to_documents([verdict], {"modules": {}, "version": ""}, program=loaded[0].program)
            own = read_format(PROGRAMS / f"{loaded[0].program.name}.toml", table)
            why = next((why for case in loaded if (why := compare(case, own)) is not None), None)
            if why is None:
                return verdict
            more = {to: line for case in loaded for to, line in _splits_in(case, own)}
        except (NotExpressibleError, ReshardError) as error:
            why = f"{error}"
            break
        if more.items() <= splits.items():
            break
        splits |= more
    return Verdict(names, module, reason=str(why))


def _splits_in(case: Case, format: Format) -> Iterator[tuple[str, Line]]:
    """Yield the tensors that vLLM splits over two ranks in another way than the model's rules: the line's name, and the
    cut.
    """
    if 2 not in case.degrees:
        return
    one, two, own = case.held(1), case.held(2), written(case, format, 2)
    for target, line in Reading(case).all().lines:
        whole, part = one[0, target], two.get((0, target), ("", (), b""))
        if own.get((0, target)) == part:
            continue
        to = line["to"].removesuffix("*") + target.rpartition(".")[2] if line["to"].endswith("*") else line["to"]
        if part == whole:
            yield to, {"cut": False}
        elif len(part[1]) == len(whole[1]) and len(line["from"]) == 1:
            yield from ((to, found) for found in _ranges(whole, part))
        elif len(part[1]) == len(whole[1]):
            yield from ((to, {"cut": dim}) for dim in _halved(whole[1], part[1]))


def _halved(whole: Sequence[int], part: Sequence[int]) -> list[int]:
    """The one dimension of which a part has half."""
    dims = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return dims if len(dims) == 1 and whole[dims[0]] == 2 * part[dims[0]] else []


def _ranges(whole: tuple[str, tuple[int, ...], bytes], part: tuple[str, tuple[int, ...], bytes]) -> Iterator[Line]:
    """Yield the cut of a tensor by the part of the first of two ranks: one range, or a range of each of several equal
    parts.
    """
    for dim in _halved(whole[1], part[1]):
        for parts in (1, 2, 3):
            if whole[1][dim] % (2 * parts) == 0:
                of = np.frombuffer(whole[2], "<u4").reshape(*whole[1][:dim], parts, 2, -1, *whole[1][dim + 1 :])
                if of.take(0, dim + 1).tobytes() == part[2]:
                    yield {"cut": {"dim": dim, "parts": parts} if parts > 1 else dim}
                    return


def describe(cases: Sequence[Case], names: list[str], splits: Mapping[str, Line]) -> Verdict:
    """Lines for all models of a class. Raises NotExpressibleError."""
    found, packed = [Reading(case, splits).all() for case in cases], set[str]()
    for one in found:
        for _, line in one.lines:
            packed |= {_template_in(cases, source) for source in line.get("packed", ())}
    twice, single, held = list[Line](), list[tuple[str, Line]](), dict[tuple[str, ...], Line]()
    for one in found:
        for target, line in one.lines:
            public = {key: value for key, value in line.items() if key != "packed"}
            other = held.setdefault((*public["from"],), public)
            if other == public:
                single.append((target, public))
                continue
            lacking = _lacking(found, other, public)
            if lacking is None:
                raise NotExpressibleError(f"vLLM has '{public['from'][0]}' as '{other['to']}' and '{public['to']}'")
            first, template = lacking
            twice.append({**first, "without": template})
            if first == other:
                held[(*public["from"],)] = public
                single = [(each, of) for each, of in single if of != other]
                single.append((target, public))
    words = [end.split(".")[-2] for end in PUBLISHED["names"].get(cases[0].config["model_type"], {}).values()]

    def saved(name: str) -> str:
        """The name as transformers saves it."""
        return next((name.replace(f"{word}.", "") for word in words if f"{word}." in name), name)

    others = [(target, {**line, "from": [*map(saved, line["from"])]}) for target, line in single]
    merged_ = [*twice, *merged([*single, *(each for each in others if each not in single)], packed)]
    constants = {json.dumps(each, sort_keys=True): each for one in found for each in one.constants}
    dropped = {template for one in found for template in one.dropped}
    used = {template for one in found for template in one.templates - {*one.dropped}}
    if dropped & used:
        raise NotExpressibleError(f"vLLM has '{min(dropped & used)}' of some models alone")
    keyed = {json.dumps(line, sort_keys=True): line for line in merged_}
    seen = frozenset.union(*(one.templates for one in found))
    dropped |= {saved(name) for name in dropped}
    seen |= {saved(name) for name in seen}
    largest = max(tp for case in cases for tp in case.degrees)
    return Verdict(names, cases[0].built["module"], keyed, [*constants.values()], sorted(dropped), seen, True, largest)


def _lacking(found: Sequence[Found], one: Line, other: Line) -> tuple[Line, str] | None:
    """Find the one of two lines for the same tensors that holds only where some tensor is absent; return it and that
    tensor.
    """
    with_one, with_other = (
        [each for each in found if any(_same(line, of) for _, line in each.lines)] for of in (one, other)
    )
    for line, has, lacks in ((one, with_other, with_one), (other, with_one, with_other)):
        everywhere = frozenset.intersection(*(each.templates for each in has)) if has else frozenset()
        nowhere = frozenset.union(*(each.templates for each in lacks)) if lacks else frozenset()
        if everywhere - nowhere:
            return line, min(everywhere - nowhere, key=lambda name: (name.count("{"), name))
    return None


def _same(line: Line, other: Line) -> bool:
    return {key: value for key, value in line.items() if key != "packed"} == other


def _template_in(cases: Sequence[Case], source: str) -> str:
    for case in cases:
        for tensor in case.model.tensors:
            if tensor.name == source:
                return tensor.kind.pattern
    raise KeyError(source)


def uncompared(cls: str, error: str, version: str, program: Program = VLLM) -> str:
    """Return the reason to refuse a class whose small model a version of a program did not load."""
    if program is not VLLM:
        return f"{UNCOMPARED}: our small model did not load in vLLM {version} ({error})"
    registry = json.loads(REGISTRY.read_text())
    lacks = f"vLLM {registry['made_with']['vllm']} has no class for it, and " if cls not in registry["classes"] else ""
    return f"{UNCOMPARED}: {lacks}our small model did not load in vLLM {version} ({error})"


def to_documents(
    verdicts: Sequence[Verdict],
    registry: Mapping[str, Any],
    others: Mapping[str, Sequence[str]] | None = None,
    program: Program = VLLM,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rules, and what was observed. ``others`` are what other fixtures compare, and on which meshes.

    Reasons are worded for vLLM: another program's name takes its place.
    """
    others, builds = others or {}, registry["modules"]
    described = [each for each in verdicts if each.is_described and each.reason is None and each.error is None]
    general = [each for each in verdicts if not each.is_described and each.reason is None and each.error is None]
    lines = document_of([Lines(each.names[0], each.names[-1], each.lines) for each in described])
    errors = {name: each.error for each in verdicts if each.error for name in each.names if name not in others}
    reasons = {
        name: (each.reason or uncompared(each.names[0], str(each.error), registry["version"], program)).replace(
            VLLM.title, program.title
        )
        for each in verdicts
        for name in each.names
        if (each.reason or each.error) and name not in others
    }
    dropped: dict[tuple[str, ...], set[str]] = defaultdict(set)
    constants: dict[str, set[str]] = defaultdict(set)
    for each in described:
        if each.dropped:
            dropped[(*each.dropped,)].update(each.names)
        for constant in each.constants:
            constants[json.dumps(constant, sort_keys=True)].update(each.names)
    seen: dict[frozenset[str], set[str]] = defaultdict(set)
    for each in described:
        seen[each.seen].update(each.names)
    modules = {each.module for each in general if not each.module.startswith("transformers:")}
    same = {name for name, module in builds.items() if module in modules} - reasons.keys()
    rules = {
        "classes": sorted({each.names[0] for each in verdicts}),
        "compared": sorted({name for each in [*general, *described] for name in each.names} | same | {*others}),
        "meshes": {name: _meshes(each, others.get(name, ())) for each in described for name in each.names},
        "lacking": lacking(known_classes(), json.loads(REGISTRY.read_text())["classes"]) if program is VLLM else [],
        "refused": by_reason(reasons),
        "lines": lines["lines"],
        "seen": [{"types": sorted(types), "tensors": _by_head(tensors)} for tensors, types in seen.items()],
        "constants": [*_constants({text: sorted(types) for text, types in sorted(constants.items())})],
        "dropped": [{"names": [*names], "types": sorted(types)} for names, types in sorted(dropped.items())],
    }
    return rules, {
        "builds": dict(sorted(builds.items())), "modules": sorted(modules), "errors": dict(sorted(errors.items()))
    }  # fmt: skip


def _constants(types: Mapping[str, Sequence[str]]) -> Iterator[dict[str, Any]]:
    """Constants as JSON with their types: one entry for those that differ in their names alone."""
    names: dict[str, list[str]] = defaultdict(list)
    for text, of in types.items():
        constant = json.loads(text)
        names[json.dumps({**constant, "names": [], "types": of})] += constant["names"]
    for text, found in names.items():
        yield {**json.loads(text), "names": found}


def _by_head(names: Set[str]) -> dict[str, list[str]]:
    """The ends of names by their beginning: up to the last index, or up to the last dot."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        head = name[: name.rfind("}") + 1] or name.rpartition(".")[0]
        found[head].append(name[len(head) :].removeprefix("."))
    return found


def cases_in(folder: Path, dumps: Path, program: Program = VLLM) -> list[Case]:
    """All models that were observed, each with its digits."""
    found, digits = list[Case](), defaultdict[str, list[Case]](list)
    for path in sorted(done.parent for done in dumps.glob("*/done")):
        case = Case(path.name, folder / path.name, path, json.loads((path / "done").read_text()), program=program)
        if DIGITS.search(case.name):
            digits[DIGITS.sub("", case.name)].append(case)
        else:
            found.append(case)
    return [replace(case, digits=tuple(digits[case.name])) for case in found]


def by_class(cases: Sequence[Case]) -> Iterator[tuple[list[str], list[Case]]]:
    """The models of each class, and what the class is called: by its name, and the first also by the model type."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.config["architectures"][0]].append(case)
    first: dict[str, str] = {}
    for name, of in groups.items():
        types = {case.config["model_type"] for case in of}
        own = [kind for kind in sorted(types) if first.setdefault(kind, name) == name]
        yield [name, *own], of


def _meshes(verdict: Verdict, others: Sequence[str]) -> dict[str, int | None]:
    """The largest degree of each dimension of a mesh that was compared; None: lines say nothing of how it splits."""
    found = {"tp": verdict.largest}
    for mesh in others:
        degrees = dict(re.findall(r"([a-z]+)([0-9]*)", mesh))
        for dimension, degree in degrees.items():  # "tp2-ep": the experts of two ranks, on the same two
            found[dimension] = max(found.get(dimension, 1), int(degree or degrees["tp"]))
    is_general = found["tp"] >= max(DEGREES) and all(line.get("cut", False) is False for line in verdict.lines.values())
    return {**found, "tp": None if is_general else found["tp"]}


def fixtures() -> dict[str, list[str]]:
    """The classes and model types of the other fixtures, with the meshes on which the tests compare them."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ORACLES / "models").glob("*.json")):
        fixture = json.loads(file.read_text())
        for name in (fixture["config"]["architectures"][0], fixture["config"]["model_type"]):
            if fixture.get("meshes"):
                found[name] += fixture["meshes"]
    return found


def is_narrowed(case: Case) -> bool:
    """Whether vLLM holds numbers of this float32 model in bfloat16."""
    return any(dtype == "BF16" for dtype, _, _ in case.held(1).values())


def hashes(case: Case) -> dict[str, list[str]]:
    """For each degree, a hash of what each rank holds. What is computed is not in it, as it may be rounded."""
    return {f"tp{tp}": hashes_of(case.held(tp), tp) for tp in case.degrees}


def hashes_of(held: Held, ranks: int) -> list[str]:
    """A hash for each rank over names, dtypes, shapes and elements."""
    found = []
    for rank in range(ranks):
        own = sorted((name, *_widened(*of)) for (at, name), of in held.items() if at == rank)
        text = hashlib.sha256()
        for name, dtype, shape, data in own:
            is_computed = dtype == "F32" and bool((np.frombuffer(data, "<f4") < 0).all())
            text.update(f"{name} {dtype} {list(shape)} ".encode() + (b"" if is_computed else data))
        found.append(text.hexdigest()[:16])
    return found


def _widened(dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    """bfloat16 as float32, which has each of its numbers."""
    if dtype != "BF16":
        return dtype, shape, data
    return "F32", shape, (np.frombuffer(data, "<u2").astype("<u4") << 16).tobytes()


def updated(old: Mapping[str, Any], new: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The rules, with those that are new of the classes ``names`` in the place of older ones."""
    document: dict[str, Any] = {**new, "lacking": old["lacking"]}
    for key in ("lines", "seen", "constants", "dropped"):
        types: dict[str, set[str]] = defaultdict(set)
        for entries, is_old in ((old[key], True), (new[key], False)):
            for entry in entries:
                content = json.dumps({name: value for name, value in entry.items() if name != "types"})
                types[content].update(each for each in entry["types"] if not is_old or each not in names)
        document[key] = [{**json.loads(content), "types": sorted(of)} for content, of in types.items() if of]
    document["lines"].sort(key=lambda entry: min(_place(*line) for line in entry["tensors"].items()))
    reasons = {
        name: entry["why"]
        for entries in (old["refused"], new["refused"])
        for entry in entries
        for name in entry["types"]
        if entries is not old["refused"] or name not in names
    }
    document["refused"] = by_reason(reasons)
    document["meshes"] = {**{name: mesh for name, mesh in old["meshes"].items() if name not in names}, **new["meshes"]}
    document["classes"] = sorted({*old["classes"], *new["classes"]})
    document["compared"] = sorted(({*old["compared"]} - {*names} | {*new["compared"]}) - reasons.keys())
    return document


def _place(to: str, lines: Any) -> tuple[bool, int]:
    """The place of the lines of a tensor among all: prefixes come last, the longest first."""
    every = (
        line if isinstance(line, dict) else {"from": line} for line in (lines if isinstance(lines, list) else [lines])
    )
    sources = (line | {"from": [line["from"]] if isinstance(line["from"], str) else line["from"]} for line in every)
    return min(rank_of(line | {"to": to}) for line in sources)


def write(folder: Path, dumps: Path, program: Program = VLLM) -> None:
    """Write the file and the tests' fixture: what was observed before of classes that are not in the folder stays."""
    registry = json.loads((dumps / "registry.json").read_text())
    format = general_rules(program)
    verdicts, fixture = [], {}
    for names, cases in by_class(cases_in(folder, dumps, program)):
        verdict = judge(cases, names, format)
        verdicts.append(verdict)
        why = verdict.reason or verdict.error
        state = f"refused: {why}" if why else ("lines" if verdict.is_described else "rules")
        print(f"{', '.join(names)}: {state}", flush=True)
        if why is None:
            for case in cases:
                of = case.digits if case.degrees and is_narrowed(case) else [case]
                fixture |= {each.name: hashes(each) for each in of if each.degrees}
    document, observed = to_documents(verdicts, registry, fixtures() if program is VLLM else {}, program)
    made_with, names = {program.name: registry["version"]}, reduce(operator.iadd, (v.names for v in verdicts), [])
    old = json.loads(program.output.read_text()) if program.output.exists() else {}
    if old.pop(MADE_WITH, None) == made_with:
        document, before = updated(old, document, names), json.loads(program.observed.read_text())
        errors = {name: why for name, why in before["errors"].items() if name not in names}
        observed["errors"] = dict(sorted({**errors, **observed["errors"]}.items()))
        observed["modules"] = sorted({*before["modules"], *observed["modules"]})
        fixture = json.loads(lzma.decompress(program.fixture.read_bytes())) | fixture
    program.output.write_text(text_of(document, made_with, LEVELS), encoding="utf-8")
    program.observed.write_text(text_of(observed, made_with), encoding="utf-8")
    program.fixture.write_bytes(lzma.compress(json.dumps(fixture, sort_keys=True).encode()))


def write_registry(file: Path, version: str) -> None:
    """Write which classes of Hugging Face's a release of vLLM has a class for, its own or one of a plugin of it."""
    found = set[str]()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = target.id if isinstance(target, ast.Name) else ""
        if name.endswith("_MODELS") and "PREVIOUSLY" not in name and isinstance(table := node.value, ast.Dict):  # type: ignore[attr-defined]
            found |= {key.value for key in table.keys if isinstance(key, ast.Constant)}
    REGISTRY.write_text(text_of({"classes": sorted(found)}, {"vllm": version}), encoding="utf-8")
    document = json.loads(OUTPUT.read_text(encoding="utf-8")) | {"lacking": lacking(known_classes(), found)}
    OUTPUT.write_text(text_of(document, document.pop(MADE_WITH), LEVELS), encoding="utf-8")


_TASKS = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel",
    "ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel", "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip
"""Ends of classes of which vLLM makes one from another: ``_SUFFIX_TO_DEFAULTS`` of vllm/config/model.py."""


def lacking(classes: Iterable[str], registered: Collection[str]) -> list[str]:
    """The classes that a release of vLLM neither has nor makes from one that it has."""

    def is_made(name: str) -> bool:
        task = next(filter(name.endswith, _TASKS), None)
        return task is not None and any(name.replace(task, other) in registered for other in _TASKS)

    return sorted(name for name in classes if name not in registered and not is_made(name))


def known_classes() -> list[str]:
    """The classes of transformers', by the table of their heads."""
    return [name for names in json.loads(HEADS.read_text(encoding="utf-8"))["classes"].values() for name in names]


def counts() -> Iterator[tuple[str, int]]:
    """Yield counts of model types: those written, by the evidence for them, and those refused, by the reason."""
    types, format, observed = {*built_in_architectures()}, format_of("vllm"), json.loads(OBSERVED.read_text())
    compared, described = format.types.compared & types, {*format.types.meshes} & types
    refused = {*format.types.refused} & types
    loads = {name for name in refused if not format.types.refused[name].startswith(UNCOMPARED)}
    same = [name for name, module in observed["builds"].items() if module in observed["modules"]]
    yield "model types with rules", len(types)
    yield "of these, vLLM loads a small model", len(compared | loads)
    yield "written and equal to what vLLM holds", len(compared)
    yield "- by the general rules of vllm.toml", len(compared - described)
    yield "- by lines that were made from what vLLM holds", len(described)
    yield "refused, because something differs", len(loads)
    yield "not compared: our model did not load", len(refused) - len(loads)
    yield (
        "refused, unless their class runs in a compared module",
        len(types - compared - {*refused}),
    )
    yield "further classes that run in such a module", len({*same} - format.types.classes - {*fixtures()})


def shown() -> str:
    """The counts as a table in Markdown."""
    rows = [f"| {name} | {count} |" for name, count in counts()]
    return "\n".join(["| | model types |", "|---|---|", *rows]) + "\n"


def make_all(folder: Path, program: Program = VLLM) -> None:
    """Write the checkpoints of all models of the zoo, of some with further language models within; of those with a tied
    table also with a head of its own.
    """
    from tests.zoo import ZOO

    shutil.rmtree(folder, ignore_errors=True)
    texts = (f"{towers}{TEXT}{text}" for towers, of in PUBLISHED["texts"].items() for text in of)
    for name in program.models:
        make(name, folder / name, program)
    for name in () if program.models else (*(name for name in ZOO if name not in ALONE), *texts):
        make(name, folder / name)
        if is_tied(folder / name):
            make(name + UNTIED, folder / (name + UNTIED))
            with contextlib.suppress(ReshardError):  # no rule has a head for it
                open_source(folder / (name + UNTIED))
                if TEXT in name:  # vLLM fills no tied head of a mixture within towers
                    shutil.rmtree(folder / name)
                continue
            shutil.rmtree(folder / (name + UNTIED))


def main() -> None:
    """Make the checkpoints, those of digits, write the file, or count what it has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "more", "write", "registry", "count"])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("dumps", type=Path, nargs="?")
    parser.add_argument("--program", choices=["vllm", "sglang"], default="vllm")
    arguments = parser.parse_args()
    program = {"vllm": VLLM, "sglang": SGLANG}[arguments.program]
    if arguments.action == "make":
        make_all(arguments.folder, program)
    elif arguments.action == "more":
        for case in cases_in(arguments.folder, arguments.dumps, program):
            for place in range(places_of(case.checkpoint)) if case.degrees and is_narrowed(case) else ():
                make(f"{case.name}{DIGIT}{place}", arguments.folder / f"{case.name}{DIGIT}{place}", program)
    elif arguments.action == "registry":
        write_registry(arguments.folder, str(arguments.dumps))
    elif arguments.action == "write":
        write(arguments.folder, arguments.dumps, program)
    if program is VLLM and arguments.action in {"write", "count"}:
        print(shown())


if __name__ == "__main__":
    main()
