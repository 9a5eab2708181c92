"""What every receiver of pushes has: a rank's end of them, and the parameters that it must receive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from formats.errors import MismatchError, listed

if TYPE_CHECKING:
    import torch


class Receiver(Protocol):
    """A rank's end of the pushes of a trainer."""

    def check(self) -> object:
        """Meet all others and agree on the plan. Raises LiveError."""
        ...

    def receive(self, version: int) -> Mapping[str, torch.Tensor]:
        """This rank's tensors by name, when they are here and all ranks agree on the push. Raises LiveError."""
        ...

    def commit(self, version: int, error: str | None) -> None:
        """Tell all ranks that this one computes with the new tensors, or why not. Raises LiveError."""
        ...


class Parameter(NamedTuple):
    """A parameter of a model as weights are loaded into it; ``names`` are several if a tensor is tied."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


def parameters_of(
    model: torch.nn.Module, loaded: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor
) -> list[Parameter]:
    """A model's parameters, each once. ``loaded`` is given a name, and gives the parameter as it is loaded."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(name)
    made: Iterable[tuple[torch.Tensor, list[str]]] = ((loaded(names[0], one), names) for one, names in found.values())
    return [Parameter(tuple(names), tuple(tensor.shape), tensor.dtype) for tensor, names in made]


def by_all_names(tensors: Mapping[str, torch.Tensor], wanted: Sequence[Parameter]) -> dict[str, torch.Tensor]:
    """What was received, under each name of each parameter.

    Raises MismatchError if anything is missing, of another shape or dtype, or not known.
    """
    found: dict[str, torch.Tensor] = {}
    for parameter in wanted:
        name = next((name for name in parameter.names if name in tensors), None)
        if name is None:
            raise MismatchError(f"parameter '{parameter.names[0]}' was not received")
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):
            raise MismatchError(
                f"parameter '{name}' is {parameter.dtype} {[*parameter.shape]} in the engine, and {tensor.dtype} "
                f"{[*tensor.shape]} was received"
            )
        found |= dict.fromkeys(parameter.names, tensor)
    unknown = [repr(name) for name in tensors if name not in found]
    if unknown:
        raise MismatchError(f"the engine's model has no parameter {listed(unknown, 3)}")
    return found
