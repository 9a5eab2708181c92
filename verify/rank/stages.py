"""Pipeline stages: whether each has the weights that it runs.

To send what one stage returns to the next would compute nothing else. So the ranks of equal places in their stages are
run as one, whose model has the layers of all of them and what stands before and behind.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from torch import nn

from formats.torch_internals import own_buffers, own_parameters
from reshard.mesh.plan import Plan
from reshard.mesh.stages import is_layered
from verify.rank.loading import Loaded, UnfitError


def check_stages(loaded: Loaded, blocks: Collection[str], plan: Plan) -> None:
    """Let a model raise UnfitError where a stage of a plan runs a module whose weights are on others.

    A block runs on the stage of its layer, what comes before all layers on the first, what comes after them on the
    last. What a module around the blocks has itself is not looked at: it may be used before them or behind.
    """
    kinds, values = plan.model.kind_of, loaded.model.state_dict(keep_vars=True)
    kind_of = {name: kinds[sources[0]] for name, sources in loaded.sources.items()}
    stages_of = {id(values[name]): kind.stages or frozenset() for name, kind in kind_of.items()}
    stage_of_block = {
        block: min(kind.stages or {0})
        for block in blocks
        for name, kind in kind_of.items()
        if name.startswith(f"{block}.") and is_layered(plan.model, kind)
    }
    running = 0

    def enter(stage: int, *_: object) -> None:
        nonlocal running
        running = stage

    def check(path: str, module: nn.Module, *_: object) -> None:
        for name, tensor in {**own_parameters(module), **own_buffers(module)}.items():
            stages = stages_of.get(id(tensor))
            if stages is not None and running not in stages:
                where = " and ".join(f"stage {stage}" for stage in sorted(stages))
                message = f"stage {running} of {plan.mesh} runs '{path}', whose '{name}' is on {where}"
                raise UnfitError(message, place=path)

    names = [block.split(".") for block in blocks]
    around = {".".join(segments[:length]) for segments in names for length in range(len(segments))}
    for path, module in loaded.model.named_modules():
        if path in stage_of_block:
            module.register_forward_pre_hook(partial(enter, stage_of_block[path]))
        if path not in around:
            module.register_forward_pre_hook(partial(check, path))
