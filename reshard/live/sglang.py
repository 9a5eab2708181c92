"""SGLang as the receiver of pushes: ``--custom-weight-loader reshard.live.sglang.load``.

The trainer has SGLang call ``update_weights_from_tensor`` with one small tensor in place of weights, which says where
the push is (``ticket``). SGLang was not run with this: there is no build of it for a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch

from formats.errors import LiveError
from reshard.live.process import pull
from reshard.live.receiver import by_all_names, parameters_of

NAME = "reshard"
"""Of the small tensor."""


def ticket(version: int, *, store: str, trainers: int, world: int) -> tuple[str, torch.Tensor]:
    """The named tensor that tells ``world`` ranks of SGLang to receive a push of so many ``trainers``."""
    text = json.dumps({"version": version, "store": store, "trainers": trainers, "world": world})
    return NAME, torch.tensor(list(text.encode()), dtype=torch.uint8)


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Receive the push that a ticket names into a running model. Raises LiveError, MismatchError."""
    found = dict(named_tensors)
    if [*found] != [NAME]:
        raise LiveError(f"SGLang was given {len(found)} tensors, and not one called '{NAME}'")
    said = json.loads(bytes(found[NAME].cpu().tolist()))
    version, device = said.pop("version"), str(next(model.parameters()).device)
    receiver = pull(**said, rank=torch.distributed.get_rank(), device=device)
    error: str | None = None
    try:
        tensors = by_all_names(receiver.receive(version), parameters_of(model))
        for name, room in model.named_parameters():
            room[: len(tensors[name])].copy_(tensors[name])
    except Exception as failure:
        error = str(failure)
        raise
    finally:
        receiver.commit(version, error)
        receiver.close()
