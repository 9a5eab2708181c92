"""What only the texts of ``obstore``'s errors say.

If a new release changes these texts, only this file breaks; ``tests/formats/test_internals.py`` has one of each.
"""

from __future__ import annotations

import re


def status_of(error: Exception) -> str | None:
    """The HTTP status of the answer to the last try."""
    match = re.search(r"status code: (\d+)", str(error))
    return match[1] if match else None


def is_broken_connection(error: Exception) -> bool:
    """Whether the connection failed, or broke off in the middle of an answer."""
    return "HTTP error:" in str(error)


def sends_no_parts(error: Exception) -> bool:
    """Whether the server answered a request for a range with the whole file."""
    from obstore.exceptions import NotSupportedError

    return isinstance(error, NotSupportedError) or "non-partial response" in str(error)
