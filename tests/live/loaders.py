"""A rank's model with weight loaders like vLLM's, without vLLM: written from what vLLM does, not from our rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

Loader = Callable[..., None]


class Model(torch.nn.Module):
    """Llama, Qwen2 or Mixtral as vLLM has it on a rank; ``tensors`` are the checkpoint's names."""

    def __init__(self, config: Mapping[str, Any], tensors: Iterable[str], rank: int, tp: int) -> None:
        super().__init__()
        self.config, self.rank, self.tp = config, rank, tp
        self.loaders: dict[str, Loader] = {}
        self.hidden, self.inner = config["hidden_size"], config["intermediate_size"]
        self.head = config.get("head_dim") or self.hidden // config["num_attention_heads"]
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.vocab = -(-config["vocab_size"] // 64) * 64
        for name in tensors:
            self._build(name)
        if config["tie_word_embeddings"]:
            self.add("lm_head.weight", self.get_parameter("model.embed_tokens.weight"))

    def add(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Register a parameter under a dotted name."""
        *path, leaf = name.split(".")
        layer: torch.nn.Module = self
        for part in path:
            if part not in layer._modules:
                layer.add_module(part, torch.nn.Module())
            layer = layer._modules[part]
        layer.register_parameter(leaf, parameter)

    def _build(self, name: str) -> None:
        """The parameter into which a tensor goes, and how it is loaded."""
        leaf, module = name.rpartition(".")[2], name.split(".")[-2]
        if module in ("embed_tokens", "lm_head"):
            self._room(name, (self.vocab // self.tp, self.hidden))
            self.loaders[name] = self._vocabulary
        elif module in ("q_proj", "k_proj", "v_proj"):
            self.own_kv = max(self.kv // self.tp, 1)
            rows = (self.heads // self.tp + 2 * self.own_kv) * self.head
            room = name.replace(module, "qkv_proj")
            self._room(room, (rows, self.hidden) if leaf == "weight" else (rows,))
            self.loaders[name] = lambda tensor: self._qkv(self.get_parameter(room), tensor, module[0])
        elif module in ("gate_proj", "up_proj"):
            room = name.replace(module, "gate_up_proj")
            rows = 2 * self.inner // self.tp
            self._room(room, (rows, self.hidden) if leaf == "weight" else (rows,))
            self.loaders[name] = lambda tensor: self._column(self.get_parameter(room), tensor, module == "up_proj")
        elif ".experts." in name:
            self._experts(name, module)
        else:
            self._other(name, module, leaf)

    def _other(self, name: str, module: str, leaf: str) -> None:
        rows = module in ("o_proj", "down_proj") and leaf == "weight"
        inner = self.heads * self.head if module == "o_proj" else self.inner
        shape: tuple[int, ...] = (self.hidden, inner // self.tp) if rows else (self.hidden,)
        if module == "gate":
            shape = (self.config["num_local_experts"], self.hidden)
        self._room(name, shape)
        self.loaders[name] = lambda tensor: self._plain(self.get_parameter(name), tensor, 1 if rows else None)

    def _experts(self, name: str, module: str) -> None:
        """Mixtral's: w1 is gate, w3 is up, w2 is down."""
        prefix, expert, _ = name.rsplit(".", 3)[0], int(name.rsplit(".", 3)[1]), name
        count, part = self.config["num_local_experts"], self.inner // self.tp
        room = f"{prefix}.routed_experts.{'w2' if module == 'w2' else 'w13'}_weight"
        self._room(room, (count, self.hidden, part) if module == "w2" else (count, 2 * part, self.hidden))

        def load(tensor: torch.Tensor) -> None:
            own = self.get_parameter(room).data[expert]
            if module == "w2":
                own.copy_(tensor.narrow(1, part * self.rank, part))
            else:
                own.narrow(0, part * (module == "w3"), part).copy_(tensor.narrow(0, part * self.rank, part))

        self.loaders[name] = load

    def _room(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in dict(self.named_parameters()):
            self.add(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))

    def _vocabulary(self, tensor: torch.Tensor) -> None:
        raise NotImplementedError  # replaced in load_weights, which knows the name

    def _plain(self, room: torch.nn.Parameter, tensor: torch.Tensor, dim: int | None) -> None:
        if dim is not None:
            tensor = tensor.narrow(dim, room.shape[dim] * self.rank, room.shape[dim])
        room.data.copy_(tensor)

    def _column(self, room: torch.nn.Parameter, tensor: torch.Tensor, second: bool) -> None:
        part = self.inner // self.tp
        room.data.narrow(0, part * second, part).copy_(tensor.narrow(0, part * self.rank, part))

    def _qkv(self, room: torch.nn.Parameter, tensor: torch.Tensor, which: str) -> None:
        q, kv = self.heads // self.tp * self.head, self.own_kv * self.head
        first, size = {"q": (0, q), "k": (q, kv), "v": (q + kv, kv)}[which]
        replicas = self.tp // self.kv if self.tp > self.kv else 1
        shard = self.rank if which == "q" else self.rank // replicas
        room.data.narrow(0, first, size).copy_(tensor.narrow(0, shard * size, size))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """vLLM's entry: each tensor goes through its loader."""
        for name, tensor in weights:
            if self.loaders[name] == self._vocabulary:
                room = self.get_parameter(name)
                first, rows = self.rank * len(room), self.config["vocab_size"]
                there = max(min(rows - first, len(room)), 0)
                room.data[:there].copy_(tensor.narrow(0, min(first, rows), there))
                room.data[there:].fill_(0)
            else:
                self.loaders[name](tensor)
