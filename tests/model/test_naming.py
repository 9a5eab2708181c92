"""Which of a set of names are the tensors of one model: below any beginning, within any wrapper, in any container."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import reshard
from reshard.formats.errors import CheckpointError, ReshardError
from reshard.formats.wrappers import WRAPPERS, without_wrappers
from reshard.model.naming import Naming, name_all
from tests import store, zoo
from tests.marks import examples, one_of_each
from tests.support import command, ok, refused

NAMES = [
    "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
    *(f"model.layers.{i}.{part}.weight" for i in range(3) for part in ("self_attn.q_proj", "mlp.up_proj", "norm")),
]  # fmt: skip
BEGINNINGS = ["", "model.", "module.", "actor.", "state.model.", "app.module.net."]
STRANGERS = [
    "rng",
    "step",
    "optim.state.model.norm.weight.exp_avg",
    "ema.n",
    "state.rng_state.cuda",
    "lr_scheduler.last",
]


def named(names: Mapping[str, str], weights: str | None = None) -> Naming:
    plain = {stored: without_wrappers(stored) for stored in names}
    return name_all("run", plain, lambda name: name if name in NAMES else None, weights)


def stored(beginning: str, wrappers: Mapping[int, str] | None = None) -> dict[str, str]:
    """The names of the model below a beginning, with wrappers before some of their segments, and the plain names."""
    found = {}
    for name in NAMES:
        segments = (beginning + name).split(".")
        for place, wrapper in sorted((wrappers or {}).items(), reverse=True):
            segments.insert(min(place, len(segments) - 1), wrapper)
        found[".".join(segments)] = name
    return found


@given(st.sampled_from(BEGINNINGS), st.dictionaries(st.integers(0, 7), st.sampled_from(WRAPPERS), max_size=3),
       st.sets(st.sampled_from(STRANGERS)))  # fmt: skip
@examples(100)
def test_neither_beginning_nor_wrapper_nor_stranger_changes_what_is_known(
    beginning: str, wrappers: dict[int, str], strangers: set[str]
) -> None:
    names = stored(beginning, wrappers)
    naming = named({**dict.fromkeys(strangers, ""), **names})
    assert {of_it: name for name, of_it in naming.known.items()} == names
    assert naming.beginning == beginning and not naming.others
    assert (naming.note is None) == (not beginning and not wrappers)


@given(st.permutations(["actor.", "ref.", "", "policy.model.", "teacher."]), st.integers(0, 8), st.booleans())
@examples(100)
def test_two_models_are_said_in_any_order_and_of_any_length(
    beginnings: list[str], lacking: int, is_second_shorter: bool
) -> None:
    one, other, *_ = beginnings
    sets = [stored(one), stored(other)]
    whole = sets[is_second_shorter]
    for name in [*whole][len(whole) // 2 + 1 :][: lacking // 2]:  # half a model is a model
        del whole[name]
    names = sets[0] | sets[1]
    if len(names) < len(sets[0]) + len(sets[1]):
        return
    with pytest.raises(CheckpointError, match="has two models") as caught:
        named(names)
    for number, beginning in enumerate((one, other)):
        assert (f"below '{beginning}'" if beginning else "at the top") in str(caught.value)
        chosen = beginning.removesuffix(".") or "/"
        assert f'weights="{chosen}"' in str(caught.value.hint)
        assert {*named(names, chosen).known.values()} == {*sets[number]} == {*named(names, beginning).known.values()}


@pytest.mark.parametrize(("one", "other"), [*itertools.permutations(["model.", "ema.", "optim.state.exp_avg."], 2)])
def test_a_role_is_no_second_model(one: str, other: str) -> None:
    naming = named(stored(one) | stored(other))
    assert naming.beginning == ("model." if "model." in (one, other) else "ema.")
    assert naming.left_behind == tuple(each.partition(".")[0] for each in (one, other) if each != naming.beginning)


def test_an_average_is_a_model_and_a_state_is_none() -> None:
    assert named(stored("ema_params.shadow.") | {"ema_params.n": ""}).beginning == "ema_params.shadow."
    with pytest.raises(CheckpointError, match="has states of an optimizer") as caught:
        named(stored("optim.exp_avg."))
    assert 'weights="optim.exp_avg"' in str(caught.value.hint)
    assert named(stored("optim.exp_avg."), "optim.exp_avg").beginning == "optim.exp_avg."
    with pytest.raises(CheckpointError, match="has two models"):  # neither is more than the other
        named(stored("ema.") | stored("swa."))


def some(beginning: str, *, layers: set[int] | None = None, without: str = "no tensor") -> dict[str, str]:
    """The names below a beginning that are of these layers, or of none, without those of one word."""
    wanted = {None: True} if layers is None else dict.fromkeys(layers, True)
    numbers = {name: next((int(word) for word in name.split(".") if word.isdecimal()), None) for name in NAMES}
    chosen = [name for name in NAMES if (layers is None or numbers[name] in wanted) and without not in name]
    return {beginning + name: "" for name in chosen}


@pytest.mark.parametrize(
    ("sets", "said", "choices"),
    [
        ([some("a.", layers={0, 1}), some("b.", layers={2})], "parts of one model or of several", ["a", "b"]),
        ([some("a.", layers={0, 1}), some("a.b.", layers={2})], "parts of one model or of several", ["a", "a.b"]),
        ([some("a.", without="layers"), some("b.", layers={0, 1, 2})], "parts of one model", ["a", "b"]),
        ([some("a."), some("b.", layers={1})], "two models", ["a", "b"]),
        ([some("", without="norm"), some("ref.", layers={1})], "two models", ["/", "ref"]),
        ([some("actor."), some("actor.ref.", layers={1})], "two models", ["actor", "actor.ref"]),
        ([some("a."), some("b."), some("c.", without="lm_head")], "3 models", ["a", "b", "c"]),
        ([some("a."), some("b."), some("ema.")], "two models", ["a", "b"]),
        ([some("ema.", layers={0}), some("swa."), some("exp_avg.")], "two models", ["ema", "swa"]),
        ([some("a.", without="lm_head"), some("b.", without="lm_head"), {"lm_head.weight": ""}], "two models", ["a"]),
    ],
)  # fmt: skip
def test_of_several_readings_none_is_chosen(sets: list[dict[str, str]], said: str, choices: list[str]) -> None:
    """Neither by their order, nor by the number of their names."""
    for order in itertools.permutations(sets):
        with pytest.raises(CheckpointError, match=said) as caught:
            named({name: "" for each in order for name in each})
        for chosen in choices:
            beginning = f"below '{chosen}.'" if chosen != "/" else "at the top"
            assert beginning in caught.value.message and f'weights="{chosen}"' in str(caught.value.hint)
            naming = named({name: "" for each in order for name in each}, chosen)
            prefix = f"{chosen}." if chosen != "/" else ""
            assert all(stored == prefix + name for name, stored in naming.known.items())


@pytest.mark.parametrize("layers", [{0}, {0, 1, 2}])
def test_a_role_and_not_a_count_says_what_is_meant(layers: set[int]) -> None:
    """A model may be broken, and its average or its state whole; it is the model."""
    for sets in itertools.permutations([some("model.", layers=layers), some("ema."), some("optim.state.exp_avg.")]):
        naming = named({name: "" for each in sets for name in each})
        assert {*naming.known.values()} == some("model.", layers=layers).keys()
        assert {*naming.others} == {"ema.", "optim.state.exp_avg."}
        naming = named({name: "" for each in sets[1:] for name in each if not name.startswith("model.")} | some("ema."))
        assert {*naming.known.values()} == some("ema.").keys()


def test_a_second_head_is_said() -> None:
    names = {**some("a.b.", without="lm_head"), "lm_head.weight": "", "a.lm_head.weight": ""}
    with pytest.raises(CheckpointError, match="two tensors of one name"):
        named(names)


def test_a_head_beside_the_model_belongs_to_it() -> None:
    names = stored("pretrained_model.")
    names = {name: "" for name in names if not name.endswith("lm_head.weight")} | {"lm_head.weight": ""}
    naming = named(names)
    assert {*naming.known} == {*NAMES} and naming.known["lm_head.weight"] == "lm_head.weight"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"lm_head.weight": "", "_orig_mod.lm_head.weight": ""}, "two tensors of one name"),
        ({"base_model.model.model.norm.weight": "", "base_model.model.x.lora_A.default.weight": ""}, "a LoRA adapter"),
        ({"x.y": "", "\n": "", "": ""}, "no tensor of this model"), ({}, "no tensor of this model"),
        ({"a." * 200 + "lm_head.weight": ""}, "no tensor of this model"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_refused(names: dict[str, str], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        named(names)


# ---------------------------------------------------------------------------------------------------------- containers


def as_safetensors(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_bin(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    torch.save(tensors, folder / "pytorch_model.bin")


def as_dcp(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    dcp.save(dict(tensors), checkpoint_id=folder, no_dist=True)


CONTAINERS: dict[str, Callable[[Path, dict[str, torch.Tensor]], None]] = {
    "safetensors": as_safetensors, "bin": as_bin, "dcp": as_dcp,
}  # fmt: skip


def saved(container: str, folder: Path, tensors: dict[str, torch.Tensor], config: Path) -> tuple[Path, tuple[str, ...]]:
    """A folder with these tensors, and the options with which it is read."""
    folder.mkdir()
    CONTAINERS[container](folder, {name: tensor.clone() for name, tensor in tensors.items()})
    if container == "dcp":
        return folder, ("--config", str(config))
    shutil.copy(config / "config.json", folder)
    return folder, ()


@pytest.mark.parametrize(
    ("container", "spell"),
    one_of_each(
        itertools.product(CONTAINERS, ["module.{}", "state.model.{}", "_orig_mod.{}", "ema_params.shadow.{}"]),
        lambda case: case[0],
    ),
)
def test_the_container_does_not_matter(container: str, spell: str, tmp_path: Path) -> None:
    model = store.checkpoint("llama")
    plain = load_file(model / "model.safetensors")
    tensors = {spell.format(name): tensor for name, tensor in plain.items()}
    if container == "dcp":
        tensors |= {"rng": torch.zeros(3), "step": torch.tensor(3)}
    run, options = saved(container, tmp_path / "run", tensors, model)
    ok("split", run, tmp_path / "out", "--tp", "2", *options)
    assert command("merge", tmp_path / "out", tmp_path / "merged").returncode == 0
    if container == "safetensors":  # its own files again
        again = (tmp_path / "merged" / "model.safetensors").read_bytes()
        assert again == (run / "model.safetensors").read_bytes()
        assert command("merge", run, tmp_path / "published").returncode == 0
        tuned = command("diff", model, tmp_path / "out", "--out", tmp_path / "delta")
        assert (
            tuned.returncode == 0 and command("patch", model, tmp_path / "delta", tmp_path / "patched").returncode == 0
        )
        again = (tmp_path / "patched" / "model.safetensors").read_bytes()
        assert again == (tmp_path / "published" / "model.safetensors").read_bytes()
    merged = load_file(tmp_path / ("published" if container == "safetensors" else "merged") / "model.safetensors")
    assert merged.keys() == plain.keys() and all(torch.equal(merged[name], plain[name]) for name in plain)
    done = command("verify", run if not options else model, tmp_path / "out", "--exact-only", "-q")
    assert done.stdout == "same\n", done.stderr


@pytest.mark.parametrize("container", CONTAINERS)
def test_one_of_two_models_is_chosen(container: str, tmp_path: Path) -> None:
    model = store.checkpoint("llama")
    plain = load_file(model / "model.safetensors")
    tensors = {f"actor.{name}": tensor for name, tensor in plain.items()}
    tensors |= {f"ref.{name}": tensor + 1 for name, tensor in plain.items()}
    run, options = saved(container, tmp_path / "run", tensors, model)
    done = command("merge", run, tmp_path / "no", *options)
    assert done.returncode == 2 and "'actor.'" in done.stderr and "'ref.'" in done.stderr
    assert not (tmp_path / "no").exists()
    ids = []
    for place, weights in enumerate(("actor", "ref.")):
        out = tmp_path / f"out{place}"
        ok("split", run, out, "--tp", "2", "--weights", weights, *options)
        ids.append(json.loads((out / "reshard.json").read_text())["source"]["id"])
        assert command("merge", out, tmp_path / f"merged{place}").returncode == 0
        merged = load_file(tmp_path / f"merged{place}" / "model.safetensors")
        assert all(torch.equal(merged[name], plain[name] + place) for name in plain)
    assert ids[0] != ids[1], "a run that stopped would be gone on with for the other model"
    assert "no tensors of this model are below 'critic.'" in refused(
        "merge", run, tmp_path / "no", "--weights", "critic", *options
    )
    assert "has one model" in refused("split", tmp_path / "out0", tmp_path / "no", "--tp", "4", "--weights", "actor")
    for a, b in ((run, tmp_path / "out0"), (tmp_path / "out0", run), (run, model)):
        assert ok("diff", a, b, "--weights", "actor", *options).stdout.startswith("SAME")
    assert command("diff", run, model, "--weights", "ref", *options).returncode == 1
    assert "no tensors of this model are below 'ref.'" in refused("diff", tmp_path / "out0", model, "--weights", "ref")


@pytest.mark.parametrize("name", one_of_each(["qwen3_moe", "mixtral", "glm4_moe", "olmoe"], lambda name: True))
def test_experts_in_one_tensor_as_the_modules_of_transformers_have_them(name: str, tmp_path: Path) -> None:
    model = store.checkpoint(name)
    modules = zoo.class_of(model).from_pretrained(model, dtype="auto")
    modules.save_pretrained(tmp_path / "modules", save_original_format=False)
    published, ours = (load_file(at / "model.safetensors") for at in (model, tmp_path / "modules"))
    assert published.keys() != ours.keys()
    for source, out in ((model, "direct"), (tmp_path / "modules", "out")):
        ok("split", source, tmp_path / out, "--tp", "2", "--as", "vllm")
    for file in (tmp_path / "direct").glob("*.safetensors"):
        one, other = load_file(file), load_file(tmp_path / "out" / file.name)
        assert one.keys() == other.keys() and all(torch.equal(one[each], other[each]) for each in one)
    assert command("merge", tmp_path / "modules", tmp_path / "merged", "--names", "published").returncode == 0
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == published.keys() and all(torch.equal(merged[each], published[each]) for each in merged)
    assert ok("diff", model, tmp_path / "modules").stdout.startswith("SAME")
    ours.pop(next(each for each in ours if "experts.down_proj" in each))
    save_file(ours, tmp_path / "modules" / "model.safetensors", {"format": "pt"})
    done = command("split", tmp_path / "modules", tmp_path / "no", "--tp", "2")
    assert done.returncode == 2 and not (tmp_path / "no").exists()


# ------------------------------------------------------------------------------------------------------------ bad input


def of_layer_0(tensors: dict[str, torch.Tensor], *, other: bool = False) -> dict[str, torch.Tensor]:
    """About half of a model's tensors, or the other half."""
    return {name: tensor for name, tensor in tensors.items() if (".layers.0." in name or "embed" in name) != other}


def below(beginning: str, tensors: dict[str, torch.Tensor], end: str = "") -> dict[str, torch.Tensor]:
    return {beginning + name + end: tensor for name, tensor in tensors.items()}


def llama() -> Path:
    return store.checkpoint("llama")


TYPED = "is config.json that of these tensors?"
BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], tuple[str, ...]]] = {
    "states alone": (lambda own: below("optim.state.", own, ".exp_avg"), ("states of an optimizer", "no model")),
    "states before names": (lambda own: below("optim.exp_avg.", own), ("states of an optimizer", "--weights optim")),
    "halves": (
        lambda own: below("a.", of_layer_0(own)) | below("b.", of_layer_0(own, other=True)),
        ("parts of one model or of several", "below 'a.'", "below 'b.'", "--weights"),
    ),
    "one of two is broken": (
        lambda own: below("actor.", own) | below("ref.", of_layer_0(own)),
        ("two models", "30 tensors are below 'actor.'", "10 below 'ref.'"),
    ),
    "a broken one below": (lambda own: own | below("ref.", of_layer_0(own)), ("two models", "--weights /")),
    "wrapped and not": (lambda own: own | below("_orig_mod.", own), ("two tensors of one name",)),
    "one is wrapped and not": (
        lambda own: own | {"model._orig_mod.norm.weight": own["model.norm.weight"]},
        ("two tensors of one name", "'model._orig_mod.norm.weight'", "'model.norm.weight'"),
    ),
    "of bert": (dict, ("30 of 30 tensors have none", TYPED)),
    "of gpt2": (dict, ("29 of 30", TYPED)),
    "a layer without end": (
        lambda own: own | {"model.layers.99999999999.mlp.up_proj.weight": own["model.norm.weight"]},
        ("99999999999",),
    ),
    "newer": (
        lambda own: own | {"model.layers.0.mlp.new_proj.weight": own["model.norm.weight"]},
        ("new_proj", "the checkpoint says 99.0.0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("bad", "container"), one_of_each(itertools.product(BAD, [*CONTAINERS, "live"]), lambda case: case[0])
)
def test_bad_input_is_refused_with_the_true_reason(bad: str, container: str, tmp_path: Path) -> None:
    make, said = BAD[bad]
    tensors = {name: tensor.clone() for name, tensor in make(load_file(llama() / "model.safetensors")).items()}
    config = tmp_path / "config"
    config.mkdir()
    typed = store.checkpoint(bad.removeprefix("of ")) if bad.startswith("of ") else llama()
    document = json.loads((typed / "config.json").read_text())
    document |= {"transformers_version": "99.0.0"} if bad == "newer" else {}
    (config / "config.json").write_text(json.dumps(document))
    run: object = reshard.state_dict(tensors)
    given = {"config": config}
    if container != "live":
        run, options = saved(container, tmp_path / "run", tensors, config)
        given = given if options else {}
    with pytest.raises(ReshardError) as caught:
        reshard.split(run, tmp_path / "out", tp=1, quiet=True, **given)
    text = f"{caught.value.message} | {caught.value.hint}".replace('weights="', "--weights ")
    if container not in ("safetensors", "bin"):
        said = tuple(each for each in said if not each.startswith("30 of"))
    assert all(each in text for each in said), text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", ".", "a\nb.weight", "a." * 200 + "weight", "x" * 3000])
@pytest.mark.parametrize("container", [*CONTAINERS, "live"])
def test_odd_names_are_named_or_left_behind(container: str, name: str, tmp_path: Path) -> None:
    """A training run has what it likes beside its model; a checkpoint and live modules have nothing."""
    tensors = load_file(llama() / "model.safetensors") | {name: torch.zeros(3)}
    if container == "live":
        with pytest.raises(ReshardError, match="is none that the format"):
            reshard.split(reshard.state_dict(tensors), tmp_path / "out", tp=1, config=llama(), quiet=True)
        return
    run, options = saved(container, tmp_path / "run", tensors, llama())
    done = command("split", run, tmp_path / "out", "--tp", "1", *options)
    assert done.returncode == (0 if container == "dcp" else 2), done.stderr
    assert container == "dcp" or ("has no rule" in done.stderr and len(done.stderr.splitlines()) == 2), done.stderr


@pytest.mark.parametrize("spell", ["module._orig_mod.{}", "state.model.{}", "{}"])
@pytest.mark.parametrize("name", one_of_each(["qwen3_moe", "llama", "mixtral"], lambda name: name == "qwen3_moe"))
def test_live_tensors_below_any_beginning(name: str, spell: str, tmp_path: Path) -> None:
    model = store.checkpoint(name)
    modules = zoo.class_of(model).from_pretrained(model, dtype="auto").state_dict()
    tensors = {spell.format(key): tensor for key, tensor in modules.items()}
    tensors |= {f"ema.{key}": tensor + 1 for key, tensor in modules.items()} if spell != "{}" else {}
    done = reshard.split(reshard.state_dict(tensors), tmp_path / "out", tp=2, config=model, quiet=True)
    assert (done.left_behind == ("ema",)) == (spell != "{}"), done
    found = reshard.diff(model, tmp_path / "out", quiet=True)
    assert not (found.of("changed") or found.of("only here")), found.to_text()
