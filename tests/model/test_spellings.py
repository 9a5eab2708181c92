"""One model under the names that others give its tensors: transformers' modules, wrappers, beginnings, another root."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import zlib
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import reshard
from benchmarks.spellings import LORA, SPELLINGS, check, contents
from reshard.formats.errors import ReshardError
from reshard.formats.notation.architecture import with_first_indices
from reshard.formats.notation.architecture_files import built_in_architectures, find_architecture
from reshard.formats.notation.spellings import Spellings, module_tensors
from tests import store, zoo
from tests.marks import one_of_each, thorough
from tests.support import command, ok, refused, weights_of

State = dict[str, torch.Tensor]

NOT_READ = {"molmo2"}
"""What transformers makes of a tensor is not in its table: two are joined whose sizes nothing states."""
PACKED_OTHERWISE = {"qwen4_exp", "qwen4_exp_text", "esm"}
"""They open by lines of their own, in which the same matrices are several tensors, or tensors have any names in a
tower: diff does not take these for the same yet.
"""
CHANGED_BY_TRANSFORMERS = {"zaya", "xmod"}
"""What transformers itself loads and saves is another model: tied tensors that differ, numbers of the last expert."""

OTHERS = NOT_READ | PACKED_OTHERWISE | CHANGED_BY_TRANSFORMERS


def some(quick: set[str], without: Collection[str] = (), models: Collection[str] = zoo.one_of_each()) -> list[object]:
    """Models of the zoo: these few, and the others as thorough cases."""
    names = dict.fromkeys([*sorted(quick), *models])
    return one_of_each([name for name in names if name not in without], lambda name: name if name in quick else "")


def modules_of(name: str) -> State:
    """The state of transformers' class of a model of the zoo, with what its modules call the tensors."""
    model = zoo.class_of(store.checkpoint(name)).from_pretrained(store.checkpoint(name), dtype="auto")
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def root_changed(state: State) -> State:
    """The names with the root, or without it."""
    return {key.removeprefix("model.") if key.startswith("model.") else f"model.{key}": state[key] for key in state}


def plain(state: State, folder: Path, model: Path) -> None:
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def pickled(state: State, folder: Path, model: Path) -> None:
    folder.mkdir()
    shutil.copy(model / "config.json", folder)
    torch.save(state, folder / "pytorch_model.bin")


def distributed(state: State, folder: Path, model: Path) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)  # type: ignore[attr-defined]


CONTAINERS: dict[str, Callable[[State, Path, Path], None] | None] = {
    "safetensors": plain, "bin": pickled, "dcp": distributed, "live": None,
}  # fmt: skip


def stored(container: str, state: State, folder: Path, model: Path) -> tuple[object, dict[str, Path]]:
    """A source that has these tensors, and what is given with it."""
    if (write := CONTAINERS[container]) is None:
        return reshard.state_dict(state), {"config": model}
    write(state, folder, model)
    return folder, {"config": model} if container == "dcp" else {}


def below(beginning: str) -> Callable[[State], State]:
    return lambda state: {beginning + key: value for key, value in state.items()}


def wrapped(state: State) -> State:
    return {key.replace("layers.", "layers._orig_mod.", 1): value for key, value in state.items()}


FORMS: list[tuple[Callable[[State], State], Callable[[State, Path, Path], None]]] = [
    (below(""), plain),
    (below("module."), pickled),
    (below("state.model."), distributed),
    (below("ema_params.shadow."), distributed),
    (wrapped, plain),
    (wrapped, distributed),
]


@pytest.mark.parametrize("name", some({"gemma3", "deepseek_v3", "gpt2", "llava"}, CHANGED_BY_TRANSFORMERS, zoo.ZOO))
def test_the_names_of_modules_are_names_of_the_model(name: str, tmp_path: Path) -> None:
    model, form = store.checkpoint(name), FORMS[zlib.crc32(name.encode()) % len(FORMS)]
    respell, write = form
    write(respell(modules_of(name)), tmp_path / "run", model)
    if name in NOT_READ:
        with pytest.raises(ReshardError):
            reshard.diff(model, tmp_path / "run", config=model, quiet=True)
        return
    found = reshard.diff(model, tmp_path / "run", config=model, quiet=True)
    assert not (found.of("changed") or found.of("other dtype") or found.of("other shape")), found.to_text()
    known = {*zoo.ZOO[name].extra, *zoo.ZOO[name].copies}
    lacking = {tensor.name for tensor in found.of("only here")} - known
    assert not lacking or name in PACKED_OTHERWISE, found.to_text()


@pytest.mark.parametrize("name", some({"gemma3", "qwen3_moe", "bert"}))
def test_the_published_names_in_a_distributed_checkpoint(name: str, tmp_path: Path) -> None:
    """They come back as they are, also with another prefix than the architecture's own."""
    model = store.checkpoint(name)
    state = weights_of(model)
    distributed(state, tmp_path / "run", model)
    reshard.merge(tmp_path / "run", tmp_path / "out", config=model, quiet=True)
    out = weights_of(tmp_path / "out")
    assert out.keys() == state.keys() and all(torch.equal(out[key], state[key]) for key in out)


@pytest.mark.parametrize("name", some({"gemma3", "qwen3_moe", "llama"}))
def test_the_root_is_there_or_not(name: str, tmp_path: Path) -> None:
    model = store.checkpoint(name)
    state = weights_of(model)
    plain(root_changed(state), tmp_path / "run", model)
    found = reshard.diff(model, tmp_path / "run", quiet=True)
    assert found.same, found.to_text()


@pytest.mark.parametrize(
    "name", some({"qwen3_moe", "llama4", "mixtral"}, NOT_READ | CHANGED_BY_TRANSFORMERS | PACKED_OTHERWISE)
)
def test_a_merge_gives_the_names_that_are_asked_for(name: str, tmp_path: Path) -> None:
    model = store.checkpoint(name)
    cls = zoo.class_of(model).from_pretrained(model, dtype="auto")
    cls.save_pretrained(tmp_path / "modules", save_original_format=False)
    saved = (tmp_path / "modules" / "model.safetensors").read_bytes()
    reshard.split(tmp_path / "modules", tmp_path / "ranks", tp=1, quiet=True)
    reshard.merge(tmp_path / "ranks", tmp_path / "source", quiet=True)
    assert (tmp_path / "source" / "model.safetensors").read_bytes() == saved
    reshard.merge(tmp_path / "ranks", tmp_path / "published", names="published", quiet=True)
    reshard.split(tmp_path / "published", tmp_path / "again", tp=1, quiet=True)
    reshard.merge(tmp_path / "again", tmp_path / "back", names="modules", quiet=True)
    back, ours = (load_file(tmp_path / each / "model.safetensors") for each in ("back", "modules"))
    assert back.keys() == ours.keys() and all(torch.equal(back[key], ours[key]) for key in ours)


def names_and_values(folder: Path) -> dict[str, bytes]:
    state = weights_of(folder)
    return {key: repr(value.shape).encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            for key, value in state.items()}  # fmt: skip


@pytest.mark.parametrize("name", some({"gemma3", "qwen3_moe", "llava", "qwen3_vl_moe"}, {*OTHERS, "mt5"}, zoo.ZOO))
def test_ranks_have_the_names_of_their_source(name: str, tmp_path: Path) -> None:
    """If each is one tensor of transformers' modules; where these join tensors, ranks have the published ones."""
    model, modules, ranks = store.checkpoint(name), tmp_path / "modules", tmp_path / "ranks"
    zoo.class_of(model).from_pretrained(model, dtype="auto").save_pretrained(modules, save_original_format=False)
    saved, degree = names_and_values(modules), max(d for d in reshard.plan(modules).swept.valid if d <= 2)
    reshard.split(modules, ranks, tp=degree, quiet=True)
    held = {key for folder in ranks.glob("rank-*") for key in names_and_values(folder)}
    try:
        reshard.split(modules, tmp_path / "asked", tp=degree, names="modules", quiet=True)
        assert held == saved.keys()
        reshard.split(modules, tmp_path / "whole", tp=1, quiet=True)
        assert names_and_values(tmp_path / "whole" / "rank-00-of-01") == saved
    except ReshardError as error:
        assert "joined with others or in another order" in error.message
        assert held <= names_and_values(model).keys()
        done = reshard.split(modules, tmp_path / "said", tp=degree, dry_run=True, quiet=True)
        assert "ranks have the published names, as transformers' modules have" in str(done.note)
    first = ranks / f"rank-00-of-{degree:02}"
    assert reshard.load(modules, tp=degree).keys() == names_and_values(first).keys()
    assert reshard.load(modules, tp=degree, names="published").keys() <= names_and_values(model).keys()
    assert reshard.verify(modules, ranks, exact_only=True, quiet=True).verdict == "same"
    reshard.merge(ranks, tmp_path / "merged", quiet=True)
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == (modules / "model.safetensors").read_bytes()
    reshard.split(ranks, tmp_path / "published", tp=1, names="published", quiet=True)
    (ranks / "reshard.json").unlink()
    assert reshard.verify(modules, ranks, exact_only=True, quiet=True).verdict == "same"
    reshard.split(ranks, tmp_path / "again", tp=1, quiet=True)
    assert names_and_values(tmp_path / "again" / "rank-00-of-01").keys() == held
    reshard.merge(ranks, tmp_path / "alone", quiet=True)
    assert names_and_values(tmp_path / "alone").items() <= saved.items() or held != saved.keys()


NO_PLACE = {"molmo2", "qwen4_exp", "qwen4_exp_text", "esm", "esm-absolute", "zamba", "zamba2"}
"""Operations of transformers that its table has not, or modules with more than checkpoints."""
TIED_OTHERWISE = {"mbart", "mt5"}
"""A tied head that is published once more, or tables that are tied although config.json does not say so."""


@pytest.mark.parametrize(
    "name",
    some({"gemma3", "minimax_m3_vl", "paddleocr_vl", "qwen2_vl", "granitemoe", "bert", "t5", "gte", "zamba",
          "ernie4_5_vl_moe", "inkling2_text"},
         TIED_OTHERWISE, zoo.ZOO),
)  # fmt: skip
def test_a_run_in_the_names_of_modules_comes_back_with_the_published_ones(name: str, tmp_path: Path) -> None:
    model, run, out = store.checkpoint(name), tmp_path / "run", tmp_path / "out"
    if name in NO_PLACE:
        with pytest.raises(ReshardError, match="has no place in the format 'dcp'"):
            reshard.split(model, run, format="dcp", names="modules", quiet=True)
        return
    published = names_and_values(model)
    reshard.split(model, run, format="dcp", names="modules", quiet=True)
    (run / "reshard.json").unlink()
    if name == "hy_v3":  # the layer that drafts has experts 0 and 5 alone, and a stack has no numbers
        with pytest.raises(ReshardError, match=r"a stack of 2 has no numbers, and config\.json says 6"):
            reshard.merge(run, out, config=model, quiet=True)
        return
    reshard.merge(run, out, config=model, quiet=True)
    assert names_and_values(out) == published
    reshard.split(run, tmp_path / "again", format="dcp", names="published", config=model, quiet=True)
    assert set(dcp.FileSystemReader(tmp_path / "again").read_metadata().state_dict_metadata) == published.keys()
    reshard.split(model, tmp_path / "ranks", tp=1, quiet=True)
    reshard.merge(tmp_path / "ranks", tmp_path / "modules", names="modules", quiet=True)
    if names_and_values(tmp_path / "modules").keys() == published.keys():
        with pytest.raises(ReshardError, match="a full checkpoint with these names"):
            reshard.merge(tmp_path / "modules", tmp_path / "back", names="published", quiet=True)
        return
    reshard.merge(tmp_path / "modules", tmp_path / "back", names="published", quiet=True)
    assert names_and_values(tmp_path / "back") == published


REFUSED = sorted(NO_PLACE - {"esm", "esm-absolute", "zamba", "zamba2"})


@pytest.mark.parametrize("name", some({"qwen4_exp_text", "molmo2"}, (), REFUSED))
def test_a_type_whose_names_in_modules_are_not_known_is_told_so(name: str, tmp_path: Path) -> None:
    """Whether they are asked for or are there, in every container."""
    model, state = store.checkpoint(name), modules_of(name)
    config = json.loads((model / "config.json").read_text())
    why = Spellings(find_architecture(config, model), config).refusal
    assert why is not None
    reshard.split(model, tmp_path / "ranks", tp=1, quiet=True)
    cases = [(at, {}, "modules") for at in (model, tmp_path / "ranks")]
    cases += [(*stored(each, state, tmp_path / each, model), "published") for each in CONTAINERS]
    for source, given, names in cases:
        with pytest.raises(ReshardError) as caught:
            reshard.merge(source, tmp_path / "out", names=names, quiet=True, **given)
        assert f"{caught.value.message} | {caught.value.hint}".count(why) == 1, caught.value
    with pytest.raises(ReshardError, match=re.escape(why)) as caught:
        reshard.split(model, tmp_path / "out", format="dcp", names="modules", quiet=True)
    assert "leave out names" in str(caught.value.hint) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", some({"t5", "llama-tied"}, (), ["marian", "mbart", "bart", "gpt2"]))
def test_published_names_are_those_of_each_tensor_once(name: str, tmp_path: Path) -> None:
    model, state = store.checkpoint(name), modules_of(name)
    plain(state, tmp_path / "plain", model)
    reshard.split(tmp_path / "plain", tmp_path / "ranks", tp=1, quiet=True)
    published = names_and_values(model).keys() - zoo.ZOO[name].copies.keys()
    wanted = {key: state[key] for key in state.keys() & published}
    for source in ("plain", "ranks"):
        out = tmp_path / f"of {source}"
        reshard.merge(tmp_path / source, out, names="published", quiet=True)
        found = load_file(out / "model.safetensors")
        assert found.keys() == wanted.keys() < state.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
        with pytest.raises(ReshardError, match="there is nothing to merge"):
            reshard.merge(out, tmp_path / "none", names="published", quiet=True)


@pytest.mark.parametrize("name", some({"gemma3", "hyperclovax_vision_v2", "qwen3_moe", "inkling2_text"}, (), zoo.ZOO))
def test_a_name_is_spelled_there_and_back(name: str) -> None:
    """No name of a published checkpoint is that of a module of another tensor."""
    model = store.checkpoint(name)
    config = json.loads((model / "config.json").read_text())
    spellings = Spellings(find_architecture(config, model), config)
    names = {key for file in model.glob("*.safetensors") for key in load_file(file)}
    assert {key: spellings.published(key) for key in names} == {
        key: None if spellings.published(key) is None else key for key in names
    }
    assert not spellings.are_of_modules(names)
    modules = {key: spelled for key in names if (spelled := spellings.in_modules(key)) is not None}
    there = {spelled: spellings.published(spelled) for key, spelled in modules.items() if spellings.published(key)}
    assert there == {modules[key]: key for key in modules if spellings.published(key)}


@pytest.mark.parametrize("write", [plain, distributed])
def test_names_of_two_spellings_are_said(write: Callable[[State, Path, Path], None], tmp_path: Path) -> None:
    model, modules = store.checkpoint("qwen3_moe"), modules_of("qwen3_moe")
    state = {key: value for key, value in load_file(model / "model.safetensors").items() if ".layers.0." not in key}
    write(state | {key: value for key, value in modules.items() if ".layers.0." in key}, tmp_path / "run", model)
    config = {"config": model} if write is distributed else {}
    with pytest.raises(ReshardError, match="names of two spellings: "):
        reshard.split(tmp_path / "run", tmp_path / "out", tp=1, quiet=True, **config)


def test_an_untied_head_that_config_json_calls_tied_is_kept(tmp_path: Path) -> None:
    """As transformers takes it: its content tells, where the model within is not tied."""
    model, state = store.checkpoint("gemma3"), modules_of("gemma3")
    for is_tied in (True, False):
        run, out = tmp_path / f"run{is_tied}", tmp_path / f"out{is_tied}"
        head = state["lm_head.weight"]
        distributed(state | {"lm_head.weight": head if is_tied else head + 1}, run, model)
        reshard.merge(run, out, config=model, quiet=True)
        names = load_file(out / "model.safetensors").keys()
        assert ("language_model.lm_head.weight" in names) is not is_tied and "lm_head.weight" not in names


@pytest.mark.parametrize("name", some({"t5", "llama-tied"}, (), ["marian", "mbart", "bart", "gpt2"]))
def test_an_untied_head_of_a_tied_model_is_refused_until_config_json_says_so(name: str, tmp_path: Path) -> None:
    """In every container: what is written is what can be opened again."""
    model, state = store.checkpoint(name), modules_of(name)
    state = below("module.")(state | {"lm_head.weight": state["lm_head.weight"] + 1})
    config = json.loads((model / "config.json").read_text())
    for is_tied, write in itertools.product((True, False), (plain, pickled, distributed)):
        at, out = tmp_path / f"{write.__name__}{is_tied}", tmp_path / f"out of {write.__name__}{is_tied}"
        write(state, at, model)
        (at / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": is_tied}))
        if is_tied:
            with pytest.raises(ReshardError, match="because the two are tied, but differs") as caught:
                reshard.merge(at, out, quiet=True)
            assert '"tie_word_embeddings": false' in str(caught.value.hint) and not out.exists()
            continue
        reshard.merge(at, out, quiet=True)
        assert reshard.verify(at, out, exact_only=True, quiet=True).verdict == "same"
        assert torch.equal(load_file(out / "model.safetensors")["lm_head.weight"], state["module.lm_head.weight"])


def test_other_names_are_refused(tmp_path: Path) -> None:
    assert "'hub' is not one of 'source', 'published', 'modules'" in refused(
        "merge", "ranks", tmp_path / "out", "--names", "hub"
    )
    with pytest.raises(ReshardError, match="'source' or 'published' or 'modules' is expected"):
        reshard.merge("ranks", tmp_path / "out", names="hub")


@pytest.mark.parametrize("name", some({"gemma3", "qwen3_moe"}, NOT_READ))
def test_the_name_of_a_module_is_its_own_spelling(name: str) -> None:
    """What transformers calls a tensor is called so again: a head, too, that is tied and so not saved."""
    config = json.loads((store.checkpoint(name) / "config.json").read_text())
    architecture = find_architecture(config, "config.json")
    spellings = Spellings(architecture, config)
    state = modules_of(name)
    spelled = {key: spellings.in_modules(key) or key for key in state}
    assert {key: other for key, other in spelled.items() if other != key} == {}


@pytest.mark.parametrize("name", some({"llama", "gemma3"}, (), [*zoo.ZOO][::10]))
def test_every_spelling_comes_back_as_published(name: str) -> None:
    found = check(name, [(spelling, "plain") for spelling in SPELLINGS])
    assert not [str(one) for one in found if one.verdict == "wrong"]
    others = [one for one in found if one.verdict != "right"]
    assert {(one.spelling, "it is no A or B of a matrix" in one.why) for one in others} <= {(LORA, True)}


@pytest.mark.parametrize("name", some({"fuyu", "glm4v_moe"}, (), ["mistral_large4", "deepseek_ocr2", "gemma4_unified"]))
def test_an_adapter_on_modules_without_rules_is_merged(name: str) -> None:
    """Under the names that modules have, where published checkpoints have others; a convolution is refused as such."""
    (found,) = check(name, [(LORA, "plain")])
    expected = ("refused", True) if name == "glm4v_moe" else ("right", False)
    assert (found.verdict, "it is no A or B of a matrix" in found.why) == expected, str(found)


@pytest.mark.parametrize(("name", "spelling"), [("cosmos3_edge", "state_dict actor. and ref."), ("esm", LORA)])
def test_published_names_claim_nothing_of_another_spelling(name: str, spelling: str) -> None:
    """Read as published names these are more models than there are; ESM's name with a star claims none of LoRA's."""
    (found,) = check(name, [(spelling, "plain")])
    assert found.verdict in {"right", "names"}, found


HELD_TWICE = ["zamba2", "diffusion_gemma", "nomic_bert", "jina_embeddings_v3", "t5gemma2", "mt5"]
"""Layers that share a block; an encoder that is the decoder; biases and tables that a class or a type ties.
"""


@pytest.mark.parametrize("name", one_of_each(HELD_TWICE, lambda name: "" if name == "zamba2" else "other"))
def test_a_state_dict_comes_back_with_each_tensor_once(name: str) -> None:
    found = check(name, [("state_dict", "plain"), ("state_dict module.", "plain"), ("state_dict", "dcp")])
    assert {(one.verdict, one.why) for one in found} == {("right", "")}


@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_what_layers_should_share_and_do_not_is_kept(container: str, tmp_path: Path) -> None:
    model, state = store.checkpoint("zamba2"), modules_of("zamba2")
    (name,) = (key for key in state if key.endswith("layers.3.shared_transformer.self_attn.q_proj.weight"))
    run, given = stored(container, state | {name: state[name] + 1}, tmp_path / "run", model)
    reshard.merge(run, tmp_path / "out", names="published", quiet=True, **given)
    found = contents(tmp_path / "out")
    assert found.keys() - names_and_values(model).keys() == {name} and torch.equal(found[name], state[name] + 1)


@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_a_head_that_is_not_tied_is_one_although_its_type_shares_tables(container: str, tmp_path: Path) -> None:
    model, state = store.checkpoint("mt5"), modules_of("mt5")
    run, given = stored(container, state | {"lm_head.weight": state["shared.weight"].clone()}, tmp_path / "run", model)
    reshard.merge(run, tmp_path / "out", names="published", quiet=True, **given)
    assert contents(tmp_path / "out").keys() == names_and_values(model).keys() >= {"lm_head.weight", "shared.weight"}


def test_published_names_are_known_as_such_where_those_of_modules_are_not() -> None:
    """The tensor for which a type's modules are not read is there: so these are not theirs."""
    hub, modules = check("qwen4_exp_text", [("hub", "plain"), ("state_dict", "plain")])
    assert (hub.verdict, modules.verdict) == ("right", "refused")
    assert "goes through Concatenate" in modules.why


SPELLED_TWICE = {"inkling_mm_model", "jina_embeddings_v3", "nomic_bert"}
"""A name of their modules is a published one of GTE or of Inkling's language model, of the same architecture file."""


@thorough
def test_no_name_stands_for_two_tensors() -> None:
    """A module's name that an architecture has a line for is that line's own name in modules."""
    found = set[str]()
    for model_type in built_in_architectures():
        config = {"model_type": model_type}
        architecture = find_architecture(config, "config.json")
        tensors = [*module_tensors(architecture, config)]
        names_of: dict[str, set[str]] = {}
        for tensor in tensors:
            for part in tensor.parts:
                names_of.setdefault(part.source, set()).add(tensor.name)
        for tensor in tensors:
            match = architecture.match(with_first_indices(tensor.name))
            if match is not None and not match.template.endswith("*") and tensor.name not in names_of:
                own = match.template in {part.source for part in tensor.parts}
                found |= set() if own or tensor.name in names_of.get(match.template, ()) else {model_type}
    assert found == SPELLED_TWICE


STRANGERS = {"rng": torch.ones(8, dtype=torch.uint8), "step": torch.ones(()), "optim.state.x.exp_avg": torch.ones(3)}


def test_what_lies_beside_a_model_is_left_behind_and_said(tmp_path: Path) -> None:
    model = store.checkpoint("llama")
    state = load_file(model / "model.safetensors")
    plain(below("state.model.")(state) | STRANGERS, tmp_path / "run", model)
    done = reshard.merge(tmp_path / "run", tmp_path / "out", quiet=True)
    assert {*done.left_behind} == {"rng", "step", "optim"}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys()
    plain(below("state.model.")(state) | {"vision.patches.weight": torch.ones(3, 3)}, tmp_path / "other", model)
    with pytest.raises(ReshardError, match=r"'vision\.patches\.weight'"):
        reshard.merge(tmp_path / "other", tmp_path / "none", quiet=True)
    for name in (
        "master_head.weight",
        "momentum_encoder.layer.weight",
        "steps.0.linear.weight",
        "ema_params.head.weight",
    ):
        shutil.rmtree(tmp_path / "other")
        beginning = "ema_params.shadow." if name.startswith("ema") else ""
        plain(below(beginning)(state) | {name: torch.ones(3, 5)}, tmp_path / "other", model)
        with pytest.raises(ReshardError, match=name):
            reshard.split(tmp_path / "other", tmp_path / "none", tp=2, quiet=True)


STRANGE = [
    (below(""), "step.proj.weight", "/"),
    (below("_orig_mod."), "model.tower.v_head.weight", "/"),
    (below("state."), "state.tower.score.weight", "state"),
    (below("pretrained_model."), "critic.v_head.weight", "pretrained_model"),
]
"""Names that end like that of a head, beside a model: none is the head of this one."""


@pytest.mark.parametrize(("respell", "name", "chosen"), one_of_each(STRANGE))
@pytest.mark.parametrize("container", CONTAINERS)
def test_an_unknown_tensor_gets_no_other_name(
    respell: Callable[[State], State], name: str, chosen: str, container: str, tmp_path: Path
) -> None:
    model = store.checkpoint("gemma3")
    state = names_and_values(model)
    held = respell(load_file(model / "model.safetensors")) | {name: torch.ones(3, 5)}
    run, given = stored(container, held, tmp_path / "run", model)
    with pytest.raises(ReshardError, match="parts of one model or of several: ") as caught:
        reshard.split(run, tmp_path / "out", tp=1, quiet=True, **given)
    assert f"below '{name.rpartition('.')[0].rpartition('.')[0]}.'" in caught.value.message
    done = reshard.split(run, tmp_path / "out", tp=1, weights=chosen, quiet=True, **given)
    assert done.left_behind
    reshard.merge(tmp_path / "out", tmp_path / "merged", names="published", quiet=True)
    assert names_and_values(tmp_path / "merged") == state


AVERAGES = {
    "ema_params.n": ("model.", "ema_params.shadow."),
    "state.ema_params.n": ("state.model.", "state.ema_params.shadow."),
    "swa.n_averaged": ("", "swa.module."),
    "n_averaged": ("module.", None),
}


@pytest.mark.parametrize("counter", one_of_each(AVERAGES))
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_counter_of_an_average_is_left_behind_with_it(counter: str, container: str, tmp_path: Path) -> None:
    model, (beginning, average) = store.checkpoint("llama"), AVERAGES[counter]
    state = load_file(model / "model.safetensors")
    averaged = {key: value + 1 for key, value in state.items()} if average is not None else {}
    held = below(beginning)(state) | below(str(average))(averaged) | {counter: torch.ones((), dtype=torch.int64)}
    run, given = stored(container, held, tmp_path / "run", model)
    done = reshard.split(run, tmp_path / "out", tp=1, quiet=True, **given)
    assert counter.partition(".")[0] in {each.partition(".")[0] for each in done.left_behind}
    reshard.merge(tmp_path / "out", tmp_path / "merged", names="published", quiet=True)
    assert names_and_values(tmp_path / "merged") == names_and_values(model)


@pytest.mark.parametrize("name", some({"qwen3_moe", "llama"}, (), ["step3p7", "dots3_note"]))
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": "pt", "step": "3"}])
def test_a_source_is_what_its_ranks_record_of_it(name: str, metadata: dict[str, str] | None, tmp_path: Path) -> None:
    """Also of names that a merge does not write by itself."""
    plain(modules_of(name), run := tmp_path / "run", store.checkpoint(name))
    save_file(modules_of(name), run / "model.safetensors", metadata)
    reshard.split(run, tmp_path / "ranks", tp=1, quiet=True)
    for original, other in ((run, tmp_path / "ranks"), (tmp_path / "ranks", run), (run, run)):
        report = reshard.verify(original, other, exact_only=True, quiet=True)
        assert report.verdict == "same", report.to_text()
    save_file(modules_of(name), run / "model.safetensors", {"format": "tf"})
    assert reshard.verify(tmp_path / "ranks", run, exact_only=True, quiet=True).verdict == "different"


@pytest.mark.parametrize("name", some({"llava"}, (), ["gemma3", "internvl", "mistral3", "qwen3_moe"]))
@pytest.mark.parametrize("container", ["safetensors", "dcp"])
def test_a_head_beside_the_modules_keeps_its_name(name: str, container: str, tmp_path: Path) -> None:
    model, state = store.checkpoint(name), modules_of(name)
    heads = {f"{head}.weight": torch.ones(1, 8) for head in ("v_head.summary", "reward_head")}
    cases = itertools.product(("", "pretrained_model."), (load_file(model / "model.safetensors"), state))
    for number, (beginning, held) in enumerate(cases):
        run, given = stored(container, below(beginning)(held) | heads, tmp_path / f"run{number}", model)
        ranks, out = tmp_path / f"ranks{number}", tmp_path / f"out{number}"
        reshard.split(run, ranks, tp=1, quiet=True, **given)
        reshard.merge(ranks, out, names="modules", max_shard_size="1GB", quiet=True)
        assert load_file(out / "model.safetensors").keys() - state.keys() == heads.keys()


@pytest.mark.parametrize("name", ["inkling_mm_model", "llava"])
def test_a_head_beside_it_is_no_reason_to_lack_a_tower(name: str, tmp_path: Path) -> None:
    model, head = store.checkpoint(name), {"v_head.summary.weight": torch.ones(1, 8)}
    tower = {"llava": "vision_tower", "inkling_mm_model": "audio"}[name]
    state = {key: each for key, each in load_file(model / "model.safetensors").items() if tower not in key}
    for further in ({}, head):
        plain(state | further, tmp_path / f"run{len(further)}", model)
        with pytest.raises(ReshardError, match="no tensor of '"):
            reshard.split(tmp_path / f"run{len(further)}", tmp_path / "out", tp=1, quiet=True)


def test_published_names_are_written_whatever_the_root(tmp_path: Path) -> None:
    model = store.checkpoint("gpt2")
    state = load_file(model / "model.safetensors")
    plain(root_changed(state), tmp_path / "run", model)
    reshard.merge(tmp_path / "run", tmp_path / "out", names="published", quiet=True)
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == state.keys() != root_changed(state).keys()
    with pytest.raises(ReshardError, match="there is nothing to merge"):
        reshard.merge(tmp_path / "out", tmp_path / "none", names="published", quiet=True)
    plain(modules_of("qwen4_exp_text"), tmp_path / "joined", store.checkpoint("qwen4_exp_text"))
    with pytest.raises(ReshardError, match="goes through Concatenate in transformers"):
        reshard.merge(tmp_path / "joined", tmp_path / "none", names="published", quiet=True)


TRANSFORMS = {"--dtype": ["--dtype", "bf16"], "--quantize": ["--quantize", "fp8-block"], "average": []}


@pytest.mark.parametrize("way", [[], ["--tp", "2"], ["--tp", "2", "--as", "vllm"]])
@pytest.mark.parametrize("what", TRANSFORMS)
def test_what_is_computed_keeps_the_names(what: str, way: list[str], tmp_path: Path) -> None:
    """Quantized experts have a matrix each, so quantized ones have the published names."""
    model, source, out = store.checkpoint("qwen3_moe"), tmp_path / "modules", tmp_path / "out"
    plain(modules_of("qwen3_moe"), source, model)
    name = "average" if what == "average" else "split" if way else "merge"
    others = [model] if what == "average" else []
    way = ["1" if what == "--quantize" and word == "2" else word for word in way]  # a block is larger than a part
    ok(name, source, *others, tmp_path / "ranks" if way else out, *TRANSFORMS[what], *way)
    assert not way or command("merge", tmp_path / "ranks", out).returncode == 0
    names = load_file(out / "model.safetensors").keys()
    assert any("experts.gate_up_proj" in each for each in names) == (what != "--quantize")
    assert any("experts.0.gate_proj" in each for each in names) == (what == "--quantize")
    if way or what == "average":
        ok("merge", tmp_path / "ranks" if way else out, tmp_path / "published", "--names", "published")
        assert not any("gate_up_proj" in each for each in load_file(tmp_path / "published" / "model.safetensors"))


@pytest.mark.parametrize("name", some({"gemma3"}, (), ["internvl", "mistral3", "t5gemma2"]))
def test_a_run_that_is_written_of_a_state_dict_is_read_again(name: str, tmp_path: Path) -> None:
    """With the second names of tied tensors, which a state dict has."""
    model = store.checkpoint(name)
    plain(modules_of(name), tmp_path / "modules", model)
    reshard.split(tmp_path / "modules", tmp_path / "run", format="dcp", quiet=True)
    (tmp_path / "run" / "reshard.json").unlink()
    reshard.merge(tmp_path / "run", tmp_path / "out", config=model, quiet=True)
    assert reshard.diff(model, tmp_path / "out", quiet=True).same


def test_a_git_for_videos_has_embeddings_of_time(tmp_path: Path) -> None:
    model = store.checkpoint("git")
    tensors = load_file(model / "model.safetensors") | {"git.img_temperal_embedding.0": torch.ones(1, 1, 80)}
    plain(tensors, tmp_path / "video", model)
    reshard.split(tmp_path / "video", tmp_path / "out", tp=2, quiet=True)
    assert "git.img_temperal_embedding.0" in contents(tmp_path / "out" / "rank-01-of-02")
