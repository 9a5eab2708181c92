"""A program's own loader as the witness of shards (``reshard verify --loader``): small models of many kinds, on a CPU.

    python -m tests.engines.loader --python ENGINES/vllm/bin/python [--models llama-biases,phi3] [--engine sglang]

Each model is split at tp 1, 2 and 4, and then with two lines of its format in another order: q, k, v and gate, up. Such
shards are the original's by every byte, because the same line maps them back. vLLM's is asked of two ranks without
files, too, as ``reshard live check`` does. Megatron-Core, which says layouts alone, is asked with the faults that show
there, and on stages, too. Prints a line for each; exit code 1 if a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from reshard.api import split
from reshard.formats.errors import ReshardError
from reshard.formats.notation.format_file import format_of
from reshard.live.meshes import Target
from reshard.live.vllm_check import check
from reshard.verify.api import verify
from reshard.verify.loader.ask import ask
from tests import zoo
from tests.programs import quantized
from tests.verify.layout_faults import FAULTS
from tests.wrong_rules import exchanged, swapped
from tools import engine_names

MODELS = (
    "llama-biases", "llama-6kv", "qwen2", "qwen2-tied", "qwen3", "phi3", "gemma2", "mixtral", "qwen3_moe", "gpt_oss",
    "deepseek_v3", "gpt2", "gpt_neox", "bloom", "falcon-7b", "mamba2", "qwen3_next", "starcoder2", "cohere2",
)  # fmt: skip
PUBLISHED = json.loads((Path(__file__).parents[1] / "oracles/vllm/published.json").read_text())
OTHERWISE = {
    "qwen2-tied": "different",  # vLLM's Qwen 2 has no head_dim of its own
    "llama-6kv tp 4": "unchecked",  # 6 KV heads on 4 ranks: vLLM does not build it
    "mamba2 tp 4": "unchecked",  # nor 2 groups on 4 ranks
}
"""Models, or models at a degree, that an engine holds in another way or not at all."""
LIVE = dict.fromkeys(("mamba2", "bloom", "falcon-7b"), "unchecked")
"""Models whose loaders the recorder of ``live check`` does not follow: -exp(A_log) in place, q, k and v taken apart."""
STAGED = (
    "llama-biases", "qwen3", "mixtral", "mixtral-tied", "qwen2_moe", "gpt_oss", "gemma2", "gemma3_text", "stablelm",
    "cohere2", "granitemoeshared", "bloom", "falcon-7b", "gpt_neox-tied", "gpt2-untied", "gptj", "opt-projected",
)  # fmt: skip
"""Models on stages of a pipeline: with the layers, or these alone, divided; tied, with a head, with projections."""
WRONG = {
    "vllm": {"qkv": ("**.qkv_proj.*", (0, 2, 1)), "gate_up": ("**.gate_up_proj.*", (1, 0))},
    "sglang": {
        "qkv": ("**.self_attn.qkv_proj.*", (0, 2, 1)),
        "gate_up": ("**.gate_up_proj.*", (1, 0)),
    },
    "torchtitan": {
        "gate_up": ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        "norms": (
            "model.layers.{layer}.input_layernorm.weight",
            "model.layers.{layer}.post_attention_layernorm.weight",
        ),
    },
}
"""Lines of a format and the order of their sources (k and v exchanged, up before gate), or two sources exchanged."""
HAVE = {
    "qkv": ("llama-biases", "qwen3", "starcoder2", "mixtral", "gpt_oss"),
    "gate_up": ("llama-biases", "qwen3", "deepseek_v3"),
}
"""Models in which vLLM joins what the checkpoint has apart."""

QUANTIZED = {
    "llama": (
        "fp8-block", "fp8-tensor", "fp8-static", "gptq", "gptq-8", "gptq-one-group", "awq", "packed-4",
        "packed-4-zeros", "packed-8-channel", "int8-channel", "float8-tensor", "float8-static", "float8-channel",
        "float8-block",
    ),
    "mixtral": ("fp8-block", "fp8-tensor", "awq", "int8-channel", "float8-channel", "float8-block"),
}  # fmt: skip
"""Methods of tests/programs/quantized.py that are written for vLLM."""


SGLANG = {
    "llama": None, "mistral": None, "phi3": None, "qwen2": None, "qwen3": None, "olmo2": {"head_dim": 10},
    "mixtral": {"head_dim": 10}, "qwen2_moe": {"head_dim": 10, "mlp_only_layers": []},
    "qwen3_moe": {"mlp_only_layers": []}, "glm4_moe": None,
}  # fmt: skip
"""Models of SGLang's format, with what it demands of their sizes. It builds no DeepSeek without rope_scaling."""
TORCHTITAN = {
    "llama": {"head_dim": 10}, "llama-tied": {"head_dim": 10}, "qwen3": None,
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True}, "deepseek_v3": None, "deepseek_v2-no-q-lora": None,
}  # fmt: skip
"""Models of torchtitan's format, with what it demands of their sizes. The adapter of its gpt-oss is older than that."""
MEGATRON = (
    "llama-biases", "llama-tied", "llama-mqa", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe",
    "deepseek_v2", "deepseek_v3", "deepseek_v3-mtp", "glm4_moe",
)  # fmt: skip
LOCAL = ("llama-biases", "llama-tied", "qwen3", "mixtral", "qwen2_moe", "glm4_moe")
EVEN = "mixtral", "deepseek_v3"
"""Models with an even number of experts."""
STAGES = {"num_hidden_layers": 4}
"""Settings of models that Megatron-Core puts on two stages."""


class Case(NamedTuple):
    model: str
    degrees: Mapping[str, int]
    wrong: str | None = None
    format: str | None = None

    @property
    def shown(self) -> str:
        of = [self.model, *([self.format] if self.format is not None else [])]
        return " ".join([*of, *(f"{name} {degree}" for name, degree in self.degrees.items())])

    @property
    def expected(self) -> str:
        return "different" if self.wrong else OTHERWISE.get(self.model) or OTHERWISE.get(self.shown) or "same"


def cases(engine: str) -> Iterator[Case]:
    if engine == "megatron":
        yield from (Case(model, {"tp": tp}) for model in MEGATRON for tp in (1, 2, 4))
        yield from (Case(model, {"tp": tp, "ep": 2}) for model in EVEN for tp in (1, 2))
        yield from (Case(f"{model} stages", {"tp": 2, "pp": 2}) for model in MEGATRON if model != "deepseek_v3-mtp")
        yield from (Case(model, {"tp": 2}, format="megatron-local") for model in LOCAL)
        yield from (Case(model, {"tp": 2}, format="megatron-singleton") for model in MEGATRON)
        yield from (Case("qwen3", {"tp": 2}, wrong) for wrong in FAULTS)
        return
    if engine == "torchtitan":
        yield from (Case(model, {"tp": 2}) for model in TORCHTITAN)
        yield from (Case("qwen3", {"tp": 2}, wrong) for wrong in WRONG["torchtitan"])
        return
    if engine == "sglang":
        yield from (Case(model, {"tp": tp}) for model in SGLANG for tp in (1, 2))
        towers = json.loads(lzma.decompress(engine_names.SGLANG.fixture.read_bytes()))
        yield from (Case(model, {"tp": tp}) for model in towers for tp in (1, 2))
        yield from (Case("qwen3", {"tp": 2}, wrong) for wrong in WRONG["sglang"])
        return
    for model in MODELS:
        yield from (Case(model, {"tp": tp}) for tp in (1, 2, 4))
    yield from (Case(model, {"tp": 2, "pp": 2}) for model in STAGED)
    yield Case("mixtral", {"tp": 2, "ep": 2})
    yield from (Case(f"{model} {method}", {"tp": 2}) for model, methods in QUANTIZED.items() for method in methods)
    yield from (Case(model, {"tp": 2}, wrong) for wrong, models in HAVE.items() for model in models)


def checkpoint(root: Path, model: str, engine: str) -> Path:
    """A quantized model, or one of the zoo in bfloat16 with what published ones of its type say beside."""
    folder = root / model
    of, _, method = model.partition(" ")
    if not folder.exists() and method and method != "stages":
        quantized.make(folder, of, method)
    elif not folder.exists() and engine == "sglang" and model in engine_names.SGLANG.models:
        engine_names.make(model, folder, engine_names.SGLANG)
    elif not folder.exists():
        sizes = {"vllm": PUBLISHED["sizes"], "sglang": SGLANG, "torchtitan": TORCHTITAN}.get(engine, {})
        settings = STAGES if method == "stages" else sizes.get(of)
        zoo.save(of, folder, torch.bfloat16, settings=settings)
        config = json.loads((folder / "config.json").read_text())
        published = PUBLISHED["config"].get(config["model_type"], {})
        more = {key: config.get(value, value) if isinstance(value, str) else value for key, value in published.items()}
        (folder / "config.json").write_text(json.dumps(more | config))
    return folder


def run(root: Path, case: Case, python: str, engine: str) -> tuple[str, str]:
    """The verdict on one, and what the loader said."""
    original = checkpoint(root, case.model, engine)
    with tempfile.TemporaryDirectory(dir=root) as folder:
        out = Path(folder) / "out"
        one, other = WRONG[engine][case.wrong] if case.wrong else ("", ())
        change = swapped if isinstance(other, str) else exchanged
        with change(Path(folder), f"{engine}.toml", one, other) if case.wrong else nullcontext():
            split(original, out, format=engine, same_ranks="ep" in case.degrees, **case.degrees)
            try:
                found = verify(original, out, exact_only=True, loader=python)
            except ReshardError as error:
                return "unchecked", error.message
    if found.exact.verdict != "same":
        return "bytes", str(found.exact.first)
    return found.verdict, found.loader.verdict


def laid(root: Path, case: Case, python: str) -> tuple[str, str]:
    """The verdict on a layout, on stages or with a fault, and what was said."""
    name = case.format or "megatron"
    with tempfile.TemporaryDirectory(dir=root) as folder:
        original, out = Path(folder) / "original", Path(folder) / "out"
        shutil.copytree(checkpoint(root, case.model, "megatron"), original)
        split(original, out, format=name, **{key: of for key, of in case.degrees.items() if key != "pp"})
        if case.wrong:
            FAULTS[case.wrong][0](original, out)
        degrees, form = {**case.degrees, "etp": case.degrees["tp"]}, format_of(name).loading.engine_format
        found = ask(python, "megatron", original, out, degrees, "bfloat16", form)
    if found.unchecked is not None:
        return "unchecked", found.unchecked
    return "same" if found.is_same else "different", found.verdict


def checked(root: Path, case: Case, python: str) -> tuple[str, str]:
    """The verdict of ``reshard live check`` on the same model and ranks, without files, and its first line."""
    try:
        lines = check(checkpoint(root, case.model, "vllm"), Target("vllm", **case.degrees), python=python)
    except ReshardError as error:
        return "unchecked", error.message
    return ("different", lines[0]) if lines else ("same", "the rules and the loader agree")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the python of the engine's environment")
    parser.add_argument("--models", help="default: all")
    parser.add_argument("--engine", choices=[*WRONG, "megatron"], default="vllm")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    only = arguments.models and arguments.models.split(",")
    chosen = [case for case in cases(arguments.engine) if not only or case.model.split()[0] in only]
    judged = laid if arguments.engine == "megatron" else partial(run, engine=arguments.engine)
    right, count = 0, 0
    with tempfile.TemporaryDirectory(prefix="reshard-loader-") as folder:
        for case in chosen:
            what = f"{case.shown}, wrong {case.wrong}" if case.wrong else case.shown
            found = [(what, case.expected, *judged(Path(folder), case, arguments.python))]
            if arguments.engine == "vllm" and case == Case(case.model, {"tp": 2}) and case.model in MODELS:
                expected = LIVE.get(case.model, case.expected)
                found.append((f"{what}, live check", expected, *checked(Path(folder), case, arguments.python)))
            for name, expected, verdict, said in found:
                count, right = count + 1, right + (verdict == expected)
                mark = "" if verdict == expected else f" (expected {expected})"
                print(f"{name:40} {verdict}{mark}: {said}", flush=True)
    print(f"{count} runs, {right} as they should be")
    sys.exit(right < count)


if __name__ == "__main__":
    main()
