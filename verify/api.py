"""The part of the Python API that needs ``verify``: ``reshard.verify``."""

from __future__ import annotations

from reshard.commands.fields import by_fields
from reshard.verify import command as _command

verify = by_fields(_command.VerifyRequest, _command.verify)
