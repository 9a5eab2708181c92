"""A rank of one pipeline stage: its model has this stage's weights alone, and takes what the stage before sends.

What stands before the layers runs on the first stage, and what it returns goes on to all others. So do the results of
the last layer of a stage, whatever that returns. Behind the layers, each stage has only what is its own: a norm or a
head on another stage than the last is missed where it is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reshard.formats.errors import ReshardError
from reshard.formats.torch_internals import own_buffers, own_parameters, tree_leaves, tree_map
from reshard.formats.transformers_internals import has_first_values, placements, tied_weights
from reshard.mesh.plan import Layout, Plan
from reshard.mesh.stages import is_layered
from reshard.model.model import Kind
from reshard.verify.rank.collectives import Groups
from reshard.verify.rank.gradients import parted_along, sum_where_ranks_part
from reshard.verify.rank.group import world
from reshard.verify.rank.loading import Loaded
from reshard.verify.rank.trace import StageEnd, Trace, blocks_of


def plan_of_stage(plan: Plan, stage: int) -> Plan:
    """Return the plan of one pipeline stage for its ranks, numbered from 0."""
    if plan.mesh.pp == 1:
        return plan
    mesh, laid = plan.mesh.of_a_stage, dict[Kind, Layout]()
    first = stage * mesh.size
    for kind, layout in plan.laid.items():
        boxes = {rank - first: box for rank, box in layout.boxes.items() if first <= rank < first + mesh.size}
        if boxes:
            laid[kind] = replace(layout, boxes=boxes, ranks=mesh.size)
    tensors = tuple(tensor for tensor in plan.model.tensors if tensor.kind in laid)
    return replace(plan, model=replace(plan.model, tensors=tensors, kinds=tuple(laid)), mesh=mesh, laid=laid)


class Message(NamedTuple):
    """A message from one pipeline stage to the next."""

    leading: dict[str, list[Any]]
    """Outputs of the modules before the layers, by module and call."""
    output: Any
    """The output of the stage's last layer."""
    lists: dict[str, Any]
    """Values that layers left for later ones in lists and tables (keys and values, if layers share them), by argument.
    """
    choices: int
    """The number of choices made so far."""
    parted: Sequence[frozenset[str]] = ()
    """For each tensor of real numbers, the mesh dimensions along which ranks have parts of it, for gradients."""

    @property
    def reals(self) -> list[Tensor]:
        """The tensors of real numbers, in one order."""
        leaves = tree_leaves((self.leading, self.output, self.lists))
        return [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


class Pipeline:
    """One stage of a pipeline, in the process of one of its ranks.

    ``plan`` is the plan of all stages. Ranks of equal places in their stages send to each other.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._ranks = plan, world()
        rank, self._device = self._ranks.rank, self._ranks.device
        self._stage = plan.mesh.stage(rank)
        self.is_first, self.is_last = self._stage == 0, self._stage == plan.mesh.pp - 1
        step = plan.mesh.size // plan.mesh.pp
        self._before_rank, self._after_rank = rank - step, rank + step
        self._blocks: dict[str, int] = {}
        self._leading: tuple[str, ...] = ()
        self._absent: list[str] = []
        self._depth = 0
        self._has_entered = False
        self._received = self._sent = Message({}, None, {}, 0)

    @property
    def continued(self) -> str | None:
        """The list of modules of whose layers this stage has later ones; None on the first stage."""
        return None if self.is_first else next(iter(self._blocks)).rpartition(".")[0]

    # ------------------------------------------------------------------------------------------------ before loading

    def cut(self, model: Any) -> None:
        """Take the weights of other stages out of a model that is not loaded yet. Raises ReshardError."""
        parameters = placements(model, {name: layout.full for name, layout in self._plan.layouts.items()})
        kind_of = {name: self._plan.model.kind_of[place.sources[0]] for name, place in parameters.items()}
        stages = {name: kind.stages or frozenset() for name, kind in kind_of.items()}
        layered = {name for name, kind in kind_of.items() if is_layered(self._plan.model, kind)}
        self._blocks = {
            path: min(min(stages[name]) for name in layered if name.startswith(f"{path}."))
            for path in blocks_of(model, layered)
        }
        lists = {path.rpartition(".")[0] for path in self._blocks}
        if len(lists) != 1:
            what = ", ".join(f"'{path}'" for path in sorted(lists))
            raise ReshardError(f"no forward of {self._plan.mesh} is known: the layers are not in one list ({what})")
        tied = tied_weights(model)
        for target, source in tied.items():
            both = stages.get(target, frozenset()) | stages.get(source, frozenset())
            stages |= {target: both, source: both}
        absent = {name for name, of_name in stages.items() if self._stage not in of_name}
        first = {name for name, of_name in stages.items() if 0 in of_name and name not in layered}
        self._leading = tuple(_outermost(first, [*self._blocks, *(stages.keys() - first)]))
        inside = tuple(f"{path}." for path in (*self._leading, *self._blocks))
        for name in absent:
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            table: dict[str, Any] = own_parameters(module) if last in own_parameters(module) else own_buffers(module)
            runs_everywhere = name in first and not name.startswith(inside)  # to no effect before the layers
            shape = parameters[name].shape if runs_everywhere else (0,)
            instead = torch.zeros(shape, dtype=table[last].dtype, device=self._device)
            has_first_values(instead)
            del table[last]
            setattr(module, last, instead)  # no parameter: nothing is to be loaded
        if tied:
            model.all_tied_weights_keys = {
                target: source for target, source in tied.items() if not {target, source} & absent
            }
        present = {path for name in stages.keys() - absent for path in _around(name)}
        for path in {path for name in absent for path in _around(name)} - present:
            has_first_values(model.get_submodule(path))  # there is nothing to give first values to
        self._absent = sorted(absent)

    # ------------------------------------------------------------------------------------------------- after loading

    def connect(self, loaded: Loaded, groups: Groups, trace: Trace, chosen: Sequence[Tensor]) -> None:
        """Let a model run from what was received, and send on what its own last layer returns.

        ``chosen`` are the choices of the whole model's run, which the trace takes over as far as they were made.
        """
        model, self._loaded, self._groups = loaded.model, loaded, groups
        for name in self._absent:  # as a parameter, by which a module tells its dtype and its device
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            value = getattr(module, last).to(model.dtype)
            delattr(module, last)
            own_parameters(module)[last] = nn.Parameter(value, requires_grad=False)
        for path in self._leading if self.is_first else ():
            for name, module in model.get_submodule(path).named_modules(prefix=path):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(partial(self._keep, name))
        for path, outputs in self._received.leading.items():
            model.get_submodule(path).forward = _returning(outputs)
        for path, stage in self._blocks.items():
            block = model.get_submodule(path)
            if stage < self._stage:
                block.forward = _returning(itertools.repeat(self._received.output))
            elif stage > self._stage:
                block.forward = self._send
            else:
                block.register_forward_pre_hook(partial(self._enter, trace, chosen), with_kwargs=True)
                block.register_forward_hook(partial(self._note, trace), with_kwargs=True)

    def receive(self, *, grad: bool) -> None:
        """Wait for what the stage before sends; with ``grad``, its gradients are kept."""
        if self.is_first:
            return

        def local(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self._device).requires_grad_(grad and x.is_floating_point())

        self._received = tree_map(local, self._ranks.receive(self._before_rank))

    def _begin(self, _: nn.Module, __: Any) -> None:
        self._depth += 1

    def _keep(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth:  # else a part of another one's results
            self._received.leading.setdefault(path, []).append(output)

    def _enter(self, trace: Trace, chosen: Sequence[Tensor], _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        if self.is_first or self._has_entered:
            return
        self._has_entered = True
        trace.chosen[:] = chosen[: self._received.choices]
        for name, values in self._received.lists.items():
            target = kwargs[name]
            target.clear()
            (target.update if isinstance(target, MutableMapping) else target.extend)(tree_map(_copied, values))

    def _note(self, trace: Trace, _: nn.Module, __: Any, kwargs: dict[str, Any], output: Any) -> None:
        lists: dict[str, Any] = {name: [*value] for name, value in kwargs.items() if isinstance(value, list)}
        lists |= {name: {**value} for name, value in kwargs.items() if isinstance(value, MutableMapping)}
        self._sent = Message(self._received.leading, output, lists, len(trace.chosen))

    def _send(self, *_: Any, **__: Any) -> Any:
        """In place of the next stage's layers: send on what the last layer here has returned."""
        parted = parted_along(self._sent.reals, self.parts, self._groups) if torch.is_grad_enabled() else ()
        self._ranks.send(tree_map(_plain, self._sent._replace(parted=parted)), self._after_rank)
        raise StageEnd

    # ----------------------------------------------------------------------------------------------------- gradients

    @property
    def parts(self) -> list[tuple[Tensor, frozenset[str]]]:
        """The parameters of which ranks have parts, and what was received of that kind."""
        received = zip(self._received.reals, self._received.parted, strict=False)
        return [*self._loaded.parts, *((x, along) for x, along in received if along)]

    def backward(self, loss: Tensor | None) -> None:
        """Compute this stage's gradients: of the loss on the last stage, or from what the next stage sends back."""
        if loss is not None:
            roots, grads = [loss], [torch.ones_like(loss)]
        else:
            pairs = zip(self._sent.reals, self._ranks.receive(self._after_rank), strict=True)
            received = [(x, grad.to(x)) for x, grad in pairs if grad is not None and x.requires_grad]
            roots, grads = [x for x, _ in received], [grad for _, grad in received]
        sum_where_ranks_part(roots, self.parts, self._groups)
        torch.autograd.backward(roots, grads)
        if not self.is_first:
            back = [None if x.grad is None else _plain(x.grad) for x in self._received.reals]
            self._ranks.send(back, self._before_rank)


def _returning(outputs: Iterable[Any]) -> Callable[..., Any]:
    """A forward that returns copies of these, one after the other: a model may change in place what it gets."""
    remaining = iter(outputs)

    def forward(*_: Any, **__: Any) -> Any:
        return tree_map(_copied, next(remaining))

    return forward


def _outermost(names: Iterable[str], excluded: Iterable[str]) -> Iterable[str]:
    """The outermost modules that hold parameters of these names and nothing of the others."""
    occupied = {path for other in excluded for path in _around(other)}
    paths = (next((path for path in _around(name) if path not in occupied), None) for name in sorted(names))
    return dict.fromkeys(path for path in paths if path is not None)


def _around(name: str) -> list[str]:
    """The modules around a parameter or a module, outermost first; the model itself is not among them."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def _plain(x: Any) -> Any:
    return x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x
