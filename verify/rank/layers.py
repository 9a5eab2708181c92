"""The parallel layers, and how an already loaded module is made into one.

Every module holds its rank's weights and nothing else. The layers are those of Shoeybi et al. 2019 (Megatron-LM).

What a gradient means when it is put together again, with ``loss`` computed alike on every rank:

- a weight that is split: each rank's gradient is its slice of the whole gradient.
- a weight that all ranks have and use alike (a norm over hidden, a row-parallel bias, a router): each rank has the
  whole gradient already. Take one; do not sum.
- a weight that several ranks have but each uses for its own outputs, as a KV head that is replicated because there are
  more ranks than KV heads: each rank has the part that came through its own query heads. **Sum over the replicas.**
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from formats.torch_internals import own_buffers, own_parameters
from verify.rank.collectives import (
    copy_to_group,
    gather_from_group,
    lengths_in_group,
    reduce_from_group,
    scatter_to_group,
)
from verify.rank.group import Group

Module = TypeVar("Module", bound=nn.Module)


# Each function gives a module of this rank's size the parallel behaviour, in place, and returns it.
# The module's own forward still does the arithmetic, whatever class it is; names of parameters stay as they are.


def column_parallel(module: Module, group: Group) -> Module:
    """Let a module that has some of the outputs take inputs that all ranks have.

    Every floating-point tensor among its arguments is one (of experts: the routing weights, too).
    """
    local = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return local(*[_shared(a, group) for a in args], **{k: _shared(a, group) for k, a in kwargs.items()})

    return _with_forward(module, forward)


def row_parallel(module: Module, group: Group, *, bias: str = "bias", elsewhere: Sequence[str] = ()) -> Module:
    """Sum the outputs of a module that has some of the inputs, and add its bias once after that.

    Of a tuple that the module returns, the first is the output. ``bias`` is the parameter that is added last, if the
    module has one. ``elsewhere``: parameters that are added further in, as the biases of experts before they are
    weighted, and that count on another rank, which has the same: here they are zero, and have no gradient.
    """
    local = module.forward
    missing = [name for name in elsewhere if getattr(module, name, None) is None]
    if missing:
        raise ValueError(f"{type(module).__name__} has no parameter {', '.join(missing)} to count elsewhere")

    def forward(*args: Any, **kwargs: Any) -> Any:
        last: Tensor | None = getattr(module, bias, None)
        # Zeros, not None: transformers' Conv1D needs a bias to add.
        instead = {} if last is None else {bias: torch.zeros_like(last)}
        instead |= {name: torch.zeros_like(getattr(module, name)) for name in elsewhere}
        with _instead(module, instead):
            out = local(*args, **kwargs)
        partial, *further = out if isinstance(out, tuple) else (out,)
        total = reduce_from_group(partial, group)
        total = total if last is None else total + last
        return (total, *further) if isinstance(out, tuple) else total

    return _with_forward(module, forward)


def sum_at_use(module: Module, name: str, group: Group) -> Module:
    """Sum what is computed with a weight that has some of the inputs, for a module that goes on from there."""
    local = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _SumsAtUse(module.get_parameter(name), group):
            return local(*args, **kwargs)

    return _with_forward(module, forward)


class _SumsAtUse(TorchFunctionMode):
    """Sums over the ranks the results of every function that takes a weight as an argument."""

    def __init__(self, weight: Tensor, group: Group) -> None:
        super().__init__()
        self._weight, self._group = weight, group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_used = any(argument is self._weight for argument in (*args, *(kwargs or {}).values()))
        return reduce_from_group(result, self._group) if is_used and isinstance(result, Tensor) else result


@dataclass(frozen=True)
class Part:
    """Where a part of a tensor lies in the whole, which has ``length`` indices in its first dimension: at ``start``."""

    start: int
    length: int

    def among_zeros(self, part: Tensor) -> Tensor:
        """The whole tensor, zero but for this part; its gradient is the part of the whole one's."""
        index = torch.arange(self.start, self.start + len(part), device=part.device)
        return part.new_zeros(self.length, *part.shape[1:]).index_copy_(0, index, part)


def with_all_experts(module: Module, holder: nn.Module, parts: Mapping[str, Part]) -> Module:
    """Let a module's forward see all experts: those that this rank has not are zero, and so is what they compute.

    ``parts`` are the parameters of ``holder``, the module itself or one in it, that have some of the experts.
    """
    local = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        whole = {}
        for name, part in parts.items():
            parameter = own_parameters(holder)[name]
            # Weights that are brought only for the holder's own forward are not there yet.
            if parameter is not None and not parameter.is_meta and len(parameter) < part.length:
                whole[name] = part.among_zeros(parameter)
        with _instead(holder, whole):
            return local(*args, **kwargs)

    return _with_forward(module, forward)


def vocab_parallel(module: Module, first_row: int, group: Group, *, padding_row: int | None = None) -> Module:
    """Let an embedding that has some rows of the vocabulary look up ids of all of it.

    ``padding_row``: the row of the whole vocabulary that takes no gradient (``padding_idx`` of the original module).
    """
    local = module.forward
    rows = module.get_parameter("weight").shape[0]
    own_padding = padding_row is not None and first_row <= padding_row < first_row + rows
    if hasattr(module, "padding_idx"):
        module.padding_idx = padding_row - first_row if own_padding and padding_row is not None else None  # type: ignore[assignment]

    for name, token in list(vars(module).items()):
        if name.endswith(("_token_index", "_token_id")) and isinstance(token, int):
            setattr(module, name, token - first_row if 0 <= token - first_row < rows else -1)  # a token apart

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _masked_lookup(lambda rows_of: local(rows_of, *args, **kwargs), ids, first_row, rows, group)

    return _with_forward(module, forward)


def gather_logits(module: Module, group: Group, true_size: int, order: Tensor | None = None) -> Module:
    """Let an output layer that has some rows of the vocabulary return the logits of all, without those of padding.

    ``order`` says where each of them lies among the parts of the ranks, if these are not in order one after the other.
    """
    local = column_parallel(module, group).forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        whole = gather_from_group(local(*args, **kwargs), group)
        return whole[..., :true_size] if order is None else whole.index_select(-1, order.to(whole.device))

    return _with_forward(module, forward)


def gathered_vectors(module: Module, group: Group, true_sizes: Mapping[str, int]) -> Module:
    """Let a module that adds split vectors to what is whole (a bias to gathered logits) see all of them, unpadded."""
    local = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parts = {name: getattr(module, name) for name in true_sizes}
        with _instead(module, {name: gather_from_group(parts[name], group)[..., :n] for name, n in true_sizes.items()}):
            return local(*args, **kwargs)

    return _with_forward(module, forward)


def without_padding(module: Module, true_size: int) -> Module:
    """Let an output layer that has all rows of the vocabulary, and rows of padding, return the logits without those."""
    local = module.forward
    return _with_forward(module, lambda *args, **kwargs: local(*args, **kwargs)[..., :true_size])


def unpadded_vectors(module: Module, true_sizes: Mapping[str, int]) -> Module:
    """Let a module that adds whole vectors to what has no padding see them without it."""
    local = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _instead(module, {name: getattr(module, name)[..., :size] for name, size in true_sizes.items()}):
            return local(*args, **kwargs)

    return _with_forward(module, forward)


def parallel_norm(module: Module, group: Group) -> Module:
    """Let a norm whose last dimension is split normalise by the statistics of the whole.

    Inputs and weights are gathered and the module computes as it would unsharded, then each rank takes its slice: more
    bytes than the ranks' mean squares would be, but the same for every kind of norm, and to the last bit. Other tensors
    of the input's shape (a gate) are split as it is.
    """
    local = module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths = lengths_in_group(x, group)

        def gathered(value: Any) -> Any:
            is_alike = isinstance(value, Tensor) and value.shape == x.shape
            return gather_from_group(value, group, lengths=lengths) if is_alike else value

        weights = module.named_parameters(recurse=False)
        whole = {name: gather_from_group(weight, group, lengths=lengths) for name, weight in weights}
        full = gathered(x)
        shape = getattr(module, "normalized_shape", None)
        try:
            if shape is not None:  # torch's own norms, which are told their size
                module.normalized_shape = (*shape[:-1], full.shape[-1])  # type: ignore[assignment]
            with _instead(module, whole):
                y: Tensor = local(full, *map(gathered, args), **{k: gathered(a) for k, a in kwargs.items()})
        finally:
            if shape is not None:
                module.normalized_shape = shape
        return scatter_to_group(y, group, lengths=lengths)

    return _with_forward(module, forward)


def _masked_lookup(lookup: Callable[[Tensor], Tensor], ids: Tensor, first_row: int, rows: int, group: Group) -> Tensor:
    size = rows * group.size
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= size):
        raise IndexError(f"token ids {int(ids.min())} to {int(ids.max())} in a vocabulary of {size}")
    is_local = (ids >= first_row) & (ids < first_row + rows)
    vectors = lookup((ids - first_row).where(is_local, 0))
    return reduce_from_group(vectors.masked_fill(~is_local.unsqueeze(-1), 0), group)


def _shared(x: Any, group: Group) -> Any:
    return copy_to_group(x, group) if isinstance(x, Tensor) and x.is_floating_point() else x


def _with_forward(module: Module, forward: Callable[..., Any]) -> Module:
    # On the instance, so that hooks and the parameters' names stay what they were.
    module.forward = forward
    return module


@contextmanager
def _instead(module: nn.Module, instead: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the module see other tensors in place of its parameters and buffers, for one forward."""
    tables: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module))
    true = [(tensors, name, tensors[name]) for tensors in tables for name in instead if name in tensors]
    try:
        for tensors, name, _ in true:
            tensors[name] = instead[name]
        yield
    finally:
        for tensors, name, tensor in true:
            tensors[name] = tensor
