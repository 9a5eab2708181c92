"""What a rank sends for a token and what it computes: by hand for models that are published, and as laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reshard.commands.plan import traffic_pairs
from reshard.formats.mesh import mesh_of
from reshard.mesh.plan import Plan, make_plan
from reshard.mesh.traffic import Rates, Traffic, traffic_of
from reshard.model.skeleton import skeleton
from tests import store, support, zoo
from tests.marks import one_of_each

LAYERS, HIDDEN, FF, VOCAB = 32, 4096, 14336, 128256
SHAPE = {
    "hidden_size": HIDDEN, "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": VOCAB, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SHAPE}
MIXTRAL = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2,
    **SHAPE,
}  # fmt: skip
ATTENTION, EXPERT = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 4, 3 * HIDDEN * FF


def planned(config: dict[str, Any], folder: Path, **mesh: Any) -> Plan:
    (folder / "config.json").write_text(json.dumps(config))
    return make_plan(skeleton(folder), mesh_of(**mesh))


def known(plan: Plan) -> Traffic:
    traffic = traffic_of(plan)
    assert traffic is not None
    return traffic


def test_tensor_parallelism_sends_two_sums_a_layer(tmp_path: Path) -> None:
    traffic = known(planned(LLAMA, tmp_path, tp=8))
    assert traffic.sent == {"tp": 2 * 7 / 8 * (2 * LAYERS + 1) * HIDDEN * 2}
    assert traffic.flops == 2 * (LAYERS * (ATTENTION + EXPERT) + VOCAB * HIDDEN) / 8
    assert traffic.share(Rates()) == pytest.approx(0.522, abs=0.001)


def test_stages_send_a_hidden_vector_and_share_the_rest(tmp_path: Path) -> None:
    whole, staged = known(planned(LLAMA, tmp_path, tp=4)), known(planned(LLAMA, tmp_path, tp=4, pp=2))
    assert staged.sent == {"tp": whole.sent["tp"] / 2, "pp": HIDDEN * 2 / 2}
    assert staged.flops == whole.flops / 2


def test_experts_get_the_tokens_of_other_ranks(tmp_path: Path) -> None:
    """Two of eight compute a token; half of them are on the other rank, and send it back."""
    traffic = known(planned(MIXTRAL, tmp_path, ep=2))
    assert traffic.sent == {"ep": 2 * 2 / 2 * LAYERS * HIDDEN * 2}
    router = HIDDEN * 8
    assert traffic.flops == 2 * (LAYERS * (ATTENTION + router + 2 * EXPERT) + VOCAB * HIDDEN)


def test_experts_on_the_same_ranks_are_summed(tmp_path: Path) -> None:
    sent = known(planned(MIXTRAL, tmp_path, ep=8, tp=8, same_ranks=True)).sent
    assert sent["tp"] + sent["ep"] == pytest.approx(2 * 7 / 8 * (2 * LAYERS + 1) * HIDDEN * 2)


def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    plan = planned(MIXTRAL, tmp_path, ep=2)
    del plan.model.sizes.settings["num_experts_per_tok"]  # type: ignore[attr-defined]
    assert traffic_of(plan) is None
    assert dict(traffic_pairs(plan, Rates()))["sent"].startswith("not known: config.json")


@pytest.mark.parametrize("name", one_of_each(zoo.ZOO))
def test_a_wider_mesh_costs_more_and_a_wider_model_less(name: str) -> None:
    model = store.source(name).model
    shares, sent = [], []
    for degree in (1, *zoo.ZOO[name].degrees):
        traffic = known(plan := make_plan(model, mesh_of(tp=degree)))
        assert traffic.flops > 0
        sent.append(traffic.nbytes)
        shares += [traffic.share(Rates())] if not plan.padding else []  # ranks compute with zeros, too
        assert traffic.share(Rates(), 4) <= traffic.share(Rates())
    assert shares == sorted(shares) and shares[0] == 0 and sent == sorted(sent)


def test_speeds_are_taken_with_units(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    command = ["plan", tmp_path, "--tp", "8", "--link", "50GB/s", "--flops", "2PFLOP/s"]
    assert "such as 990TFLOP/s" in support.command(*command).stderr
    command[-1] = "1000TFLOP/s"
    document = json.loads(support.command(*command, "--json").stdout)
    assert document["rates"] == {"link": 50e9, "flops": 1e15}
    assert document["per_token"]["sent"] == {"tp": 931840}
