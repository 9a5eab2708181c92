"""The part of the Python API that needs ``reshard.profile``: its function."""

from __future__ import annotations

from reshard.commands.fields import by_fields
from reshard.profile import command as _command
from reshard.profile.job import ProfileRequest

profile = by_fields(ProfileRequest, _command.profile)
