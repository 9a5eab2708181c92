"""Routes of a checkpoint through two forms: every route to a form must give the bytes of the direct one.

For a source S and forms F and G: S -> F -> G is refused with a reason, or its files are those of S -> G. ``verify S``
of it says SAME, and it merges to S: byte for byte with all manifests, by values and dtypes if any of them is lost.

``python -m tests.routes --seconds 600`` walks all routes, in an order that ``--seed`` gives, and prints what fails;
``--source`` and ``--form`` choose some. ``tests/test_routes.py`` walks a sample.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reshard.api import merge, split
from reshard.formats.errors import MismatchError, ReshardError
from reshard.formats.files.safetensors import read_header
from reshard.source.opening import open_source
from reshard.verify.bytes.exact import verify_exact
from tests import zoo
from tests.dequantize import METHODS
from tests.programs.quantized import make
from tests.source.test_quantized import checkpoint
from tests.support import LLAMA, contents, write_checkpoint, write_tied_twice

ONE = {"workers": 1, "fsync": False}


def _zoo(name: str) -> Callable[[Path], Path]:
    def made(folder: Path) -> Path:
        import torch

        return zoo.save(name, folder, dtype=torch.bfloat16)

    return made


def _vllm(model: str, method: str) -> Callable[[Path], Path]:
    return lambda folder: make(folder, model, method)


def _method(name: str, packing: str) -> Callable[[Path], Path]:
    return lambda folder: checkpoint(folder, METHODS[name], packing)[0]


def _grouped(**other: Any) -> Callable[[Path], Path]:
    """A Llama whose heads are all of the hidden size, with two query heads for each KV head: Meta's and torchtitan's
    forms are of it, too."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 64}
    heads = {"num_attention_heads": 8, "head_dim": 8, "num_key_value_heads": 4}
    config = LLAMA | sizes | heads | {"dtype": "bfloat16"} | other
    write = write_tied_twice if other.get("tie_word_embeddings") else write_checkpoint
    return lambda folder: write(folder, config=config)


SOURCES: Mapping[str, Callable[[Path], Path]] = {
    "plain": _zoo("llama"),
    "kv-block": _grouped(),
    "kv-mistral": _grouped(model_type="mistral", architectures=["MistralForCausalLM"]),
    "kv-tied": _grouped(tie_word_embeddings=True),
    "tied": _zoo("llama-tied"),
    "kv-6": _zoo("llama-6kv"),
    "packed": _zoo("phi3"),
    "experts": _zoo("mixtral"),
    "experts-shared": _zoo("qwen2_moe"),
    "latent": _zoo("deepseek_v3"),
    "gpt-oss": _zoo("gpt_oss"),
    "input-first": _zoo("gpt2"),
    "mamba": _zoo("mamba"),
    "mamba2": _zoo("mamba2"),
    "fp8-block": _vllm("llama", "fp8-block"),
    "fp8-tensor": _vllm("llama", "fp8-tensor"),
    "fp8-channel": _vllm("llama", "float8-channel"),
    "fp8-experts": _vllm("deepseek_v3", "fp8-block"),
    "int4-stated": _vllm("llama", "packed-4"),
    "gptq": _vllm("llama", "gptq"),
    "awq": _vllm("qwen3_moe", "awq"),
    "fp8-packed": _method("fp8-block", "packed"),
    "int4-packed": _method("packed-4", "packed"),
    "bnb": _method("bitsandbytes-nf4", "column and row"),
    "bnb-packed": _method("bitsandbytes-nf4", "packed"),
    "mxfp4": _method("gpt-oss", "experts fused"),
}

FORMS: Mapping[str, dict[str, Any]] = {
    "tp1": {"tp": 1},
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "ep2": {"tp": 1, "ep": 2},
    "pp2": {"tp": 1, "pp": 2},
    "uneven": {"tp": 3, "uneven": True},
    **{
        f"{form}-{tp}": {"tp": tp, "format": form}
        for form, tp in [
            ("dcp", 1), ("dcp", 2), ("deepseek", 2), ("deepspeed-universal", 1),
            ("megatron", 1), ("megatron", 2),
            ("megatron-legacy", 1), ("megatron-legacy", 2), ("megatron-legacy-local", 1),
            ("megatron-legacy-sequential", 1), ("megatron-local", 2), ("megatron-singleton", 1), ("meta", 1),
            ("meta", 2), ("mistral", 1), ("sglang", 2), ("torchtitan", 1), ("torchtitan", 2), ("torchtitan-0.2", 1),
            ("transformers", 2), ("vllm", 1), ("vllm", 2), ("vllm", 4), ("vllm-0.23", 2),
        ]
    },
    "dcp-modules-2": {"tp": 2, "format": "dcp", "names": "modules"},
    "vllm-ep2": {"tp": 2, "ep": 2, "same_ranks": True, "format": "vllm"},
    "vllm-pp2": {"pp": 2, "format": "vllm"},
    "megatron-legacy-pp2": {"pp": 2, "format": "megatron-legacy"},
}  # fmt: skip


SPELLED = ("deepspeed-universal", "transformers")
"""Formats with the names of transformers' classes: without a manifest, a merge has these."""
FREE = re.compile("has no layer behind")
"""Why a route may be refused although the direct one is not."""


@dataclass
class Route:
    """What became of a route: ``found`` is ``same``, ``refused`` or what is wrong."""

    source: str
    forms: tuple[str, ...]
    found: str
    why: str = ""

    def __str__(self) -> str:
        return f"{' -> '.join((self.source, *self.forms))}: {self.found} {self.why}"


@dataclass
class Walk:
    """The routes of one source, below a folder."""

    source: str
    folder: Path
    made: dict[tuple[str, ...], Path | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made[()] = SOURCES[self.source](self.folder / "source")

    def at(self, *forms: str) -> Path | str:
        """The output of a route, or why it was refused. Raises what is no refusal."""
        if forms not in self.made:
            before = self.at(*forms[:-1])
            self.made[forms] = before if isinstance(before, str) else self._split(before, forms)
        return self.made[forms]

    def _split(self, before: Path, forms: tuple[str, ...]) -> Path | str:
        out = self.folder / "+".join(forms)
        try:
            split(before, out, **FORMS[forms[-1]], **ONE)
        except MismatchError:
            raise  # right bytes called damaged
        except ReshardError as error:
            return str(error)
        return out

    def direct(self, form: str) -> Iterator[Route]:
        """What one form must keep: the proof says SAME, and it merges to the source."""
        out = self.at(form)
        if isinstance(out, str):
            yield Route(self.source, (form,), "refused", out)
            return
        original = self.made[()]
        assert isinstance(original, Path)
        yield self._tried((form,), "verify", lambda: _proved(original, out))
        yield self._tried((form,), "merge", lambda: self._merged(out, original, exact=True))
        yield self._tried((form,), "merge without manifest", lambda: self._merged_bare(out, original))

    def second(self, first: str, second: str) -> Iterator[Route]:
        """The law of a route through two forms."""
        if isinstance(self.at(first), str):
            return
        forms = (first, second)
        found = self._tried(forms, "", lambda: self._compared(first, second))
        yield found
        out, original, before = self.made.get(forms), self.made[()], self.made[first,]
        assert isinstance(original, Path) and isinstance(before, Path)
        if found.found == "same" and isinstance(out, Path):
            yield self._tried(forms, "verify", lambda: _proved(original, out))
            yield self._tried(forms, "merge", lambda: self._merged(out, original, exact=True))
        if isinstance(out, Path):
            shutil.rmtree(out)
        with without_manifest(before):
            yield self._tried(forms, "without the first manifest", lambda: self._written(before, forms, original))

    def _written(self, before: Path, forms: tuple[str, ...], original: Path) -> str:
        """What is written can be read, with its own manifest and without."""
        out = self._split(before, forms)
        if isinstance(out, str):
            return f"refused {out}"
        try:
            return self._merged(out, original, exact=False) or self._merged_bare(out, original)
        finally:
            shutil.rmtree(out)

    def _merged_bare(self, out: Path, original: Path) -> str:
        with without_manifest(out):
            return self._merged(out, original, exact=False)

    def _compared(self, first: str, second: str) -> str:
        there, direct = self.at(first, second), self.at(second)
        if isinstance(there, str) and isinstance(direct, str):
            return f"refused {there}"
        if isinstance(there, str):
            return f"refused, though the direct route is not: {there}"
        if isinstance(direct, str):
            return f"written, but directly refused: {direct}"
        return _difference(weights(direct), weights(there))

    def _merged(self, out: Path, original: Path, *, exact: bool) -> str:
        merged = self.folder / "merged"
        try:
            merge(out, merged, **ONE)
            if exact:
                return _difference(contents(original), contents(merged))
            found = tensors(merged)
            wanted = tensors(original, {name for name, data in found.items() if data.startswith(b"F32 ")})
            sides = (found, wanted), (wanted, found)  # a tied table may be there twice, as the format has it
            found, wanted = (
                {name: data for name, data in one.items() if name in other or data not in {*other.values()}}
                for one, other in sides
            )
            spelled = any(
                FORMS[form].get("format") in SPELLED or "names" in FORMS[form] for form in out.name.split("+")
            )
            if spelled and wanted.keys() != found.keys():
                kept = wanted.keys() & found.keys()  # experts as transformers itself saves them: in one tensor
                wanted, found = ({name: of[name] for name in kept} for of in (wanted, found))
            return _difference(wanted, found)
        finally:
            shutil.rmtree(merged, ignore_errors=True)

    def _tried(self, forms: tuple[str, ...], what: str, run: Callable[[], str]) -> Route:
        try:
            wrong = run()
        except Exception as error:
            known = isinstance(error, ReshardError)
            wrong = f"{type(error).__name__}: {error}" if known else traceback.format_exc()
        if wrong.startswith("refused ") or (wrong.startswith("refused, ") and FREE.search(wrong)):
            return Route(self.source, forms, "refused", wrong.removeprefix("refused "))
        return Route(self.source, forms, f"{what}: {wrong}" if wrong else "same")


@contextmanager
def without_manifest(folder: Path) -> Iterator[None]:
    """A folder that has lost its manifest, within the block."""
    kept = (folder / "reshard.json").rename(folder.parent / f"{folder.name}.json")
    try:
        yield
    finally:
        kept.rename(folder / "reshard.json")


def _proved(original: Path, out: Path) -> str:
    found = verify_exact(open_source(original), out)
    return "" if found.verdict == "same" else f"verify says {found.verdict}: {json.dumps(found.problems)[:300]}"


def weights(folder: Path) -> dict[str, bytes]:
    """What no route may change: every file but the manifest and the mark of a published output."""
    return {
        name: data for name, data in contents(folder).items() if name != "reshard.json" and not name.startswith(".resh")
    }


def tensors(folder: Path, widened: Container[str] = ()) -> dict[str, bytes]:
    """The tensors of a full checkpoint: dtype, shape and bytes; those in BF16 that are ``widened``, as F32."""
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        for info in read_header(file).tensors.values():
            dtype, content = info.dtype, data[info.offset : info.offset + info.nbytes]
            if dtype == "BF16" and info.name in widened:
                dtype, content = "F32", (np.frombuffer(content, "<u2").astype("<u4") << 16).tobytes()
            found[info.name] = f"{dtype} {info.shape} ".encode() + content
    return found


def _difference(wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> str:
    """What differs, in a few words; nothing if nothing does."""
    names = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
    if not names:
        return ""
    first = names[0]
    sizes = [None if of.get(first) is None else len(of[first]) for of in (wanted, found)]
    return f"{len(names)} of {len(wanted)} differ, first '{first}' ({sizes[0]} and {sizes[1]} bytes)"


def walk(source: str, folder: Path, forms: list[str]) -> Iterator[Route]:
    """All routes of a source."""
    of = Walk(source, folder)
    for form in forms:
        yield from of.direct(form)
    for first, second in itertools.product(forms, forms):
        yield from of.second(first, second)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--source", action="append", choices=SOURCES)
    parser.add_argument("--form", action="append", choices=FORMS)
    parser.add_argument("--refused", action="store_true", help="show what is refused, too")
    given = parser.parse_args()
    end, chance = time.monotonic() + given.seconds, random.Random(given.seed)
    sources, forms = given.source or [*SOURCES], given.form or [*FORMS]
    chance.shuffle(sources)
    chance.shuffle(forms)
    counts = Counter[str]()
    for source in sources:
        with tempfile.TemporaryDirectory() as folder:
            for route in walk(source, Path(folder), forms):
                kind = route.found if route.found in {"same", "refused"} else "wrong"
                counts[kind] += 1
                if kind == "wrong" or (given.refused and kind == "refused"):
                    print(route, flush=True)
                if time.monotonic() > end:
                    break
        if time.monotonic() > end:
            break
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
