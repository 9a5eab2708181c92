"""Which degrees a sweep tries, and what it says of each."""

from __future__ import annotations

from pathlib import Path

from reshard.formats.mesh import Mesh
from reshard.formats.notation.architecture_files import find_architecture
from reshard.mesh.degrees import TRIED, check_degrees, refusal, sweep, valid_degrees
from reshard.model.binding import bind
from reshard.model.model import FullTensor, Model

LLAMA = {
    "model_type": "llama", "hidden_size": 20, "intermediate_size": 80, "num_hidden_layers": 1,
    "num_attention_heads": 40, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 41,
}  # fmt: skip
SHAPES = {
    "model.embed_tokens.weight": (41, 20),
    "model.layers.0.self_attn.q_proj.weight": (240, 20),
    "model.layers.0.self_attn.k_proj.weight": (24, 20),
    "model.layers.0.mlp.up_proj.weight": (80, 20),
}


def model_of(config: dict, shapes: dict[str, tuple[int, ...]]) -> Model:
    full = [FullTensor(name, "BF16", shape, "here") for name, shape in shapes.items()]
    return bind(find_architecture(config, Path()), config, full)


def test_a_sweep_says_what_each_degree_alone_says() -> None:
    model = model_of(LLAMA, SHAPES)
    found = sweep(model)
    assert found.valid == tuple(valid_degrees(model)) == (1, 2, 4, 5, 8, 10, 20, 40)
    assert found.valid_ep == (1,)
    assert [*found.attempts] == [degree for degree in TRIED if degree <= 80]
    for degree, refused in found.attempts.items():
        alone = refusal(model, Mesh((("tp", degree),)))
        assert (refused and refused.why) == (alone and alone.why)
        assert (refused is None) == (degree in found.valid)


def test_degrees_that_are_far_too_large_are_not_tried() -> None:
    small = model_of(LLAMA | {"num_attention_heads": 4}, SHAPES | {"model.layers.0.self_attn.q_proj.weight": (24, 20)})
    found = sweep(small)
    assert found.valid == (1, 2, 4)
    assert [*found.attempts] == list(range(1, 17))


def test_a_vocabulary_that_may_not_be_padded_allows_one_rank() -> None:
    assert sweep(model_of(LLAMA, SHAPES), pad=False).valid == (1,)


def test_the_options_that_allow_a_degree_are_told_and_do() -> None:
    odd = model_of(LLAMA | {"intermediate_size": 81}, SHAPES | {"model.layers.0.mlp.up_proj.weight": (81, 20)})
    ways = {degree: refused.instead for degree, refused in sweep(odd).attempts.items() if refused}
    assert 1 not in ways and not ways[3] and ways[4] == ({"uneven": True},)
    uneven = sweep(odd, uneven=True)
    assert uneven.valid == (1, 2, 4, 5, 8), "of 81 units at 10 ranks, nine take 9 and the last one none"
    assert all(refused is None for degree, refused in uneven.attempts.items() if degree in uneven.valid)
    check_degrees(odd, Mesh((("tp", 4),), uneven=(("ff", 1),)))
