"""What is said of a tensor without a rule: is each proposed line refused, or does it split the tensor?"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reshard.formats.errors import NotationError, PlanError
from reshard.formats.notation.architecture import Architecture, Rule
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.axes import parse
from reshard.formats.notation.tables import CONFIG_DEFAULTS, newer_than_tables
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Kind, Model
from reshard.model.unknown import NoRuleError
from tests import store, zoo
from tests.support import LLAMA, command, llama_tensors, write_checkpoint, write_file

LINE = re.compile(r"add the line (.* = \".*\")(?: with .*)?, and pass it")


def divided(model: Model) -> Iterator[Kind]:
    """A kind of each line whose tensors are matrices that ranks divide, companions of quantized ones aside."""
    kinds = {kind.template: kind for kind in model.kinds if kind.name.endswith(".weight")}
    dealt = model.architecture.dealt - model.architecture.expert_axes
    for template, kind in kinds.items():
        shapes = [shape for rule in model.architecture.tensors[template] for shape in rule.shapes]
        if len(kind.rule.dims) > 1 and kind.rule.axes & dealt and kind.rule in shapes:
            yield kind


def tensors_of(model: Model, template: str, word: str) -> list[FullTensor]:
    """The tensors of a model, with a word behind the module's name in those of one line."""
    names = ((tensor.name.rpartition("."), tensor) for tensor in model.tensors)
    renamed = (
        (f"{a}{word}.{b}" if tensor.template == template else tensor.name, tensor) for (a, _, b), tensor in names
    )
    return [FullTensor(name, tensor.dtype, tensor.shape, "model.safetensors") for name, tensor in renamed]


def with_line(model: Model, template: str, shape: str) -> Architecture:
    """The rules of a model with one more line of the user's, or another one."""
    return replace(model.architecture, tensors={**model.architecture.tensors, template: (Rule((parse(shape),)),)})


@pytest.mark.parametrize("name", zoo.one_of_each())
def test_a_hint_fed_back_is_refused_or_splits(name: str) -> None:
    model = store.source(name).model
    for kind in divided(model):
        tensors = tensors_of(model, kind.template, "_strange")
        strange = next(tensor.name for tensor in tensors if "_strange." in tensor.name)
        if model.architecture.match(strange) is not None:
            continue  # an open line has it
        with pytest.raises(NoRuleError) as error:
            bind(model.architecture, model.config, tensors)
        line = LINE.search(error.value.hint or "")
        if line is None:
            assert "'...'" in error.value.hint or "draft" in error.value.hint, error.value.hint
            continue
        ((template, shape),) = tomllib.loads(line[1]).items()
        try:
            again = bind(with_line(model, template, shape), model.config, tensors)
        except (NotationError, PlanError):
            continue
        rule = again.kind_of[strange].rule
        assert rule.axes & model.architecture.dealt, f"{template} = {shape}, for {kind.rule}"


@pytest.mark.parametrize("name", zoo.one_of_each())
def test_no_line_hides_a_divided_axis_in_numbers(name: str) -> None:
    """A user's line with the numbers of a matrix that ranks divide is refused; with dots it is taken."""
    model = store.source(name).model
    for kind in divided(model):
        if kind.rule.axes & model.sizes.measured.keys():  # it is what tells the size of its axes
            continue
        tensors = tensors_of(model, kind.template, "_strange")
        strange = next(tensor for tensor in tensors if "_strange." in tensor.name)
        if model.architecture.match(strange.name) is not None:
            continue
        numbers = with_line(model, model.architecture.in_general(strange.name), " ".join(map(str, strange.shape or ())))
        few = [tensor for tensor in tensors if tensor.name == strange.name or "_strange." not in tensor.name]
        with pytest.raises(PlanError, match="every rank would hold all of it") as error:
            bind(numbers, model.config, few, every_rule=True)
        assert "or '...' if that is meant" in (error.value.hint or "")


def said_of(folder: Path, more: Iterable[tuple[str, tuple[int, ...]]], config: Mapping[str, Any] = LLAMA) -> str:
    """What is printed for a small Llama with more tensors, on one line."""
    source = write_checkpoint(folder / "model", config={**LLAMA, **config})
    write_file(source / "model.safetensors", [*llama_tensors(), *((name, "BF16", shape) for name, shape in more)])
    refused = command("plan", "model", "--tp", "2", cwd=folder)
    assert refused.returncode == 2 and "has no rule" in refused.stderr
    return " ".join(refused.stderr.split())


def test_a_length_of_two_axes_is_a_question(tmp_path: Path) -> None:
    said = said_of(
        tmp_path, [("model.layers.0.mlp.extra_proj.weight", (37, 24)), ("model.layers.0.own.weight", (7, 3))]
    )
    assert '"model.layers.{layer}.mlp.extra_proj.weight" = "vocab ?" with the right one for each' in said
    assert "(24 is (kv head), ff)" in said
    with pytest.raises(NotationError, match=r"cannot read '\?'"):
        parse("ff ?")


def test_a_part_that_the_plan_does_not_know_is_said_as_a_whole(tmp_path: Path) -> None:
    names = [f"sidecar.model.layers.{layer}.{part}_proj.weight" for layer in range(2) for part in ("q", "up")]
    said = said_of(tmp_path, [(name, (24, 20)) for name in names])
    assert "the names of all 4 tensors without one begin with 'sidecar.'" in said and " = " not in said
    assert "--draft FILE" in said
    done = command("plan", "model", "--draft", "draft.toml", cwd=tmp_path)
    assert done.returncode == 0 and "sidecar." in (tmp_path / "draft.toml").read_text(), done.stderr


def test_a_config_of_another_type_is_asked_for(tmp_path: Path) -> None:
    said = said_of(tmp_path, [(f"h.{layer}.a{part}.weight", (24, 20)) for layer in range(9) for part in range(9)])
    assert "81 of " in said and "tensors have none" in said and "is config.json that of these tensors?" in said
    assert " = " not in said


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("99.1.0", True),
        ("5.99.0.dev0", True),
        ("5.2", False),
        ("4.57.1", False),
        (None, False),
        (7, False),
        ("x", False),
    ],
)
def test_a_newer_transformers_is_named_where_something_is_not_known(
    version: object, newer: bool, tmp_path: Path
) -> None:
    ours = json.loads(CONFIG_DEFAULTS.read_text())["made_with"]["transformers"]
    words = f"what is known was made with transformers {ours}; the checkpoint says {version}"
    config = {"transformers_version": version}
    assert newer_than_tables(config) == (words if newer else None)
    assert (words in said_of(tmp_path, [("own.weight", (7, 3))], config)) == newer
    with pytest.raises(PlanError, match="unknown model_type 'nobody_knows'") as error:
        find_architecture({**config, "model_type": "nobody_knows"}, Path())
    assert error.value.message.endswith(words) == newer
