"""What a plan keeps of what it was asked is of this plan alone; what a model keeps of a name is all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reshard.formats.mesh import Mesh, mesh_of
from reshard.formats.notation.architecture import filled
from reshard.formats.notation.format_file import format_of
from reshard.mesh.plan import make_plan
from reshard.placement.arrangement import arrangement_of
from tests import store


def test_a_plan_with_other_padding_computes_its_own_layouts() -> None:
    model = store.source("llama").model
    plan = make_plan(model, mesh_of(2))
    first, second = (arrangement_of(plan, format_of("vllm")) for _ in range(2))
    assert plan._layouts and {id(each) for each in plan._layouts.values()} >= {
        id(layout) for each in second.stored for layout in getattr(each.geometry, "layouts", ())
    }
    assert [each.geometry.shape(1) for each in first.stored] == [each.geometry.shape(1) for each in second.stored]
    assert not replace(plan, padding={})._layouts
    assert plan.unsplit.mesh == Mesh() and plan.unsplit.padding == plan.padding


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_a_name_is_a_template_and_indices(name: str) -> None:
    model = store.source(name).model
    assert [filled(tensor.kind.pattern, tensor.indices) for tensor in model.tensors] == [
        tensor.name for tensor in model.tensors
    ]
    assert all(tensor.indices.keys() >= {"layer"} for tensor in model.tensors if "{layer}" in tensor.kind.pattern)
