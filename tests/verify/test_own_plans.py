"""A user's own plan: what the bytes alone cannot say of it, and what the forward, the built-in rules and the original's
config.json say instead.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import tomli_w

from reshard.api import split
from reshard.source.access import Access
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.transforms.opening import open_any
from reshard.verify.bytes.exact import compare
from reshard.verify.bytes.rules import own_rules, with_sound_config
from reshard.verify.forward.compare import ForwardOptions, ForwardReport, run_forward
from reshard.verify.rank.group import RankError
from tests import zoo
from tests.marks import of_ranks, thorough
from tests.support import change_json, command, ok
from tests.verify.by_hand import by_hand
from tests.verify.by_hand import command as by_hand_command
from tests.verify.forwards import run_forwards

pytestmark = [thorough, of_ranks]


ROOT = Path(__file__).parents[2]
Edits = Mapping[str, str]

QUICK = ForwardOptions(seq=16, draws=1)
QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"
Q = "model.layers.{layer}.self_attn.q_proj.weight"
GATE_UP = "model.layers.{layer}.mlp.gate_up_proj.weight"
IN_PROJ = "backbone.layers.{layer}.mixer.in_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model of the zoo, made once, with its built-in rules beside it as ``reshard plan --save`` writes them."""
    root = tmp_path_factory.mktemp("own-plans")

    def get(name: str) -> Path:
        if not (root / name).exists():
            zoo.save(name, root / name)
            ok("plan", root / name, "--save", root / f"{name}.toml")
        return root / name

    return get


def edited(model: Path, plan: Path, edits: Edits) -> Path:
    """The model's saved plan with other lines: ``{key: line}``, a key of a table that has none goes to its end."""
    document = tomllib.loads(model.with_suffix(".toml").read_text())
    for place, line in edits.items():
        name, key = place.split(" ", 1)
        table = document.setdefault(name, {})
        table.pop(key, None)
        table |= {key: tomllib.loads(f"value = {line}")["value"]} if line else {}
    plan.write_text(tomli_w.dumps(document))
    return plan


def dealt(rule: str, template: str, families: str, **sizes: str) -> Edits:
    """A tensor of another rule, with what is dealt, and axes of its own."""
    lines = {f"tensors {template}": json.dumps(rule), "parallel tp": families}
    return lines | {f"sizes {axis}": json.dumps(text) for axis, text in sizes.items()}


PHI3 = '[["kv", "group"], ["ff"], ["vocab"], ["packed"]]'
PLAIN = '[["kv", "group"], ["ff"], ["vocab"]]'
MAMBA2 = '[["g", "per"], ["vocab"], ["packed"]]'


@pytest.mark.parametrize(
    ("name", "template", "families", "place"),
    [("phi3", QKV, PHI3, "model.layers.0.self_attn"), ("mamba2", IN_PROJ, MAMBA2, "backbone.layers.0.mixer")],
)
def test_a_packed_weight_dealt_by_plain_chunks(
    name: str, template: str, families: str, place: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """With that plan every byte is where it should be, and the model of such shards does not even run."""
    original, shards = model(name), tmp_path / "shards"
    plan = edited(original, tmp_path / "wrong.toml", dealt("packed hidden", template, families))
    assert command("split", original, shards, "--tp", "2", "--plan", plan).returncode == 0
    tensor = template.replace("{layer}", "0")
    done = command("verify", original, shards, "--plan", plan)
    assert done.returncode == 1, done.stderr
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith(f"DIFFERENT: Every byte is the original's by the plan {plan} (")
    assert f"fails in '{place}', where the original does not (RuntimeError: " in verdict
    assert verdict.endswith(f"No weight takes as its input the part of '{tensor}' that 'packed hidden' gives a rank.")
    assert "Error" not in done.stderr
    listed = done.stdout[: done.stdout.index("bytes: all equal")].splitlines()
    assert listed[0] == f"plan {plan}: differs from the built-in rules of model type '{name}'"
    assert [line.partition(" is ")[0] for line in listed[1:]] == [f"  {template}"]
    # Nor is it taken for the model by the built-in rules, without the plan.
    done = command("verify", original, shards, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (1, "different") and tensor in document["summary"]
    assert document["plan"]["differences"][0].startswith(f"{template} is 'packed hidden', built in ")


def test_bytes_by_a_plan_of_the_users_say_so(model: Callable[[str], Path], tmp_path: Path) -> None:
    original, shards = model("phi3"), tmp_path / "shards"
    plan = edited(original, tmp_path / "wrong.toml", dealt("packed hidden", QKV, PHI3))
    split(original, shards, tp=2, plan_file=plan)
    done = ok("verify", original, shards, "--plan", plan, "--exact-only")
    assert "Only the forward pass can tell if that plan is right." in done.stdout.splitlines()[-1]
    assert f"{QKV} is 'packed hidden', built in " in done.stdout
    # A plan that says what the built-in rules say is no other plan.
    saved = original.with_suffix(".toml")
    split(original, tmp_path / "right", tp=2, plan_file=saved)
    done = command("verify", original, tmp_path / "right", "--plan", saved, "--exact-only")
    assert done.returncode == 0 and "the forward alone" not in done.stdout
    assert done.stdout.startswith(f"plan {saved}: says the same as the built-in rules of model type 'phi3'\n")


def judged(model: Path, tmp_path: Path, edits: Edits, tp: int = 2) -> ForwardReport:
    plan = edited(model, tmp_path / "plan.toml", edits)
    access = {"plan_file": plan}
    split(model, tmp_path / "shards", tp=tp, **access)
    original, shards = open_any(model, Access(**access)), open_source(tmp_path / "shards", plan_file=plan)
    assert compare(original, shards).verdict == "same"
    return run_forward(original, shards, QUICK)


WRONG = [
    # What does not fit: the parts are gathered, as nothing takes them.
    ("phi3", 2, dealt("packed hidden", GATE_UP, PHI3), "model.layers.0.mlp.down_proj", GATE_UP),
    ("phi3", 2, dealt("(packed head) hidden", QKV, PHI3, packed="(group + 2) * kv"), "model.layers.0.self_attn", QKV),
    # What fits, with other rows than the model means: of 8 ranks each takes the first rows of all.
    ("phi3", 8, dealt("packed hidden", QKV, PHI3), "model.layers.0.self_attn.o_proj", QKV),
    ("phi3", 2, dealt("(kv of head) hidden", QKV, PLAIN, of="group + 2"), "model.layers.0.self_attn.o_proj", None),
    ("phi3", 4, dealt("(kv of head) hidden", QKV, PLAIN, of="group + 2"), "model.layers.0.self_attn.o_proj", None),
    ("phi3", 2, dealt("(ff 2) hidden", GATE_UP, PLAIN), "model.layers.0.mlp.down_proj", None),
    ("llama", 2, {f"tensors {Q}": '"(group kv head) hidden"'}, "model.layers.0.self_attn.o_proj", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tp", "edits", "place", "tensor"), WRONG)
def test_a_wrong_plan_is_not_the_same_model(
    name: str, tp: int, edits: Edits, place: str, tensor: str | None, model: Callable[[str], Path], tmp_path: Path
) -> None:
    report = judged(model(name), tmp_path, edits, tp)
    assert (report.is_same, report.first) == (False, place)
    failed = report.failure.tensor if report.failure is not None else None
    assert failed == (tensor and tensor.replace("{layer}", "0"))
    assert place in report.verdict
    json.loads(json.dumps(report.verdict))


def test_what_is_gathered_may_be_right(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Attention whole on every rank but for the rows of its packed weight, two blocks of which each rank has."""
    edits: dict[str, str] = {
        "tensors model.layers.{layer}.self_attn.o_proj.weight": '"hidden wide"',
        "config num_attention_heads": "", "config num_key_value_heads": "",
    }  # fmt: skip
    for rule in ("packed hidden", "(packed 2) hidden", "(2 packed) hidden"):
        lines = edits | dealt(rule, QKV, '[["ff"], ["vocab"], ["packed"]]')
        if rule != "packed hidden":
            lines["sizes packed"] = '"(group + 2) * kv * head / 2"'
        folder = tmp_path / rule.replace(" ", "-")
        folder.mkdir()
        report = judged(model("phi3"), folder, lines)
        assert report.is_same, (rule, report.verdict)


# ----------------------------------------------------------------------------------------------------- a rank's config

NORMS = {"falcon-7b": "layer_norm_epsilon", "bloom": "layer_norm_epsilon", "mamba2": "layer_norm_epsilon",
         "bamba": "rms_norm_eps"}  # fmt: skip


def by_plan(model: Path, tmp_path: Path, edits: Edits) -> tuple[Source, Source]:
    """A model and its shards for two ranks, by its saved plan with other lines; all are opened with that plan."""
    tmp_path.mkdir(exist_ok=True)
    plan = edited(model, tmp_path / "plan.toml", edits)
    access = {"plan_file": plan}
    split(model, tmp_path / "shards", tp=2, **access)
    return open_any(model, Access(**access)), open_source(tmp_path / "shards", plan_file=plan)


@pytest.mark.parametrize("name", NORMS)
def test_a_rank_has_no_settings_of_its_own_but_sizes(name: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Not even if the plan says so. A rank's model cannot be built from its config.json alone in any of these types."""
    key = NORMS[name]
    original, shards = by_plan(model(name), tmp_path, {f"config {key}": '"1"'})
    found = compare(original, shards).configs
    assert [(each.file, each.key, each.found) for each in found] == [
        (f"rank-0{rank}-of-02/config.json", key, "1") for rank in range(2)
    ]
    assert {each.expected for each in found} == {json.dumps(original.model.config[key])}


def test_the_model_of_a_rank_is_made_from_its_own_config(model: Callable[[str], Path], tmp_path: Path) -> None:
    pairs = [by_plan(model(name), tmp_path / name, {f"config {key}": '"1.0"'}) for name, key in NORMS.items()]
    for name, report in zip(NORMS, run_forwards(pairs, QUICK), strict=True):
        assert not report.is_same and report.failure is None, name


OTHERS = [
    # A size that is not dealt with its axis, one that is not the rank's, one that no line gives, one of another key.
    ("bloom", "n_head", '"n_head"', "4", "8"),
    ("bloom", "n_head", '"kv * group * 2"', "4", "8"),
    ("falcon-7b", "num_attention_heads", "", "4", "8"),
    ("gpt2", "n_head", '"12"', "4", "12"),
    # What the original leaves to the type.
    ("gpt2", "rope_theta", '"1"', None, "1"),
    ("llama", "rope_parameters.rope_theta", '"1"', "10000.0", "1"),
    ("gemma3", "sliding_window", '"hidden_size"', "4096", None),
]


@pytest.mark.parametrize(("name", "key", "line", "expected", "found"), OTHERS)
def test_other_settings(
    name: str, key: str, line: str, expected: str | None, found: str | None,
    model: Callable[[str], Path], tmp_path: Path,
) -> None:  # fmt: skip
    original, shards = by_plan(model(name), tmp_path, {f"config {key}": line})
    configs = {each.file: each for each in compare(original, shards).configs}
    assert configs.keys() == {f"rank-0{rank}-of-02/config.json" for rank in range(2)}
    assert all(each.key.endswith(key) for each in configs.values())
    assert {each.expected for each in configs.values()} == {expected}
    assert found is None or {each.found for each in configs.values()} == {found}


def test_a_plan_in_other_words_is_right(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Axes of other names, and a number that the built-in rules do not have."""
    text = model("phi3").with_suffix(".toml").read_text()
    text = re.sub(r"\bkv\b", "groups", re.sub(r"\bff\b", "inner", text))
    text = text.replace("[config]", '[config]\n"resid_pdrop" = "resid_pdrop * groups // groups"')
    plan = tmp_path / "plan.toml"
    plan.write_text(text)
    access = {"plan_file": plan}
    split(model("phi3"), tmp_path / "shards", tp=2, **access)
    original, shards = open_any(model("phi3"), Access(**access)), open_source(tmp_path / "shards", plan_file=plan)
    assert own_rules(shards.plan, original.model.architecture) == ()
    assert compare(original, shards).verdict == "same"


SAVED = ["llama", "gpt2", "falcon-7b", "mixtral", "deepseek_v3", "gpt_oss", "bamba", "mllama", "xlnet", "gemma4"]


@pytest.mark.parametrize("name", SAVED)
def test_the_built_in_rules_as_saved_are_no_others(name: str, model: Callable[[str], Path], tmp_path: Path) -> None:
    original, shards = by_plan(model(name), tmp_path, {})
    assert own_rules(shards.plan, original.model.architecture) == ()
    assert compare(original, shards).verdict == "same"


def test_what_differs_is_listed(model: Callable[[str], Path], tmp_path: Path) -> None:
    edits = {
        "tensors transformer.h.{layer}.attn.c_attn.bias": '"(kv of head)"', "sizes of": '"3"',
        "config n_inner": '"2 * ff"', "modules transformer.h.{layer}.attn": '{ num_heads = "kv" }',
    }  # fmt: skip
    original, shards = by_plan(model("gpt2"), tmp_path, edits)
    listed = own_rules(shards.plan, original.model.architecture)
    assert listed is not None and [line.partition(" is ")[0] for line in listed] == [
        "transformer.h.{layer}.attn.c_attn.bias", "[config] n_inner", "[modules] transformer.h.{layer}.attn",
    ]  # fmt: skip
    assert listed[0].endswith("is '(kv of head)', built in '(q: kv group head + k: kv head + v: kv head)'")
    config = {**original.model.config, "model_type": "nobody-knows-it"}
    unknown = dataclasses.replace(shards.plan.model, config=config)
    assert own_rules(dataclasses.replace(shards.plan, model=unknown), original.model.architecture) is None


def test_under_another_launcher(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The ranks fail together, and the first says once what any of them found out."""
    original, shards = by_plan(model("phi3"), tmp_path, dealt("packed hidden", QKV, PHI3))
    arguments = [original.path, shards.path, "--json", "--plan", tmp_path / "plan.toml"]
    first, second = by_hand([partial(by_hand_command, "verify", *map(str, arguments))] * 2)
    document = json.loads(first.stdout)
    assert (first.returncode, document["verdict"], document["error"]) == (1, "different", None)
    assert document["forward"]["failure"]["place"] == "model.layers.0.self_attn"
    assert (second.returncode, second.stdout) == (1, "")


def test_a_plan_that_is_another_and_right(model: Callable[[str], Path], tmp_path: Path) -> None:
    """The table of tokens is whole on every rank. What one rank alone finds wrong is the answer of all, and soon."""
    edits = {"tensors model.embed_tokens.weight": '"words hidden"'}
    original, shards = by_plan(model("phi3"), tmp_path, edits)
    assert own_rules(shards.plan, original.model.architecture) == (
        "model.embed_tokens.weight is 'words hidden', built in 'vocab hidden'",
    )
    assert compare(original, shards).verdict == "same"
    report = run_forward(original, shards, QUICK)
    assert report.is_same and report.cut == ("model.embed_tokens.weight",), report.verdict
    config = shards.path / "rank-01-of-02" / "config.json"
    change_json(config, rms_norm_eps="small")
    started = time.monotonic()
    report = run_forward(original, shards, QUICK)
    assert report.failure is not None and (report.is_same, report.failure.rank) == (False, 1)
    assert "transformers cannot load it" in report.verdict and str(config.parent) in report.verdict
    assert time.monotonic() - started < QUICK.timeout / 3


def test_what_fails_by_the_built_in_rules_is_an_error(model: Callable[[str], Path], tmp_path: Path) -> None:
    """They are known to be right: that the run fails is no answer, but it says where."""
    split(model("bert"), tmp_path / "shards", tp=2)
    original, shards = open_source(model("bert")), open_source(tmp_path / "shards")
    config = tmp_path / "shards" / "rank-01-of-02" / "config.json"
    change_json(config, chunk_size_feed_forward=5)
    said = (
        r"rank 1 of 2 failed: the shards' model: 'bert\.encoder\.layer\.0' fails, where the original's does not: ValueE"
    )
    with pytest.raises(RankError, match=said):
        run_forward(original, shards, ForwardOptions(draws=3))


def test_of_a_type_without_rules_a_line_is_believed_that_has_the_originals_number(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    edits = {"config n_head": '"kv * group * 2"', "config n_inner": '"ff"', "config n_layer": '"layer // group"',
             "config n_embd": '"80"', "config head_dim": '"head"', "config label": '"3"'}  # fmt: skip
    _, shards = by_plan(model("gpt2"), tmp_path, edits)
    config = {**shards.plan.model.config, "model_type": "nobody-knows-it"}
    plan = dataclasses.replace(shards.plan, model=dataclasses.replace(shards.plan.model, config=config))
    believed = with_sound_config(plan).model.architecture.config
    assert believed.keys() == {"n_inner", "n_layer", "head_dim", "vocab_size", "pad_token_id"}
