"""What the tests of verify share."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _imports_happen_once(fork_server: None) -> None:
    """Most of them run ranks."""
