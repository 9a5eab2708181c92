"""``--dtype``: every element as torch rounds it, on every route; what stays; what ``verify`` says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import build_glob_alternation

from reshard.api import diff, load, merge, split
from reshard.formats.errors import MismatchError
from reshard.formats.files.safetensors import CASTS, read_header
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.numbers import CODES, convert
from reshard.formats.transformers_internals import placements
from reshard.move.changes import Change
from reshard.source.access import Access
from reshard.transforms.opening import open_any
from reshard.verify.api import verify
from reshard.verify.bytes.reading import cast as proof
from tests import store, zoo
from tests.marks import one_of_each, thorough
from tests.support import LLAMA, change_tensor, changed_tensors, command, contents, write_checkpoint

ONE = {"workers": 1}
TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PAIRS = [(before, after) for before in TORCH for after in CASTS.values() if before != after]
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}

# ---------------------------------------------------------------------------------------------------------- arithmetic


def bits(tensor: torch.Tensor) -> np.ndarray:
    size = tensor.element_size()
    return tensor.contiguous().view(INTEGERS[size]).numpy().view(f"<u{size}")


def cast(tensor: torch.Tensor, before: str, after: str) -> np.ndarray:
    change = Change("w", before, after, None, after)
    codes = np.ascontiguousarray(bits(tensor))
    return change.elements()(codes.view(np.uint8).reshape(-1, change.before)).reshape(-1).view(f"<u{change.after}")


def check(tensor: torch.Tensor, before: str, after: str) -> None:
    """As torch in the proof; the engine too, but for what would become infinite, which it refuses."""
    wide = tensor.to(torch.float32)  # torch's own kernel from float64 has another NaN at the end of a tensor
    wanted = wide.to(TORCH[after]) if (before, after) == ("F64", "BF16") else tensor.to(TORCH[after])
    assert np.array_equal(proof(bits(tensor), before, after), bits(wanted))
    lost = torch.isfinite(tensor) & torch.isinf(wanted)
    assert np.array_equal(cast(tensor[~lost], before, after), bits(wanted[~lost]))
    for one in tensor[lost][:1]:
        with pytest.raises(MismatchError, match=r"tensor 'w' has values that are beyond .*, and would become infinite"):
            cast(one.reshape(1), before, after)


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[0] in {"F16", "BF16"}])
def test_all_numbers_of_16_bits(before: str, after: str) -> None:
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(TORCH[before])
    check(every.repeat(2), before, after)  # a cast takes as many at a time


@pytest.mark.parametrize(("before", "after"), [("BF16", "F16"), ("F16", "BF16")])
def test_each_number_alone_is_lost_if_it_becomes_infinite(before: str, after: str) -> None:
    """Of either sign, also beside a NaN."""
    every = np.arange(1 << 16, dtype=np.uint16)
    values = torch.from_numpy(every.view(np.int16)).view(TORCH[before])
    is_lost = (torch.isfinite(values) & torch.isinf(values.to(TORCH[after]))).tolist()
    for code, lost in zip(every, is_lost, strict=True):
        for other in (code, 0xFFFF):  # NaN
            codes = np.array([code, other], "<u2").view(CODES[before])
            assert convert(codes, before, after, np.empty(2, CODES[after])) == lost


@pytest.mark.parametrize(("before", "after"), [pair for pair in PAIRS if pair[0] in {"F64", "F32"}])
@given(data=st.data())
def test_any_bits(before: str, after: str, data: st.DataObject) -> None:
    """Also numbers halfway between two of the other dtype, the largest and the smallest of both, and NaNs."""
    size = TORCH[before].itemsize
    edges = [torch.finfo(TORCH[dtype]) for dtype in (after, "F16", "BF16", "F32")]
    known = [value for of in edges for value in (of.max, of.tiny, of.smallest_normal, of.tiny * of.eps, of.tiny * 1.5)]
    words = data.draw(st.lists(st.integers(0, 256**size - 1), min_size=1, max_size=30))
    drawn = torch.from_numpy(np.array(words, f"<u{size}").view(f"<f{size}"))
    dropped = torch.from_numpy(np.array(words, f"<u{size}") >> np.uint64(12) << np.uint64(12)).view(TORCH[before])
    near = torch.tensor(known, dtype=TORCH[before])
    steps = torch.tensor([1, -1, 1 + 2**-8, 1 + 2**-9, 1 + 2**-11, 1 + 2**-12, 1 + 3 * 2**-9], dtype=TORCH[before])
    check(torch.cat([drawn, dropped, (near[:, None] * steps).reshape(-1)]), before, after)


# -------------------------------------------------------------------------------------------------------------- routes


def trained(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model of the zoo with a NaN, infinities and subnormals in it."""
    zoo.save(name, folder, dtype=dtype)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-41, 1 + 2**-8, 1 + 3 * 2**-8], dtype=dtype)
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor[0, : min(7, tensor.shape[1])] = odd[: tensor.shape[1]]
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def made(name: str, dtype: torch.dtype = torch.float32) -> Path:
    return store.made(f"trained-{name}-{dtype}", lambda folder: trained(folder, name, dtype) and None)


def by_torch(folder: Path, dtype: torch.dtype, stay: str = "-") -> dict[str, torch.Tensor]:
    return {name: t if stay in name else t.to(dtype) for name, t in load_file(folder / "model.safetensors").items()}


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert {name: t.dtype for name, t in found.items()} == {name: t.dtype for name, t in wanted.items()}
    for name, tensor in wanted.items():
        assert np.array_equal(bits(found[name]), bits(tensor)), name


FORMS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 3}, {"tp": 2, "format": "vllm"}, {"tp": 2, "format": "megatron"}, {"tp": 2}, {"format": "dcp"},
    {"tp": 2, "format": "sglang"}, {"format": "dcp", "names": "modules"}, {"tp": 2, "format": "megatron-legacy"},
]  # fmt: skip
QUICK = {None: "ranks", "vllm": "one file a rank"}
"""The others are containers of chunks."""
BIAS = "e_score_correction_bias"


@pytest.mark.parametrize("form", one_of_each(FORMS, lambda form: QUICK.get(form.get("format"))))
def test_a_cast_goes_with_every_move(form: dict[str, Any], tmp_path: Path) -> None:
    """Cast and split, split and cast, and cast twice over give one checkpoint, which is torch's."""
    model = made("deepseek_v3")
    split(model, tmp_path / "out", dtype="bf16", **form, **ONE)
    merge(tmp_path / "out", tmp_path / "back", **ONE)
    assert_equal(load_file(tmp_path / "back/model.safetensors"), by_torch(model, torch.bfloat16, BIAS))
    split(model, tmp_path / "wide", **form, **ONE)
    merge(tmp_path / "wide", tmp_path / "direct", dtype=torch.bfloat16, **ONE)
    assert contents(tmp_path / "direct") == contents(tmp_path / "back")
    answer = verify(model, tmp_path / "out", dtype="bf16", exact_only=True)
    assert answer.verdict == "same" and "after a cast to bf16" in str(answer)
    assert verify(tmp_path / "back", tmp_path / "out", exact_only=True).verdict == "same"
    assert diff(model, tmp_path / "out", dtype="bf16").same


@pytest.mark.parametrize(("before", "after"), one_of_each(PAIRS, kind=lambda pair: pair[1]))
def test_each_dtype(before: str, after: str, tmp_path: Path) -> None:
    model = made("llama-biases", TORCH[before])
    name = next(name for name, dtype in CASTS.items() if dtype == after)
    merge(model, tmp_path / "out", dtype=name, **ONE)
    assert_equal(load_file(tmp_path / "out/model.safetensors"), by_torch(model, TORCH[after]))
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == str(TORCH[after])[6:]
    assert verify(model, tmp_path / "out", dtype=name, exact_only=True).verdict == "same"


def test_a_function_is_of_what_was_cast(tmp_path: Path) -> None:
    """vLLM stores -exp(A_log): of the rounded one, which stands beside the shards."""
    model = made("mamba")
    merge(model, tmp_path / "narrow", dtype="bf16", **ONE)
    for source, more in ((tmp_path / "narrow", {}), (model, {"dtype": "bf16"})):
        split(source, tmp_path / f"served-{len(more)}", tp=2, format="vllm", **more, **ONE)
    one, other = (contents(tmp_path / f"served-{number}") for number in (0, 1))
    assert one.keys() == other.keys() and all(one[name] == other[name] for name in one if name != "reshard.json")
    split(tmp_path / "served-1", tmp_path / "wider", tp=1, format="vllm", dtype="fp16", **ONE)
    merge(model, tmp_path / "straight", dtype="bf16", overwrite=True, **ONE)
    merge(tmp_path / "straight", tmp_path / "half", dtype="fp16", **ONE)
    merge(tmp_path / "wider", tmp_path / "back", **ONE)
    assert_equal(*(load_file(tmp_path / name / "model.safetensors") for name in ("back", "half")))
    assert verify(model, tmp_path / "served-1", dtype="bf16", exact_only=True).verdict == "same"


def test_one_rank_in_memory() -> None:
    model = made("llama-biases")
    found = load(model, tp=2, rank=1, dtype="fp16")
    wanted = {name: tensor.to(torch.float16) for name, tensor in load(model, tp=2, rank=1).items()}
    assert_equal(found, wanted)


def test_several_files_keep_their_names(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", files=3)
    split(tmp_path / "model", tmp_path / "out", tp=2, dtype="fp32", **ONE)
    merge(tmp_path / "out", tmp_path / "back", **ONE)
    merge(tmp_path / "model", tmp_path / "wide", dtype="float32", **ONE)
    assert contents(tmp_path / "back") == contents(tmp_path / "wide")
    index = json.loads((tmp_path / "wide/model.safetensors.index.json").read_text())
    assert {*index["weight_map"].values()} == {path.name for path in (tmp_path / "model").glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(
        info.nbytes for path in (tmp_path / "wide").glob("*.safetensors") for info in read_header(path).tensors.values()
    )


def test_it_is_the_last_of_all_changes(tmp_path: Path) -> None:
    model, tuned = made("llama-biases"), tmp_path / "tuned"
    zoo.save("llama-biases", tuned, settings={})
    change_tensor(tuned / "model.safetensors", "model.norm.weight", at=2)
    diff(model, tuned, out=tmp_path / "delta")
    merge(model, tmp_path / "one", patch=tmp_path / "delta", dtype="bf16", **ONE)
    merge(tuned, tmp_path / "two", dtype="bf16", **ONE)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_cast_to_its_own_dtype_changes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", config=LLAMA | {"torch_dtype": "bfloat16"})
    done = command("split", "model", "out", "--tp", "2", "--dtype", "bfloat16", cwd=tmp_path)
    assert "No weight is in another dtype than bf16" in done.stdout
    merge(tmp_path / "out", tmp_path / "back", **ONE)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (tmp_path / "model/model.safetensors").read_bytes()


def test_quantized_weights_and_scales_stay(tmp_path: Path) -> None:
    from tests.dequantize import METHODS
    from tests.source.test_quantized import PACKINGS, checkpoint

    for method in ("gptq", "float8-block"):
        folder, *_ = checkpoint(tmp_path / method, METHODS[method], PACKINGS[0])
        done = command("split", folder, tmp_path / f"{method}-out", "--tp", "2", "--dtype", "fp32")
        assert "uantized weights and their scales stay" in done.stdout, done.stderr
        merge(tmp_path / f"{method}-out", tmp_path / f"{method}-back", **ONE)
        before, after = ({n: i.dtype for f in folder.glob("*.safetensors") for n, i in read_header(f).tensors.items()}
                         for folder in (folder, tmp_path / f"{method}-back"))  # fmt: skip
        changed = {name for name in before if before[name] != after[name]}
        assert changed and not any("scale" in n or "zeros" in n or "qweight" in n for n in changed)
        assert all(after[name] == "F32" for name in changed)


# --------------------------------------------------------------------------------------------------- what is refused


def test_a_name_that_is_no_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    done = command("split", "model", "out", "--tp", "2", "--dtype", "int8", cwd=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[0] == "Error: --dtype int8 is not possible: the dtypes are bf16, fp16, fp32"


def test_a_weight_that_would_become_infinite(tmp_path: Path) -> None:
    """An infinite weight is no model: nothing is written."""
    zoo.save("llama-biases", tmp_path / "model")
    with changed_tensors(tmp_path / "model/model.safetensors") as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 65520.0
    done = command("split", "model", "out", "--tp", "2", "--dtype", "fp16", cwd=tmp_path)
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.splitlines()[-2:] == [
        "Error: tensor 'model.layers.*.mlp.up_proj.weight' has values that are beyond float16, and would become "
        "infinite",
        "Hint: bf16 has the range of fp32",
    ]
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 65519.0
    save_file(tensors, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    assert command("split", "model", "out", "--tp", "2", "--dtype", "fp16", cwd=tmp_path).returncode == 0


# --------------------------------------------------------------------------------------------------- what verify says


def test_verify_names_the_option_that_is_missing(tmp_path: Path) -> None:
    model = made("llama-biases")
    for form in ({"tp": 2}, {"tp": 2, "format": "vllm"}, {"format": "huggingface"}):
        split(model, tmp_path / "out", dtype="bf16", overwrite=True, **form, **ONE)
        answer = verify(model, tmp_path / "out", exact_only=True)
        assert answer.verdict == "different"
        assert "These have weights in bf16, the original has none. If it was cast, give --dtype bf16, too." in str(
            answer
        )
    done = command("verify", model, tmp_path / "out", "--dtype", "bf16")
    assert done.returncode == 2 and "--dtype is not possible: with it, only bytes can be compared" in done.stderr


@pytest.mark.parametrize("form", [{"tp": 2}, {"tp": 2, "format": "vllm"}], ids=str)
def test_verify_sees_each_bit_that_was_rounded_otherwise(form: dict[str, Any], tmp_path: Path) -> None:
    model = made("llama-biases")
    split(model, tmp_path / "out", dtype="bf16", **form, **ONE)
    path = next((tmp_path / "out").rglob("*.safetensors"))
    name = next(name for name in read_header(path).tensors if name.endswith("input_layernorm.weight"))
    change_tensor(path, name, at=4)
    answer = verify(model, tmp_path / "out", dtype="bf16", exact_only=True)
    assert answer.verdict == "different" and answer.exact is not None
    first = answer.exact.first
    assert first is not None and (first.tensor, first.index) == ("model.layers.0.input_layernorm.weight", (2,))
    assert first.expected == bits(by_torch(model, torch.bfloat16)[first.tensor])[2:3].tobytes()


# ----------------------------------------------------------------------------------------------- what a model declares

MORE = (
    "e_score_correction_bias", "expert_bias", "router_bias", "A_log", "dt_bias",  # as published checkpoints store them
    "masked_bias", "_fp32_params", "embed_positions", "sconv.", "qformer.", ".wo.",
)  # fmt: skip
"""What stays although transformers' class of some type does not say so."""
ONE_OF_EACH = ["deepseek_v3", "gpt_oss", "t5"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """To find who declares something, all architectures are read: a second in each process that collects tests."""
    if kinds := {"declaring", "silent"} & {*metafunc.fixturenames}:
        forms = {name: find_architecture({"model_type": entry.model_type}, Path()) for name, entry in zoo.ZOO.items()}
        declaring = {name for name, form in forms.items() if form.float32} | {"internvl-gpt_oss"}
        names = {"declaring": declaring - {*ONE_OF_EACH}, "silent": {*zoo.ZOO} - declaring}
        for kind in kinds:
            metafunc.parametrize(kind, sorted(names[kind]))


def kept_in_float32(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether ``from_pretrained`` keeps a parameter in float32 that is loaded in a dtype."""
    plan = model._get_dtype_plan(dtype)
    return bool(plan) and build_glob_alternation(list(plan))[0].search(name) is not None


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_what_a_class_of_transformers_keeps_in_float32_stays(name: str) -> None:
    folder = store.made(f"declared-{name}", lambda path: zoo.save(name, path) and None)
    model = zoo.ZOO[name].build(None, {}, None)
    source = open_any(folder, Access())
    placed = placements(model, {tensor.name: tensor.shape for tensor in source.model.tensors})
    for word, dtype in CASTS.items():
        if dtype == "F32":
            continue
        kept = {param for param in placed if kept_in_float32(model, param, TORCH[dtype])}
        theirs = {disk for param in kept for disk in placed[param].sources}
        ours = {t.name for t in open_any(folder, Access(dtype=word)).model.tensors if t.dtype == "F32"}
        assert theirs <= ours, (word, sorted(theirs - ours))
        assert all(any(part in other for part in MORE) for other in ours - theirs), (word, sorted(ours - theirs))


@thorough
def test_so_it_does_of_each_class_that_declares_some(declaring: str) -> None:
    test_what_a_class_of_transformers_keeps_in_float32_stays(declaring)


@thorough
def test_no_other_class_keeps_any(silent: str) -> None:
    model = zoo.ZOO[silent].build(None, {}, None)
    params = [n for n, _ in model.named_parameters()]
    assert not [n for n in params for dtype in (torch.float16, torch.bfloat16) if kept_in_float32(model, n, dtype)]


@pytest.mark.parametrize(("name", "is_rounded"), [("fp32", False), ("fp16", True)])
def test_a_wider_dtype_is_not_called_rounded(name: str, is_rounded: bool) -> None:
    note = open_any(store.checkpoint("llama", "bfloat16"), Access(dtype=name)).note
    assert note == f"weights were cast to {name}" + ", rounded to nearest even" * is_rounded
