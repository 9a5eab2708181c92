"""What ``--as torchtitan`` writes, loaded by torchtitan's own models and run; what they save, merged again.

    python -m tests.engines.load_torchtitan      (in an environment with torchtitan: tests/engines/torchtitan.txt)

For each small model: split, ``dcp.load`` of the whole state of torchtitan's model, which fails where a name is missing,
the logits against those of transformers, ``dcp.save`` of the state, a merge, and every tensor against the original.
What the model holds then (``reshard.live``) must be what ``--as torchtitan-live`` writes.
Attention is in plain torch instead of flex attention, which needs a compiler. Prints a line for each. Exit code 1:
something differs.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers.utils.logging import disable_progress_bar

from reshard.api import merge, split
from reshard.live.parameters import slices_of
from tests import zoo
from tests.support import change_json

MODELS = (
    "llama-heads",
    "llama-tied",
    "qwen3",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_v3-mtp",
    "deepseek_v2-no-q-lora",
    "gpt_oss",
)
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama-heads": {"head_dim": 10}, "llama-tied": {"head_dim": 10}, "gpt_oss": {"sliding_window": 128},
    "deepseek_v3": {"num_nextn_predict_layers": 0},
    "qwen3_moe": {"mlp_only_layers": [], "norm_topk_prob": True},
}  # fmt: skip
"""torchtitan takes the size of a head of Llama from the width. Its Qwen 3 has experts in each layer, whose weights add
up to 1, and the windows of gpt-oss are longer than a test."""
COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Layers that predict further tokens have copies of the table and the head, which torchtitan does not store."""
NOISE = 1e-5
"""The largest difference of logits, beside the largest logit, of two programs that compute in F32, in other orders."""
NOISE_OF_EXPERTS = 2e-2
"""The same where torchtitan computes experts in BF16, as it does whatever the model's dtype."""


def _outer(config: Any) -> dict[str, Any]:
    """The embedding, the last norm and the head, in torchtitan's own settings."""
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    hidden, vocab = config.hidden_size, config.vocab_size
    return {
        "dim": hidden, "vocab_size": vocab,
        "tok_embeddings": Embedding.Config(num_embeddings=vocab, embedding_dim=hidden),
        "norm": RMSNorm.Config(normalized_shape=hidden, eps=config.rms_norm_eps),
        "lm_head": Linear.Config(in_features=hidden, out_features=vocab),
    }  # fmt: skip


def _rope(kind: str, config: Any, size: int) -> Any:
    from torchtitan.models.common import rope

    given = config.rope_parameters
    known = {
        "factor": "rope_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow", "truncate": "truncate",
        "original_max_position_embeddings": "original_seq_len",
    }  # fmt: skip
    yarn = {known[key]: value for key, value in given.items() if key in known}
    return getattr(rope, kind).Config(
        dim=size, max_seq_len=64, theta=given["rope_theta"], **(yarn and {"scaling": "yarn"} | yarn)
    )


def _llama(config: Any) -> Any:
    from torchtitan.models import llama3

    head = config.hidden_size // config.num_attention_heads
    layers = llama3._build_llama3_layers(
        n_layers=config.num_hidden_layers, dim=config.hidden_size, n_heads=config.num_attention_heads,
        hidden_dim=config.intermediate_size, rope=_rope("ComplexRoPE", config, head),
        n_kv_heads=config.num_key_value_heads, attn_backend="flex",
    )  # fmt: skip
    return llama3.Llama3Model.Config(layers=layers, enable_weight_tying=config.tie_word_embeddings, **_outer(config))


def _qwen3(config: Any) -> Any:
    from torchtitan.models import qwen3

    common: dict[str, Any] = {
        "n_layers": config.num_hidden_layers, "dim": config.hidden_size, "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim, "attn_backend": "flex",
        "rope": _rope("CosSinRoPE", config, config.head_dim),
    }  # fmt: skip
    if config.model_type == "qwen3_moe":
        layers = qwen3._build_qwen3_moe_layers(
            moe_hidden_dim=config.moe_intermediate_size, num_experts=config.num_experts,
            top_k=config.num_experts_per_tok, moe_comm_backend="standard", **common,
        )  # fmt: skip
    else:
        layers = qwen3._build_qwen3_layers(hidden_dim=config.intermediate_size, **common)
    return qwen3.Qwen3Model.Config(layers=layers, enable_weight_tying=config.tie_word_embeddings, **_outer(config))


def _deepseek(config: Any) -> Any:
    from torchtitan.models import deepseek_v3

    is_grouped = config.model_type == "deepseek_v3" or config.topk_method == "group_limited_greedy"
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=config.num_hidden_layers, n_dense_layers=config.first_k_dense_replace, dim=config.hidden_size,
        n_heads=config.num_attention_heads, q_lora_rank=config.q_lora_rank or 0, kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim, qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim, mscale=1.0, dense_hidden_dim=config.intermediate_size,
        moe_hidden_dim=config.moe_intermediate_size, num_experts=config.n_routed_experts,
        num_shared_experts=config.n_shared_experts, router_top_k=config.num_experts_per_tok,
        router_score_func="sigmoid" if config.model_type == "deepseek_v3" else "softmax",
        router_num_expert_groups=config.n_group if is_grouped else None,
        router_num_limited_groups=config.topk_group if is_grouped else None,
        router_route_scale=config.routed_scaling_factor, router_route_norm=config.norm_topk_prob, attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=_rope("ComplexRoPE", config, config.qk_rope_head_dim),
    )  # fmt: skip
    further = deepseek_v3._build_mtp_layers(
        layers[-1], dim=config.hidden_size, num_mtp_layers=getattr(config, "num_nextn_predict_layers", None) or 0
    )
    return deepseek_v3.DeepSeekV3Model.Config(layers=layers, mtp_layers=further, **_outer(config))


def _gpt_oss(config: Any) -> Any:
    from torchtitan.models import gpt_oss

    sizes = {
        "n_heads": config.num_attention_heads, "n_kv_heads": config.num_key_value_heads, "head_dim": config.head_dim,
    }  # fmt: skip
    whole = gpt_oss._make_gptoss_attn_config
    gpt_oss._make_gptoss_attn_config = partial(whole, **sizes)
    layers = gpt_oss._build_gptoss_layers(
        dim=config.hidden_size, n_layers=config.num_hidden_layers, hidden_dim=config.intermediate_size,
        num_experts=config.num_local_experts, top_k=config.num_experts_per_tok, load_balance_coeff=1e-3,
        attn_backend="flex", moe_comm_backend="standard", rope=_rope("CosSinRoPE", config, config.head_dim),
    )  # fmt: skip
    return gpt_oss.GptOssModel.Config(layers=layers, **_outer(config))


BUILDERS: Mapping[str, Callable[[Any], Any]] = {
    "llama": _llama, "qwen3": _qwen3, "qwen3_moe": _qwen3, "deepseek_v3": _deepseek,
    "deepseek_v2": _deepseek, "gpt_oss": _gpt_oss,
}  # fmt: skip


class _Attention(torch.nn.Module):
    """Attention in plain torch."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None,
        out_transform: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None, **_: object,
    ) -> torch.Tensor:  # fmt: skip
        """Of q (batch, length, heads, head) and k, v (batch, length, KV heads, head)."""
        group, length = q.shape[2] // k.shape[2], q.shape[1]
        k, v = (each.repeat_interleave(group, dim=2) for each in (k, v))
        scores = torch.einsum("blnh,bmnh->blnm", q, k) * (scale or q.shape[-1] ** -0.5)
        ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(ahead[:, None, :], -torch.inf)
        found = torch.einsum("blnm,bmnh->blnh", scores.softmax(dim=-1), v)
        return out_transform(found, scores.logsumexp(dim=-1)) if out_transform is not None else found


def _build(config: Any) -> torch.nn.Module:
    """torchtitan's model of a config of transformers'."""
    model: torch.nn.Module = BUILDERS[config.model_type](config).build().float().eval()
    for module in [*model.modules()]:
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = config.rms_norm_eps
        if hasattr(module, "inner_attention"):
            module.inner_attention = _Attention()
        if hasattr(module, "inner_experts"):  # gpt-oss expects a model in BF16
            module.inner_experts.register_forward_hook(lambda _, inputs, output: output.to(inputs[0].dtype))
    return model


def _logits(model: torch.nn.Module, original: Path) -> float:
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(2 * 12).reshape(2, 12) * 7 % 60
    theirs = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(tokens).logits
        found = model(tokens, positions=torch.arange(12).expand(2, 12))
    found = found[0] if isinstance(found, list) else found  # further tokens are predicted behind it
    return float((found - wanted).abs().max() / wanted.abs().max())


def _held(model: torch.nn.Module, folder: Path) -> list[str]:
    """What a model holds otherwise than a folder."""
    whole: dict[str, Any] = {}
    reader = dcp.FileSystemReader(folder)
    _load_state_dict(whole, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    found = {own.name: tensor for own, tensor in slices_of(model)}
    names = {id(each): name for name, each in model.named_parameters()}
    tied = {name: names[id(each)] for name, each in model.named_parameters(remove_duplicate=False)}
    found |= {name: found[first] for name, first in tied.items() if first in found}
    return [f"'{key}' is held otherwise" for key in found.keys() | whole.keys() if key not in found or key not in whole
            or not torch.equal(found[key], whole[key])]  # fmt: skip


def _check(name: str, root: Path) -> list[str]:
    from transformers import AutoConfig

    original = root / "original"
    zoo.save(name.removesuffix("-heads"), original, settings=SETTINGS.get(name))
    config_file = original / "config.json"
    change_json(config_file, **SETTINGS.get(name, {}))
    split(original, root / "titan", tp=2, format="torchtitan")
    config = AutoConfig.from_pretrained(original)
    model = _build(config)
    state = model.state_dict()
    for each in state.values():
        each.fill_(float("nan"))
    dcp.load(state, checkpoint_id=root / "titan", no_dist=True)
    model.load_state_dict(state)
    far, noise = _logits(model, original), NOISE_OF_EXPERTS if "moe" in " ".join(state) else NOISE
    wrong = [f"logits differ by {far:.1e} of the largest, which is more than {noise:.0e}"] if not far < noise else []
    split(original, root / "live", tp=2, format="torchtitan-live")
    wrong += _held(model, root / "live")
    dcp.save(model.state_dict(), checkpoint_id=root / "saved", no_dist=True)
    merge(root / "saved", root / "merged", config=original)
    before, after = load_file(original / "model.safetensors"), load_file(root / "merged" / "model.safetensors")
    copies = {key for key in before if key.startswith("model.layers.") and key.endswith(COPIES)}
    wanted = before.keys() - copies
    wrong += [f"'{key}' differs" for key in wanted if key not in after or not torch.equal(before[key], after[key])]
    print(f"{name}: logits within {far:.1e} of the largest", flush=True)
    return wrong


def main() -> None:
    """Check each model."""
    warnings.simplefilter("ignore")
    disable_progress_bar()
    failures = 0
    for name in sys.argv[1:] or MODELS:
        with tempfile.TemporaryDirectory(prefix="reshard-torchtitan-") as temporary:
            try:
                wrong = _check(name, Path(temporary))
            except BaseException as error:  # whatever a program raises is an answer about it
                traceback.print_exc()
                wrong = [f"{type(error).__name__}: {str(error).splitlines()[-1]}"]
        print(f"{name}: {'; '.join(wrong) or 'every tensor is right'}", flush=True)
        failures += bool(wrong)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
