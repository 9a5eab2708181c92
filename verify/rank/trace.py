"""The trace of a running model: the hidden states between its blocks, its outputs, and its choices.

A choice (the experts of a token, the keys that a sparse attention keeps) is a step: two scores that tie within the
rounding are ranked either way, and all that follows differs. So the high-precision run's choices are kept, and the
other runs take the same. That hides nothing: the scores that a choice is made from are compared like any hidden state,
and how often a run would have chosen otherwise is counted.

The inputs are the same for the original and all ranks: tokens, and the other arguments of its forward. An encoder and a
decoder take tokens of their own, a speech model takes sound, and a decoder whose encoder is another model takes that
one's states.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationMixin

EMBEDDING, FINAL = "embedding", "final hidden state"


class StageEnd(Exception):  # noqa: N818
    """The last layer of a pipeline stage has run; what comes after it runs elsewhere."""


@dataclass
class Trace:
    """One run."""

    states: dict[str, Tensor] = field(default_factory=dict)
    """The states in the order of the model, on the CPU."""
    chosen: list[Tensor] = field(default_factory=list)
    """The indices of each choice, in order."""
    choices: int = 0
    """The number of rows of choices."""
    overruled: int = 0
    """The number of rows that this run would have chosen otherwise."""
    outputs: dict[str, Tensor] = field(default_factory=dict)
    path: list[str] = field(default_factory=list)
    """The modules that compute, the innermost last: those in which a run ended that failed."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The gradients of the original, by tensors on disk."""


def is_choice(name: str) -> bool:
    """Whether a state holds the scores from which a choice was made."""
    return re.search(r" choice \d+$", name) is not None


@dataclass(frozen=True)
class Places:
    """Modules by name whose outputs are kept: the blocks, in order, and others within them.

    ``parts``: of some of these others, which inputs each rank multiplies, to be summed over the ranks.
    """

    blocks: Mapping[str, nn.Module]
    others: Mapping[str, nn.Module]
    parts: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)


def blocks_of(model: Any, parameters: Iterable[str]) -> dict[str, nn.Module]:
    """The blocks by name: the members of the outermost lists of modules that these parameters run through."""
    blocks: dict[str, nn.Module] = {}
    for name in parameters:
        segments = name.split(".")
        for i, segment in enumerate(segments):
            path = ".".join(segments[:i])
            if segment.isdigit() and isinstance(model.get_submodule(path), nn.ModuleList):
                blocks[f"{path}.{segment}"] = model.get_submodule(f"{path}.{segment}")
                break
    return dict(sorted(blocks.items(), key=lambda item: [int(s) if s.isdigit() else 0 for s in item[0].split(".")]))


def run(
    model: Any,
    inputs: Mapping[str, Tensor],
    places: Places,
    chosen: Sequence[Tensor] | None = None,
    *,
    draw: int = 0,
    grad: bool = False,
    feed: Mapping[str, Tensor] | None = None,
    into: Trace | None = None,
    continued: str | None = None,
) -> Trace:
    """Run a model on the inputs of its forward (see ``inputs_of``) and trace it, ``into`` a trace that the
    caller has even if the run fails.

    With ``feed``, another run's states, each block's output is kept and then replaced by that run's, so that the
    next block starts from it.

    With ``chosen``, another run's choices are taken. With ``draw``, the results of all layers that have weights are
    moved at random by as much as rounding moves them: another draw of the rounding, with ``draw`` its seed. In every
    odd draw the products of ``places.parts`` are rounded part by part before they are summed, as ranks round them: a
    part may be much larger than the sum.

    ``continued`` is the list of modules of which the model has only later layers: the input of the first of these is no
    embedding. A StageEnd ends the run of a model that has no more of its layers.
    """
    trace = Trace() if into is None else into
    path = trace.path
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(lambda *_, name=name: path.append(name)).remove)
            stack.callback(module.register_forward_hook(partial(_leave, path)).remove)
        for name, first in _first_blocks(places.blocks, continued).items():
            stack.callback(
                first.register_forward_pre_hook(partial(_keep_input, trace, name, feed), with_kwargs=True).remove
            )
        for name, module in {**places.others, **places.blocks}.items():
            instead = feed if name in places.blocks else None
            # First of all hooks: of what some modules return whole, a rank takes its part.
            stack.callback(module.register_forward_hook(_keep_output(trace, name, instead), prepend=True).remove)
        if draw:
            generator = torch.Generator().manual_seed(draw)
            for name, parts in places.parts.items() if draw % 2 else ():
                hook = partial(_in_parts, parts)  # before what keeps the output
                stack.callback(places.others[name].register_forward_hook(hook, prepend=True).remove)
            for module in model.modules():
                # A lookup does not round.
                if next(module.parameters(recurse=False), None) is not None and not isinstance(module, nn.Embedding):
                    stack.callback(module.register_forward_hook(partial(_round_again, generator)).remove)
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(_Choices(trace, path, chosen))
        if model.dtype == torch.float64:  # so is what it makes by itself: some put its smallest number into a mask
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            stack.enter_context(NoLessThanFloat64())
        arguments = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in inputs.items()}
        output: Any = {}
        with suppress(StageEnd):
            output = running(model)(**arguments, use_cache=False)
    for name, value in output.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            trace.outputs[name] = value
            trace.states[FINAL if name == "last_hidden_state" else name] = _kept(value)
    return trace


def _first_blocks(blocks: Mapping[str, nn.Module], continued: str | None) -> dict[str, nn.Module]:
    """The first block of each list, by the name of what enters it: of an encoder and of a decoder, for one.

    Not of the list ``continued``, which begins elsewhere.
    """
    firsts: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        firsts.setdefault(name.rpartition(".")[0], block)
    names = {path: EMBEDDING if len(firsts) == 1 else f"{path} {EMBEDDING}" for path in firsts}
    return {names[path]: block for path, block in firsts.items() if path != continued}


def _leave(path: list[str], *_: Any) -> None:
    path.pop()


def _keep_input(
    trace: Trace, name: str, feed: Mapping[str, Tensor] | None, _: nn.Module, args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    if name in trace.states:
        return None  # a block that runs more than once: what it takes then are results of blocks
    hidden = args[0] if args else kwargs["hidden_states"]
    trace.states[name] = _kept(hidden)
    if feed is None:
        return None
    instead = feed[name].to(hidden)
    return ((instead, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": instead})


def _keep_output(trace: Trace, name: str, feed: Mapping[str, Tensor] | None) -> Callable[..., Any]:
    calls = 0

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        first, *further = output if isinstance(output, (tuple, list)) else (output,)
        called = f"{name} call {calls}" if calls > 1 else name
        trace.states[called] = _kept(first)
        if feed is None:
            return None
        first = feed[called].to(first)
        return type(output)((first, *further)) if isinstance(output, (tuple, list)) else first

    return hook


def _round_again(generator: torch.Generator, _: nn.Module, __: Any, output: Any) -> Any:
    first, *further = output if isinstance(output, tuple) else (output,)
    if not (isinstance(first, Tensor) and first.is_floating_point()):
        return output
    by = torch.rand(first.shape, generator=generator).to(first.device).sub_(0.5) * torch.finfo(first.dtype).eps
    moved = (first * (1 + by.to(torch.promote_types(first.dtype, torch.float32)))).to(first.dtype)
    return (moved, *further) if isinstance(output, tuple) else moved


def _in_parts(parts: Sequence[Tensor], module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """The output of a linear layer again, summed of products with a part of its inputs that are rounded each."""
    x, weight = args[0], module.weight if isinstance(module, nn.Linear) else module.weight.t()
    if weight.device != x.device or weight.dtype != x.dtype:  # streamed: it is on the disk again; quantized
        return output
    wide = torch.promote_types(x.dtype, torch.float32)
    products = [nn.functional.linear(x[..., part], weight[:, part]).to(wide) for part in parts]
    total = sum(products[1:], products[0]).to(output.dtype)
    return total if module.bias is None else total + module.bias


def _kept(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)


_COMPARISONS = {getattr(Tensor, form) for name in ("gt", "ge", "lt", "le") for form in (name, f"__{name}__")}
_COMPARISONS |= {torch.gt, torch.ge, torch.lt, torch.le}


def _is_real(x: Any) -> bool:
    return x.is_floating_point() if isinstance(x, Tensor) else isinstance(x, float)


class NoLessThanFloat64(TorchFunctionMode):
    """Lets a float64 model compute in float64 what it would compute in float32: norms, rotary angles, linear attention.

    Models write float32 there to have more than their own 16 bits; in the run that all others are measured against it
    would be less, and its rounding would be that of the original in float32, and not that of the shards.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.frombuffer, Tensor.view):  # what bytes mean: a weight comes from the disk
            return func(*args, **(kwargs or {}))
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if x is torch.float32 else x for x in args)
        if func is nn.functional.linear:  # of a router whose weight is float32 in whatever model
            args = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
        return func(*args, **{key: torch.float64 if x is torch.float32 else x for key, x in (kwargs or {}).items()})


class _Choices(TorchFunctionMode):
    """Keeps, or replaces, the indices of each ``topk`` (or largest score of a token), and keeps the scores."""

    def __init__(self, trace: Trace, path: Sequence[str], chosen: Sequence[Tensor] | None) -> None:
        super().__init__()
        self._trace, self._path, self._imposed = trace, path, chosen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in (torch.topk, Tensor.topk):
            dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
            return torch.return_types.topk(self._choose(args[0] if args else kwargs["input"], dim, *result))
        if (
            func in (torch.max, Tensor.max)
            and isinstance(result, torch.return_types.max)
            and args
            and args[0].dim() == 2
            and _is_real(args[0])
        ):
            # Per token, so not the largest score of an attention that is subtracted before its softmax, nor a position.
            dim = args[1] if len(args) > 1 else kwargs["dim"]
            keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            values, indices = self._choose(args[0], dim, *(x if keep else x.unsqueeze(dim) for x in result))
            return torch.return_types.max((values, indices) if keep else (values.squeeze(dim), indices.squeeze(dim)))
        if func in _COMPARISONS and result.dim() == 2 and all(_is_real(x) for x in args):
            return self._settle(result)
        return result

    def _settle(self, mask: Tensor) -> Tensor:
        """Take the other run's answer to which scores of a token lie above a threshold."""
        if self._imposed is not None:
            chosen = self._next(mask)
            self._trace.overruled += int((chosen != mask).any(-1).sum())
            mask = chosen
        self._trace.choices += len(mask)
        self._trace.chosen.append(mask.to("cpu", copy=True))
        return mask

    def _next(self, like: Tensor) -> Tensor:
        at = len(self._trace.chosen)
        if self._imposed is None or at >= len(self._imposed) or self._imposed[at].shape != like.shape:
            raise ValueError(f"{self._path[-1]} chooses other than in the original model")
        return self._imposed[at].to(like.device)

    def _choose(self, scores: Tensor, dim: int, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        trace, at = self._trace, len(self._trace.chosen)
        if self._imposed is not None:
            indices = self._next(indices)
            taken_scores = scores.gather(dim, indices)
            trace.overruled += int((taken_scores.sort(dim).values != values.sort(dim).values).any(dim).sum())
            values = taken_scores
        trace.choices += indices.numel() // max(indices.shape[dim], 1)
        trace.chosen.append(indices.detach().to("cpu", copy=True))
        trace.states[f"{self._path[-1]} choice {at}"] = _kept(scores)
        return values, indices


# --------------------------------------------------------------------------------------------------------------- inputs


def running(model: Any) -> Any:
    """The part of a model that is run: of one that asks for an image, the part that generates."""
    if _asks_for(model) in {"input_ids", "input_features"}:
        return model
    return next((part for part in model.children() if isinstance(part, GenerationMixin)), model)


def random_ids(model: Any, batch: int, seq: int, seed: int, avoided: int | None = None) -> Tensor:
    """Tokens of the original's vocabulary, ``batch`` x ``seq`` or as many as the model has positions for.

    ``avoided`` is a token that is not among them.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    limits = (getattr(model.config, key, None) for key in ("max_position_embeddings", "max_target_positions"))
    limit = next((value for value in limits if value), seq)
    tables = (
        module for module in model.modules() if isinstance(module, nn.Embedding) and module.num_embeddings == limit
    )
    # RoBERTa's positions begin behind the number of the padding token.
    limit -= max((table.padding_idx + 1 for table in tables if table.padding_idx is not None), default=0)
    longest = min(seq, limit) if limit > 0 else seq  # -1: there is no limit
    ids = torch.randint(rows, (batch, longest), generator=torch.Generator().manual_seed(seed))
    return _without(ids, avoided, rows)


def inputs_of(model: Any, ids: Tensor, dtype: torch.dtype, avoided: int | None = None) -> dict[str, Tensor]:
    """The arguments of the forward of ``running(model)``, a whole model, for these tokens.

    A decoder beside an encoder has the same tokens, as numbers of its own vocabulary. Sound and states are random
    numbers that ``dtype`` can hold, sound as long as the model's encoder takes it.
    """
    model = running(model)
    parameters = inspect.signature(model.forward).parameters
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if _asks_for(model) == "input_features":
        inputs = {"input_features": _random((len(ids), *_sound(model)), dtype)}
    if "decoder_input_ids" in parameters:
        rows = _decoder_rows(model)
        inputs["decoder_input_ids"] = _without(ids % rows, avoided, rows) if rows else ids
        return inputs
    # A type whose config does not say whether it attends to an encoder always does.
    for states in {"encoder_hidden_states", "encoder_outputs"} & parameters.keys():
        if getattr(model.config, "add_cross_attention", True):
            width = getattr(model.config, "cross_attention_hidden_size", None) or model.config.hidden_size
            inputs[states] = _random((*ids.shape, width), dtype)
    return inputs


def _asks_for(model: Any) -> str:
    return str(getattr(model, "main_input_name", "input_ids"))


def _without(ids: Tensor, avoided: int | None, rows: int) -> Tensor:
    return ids if avoided is None else ids.where(ids != avoided, (avoided + 1) % rows)


def _decoder_rows(model: Any) -> int | None:
    """The vocabulary of the decoder beside an encoder, where it has a table of tokens."""
    table = getattr(model.get_decoder(), "embed_tokens", None)
    return table.weight.shape[0] if isinstance(table, nn.Embedding) else None


def _sound(model: Any) -> tuple[int, int]:
    """The bands of a sound and the places in time that a speech encoder takes."""
    strides = [layer.stride[0] for layer in model.get_encoder().children() if isinstance(layer, nn.Conv1d)]
    places = model.config.max_source_positions
    for stride in strides:
        places *= stride
    return model.config.num_mel_bins, places


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)
