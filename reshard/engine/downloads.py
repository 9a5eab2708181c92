"""What a rank's shards take of a source that lies elsewhere."""

from __future__ import annotations

from reshard.engine.ahead import GAP
from reshard.engine.jobs import STEP
from reshard.engine.reading import needed
from reshard.engine.ways import way_between
from reshard.planning.plan import Layout, Plan
from reshard.storage.remote import joined
from reshard.storage.source import Source, SourceFile


def download_of(source: Source, target: Plan, rank: int) -> int:
    """The bytes of weights that are fetched if this rank alone is written, of files that are not on this machine.

    Of a row-parallel weight these are more than the rank holds: where its parts of the rows lie close together, what
    lies between them is fetched with them.
    """
    known: dict[tuple[Layout, Layout, str], int] = {}
    total = 0
    for (name, kind, _), (_, wanted, _) in zip(source.plan.model.tensors, target.model.tensors, strict=True):
        before, after, places = source.plan.laid[kind], target.laid[wanted], source.places(name)
        if rank not in after.layout.boxes:
            continue
        key = (before.layout, after.layout, before.dtype)
        if key not in known or before.stated is not None:
            way = way_between(before._replace(name=name), after, places, frozenset({rank}), compare=False)
            found: dict[SourceFile, list[tuple[int, int]]] = {}
            for region in (region for slab in way.slabs(STEP) for region in slab.reads):
                place = places(region.rank)
                if place is not None and place.file.remote is not None:
                    found.setdefault(place.file, []).extend(joined(needed(place, region), GAP))
            known[key] = sum(
                file.remote.over_network(end - begin)
                for file, ranges in found.items()
                for begin, end in joined(ranges, 0)
                if file.remote is not None
            )
        total += known[key]
    return total
