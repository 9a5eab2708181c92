"""What the tests of verify share."""

import pytest

from verify.forward.compare import IMPORTED
from verify.forward.launch import start_fork_server


@pytest.fixture(scope="session", autouse=True)
def _imports_happen_once() -> None:
    """All ranks of all tests come from one fork server, which is told at its start what to import."""
    start_fork_server("hypothesis", "pytest", "torch.distributed.device_mesh", *IMPORTED)
