"""SGLang as the receiver of pushes: ``--custom-weight-loader reshard.live.sglang.load``.

The trainer has SGLang call ``update_weights_from_tensor`` with one small tensor in place of weights, which says where
the push is (``notice``). SGLang was not run with this: there is no build of it for a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from formats.errors import LiveError
from reshard.live.receiver import by_all_names, parameters_of

NAME = "reshard"
"""Of the small tensor."""


def notice(ticket: Mapping[str, Any], version: int) -> tuple[str, torch.Tensor]:
    """The named tensor that tells ranks of SGLang to receive a push, from the trainer's ``push.ticket``."""
    text = json.dumps({"ticket": dict(ticket), "version": version})
    return NAME, torch.tensor(list(text.encode()), dtype=torch.uint8)


@torch.no_grad()
def load(model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Receive the push that a notice names into a running model. Raises LiveError, MismatchError."""
    from reshard.live.process import pull_by

    found = dict(named_tensors)
    if [*found] != [NAME]:
        raise LiveError(f"SGLang was given {len(found)} tensors, and not one called '{NAME}'")
    said = json.loads(bytes(found[NAME].cpu().tolist()))
    device = next(model.parameters()).device
    ranks = torch.distributed.get_world_size()
    receiver = pull_by(said["ticket"], torch.distributed.get_rank(), ranks, str(device))
    error: str | None = None
    try:
        tensors = by_all_names(receiver.receive(said["version"]), parameters_of(model))
        for name, room in model.named_parameters():
            room.copy_(tensors[name])
    except Exception as failure:
        error = str(failure)
        raise
    finally:
        receiver.commit(said["version"], error)
