"""The numbers and words of ``reshard plan``, for plans whose answers can be counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from reshard.commands.plan import format_table, sources_text, stored_rows
from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture import architecture_from_document
from reshard.formats.notation.architecture_files import find_architecture
from reshard.formats.notation.expressions import read_expression
from reshard.formats.notation.format_file import format_of, in_modules
from reshard.mesh.plan import Plan, make_plan
from reshard.mesh.totals import rows_of, totals_of
from reshard.model.binding import bind
from reshard.model.model import FullTensor
from reshard.placement.arrangement import arrangement_of

# 8 query heads of 6 on 4 KV heads
PHI3 = {
    "model_type": "phi3", "hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 40,
}  # fmt: skip
QKV = "model.layers.0.self_attn.qkv_proj.weight"


def plan_of(config: dict, tensors: dict[str, tuple[int, ...]], mesh: Mesh) -> Plan:
    full = [FullTensor(name, "BF16", shape, "here") for name, shape in tensors.items()]
    return make_plan(bind(find_architecture(config, Path()), config, full), mesh)


@pytest.mark.parametrize(
    "degree, copies, replicated, shown",
    [
        (4, (1,), 0, []),
        # of the 3 heads of a rank, its key and its value are on one more
        (8, (1, 2), 2 * 6 * 20 * 2, ["1-2x: some of it is on 1 rank, some on 2"]),
    ],
)
def test_a_packed_weight_counts_as_replicated_where_it_is(degree, copies, replicated, shown):
    plan = plan_of(PHI3, {QKV: (96, 20)}, Mesh((("tp", degree),)))
    (row,) = rows_of(plan)
    assert (row.copies, row.replicated) == (copies, replicated)
    assert totals_of(plan, [row]).replicated == replicated
    lines = format_table([row], None)
    assert lines[2:] == shown
    assert ("column 1-2x" in lines[1]) == bool(shown)


def test_several_ranks_that_hold_the_same_whole_part():
    config = PHI3 | {"model_type": "llama"}
    shapes = {"model.layers.0.self_attn.k_proj.weight": (24, 20), "model.norm.weight": (20,)}
    plan = plan_of(config, shapes | {"model.layers.0.self_attn.q_proj.weight": (48, 20)}, Mesh((("tp", 8),)))
    keys, norm, queries = rows_of(plan)
    assert (keys.copies, keys.replicated, keys.bytes_per_rank) == ((2,), 240, 240)
    assert (norm.copies, norm.replicated) == ((8,), 40)
    assert (queries.copies, queries.replicated) == ((1,), 0)
    lines = format_table([keys, norm, queries], None)
    assert lines[4:] == ["2x: each part is on 2 ranks"]


def test_experts_of_other_ranks_are_not_counted_on_the_first():
    config = {
        "model_type": "qwen3_moe", "hidden_size": 20, "moe_intermediate_size": 12, "num_experts": 4, "vocab_size": 40,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    }  # fmt: skip
    experts = {f"model.layers.0.mlp.experts.{i}.up_proj.weight": (12, 20) for i in range(4)}
    plan = plan_of(config, experts | {"model.norm.weight": (20,)}, Mesh((("ep", 2), ("tp", 2))))
    *rows, norm = rows_of(plan)
    assert sum(row.bytes_per_rank for row in rows) == 2 * 6 * 20 * 2
    assert {(row.copies, row.replicated) for row in rows} == {((1,), 0)}
    assert (norm.copies, norm.replicated) == ((4,), 40)


def test_a_stack_of_experts_that_is_stored_input_first_is_split_as_each_expert_is():
    config = {
        "model_type": "gpt_oss", "hidden_size": 20, "intermediate_size": 12, "num_local_experts": 4, "vocab_size": 40,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    }  # fmt: skip
    experts = {"gate_up_proj": (4, 20, 24), "gate_up_proj_bias": (4, 24), "down_proj": (4, 12, 20)}
    tensors = {f"model.layers.0.mlp.experts.{name}": shape for name, shape in experts.items()}
    plan = plan_of(config, tensors, Mesh((("ep", 2), ("tp", 2))))
    rows = rows_of(plan)
    assert [row.kind for row in rows] == ["expert column", "expert column", "expert row"]
    assert totals_of(plan, rows).forward.count == 1


def test_a_program_s_second_copy_of_a_tied_table_is_made_of_the_first():
    config, table = PHI3 | {"model_type": "llama", "tie_word_embeddings": True}, "model.embed_tokens.weight"
    format = in_modules(format_of("dcp"))
    rows = stored_rows(arrangement_of(plan_of(config, {table: (40, 20)}, Mesh()), format))
    assert {row.name: sources_text(row) for row in rows} == {table: "the same", "lm_head.weight": table}


def test_a_condition_may_ask_for_a_size_that_depends_on_the_layer() -> None:
    document = {
        "sizes": {"hidden": "hidden_size", "ff": "widths[layer]"},
        "tensors": {"{layer}.up": [{"when": "ff > 10", "shape": "ff hidden"}, {"shape": "hidden ff"}]},
    }
    architecture = architecture_from_document(document, "own", "own")
    tensors = [FullTensor("0.up", "F32", (4, 8), "file"), FullTensor("1.up", "F32", (16, 4), "file")]
    model = bind(architecture, {"hidden_size": 4, "widths": [8, 16]}, tensors)
    assert [str(kind.rule) for kind in model.kinds] == ["hidden ff", "ff hidden"]


def test_sizes_are_asked_for_any_number_of_times() -> None:
    sizes, heads = bind(find_architecture(PHI3, Path()), PHI3, []).sizes, read_expression("kv * group")
    for _ in range(4000):
        assert (sizes.evaluate(heads, {}), sizes.look_up("group"), sizes.count("head", {})) == (8, 2, 6)
