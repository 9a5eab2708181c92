"""The Python API: the functions that the commands call. ``verify/api.py`` has those that need ``verify``."""

from __future__ import annotations

from reshard.commands import diff as _diff
from reshard.commands import inspect as _inspect
from reshard.commands import load as _load
from reshard.commands import plan as _plan
from reshard.commands import split as _split
from reshard.commands.fields import by_fields
from reshard.writing.request import WriteRequest

average = by_fields(_split.AverageRequest, _split.average)
diff = by_fields(_diff.DiffRequest, _diff.diff)
inspect = by_fields(_inspect.InspectRequest, _inspect.inspect)
load = by_fields(_load.LoadRequest, _load.load)
merge = by_fields(WriteRequest, _split.merge)
patch = by_fields(_split.PatchRequest, _split.patch)
plan = by_fields(_plan.PlanRequest, _plan.plan)
tensors = by_fields(_load.TensorsRequest, _load.tensors)
slices = by_fields(_load.RankRequest, _load.slices)
rank_config = by_fields(_load.RankRequest, _load.rank_config)
split = by_fields(_split.SplitRequest, _split.split)
