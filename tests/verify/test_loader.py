"""verify --loader: what a loader puts into a model, against files; and transformers' own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from reshard.api import merge, split
from reshard.formats.errors import CheckpointError
from reshard.verify.api import verify
from reshard.verify.loader.program import ProgramRank, Request
from reshard.verify.loader.watch import SMALL, Creation, NotFollowedError
from reshard.verify.loader.witness import answer, judge
from tests import store
from tests.marks import thorough
from tests.support import change_tensor, command, form_of, python_with
from tests.verify.test_launch import assert_gone
from tests.wrong_rules import exchanged

BOTH = pytest.mark.parametrize("small", [0, SMALL], ids=["caught", "loaded"])


class Model(nn.Module):
    """What an engine builds: memory that nobody wrote, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.empty(6, 4))
        self.norm = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((3,), 2.0))


HALVES = torch.arange(1.0, 25).reshape(2, 3, 4)
NORM = torch.tensor([5.0, 6, 7, 8])
FILES = {"joined": torch.cat([*HALVES]), "norm": NORM, "scale": torch.full((3,), 2.0)}
Load = Callable[[Model], object]


def load(model: Model) -> None:
    """The engine's loader."""
    for at in (0, 1):
        model.joined.data.narrow(0, 3 * at, 3).copy_(HALVES[at])
    model.norm.data.copy_(NORM)


def found(files: dict[str, Tensor], small: int, then: Load = lambda model: None, first: Load = load) -> list[str]:
    """The differences of files from what the loader, and ``then``, make of a model."""
    reserved = Creation()
    with reserved:
        model = Model()

    def run() -> None:
        first(model)
        then(model)

    return judge(
        ProgramRank("rank 0", lambda: model.state_dict(keep_vars=True), files, run, reserved), small
    ).differences


@BOTH
def test_the_same_bytes(small: int) -> None:
    assert found(FILES, small) == []


def _changed(name: str, change: Callable[[Tensor], object]) -> dict[str, Tensor]:
    files = {key: tensor.clone() for key, tensor in FILES.items()}
    change(files[name])
    return files


@BOTH
@pytest.mark.parametrize(
    ("files", "said"),
    [
        (_changed("joined", lambda x: x[4, 1].mul_(-1)), "1 of 24 elements that it loads, first at [4, 1]"),
        (_changed("joined", lambda x: x.copy_(x.flip(0))), "24 of 24 elements"),
        (_changed("norm", lambda x: x[2].fill_(float("nan"))), "'norm' on rank 0: 1 of 4 elements that it loads"),
        (_changed("scale", lambda x: x[0].fill_(1)), "'scale' on rank 0: 1 of 3 elements that it leaves"),
        (FILES | {"norm": NORM.bfloat16()}, "'norm' on rank 0: bfloat16 [4], the engine has float32 [4]"),
        (FILES | {"joined": FILES["joined"][:5]}, "float32 [5, 4], the engine has float32 [6, 4]"),
        (FILES | {"more": NORM}, "'more' on rank 0: only the shards have it"),
        ({name: FILES[name] for name in ("joined", "scale")}, "'norm' on rank 0: the shards lack it"),
    ],
    ids=["sign", "order", "nan", "constant", "dtype", "row", "extra", "missing"],
)  # fmt: skip
def test_other_files_are_named(files: dict[str, Tensor], said: str, small: int) -> None:
    lines = found(files, small)
    assert len(lines) == 1 and said in lines[0]


@BOTH
def test_a_zero_of_the_other_sign_is_another_byte(small: int) -> None:
    files = _changed("joined", lambda x: x[0, 0].fill_(-0.0))
    assert len(found(files, small, lambda model: model.joined.data[0, 0].fill_(0.0))) == 1


@BOTH
def test_what_nobody_fills_is_chance(small: int) -> None:
    lines = found(FILES, small, first=lambda model: model.joined.data[:3].copy_(HALVES[0]))
    assert any("12 elements that it fills from nothing" in line for line in lines)


@BOTH
def test_the_last_of_two_writes_counts(small: int) -> None:
    """Of a name that two files have, an engine keeps the later."""

    def twice(model: Model) -> None:
        model.joined.data[:3].copy_(HALVES[1])
        load(model)

    def wrong_again(model: Model) -> None:
        model.joined.data[1].fill_(3)

    assert found(FILES, small, first=twice) == []
    assert len(found(FILES, small, wrong_again)) == 1


@BOTH
def test_a_parameter_in_place_of_another_is_compared(small: int) -> None:
    def replace(model: Model) -> None:
        model.norm.data = NORM + 1

    assert len(found(FILES, small, replace)) == 1
    assert found(FILES | {"norm": NORM + 1}, small, replace) == []


CHANGES: dict[str, Load] = {
    "add": lambda model: model.joined.data.add_(1),
    "neg": lambda model: model.joined.data.neg_(),
    "flip": lambda model: model.joined.data.copy_(model.joined.data.flip(0)),
    "temporary": lambda model: model.joined.data.copy_((model.joined.data * 2).clone()),
    "index": lambda model: model.joined.data.index_fill_(0, torch.tensor([1]), 0.0),
    "other dtype": lambda model: model.joined.data.view(torch.uint8).fill_(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_loading_is_refused_or_found(change: str) -> None:
    """It misled a recorder of copies, which said the same of all of them."""
    with pytest.raises(NotFollowedError, match="joined"):
        found(FILES, 0, CHANGES[change])
    assert len(found(FILES, SMALL, CHANGES[change])) == 1


@BOTH
def test_memory_that_is_given_away_is_refused(small: int) -> None:
    with pytest.raises(NotFollowedError, match=r"numpy.* of 'joined': writes there are not followed"):
        found(FILES, small, lambda model: model.joined.detach().numpy().fill(0))


def test_what_is_not_known_is_refused() -> None:
    class Part(Model):
        def __init__(self) -> None:
            super().__init__()
            self.joined.data[0].fill_(0)

    class Turned(Model):
        def __init__(self) -> None:
            super().__init__()
            self.joined.data = torch.empty(4, 6).t()

    for kind, said in ((Part, "is filled when the model is built"), (Turned, "its memory alone, in order")):
        reserved = Creation()
        with reserved:
            model = kind()
        rank = ProgramRank("rank 0", lambda model=model: model.state_dict(), FILES, lambda: None, reserved)
        with pytest.raises(NotFollowedError, match=said):
            judge(rank, 0)


# --------------------------------------------------------------------------------------------------------- transformers


def _asked(original: Path, shards: Path, scratch: Path) -> list[str]:
    """What transformers' loader says, in this process."""
    said = answer(Request("transformers", str(original), str(shards), str(scratch)))
    assert said["stopped"] is None
    return list(said["ranks"][0]["differences"])


@pytest.mark.parametrize("form", ["transformers", "dcp modules"])
def test_transformers_holds_the_same(form: str, tmp_path: Path) -> None:
    original, out = store.checkpoint("mixtral"), tmp_path / "out"
    split(original, out, tp=2, **form_of(form))
    assert _asked(original, out, tmp_path) == []


def test_transformers_holds_the_same_of_a_merged_folder(tmp_path: Path) -> None:
    original, out = store.checkpoint("qwen3"), tmp_path / "out"
    merge(store.shards("qwen3", tp=2), out)
    assert _asked(original, out, tmp_path) == []
    change_tensor(out / "model.safetensors", "model.norm.weight", at=3)
    assert ["'model.norm.weight' on rank 0:" in line for line in _asked(original, out, tmp_path)] == [True]


def test_a_name_that_transformers_has_no_use_for_is_named(tmp_path: Path) -> None:
    original, out = store.checkpoint("qwen3"), tmp_path / "out"
    tensors = load_file(original / "model.safetensors")
    shutil.copytree(original, out)
    save_file(tensors | {"model.more.weight": torch.ones(2)}, out / "model.safetensors", metadata={"format": "pt"})
    assert _asked(original, out, tmp_path) == ["'model.more.weight' on rank 0: only the shards have it"]
    said = answer(Request("transformers", str(out), str(out), str(tmp_path)))["ranks"][0]
    assert said["differences"] == [] and said["ignored"] == ["model.more.weight"]


def test_a_wrong_rule_is_found_by_the_loader_alone(tmp_path: Path) -> None:
    """The files are wrong, and the same line maps them back: the bytes are the original's."""
    original, out = store.checkpoint("mixtral"), tmp_path / "out"
    line = "model.layers.{layer}.mlp.experts.gate_up_proj"
    with exchanged(tmp_path, "transformers.json", line, (1, 0)):
        split(original, out, format="transformers", tp=2)
        assert verify(original, out, exact_only=True).verdict == "same"
        done = command("verify", original, out, "--exact-only", "--loader", sys.executable)
    assert done.returncode == 1, done.stderr
    assert "DIFFERENT: Every byte is the original's" in done.stdout
    assert "own loader differs from the shards in 'model.layers.0.mlp.experts.gate_up_proj' on rank 0" in done.stdout


def test_the_answer_names_the_witness(tmp_path: Path) -> None:
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, format="transformers", tp=2)
    done = command("verify", original, out, "--exact-only", "--loader", sys.executable, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert "own loader puts the same bytes into all 30 tensors of 1 rank (30 loaded, 0 constants)" in said["summary"]
    assert said["loader"]["name"].startswith("transformers 5.") and said["loader"]["tensors"] == 30


@pytest.mark.parametrize(
    ("model", "settings", "said"),
    [
        (
            "llama",
            {"tp": 2},
            "the bytes, by the built-in rules of 'llama'; no forward pass; ranks' sizes by their tensors.",
        ),
        (
            "llama",
            {"tp": 2, "format": "vllm"},
            "the format 'vllm' as compared with vLLM 0.32.0 for this model type earlier: no program was asked now.",
        ),
        ("gpt2", {"tp": 2}, "no forward pass; ranks' sizes from split."),
        ("llama", {"tp": 2, "format": "sglang"}, "the format 'sglang' by reshard's lines alone: no program was asked."),
    ],
    ids=["own", "compared", "split", "lines"],
)
def test_the_verdict_says_what_it_rests_on(model: str, settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    original, out = store.checkpoint(model), tmp_path / "out"
    split(original, out, **settings)
    found = verify(original, out, exact_only=True, dtype=settings.get("dtype"))
    assert said in found.in_words and found.evidence[0] == f"the bytes, by the built-in rules of '{model}'"
    assert found.to_document()["evidence"] == found.evidence


def test_a_loader_and_a_forward_are_named(tmp_path: Path) -> None:
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, format="transformers", tp=2)
    found = verify(original, out, loader=sys.executable)
    version = transformers.__version__
    assert found.evidence[1:] == [
        f"the forward pass, by transformers {version} on cpu",
        f"the format 'transformers' as transformers {version}'s own loader has it",
    ]


def _python(folder: Path, module: str) -> Path:
    """A Python in which transformers is this text."""
    folder.mkdir()
    (folder / "transformers.py").write_text(module)
    (folder / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    return python_with(folder / "python", folder)


MOVED = "__version__ = '9.0'"
BROKEN = "import torchvision"
WRAPPED = """
try:
    import torchvision
except RuntimeError as error:
    raise ModuleNotFoundError("Could not import module 'PreTrainedModel'") from error
"""
LAZY = """
__version__ = "9.0"
class logging:
    set_verbosity_error = disable_progress_bar = staticmethod(lambda: None)
def __getattr__(name):
    import torchvision
"""
REFUSES = """
__version__ = "9.0"
class logging:
    set_verbosity_error = disable_progress_bar = staticmethod(lambda: None)
class AutoModel: pass
class LlamaForCausalLM:
    @classmethod
    def from_pretrained(cls, *_, **__): assert cls is None
"""
DIES = "import os; os._exit(3)"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (REFUSES, "transformers 9.0 stopped while it built its model on this machine: AssertionError: "),
        (MOVED, "not know the inside of the transformers that is installed there: AttributeError: module 'transfo"),
        *((text, f"the environment of {name} is broken: 'torchvision' cannot be imported there: RuntimeError: operator "
           "torchvision::nms does not exist")
          for text, name in ((BROKEN, "transformers"), (WRAPPED, "transformers"), (LAZY, "transformers 9.0"))),
        ("import a_package", "'transformers' cannot be imported there: ModuleNotFoundError: No module named 'a_p"),
        (DIES, "transformers's loader ended without an answer: status 3"),
    ],
    ids=["refuses", "moved", "broken", "wrapped", "lazy", "lacks", "dies"],
)  # fmt: skip
def test_what_does_not_answer_proves_nothing(module: str, said: str, tmp_path: Path) -> None:
    original, out = store.checkpoint("llama"), tmp_path / "out"
    split(original, out, format="transformers", tp=2)
    python = _python(tmp_path / "engine", module)
    done = command("verify", original, out, "--exact-only", "--loader", python)
    assert done.returncode == 2
    assert (
        "UNCHECKED: Every byte is the original's" in done.stdout and "The format could not be checked: " in done.stdout
    )
    assert said in done.stdout
    with pytest.raises(CheckpointError, match="transformers"):
        verify(original, out, exact_only=True, loader=str(python))


def test_a_loader_needs_its_program_and_its_format(tmp_path: Path) -> None:
    original, out, own = store.checkpoint("llama"), tmp_path / "out", tmp_path / "own"
    split(original, out, format="transformers", tp=2)
    split(original, own, tp=2)
    done = command("verify", original, own, "--exact-only", "--loader", sys.executable)
    assert done.returncode == 2 and "has reshard's own folders, and the loaders that are known" in done.stderr
    done = command("verify", original, out, "--exact-only", "--loader", "/none/python")
    assert done.returncode == 2 and "--loader /none/python is not possible: No such file" in done.stderr
    done = command("verify", original, out, "--exact-only", "--loader", shutil.which("false"))
    assert done.returncode == 2 and "it has no transformers" in done.stderr
    done = command("verify", original, out, "--exact-only", "--dtype", "bf16", "--loader", sys.executable)
    assert done.returncode == 2 and "--dtype is not possible" in done.stderr


@thorough
@pytest.mark.parametrize(
    "line", ["verify {model} {out} --exact-only --loader", "live check {model} --to vllm:1 --engine-python"]
)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_leaves_no_program_behind(how: signal.Signals, line: str, tmp_path: Path) -> None:
    """Nor one that the program has started."""
    original, begun = store.checkpoint("llama"), tmp_path / "begun"
    split(original, tmp_path / "out", format="transformers")
    python = tmp_path / "python"
    asks = 'case "$*" in *find_spec*) exit 0;; esac'
    python.write_text(f'#!/bin/sh\n{asks}\nsleep 600 &\necho $! $$ > "{begun}.new"; mv "{begun}.new" "{begun}"; wait\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    words = line.format(model=original, out=tmp_path / "out").split()
    process = subprocess.Popen(
        [sys.executable, "-m", "reshard", *words, python], cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while process.poll() is None and not begun.exists():
        time.sleep(0.05)
    assert begun.exists(), process.communicate()
    process.send_signal(how)
    assert process.communicate(timeout=60)[1].endswith("reshard: interrupted\n")
    assert_gone([int(pid) for pid in begun.read_text().split()])
    assert not [*tmp_path.glob("reshard-*")]


TITAN = """
class Qwen3StateDictAdapter:
    def __init__(self, config, folder):
        assert config.dim == 80 and folder is None
    def from_hf(self, tensors):
        for old, new in NAMES.items():
            tensors = {key.replace(old, new): tensor for key, tensor in tensors.items()}
        return tensors
NAMES = {
    "model.embed_tokens": "tok_embeddings", "model.": "", "self_attn.": "attention.",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "q_proj": "qkv_linear.wq", "k_proj": "qkv_linear.wk", "v_proj": "qkv_linear.wv",
    "o_proj": "wo", "mlp.": "feed_forward.", "gate_proj": "w1", "down_proj": "w2",
    "up_proj": "w3",
}
"""
"""A program of the name of torchtitan, with the names of its Qwen 3."""


@pytest.mark.parametrize(
    ("changed", "verdict"), [("", "same"), ('NAMES |= {"gate_proj": "w3", "up_proj": "w1"}', "different")]
)
def test_an_adapter_of_torchtitan_is_the_witness(changed: str, verdict: str, tmp_path: Path) -> None:
    package, version = tmp_path / "torchtitan/models/qwen3", tmp_path / "torchtitan-9.0.dist-info"
    package.mkdir(parents=True)
    version.mkdir()
    (version / "METADATA").write_text("Name: torchtitan\nVersion: 9.0\n")
    (package / "state_dict_adapter.py").write_text(TITAN + changed)
    python = python_with(tmp_path / "python", tmp_path)
    original = store.checkpoint("qwen3")
    split(original, tmp_path / "out", tp=2, format="torchtitan")
    found = verify(original, tmp_path / "out", exact_only=True, loader=str(python))
    assert found.verdict == verdict and "torchtitan 9.0's own loader" in found.in_words


SGLANG = {
    "__init__": "__version__ = '9.0'",
    "srt/server_args": """
from types import SimpleNamespace as ServerArgs
def set_global_server_args_for_scheduler(arguments):
    import sgl_kernel.gemm, flashinfer  # which are not installed
    assert sgl_kernel.gemm.fp8_scaled_mm(0) is None
""",
    "srt/runtime_context": """
places = {}
class Parallel:
    override_permanently = staticmethod(lambda **of: places.update(of))
get_parallel = Parallel
""",
    "srt/distributed/parallel_state": """
import torch.distributed as dist
from sglang.srt.runtime_context import places
def init_distributed_environment(size, rank, local_rank, backend):
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size) == (places.get("tp_rank", rank), size)
def initialize_model_parallel():
    assert dist.new_group([0, 1], backend="gloo") is not None  # a real one would wait for the other rank
def destroy_model_parallel():
    places.clear()
destroy_distributed_environment = dist.destroy_process_group
""",
    "srt/configs/load_config": "from types import SimpleNamespace as LoadConfig",
    "srt/configs/model_config": """
import torch
class ModelConfig:
    def from_server_args(arguments):
        config = ModelConfig()
        config.path, config.dtype, config.size = arguments.model_path, torch.float32, arguments.tp_size
        return config
""",
    "srt/model_loader/loader": """
import glob, torch
import torch.distributed as dist
from safetensors.torch import load_file
CUT = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
JOINED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
          "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}
def parts(tensors, size):
    found = {}
    for name, tensor in tensors:
        module = name.split(".")[-2]
        if module in CUT:
            tensor = tensor.chunk(size, CUT[module])[dist.get_rank()]
        elif module in ("embed_tokens", "lm_head"):
            rows = -(-len(tensor) // 64) * 64
            tensor = torch.cat([tensor, torch.zeros(rows - len(tensor), tensor.shape[1])]).chunk(size)[dist.get_rank()]
        joined, at = JOINED.get(module, (module, 0))
        found.setdefault(name.replace(module, joined), {})[at] = tensor
    return {name: [of[at] for at in sorted(of)] for name, of in found.items()}
class DefaultModelLoader:
    def __init__(self, config):
        assert config.load_format == "safetensors"
    def _get_all_weights(self, config, model):
        return [each for file in glob.glob(config.path + "/*.safetensors") for each in load_file(file).items()]
class Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.size, self.own = config.size, parts(DefaultModelLoader._get_all_weights(None, config, None), config.size)
        self.own = {name: torch.empty_like(torch.cat(of)) for name, of in self.own.items()}
    def state_dict(self, **_):
        return self.own
    def load_weights(self, weights):
        for name, of in parts(weights, self.size).items():
            at = 0
            for each in of:
                self.own[name][at : at + len(each)].copy_(each)
                at += len(each)
_initialize_model = lambda config, load_config: Model(config)
class ShardedStateLoader:
    DEFAULT_PATTERN = "model-rank-{rank}-part-{part}.safetensors"
    _filter_subtensors = staticmethod(lambda state: state)
""",
}
"""A program of the name of SGLang, which holds Llama as SGLang does."""


@pytest.mark.parametrize(
    ("changed", "verdict"), [("", "same"), ('JOINED |= {"gate_proj": ("gate_up_proj", 2)}', "different")]
)
def test_both_ranks_of_sglang_are_played_in_one_process(changed: str, verdict: str, tmp_path: Path) -> None:
    for name, text in SGLANG.items():
        file = tmp_path / f"sglang/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + (changed if name.endswith("/loader") else ""))
    python = python_with(tmp_path / "python", tmp_path)
    original = store.checkpoint("llama")
    split(original, tmp_path / "out", tp=2, format="sglang")
    found = verify(original, tmp_path / "out", exact_only=True, loader=str(python))
    assert found.verdict == verdict and "SGLang 9.0's own loader" in found.in_words
    assert verdict == "different" or "tensors of 2 ranks" in found.in_words
