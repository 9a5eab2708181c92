"""What ranks compute without the code that is tested, and with it: functions of test_forward.py that ranks import.

They are apart from the tests, which take a second to import on every rank.
"""

from __future__ import annotations

from pathlib import Path

import torch


def logits_by_transformers(folders: list[Path], ids: torch.Tensor) -> list[torch.Tensor]:
    """What transformers' own tensor parallelism makes of the original checkpoint, in a rank."""
    import transformers

    found = []
    for folder in folders:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", attn_implementation="eager")
        with torch.no_grad():
            logits = model.eval()(input_ids=ids, use_cache=False).logits
        found.append(logits.full_tensor() if hasattr(logits, "full_tensor") else logits)
    return found


def logits_of_shards(paths: list[tuple[Path, Path]], ids: torch.Tensor) -> list[torch.Tensor]:
    """What a rank's own folder makes of the same tokens."""
    from reshard.source.opening import open_source
    from reshard.verify.rank.collectives import Groups
    from reshard.verify.rank.group import world
    from reshard.verify.rank.model import load_rank
    from reshard.verify.rank.roles import Rank

    found = []
    for original, shards in paths:
        source = open_source(shards)
        rank = Rank(source.plan, world().rank, open_source(original).model.architecture)
        folder = shards / source.plan.mesh.folder(rank.rank)
        groups = Groups(source.plan.mesh)
        loaded = load_rank(folder, rank, torch.float32, torch.device("cpu"), groups, tokens=ids.shape[1])
        with torch.no_grad():
            found.append(loaded.model(input_ids=ids, use_cache=False).logits)
    return found
