"""The part of the Python API that needs ``verify.profile``: ``reshard.profile``."""

from __future__ import annotations

from reshard.commands.fields import by_fields
from reshard.verify.profile import command as _command
from reshard.verify.profile.job import ProfileRequest

profile = by_fields(ProfileRequest, _command.profile)
