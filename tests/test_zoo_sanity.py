"""The zoo against the architecture files: every model, by plan, byte for byte, and by what its dimensions mean.

Rules that fit are not yet rules that are right.
A dimension's meaning is checked without any tensor parallelism: reorder the parallel axes in all tensors at once, by
the rules, and the model must compute what it computed before. A rule that calls a dimension by the wrong name, or packs
it in the wrong order, takes part in the reordering wrongly, and the outputs change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from reshard.api import merge
from reshard.formats.errors import PlanError
from reshard.formats.mesh import Mesh, mesh_of
from reshard.formats.notation.architecture_files import built_in_architectures
from reshard.formats.notation.axes import Dim
from reshard.formats.notation.format_file import format_of
from reshard.formats.transformers_internals import concrete_class, model_class, placements, settings_of
from reshard.mesh.degrees import valid_degrees
from reshard.mesh.plan import Degrees, Plan, make_plan, rank_config
from reshard.model.model import Model
from reshard.placement.arrangement import arrangement_of
from reshard.placement.program_plan import plan_for
from reshard.verify.bytes.exact import verify_exact
from reshard.verify.bytes.rules import with_sound_config
from reshard.verify.rank.trace import inputs_of, running
from tests import remote, store, zoo
from tests.marks import thorough
from tests.mesh.test_stages import REFUSED, check_layers, stages_of
from tests.support import assert_boxes_make_up_the_tensors, contents

FORMAT = format_of("transformers")

# what a reordering changes although the rule is right
POSITIONAL = {
    "bloom": {"kv": "ALiBi: a head's slope follows from its number"},
    "mpt": {"kv": "ALiBi: a head's slope follows from its number"},
    "falcon-rw": {"kv": "ALiBi: a head's slope follows from its number"},
    "stablelm-norms": {"kv": "a head's norm has the head's number in its name", "group": "as kv"},
    **{
        name: {"vocab": "positions are counted over the tokens that are not padding"}
        for name in (
            "roberta",
            "xlm-roberta",
            "camembert",
            "roberta-prelayernorm",
            "data2vec-text",
            "xlm-roberta-xl",
            "xmod",
            "kosmos-2",
            "kosmos-2.5",
            "mpnet",
            "esm",
            "esm-absolute",
            "m2m_100",
        )
    },
    **{
        name: {"kv": "dt_proj returns a number for each KV head, of which a rank takes its own"}
        for name in ("doge", "doge-experts")
    },
    **{name: {"vocab": "a token says that it is padding"} for name in ("xlm", "xlm-causal", "flaubert")},
    "t5gemma2": {"vocab": "one token has a vector beside the table"},
    "blt": {"vocab": "groups of bytes are hashed from their numbers", "hashes": "as vocab"},
    "molmo2": {"vocab": "the table of tokens is the same on every rank, only the head is dealt"},
    "mllama": {"vocab": "two tables are read with the same token", "rows": "as vocab"},
    "cpmant": {"vocab": "prompts have rows of the same table, behind the vocabulary", "rows": "as vocab"},
    **{name: {"vocab": "n-grams are hashed from the numbers of tokens"} for name in ("qwen4_exp", "qwen4_exp_text")},
    "gemma3n_text": {"vocab": "two tables are read with the same token", "layer_vocab": "as vocab"},
    "gemma4_text-global-kv": {"vocab": "two tables are read with the same token", "layer_vocab": "as vocab"},
    "gemma4": {"vocab": "two tables are read with the same token", "layer_vocab": "as vocab"},
    "gemma4_text": {"vocab": "two tables are read with the same token", "layer_vocab": "as vocab"},
}


# model types that transformers cannot build, knows by another name, or writes with other names than the published ones
NOT_IN_THE_ZOO = {
    "EvollaModel", "NemotronH_Nano_Omni_Reasoning_V3", "RefinedWeb", "RefinedWebModel", "Yi", "aquila", "deepseek",
    "deepseek_ref", "fast_vlm", "gemma3n", "glm4v_moe_text", "glm4v_text", "gpt-sw3", "internlm", "internlm3",
    "iquestcoder", "kimi_k2", "kimi_k25", "lfm2-vl", "llava_next", "logics", "minicpm", "orion", "perception_lm",
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_moe_text", "qwen3_vl_text", "shieldgemma2", "step3_text",
    "vipllava", "xverse",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def test_every_model_type_is_in_the_zoo_or_excused():
    in_zoo = {entry.model_type for entry in zoo.ZOO.values()}
    in_zoo |= {str(entry.config.get("model_type")) for entry in remote.REMOTE.values()}
    assert built_in_architectures().keys() - in_zoo == NOT_IN_THE_ZOO


# whose classes draw something at random that ``randomize`` only adds to
@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_the_same_name_gives_the_same_bytes(name: str, tmp_path: Path):
    first, second = (contents(zoo.save(name, tmp_path / folder)) for folder in ("first", "second"))
    assert first == second


def of_kinds(names: Iterable[str]) -> list[Any]:
    """Models, those beside the kinds as thorough ones."""
    return [each if each in zoo.KINDS else pytest.param(each, marks=thorough) for each in names]


@pytest.fixture(scope="module", params=of_kinds(zoo.ZOO))
def name(request: pytest.FixtureRequest) -> str:
    """A model of the zoo: all tests of one come before the next, so that its code is imported once."""
    return str(request.param)


def test_boxes_of_the_ranks_make_up_the_tensors(name: str):
    """At every degree that the zoo knows. That a transfer between any boxes moves the right bytes: test_slabs.py."""
    source = store.source(name)
    degrees = zoo.ZOO[name].degrees
    assert degrees == tuple(degree for degree in valid_degrees(source.model) if degree in zoo.DEGREES)
    for tp in degrees:
        assert_boxes_make_up_the_tensors(make_plan(source.model, Mesh((("tp", tp),))))


@thorough
def test_a_rank_alone_is_a_model_of_its_sizes(name: str):
    """Its config.json says so, of those models of which a config.json can; and ``verify`` expects that one."""
    plan = make_plan(store.source(name).model, Mesh((("tp", zoo.ZOO[name].degrees[0]),)))
    config = rank_config(plan, 1)
    assert rank_config(with_sound_config(plan), 1) == config
    assert _is_model_of(config, plan, 1) == zoo.ZOO[name].loads_alone


def _is_model_of(config: Mapping[str, Any], plan: Plan, rank: int) -> bool:
    """Whether transformers makes of a rank's config.json a model with the rank's shapes."""
    boxes = plan.boxes(rank)
    shapes = {tensor.name: boxes[tensor.kind].shape for tensor in plan.model.tensors if tensor.kind in boxes}
    try:
        with torch.device("meta"):
            cls = concrete_class(model_class(config), config)
            model = cls(transformers.AutoConfig.for_model(**settings_of(config)))
        known = model.state_dict()
        return all(tuple(known[key].shape) == place.shape for key, place in placements(model, shapes).items())
    except Exception:  # a config.json that transformers refuses
        return False


@pytest.mark.parametrize("name", of_kinds(zoo.one_of_each()), indirect=True)
def test_bytes_of_the_ranks_are_the_originals_and_the_way_back(name: str, tmp_path: Path):
    low = zoo.ZOO[name].degrees[0]
    source, shards = store.source(name), store.shards(name, tp=low)
    report = verify_exact(source, shards)
    assert (report.verdict, report.ranks, report.tensors) == ("same", low, len(source.names)), report
    assert zoo.loads(shards / f"rank-01-of-{low:02d}") == zoo.ZOO[name].loads_alone
    merge(shards, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(store.checkpoint(name))


@thorough
def test_the_names_of_transformers_modules(name: str):
    """Of the format 'transformers': those of the model that transformers loads, with their shapes."""
    plan = make_plan(store.source(name).model, Mesh())
    kind = FORMAT.types.name_of(plan.model.config)
    if kind in FORMAT.types.refused:
        with pytest.raises(PlanError, match="has no place in the format 'transformers'"):
            arrangement_of(plan, FORMAT)
        return
    stored = {each.name: each.geometry.shape(0) for each in arrangement_of(plan, FORMAT).stored}
    loaded = _loaded(name)
    unsaved = loaded._keys_to_ignore_on_save or ()
    wanted = {key: tuple(value.shape) for key, value in loaded.state_dict().items() if key not in unsaved}
    if kind in FORMAT.types.beyond:  # the modules have more: no files are written
        with pytest.raises(PlanError, match="which checkpoints do not have"):
            plan_for(plan.model, FORMAT, Degrees())
        wanted = {key: shape for key, shape in wanted.items() if key in stored}
    assert {key: stored.get(key) for key in wanted} == wanted


@thorough
def test_pipeline_stages_are_as_transformers_runs_it(name: str) -> None:
    model = store.source(name).model
    if name in REFUSED:
        with pytest.raises(PlanError, match="is not possible"):
            make_plan(model, mesh_of(pp=2))
        return
    found = make_plan(model, mesh_of(pp=2))
    check_layers(found)
    stages, loaded = stages_of(found), _loaded(name)
    placed = placements(loaded, {name: layout.full for name, layout in found.layouts.items()})
    known = {name: stages[place.sources[0]] for name, place in placed.items()}
    ties = getattr(loaded, "all_tied_weights_keys", None) or {}
    for tied, kept in (*ties.items(), *ties.items()):
        both = known.get(tied, frozenset()) | known.get(kept, frozenset())
        known |= {tied: both, kept: both}
    ends: Sequence[tuple[str, int]] = (("get_input_embeddings", 0), ("get_output_embeddings", 1))
    for method, stage in ends:
        try:
            weight = getattr(getattr(loaded, method)(), "weight", None)
        except (AttributeError, NotImplementedError):
            continue
        names = [name for name, each in loaded.named_parameters(remove_duplicate=False) if each is weight]
        assert all(stage in known[name] for name in names if name in known), names


@lru_cache(maxsize=1)
def _loaded(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model of the zoo as transformers loads it, for the tests of one model, which come together."""
    folder = store.checkpoint(name)
    return zoo.class_of(folder).from_pretrained(folder, dtype=dtype).eval()


def test_reordering_parallel_axes_changes_nothing(name: str):
    folder = store.checkpoint(name)
    model = store.source(name).plan.model
    tensors = load_file(folder / "model.safetensors")
    vocabularies = _vocabularies(model)
    vocab = vocabularies["input_ids"][1]
    tokens = torch.randint(3, vocab, (2, 23), generator=torch.Generator().manual_seed(0))
    cls, config = zoo.class_of(folder), _loaded(name).config
    dtype, expected = _first_forward(name, tokens)
    tolerance = (1e-4 if dtype == torch.float64 else 1e-3) * expected.std()
    used = frozenset().union(*(kind.rule.axes for kind in model.kinds))
    families = [axis for family in model.architecture.families["tp"] for axis in family]
    axes = [axis for axis in families if axis in used and axis not in POSITIONAL.get(name, {})]

    def changed(axes: list[str]) -> bool:
        reordered = _reordered(model, tensors, axes)
        reordered |= {second: reordered[first].clone() for second, first in store.source(name).aliases.items()}
        places = {key: _new_places(size, axis in axes) for key, (axis, size) in vocabularies.items()}
        loaded = cls.from_pretrained(None, config=config, state_dict=reordered, dtype=dtype)
        found = _forward(loaded.eval(), tokens, dtype, places)
        outputs = places["decoder_input_ids"]
        found = found[..., outputs] if found.shape[-1] == len(outputs) else found
        return bool((found - expected).abs().max() >= tolerance)

    if changed(axes):
        guilty = [axis for axis in axes if changed([axis])]
        pytest.fail(f"reordering {' and '.join(guilty or axes)} changes what {name} computes")


def _vocabularies(model: Model) -> dict[str, tuple[str, int]]:
    """The axis and the size of the vocabulary of each side's tokens. The decoder's may be its own."""
    used = frozenset().union(*(kind.rule.axes for kind in model.kinds))
    both = {"input_ids": "vocab", "decoder_input_ids": "dvocab" if "dvocab" in used else "vocab"}
    return {key: (axis, model.sizes.of({})[axis]) for key, axis in both.items()}


def _new_places(size: int, is_reordered: bool) -> torch.Tensor:
    """Where each row is found after a reordering."""
    return torch.argsort(_order(size)) if is_reordered else torch.arange(size)


def _order(size: int) -> torch.Tensor:
    """A permutation that is not the identity, the same for the same size."""
    order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
    return order.roll(1) if torch.equal(order, torch.arange(size)) else order


def _reordered(model: Model, tensors: Mapping[str, torch.Tensor], axes: list[str]) -> dict[str, torch.Tensor]:
    result = dict(tensors)
    for name, kind, _ in model.tensors:
        sizes = kind.sizes
        for number, dim in enumerate(kind.rule.dims):
            if dim.axes & {*axes}:
                result[name] = result[name].index_select(number, _places(dim, sizes, axes)).contiguous()
    return result


def _places(dim: Dim, sizes: Mapping[str, int], axes: list[str]) -> torch.Tensor:
    """Where each index of a dimension is taken from when ``axes`` are reordered."""
    found, start = [], 0
    for summand in dim.summands:
        places = torch.zeros(1, dtype=torch.long)
        for factor in summand.factors:
            if isinstance(factor, Dim):
                inner = _places(factor, sizes, axes)
            else:
                size = factor if isinstance(factor, int) else sizes[factor]
                inner = _order(size) if factor in axes else torch.arange(size)
            places = (places[:, None] * len(inner) + inner).flatten()
        found.append(places + start)
        start += len(places)
    return torch.cat(found)


def _first_forward(name: str, tokens: torch.Tensor) -> tuple[torch.dtype, torch.Tensor]:
    """In float64 where the model's kernels know it."""
    try:
        return torch.float64, _forward(_loaded(name), tokens, torch.float64)
    except RuntimeError:
        return torch.float32, _forward(_loaded(name, torch.float32), tokens, torch.float32)


@torch.no_grad()
def _forward(
    model: Any, tokens: torch.Tensor, dtype: torch.dtype, places: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    inputs = inputs_of(model, tokens, dtype)
    inputs |= {key: new[inputs[key]] for key, new in (places or {}).items() if key in inputs}
    output = running(model)(**inputs)
    for kind in ("logits", "prediction_logits", "last_hidden_state"):
        if getattr(output, kind, None) is not None:
            return getattr(output, kind)
    raise AssertionError(f"{type(model).__name__} has no output to compare")
