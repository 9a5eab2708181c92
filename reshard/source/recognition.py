"""Recognises what a folder holds, by the names of its files and their headers."""

from __future__ import annotations

from reshard.formats.files.checkpoint import has_adapter, has_usual_weights
from reshard.formats.files.sharded import is_sharded
from reshard.formats.notation.format_file import all_formats
from reshard.source.folder import Folder


def recognise(folder: Folder) -> Folder:
    """The same folder, with its kind and the formats that its files may be in (see ``Folder``).

    Raises CheckpointError if a program's file names a folder of weights that is not there.
    """
    path = folder.path
    is_split = is_sharded(path)
    if not folder.formats and not has_usual_weights(path) and (folder.damage is not None or not is_split):
        from reshard.source.program_files import readings  # rarely needed

        folder.formats = tuple(format for format in all_formats().values() if readings(folder, format))
    if folder.formats:
        folder.kind = "program"
    elif is_split:
        folder.kind = "split"
    elif has_adapter(path):
        folder.kind = "adapter"
    return folder
