"""Ranks with unequal parts of an MLP, run forward and backward."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import reshard.placement.program_plan
from reshard.api import split
from reshard.formats.mesh import Mesh
from reshard.model.model import Model
from reshard.source.opening import open_source
from reshard.source.source import Source
from reshard.verify.forward.compare import ForwardOptions
from tests import store
from tests.marks import thorough
from tests.verify import test_quantized_forward
from tests.verify.forwards import run_forwards
from tests.verify.test_forward import WITH_GRADIENTS, run_all

pytestmark = thorough


# a plain MLP; one in two packings; experts in three; a norm over the parts; parts that are gathered in between; widths
# of which a rank's config.json cannot say both; channels of a mixer
NAMES = ["gpt2", "phi3", "dbrx", "gpt_oss", "mixtral", "bitnet", "gemma3n_text", "deepseek_v3", "jamba"]


def any_units(model: Model, mesh: Mesh) -> Mesh:
    """Two units for two ranks, the second of them smaller, of whatever may be dealt unevenly."""
    units = {}
    for axis in sorted(model.channels):
        lengths = {sizes[axis] for sizes in model.axis_sets() if axis in sizes}
        if max(lengths) // 2 + 1 < min(lengths):
            units[axis] = max(lengths) // 2 + 1
    return dataclasses.replace(mesh, uneven=tuple(units.items()))


def pair(source: Path, out: Path, tp: int) -> tuple[Source, Source]:
    split(source, out, tp=tp, uneven=True)
    found = open_source(source), open_source(out)
    assert found[1].plan.mesh.uneven, source
    return found


def test_unequal_parts_are_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reshard.placement.program_plan, "unevenly", any_units)
    pairs = [pair(store.checkpoint(name), tmp_path / f"{name}-2", 2) for name in NAMES]
    for name, report in zip(NAMES, run_all(pairs, WITH_GRADIENTS), strict=True):
        assert report.is_same, (name, report.verdict)
        assert report.gradients, name


def test_mxfp4_on_four_ranks_of_which_the_last_has_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same model with bf16 weights, in units of one."""
    monkeypatch.setitem(test_quantized_forward.SIZES, "intermediate_size", 7 * 32)
    packed, _ = test_quantized_forward.quantize(tmp_path / "mxfp4", "gpt_oss", "gpt-oss")
    monkeypatch.setitem(test_quantized_forward.SIZES, "intermediate_size", 7 * 32 + 2)
    test_quantized_forward.quantize(tmp_path / "odd", "gpt_oss", "gpt-oss")
    pairs = [pair(packed, tmp_path / "mxfp4-4", 4), pair(tmp_path / "odd-plain", tmp_path / "bf16-4", 4)]
    assert [shards.plan.mesh.uneven for _, shards in pairs] == [(("ff", 32),), (("ff", 1),)]
    for report in run_forwards(pairs, ForwardOptions(seq=24, draws=4)):
        assert report.is_same, report.verdict
        assert (report.ranks, report.dtype) == (4, "bfloat16")
