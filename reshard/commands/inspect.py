"""What a path is, and whether it is complete."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from formats.store import StoredPath
from reshard.source import inspect as source
from reshard.source.opening import Place, find
from reshard.store.selection import HubAccess, Weights
from reshard.store.staging_names import staging_of


@dataclass(frozen=True)
class InspectRequest(HubAccess):
    """What ``inspect`` takes: a folder, a file, a Hub id or a URL."""

    source: Place = field(repr=False)  # a URL may have a password


def inspect(request: InspectRequest) -> source.Report:
    """Say what a path is: format, model type, dtypes, parameters, mesh, complete or not. Reads headers only.

    Raises ReshardError if it is not a checkpoint at all.
    """
    if isinstance(request.source, StoredPath):
        return source.inspect(request.source)
    place = Path(request.source).expanduser()
    is_here = request.revision is None and any(map(os.path.exists, (place, staging_of(place))))
    return source.inspect(place if is_here else find(request.source, request, Weights.HEADERS))
