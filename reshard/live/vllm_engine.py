"""The receiving end of a push inside a vLLM worker: a weight transfer engine of vLLM's (``reshard.live.vllm``).

An update leaves the engine as it is: what came is kept, which is what vLLM's model has, as its own loader has agreed to
the plan. Only ``finish`` gives it to the model, on all ranks or on none. At more than one rank nothing is raised,
because vLLM then takes the answer to one call for that to the next: all ranks agree on errors, and tell them to the
trainer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.logger import init_logger

from reshard.formats.errors import LiveError, ReshardError
from reshard.live import vllm_reload
from reshard.live.witness import compare, recorded
from reshard.placement.arrangement import Arrangement

if TYPE_CHECKING:
    from reshard.live.process import Pull

_LOGGER = init_logger("vllm.reshard")


class Engine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Receives pushes. Made by each worker; raises LiveError for a version of vLLM that reloads in another way."""

    supports_draft_weight_update = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        vllm_reload.prove()
        self.receiver: Pull | None = None
        self.problem: str | None = None
        self._kept: tuple[int, Mapping[str, torch.Tensor]] | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> dict[str, Any]:
        """Whatever is given: a rank that raises here would be alone."""
        return init_dict

    def init_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Meet the trainer of this ticket, and agree on the plan, which is compared with this model's own loader."""

        def meet() -> None:
            self.receiver = self.connect(init_info)
            self.receiver.check()

        self.problem = self._agreed(meet)
        version, tried = vllm_reload.version(), vllm_reload.TRIED
        if self.problem is None and not version.startswith(f"{tried}.") and get_world_group().rank_in_group == 0:
            _LOGGER.warning_once(
                "reshard: vLLM %s was not tried, %s was. It reloads layers, and loads this model, as expected.",
                version,
                tried,
            )

    def connect(self, ticket: Mapping[str, Any]) -> Pull:
        """This rank's end of the pushes of a trainer, from the trainer's ``ticket``. Raises LiveError."""
        from reshard.live.process import Meeting, pull  # not needed to list the engine

        if not {"store", "trainers"} <= ticket.keys() <= {field.name for field in fields(Meeting)} - {"receivers"}:
            raise LiveError(f"{dict(ticket)} is not a ticket of a trainer", "give the engine push.ticket")
        group, device, witness = get_world_group(), str(self.device), partial(ask_loader, self)
        return pull(rank=group.rank_in_group, world=group.world_size, device=device, witness=witness, **ticket)

    def start_weight_update(self) -> None:
        """Begin: nothing changes, the old weights serve."""
        self._kept = None

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive a push and keep it, if all ranks have all of it."""

        def receive() -> None:
            if update_info.keys() != {"version"}:
                raise LiveError(f"vLLM was told {update_info}, and not a version")
            if self.receiver is None:
                raise LiveError(self.problem or "init_weight_transfer_engine was not called")
            self._kept = update_info["version"], self.receiver.receive(update_info["version"])

        self._kept = None
        self.problem = self._agreed(receive)
        if self.problem is not None:
            self._kept = None
            self._tell(update_info.get("version", -1))

    receive_weights = update_weights  # which vLLM's own would call, and then wait for a GPU that may not be there

    def finish_weight_update(self) -> None:
        """Use the received weights; if any rank fails, no rank answers requests until the next push."""
        if self._kept is None:
            return
        (version, received), self._kept = self._kept, None
        self.problem = self._agreed(lambda: vllm_reload.commit(self.model, received, self.model_config.dtype))
        poison(self.model, self.problem)
        self._tell(version)

    def shutdown(self) -> None:
        """Forget the trainer."""
        self._kept = self.receiver = None

    def _tell(self, version: int) -> None:
        if self.receiver is not None:
            with contextlib.suppress(ReshardError):  # the trainer that would hear it has an error of its own
                self.receiver.commit(version, self.problem)

    def _agreed(self, work: Callable[[], None]) -> str | None:
        """Do something on all ranks. Every rank raises the same error if any of them fails."""
        group, wrong = get_world_group(), None
        try:
            work()
        except Exception as error:
            words = error.message if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
            wrong = f"vLLM's rank {group.rank_in_group}: {words}"
        problems: list[str | None] = [None] * group.world_size
        torch.distributed.all_gather_object(problems, wrong, group=group.cpu_group)
        problem = "; ".join(dict.fromkeys(filter(None, problems))) or None
        if problem is not None:
            _LOGGER.error("reshard: %s", problem)
        return problem


def ask_loader(engine: Engine, arrangement: Arrangement, rank: int) -> list[str]:
    """Compare the running model's own loader with our rules, as ``witness.compare`` does. No request may run meanwhile.

    Raises LiveError if the loader does what is not followed.
    """
    model, tensors = engine.model, arrangement.plan.model.tensors
    with set_current_vllm_config(engine.vllm_config), vllm_reload.as_loaded(model):
        loaded = recorded(model, model.load_weights, {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors})
        return compare(arrangement, rank, model, loaded)


def poison(model: torch.nn.Module, why: str | None) -> None:
    """Have a model that is half new answer no request; without a reason, answer again."""
    if why is None:
        vars(model).pop("compute_logits", None)
        return

    def refuse(*_: object, **__: object) -> NoReturn:
        raise LiveError(f"the weights are half new, because a push failed: {why}", "push again, before any request")

    vars(model)["compute_logits"] = refuse  # called in each step, also where a captured graph runs the layers
