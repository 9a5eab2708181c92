"""Settings of all tests."""

import gc
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests import store
from tests.forked import begin_fork_server

if TYPE_CHECKING:
    from tests.verify.browser import Browser

# No deadlines, and no checks of how fast examples are made: they depend on the machine and on chance.
CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("full", deadline=None, suppress_health_check=CHECKS)
settings.register_profile("quick", deadline=None, suppress_health_check=CHECKS, max_examples=25)

QUICK = "not thorough"
"""The marks of ``make test``."""

# A shell's background job ignores Ctrl-C, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# torch and transformers are a million objects, which are looked through at each full collection.
gc.set_threshold(500_000, 50, 50)


def pytest_configure(config: pytest.Config) -> None:
    """One store for all processes: those that run the tests are started after this."""
    settings.load_profile("quick" if config.option.markexpr == QUICK else "full")
    if not any("tests/gpu" in argument for argument in config.args):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is found is the same on each machine
    if not hasattr(config, "workerinput"):
        _write_to_memory()
        store.begin()
        if config.getoption("dist", "no") != "no":
            # Or each of the hundred processes that the tests start would compile all that it imports of ours.
            os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        _make_all_small()


def _write_to_memory() -> None:
    """The files of the tests are many, small, and gone in a moment: no disk needs to hear of them."""
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not os.access(memory, os.W_OK) or os.statvfs(memory).f_flag & os.ST_NOEXEC:
        return
    if shutil.disk_usage(memory).free > _ROOM:
        os.environ["TMPDIR"] = str(memory)
        tempfile.tempdir = None  # it is to be looked up again


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What needs a GPU runs if it is asked for by name. ``make test`` imports no file of thorough tests alone."""
    if collection_path.name == "gpu" and not any("tests/gpu" in argument for argument in config.args):
        return True
    is_test = config.option.markexpr == QUICK and collection_path.match("test_*.py")
    return True if is_test and re.search(r"^pytestmark = .*\bthorough\b", collection_path.read_text(), re.M) else None


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """``make test`` makes no items of the thousands of cases of functions that are thorough."""
    marks = getattr(obj, "pytestmark", ()) if collector.config.option.markexpr == QUICK else ()
    return [] if isinstance(marks, list) and any(mark.name == "thorough" for mark in marks) else None


def pytest_collection_finish() -> None:
    """What all tests import stays: no collection looks through it again."""
    gc.freeze()


_ROOM = 4 << 30  # bytes, of which the tests need less than one half


def _make_all_small() -> None:
    """In a process that runs tests; what only starts others does not wait for torch."""
    import torch

    import reshard.move.jobs
    import reshard.publishing.staging

    # The models are tiny, and tests run side by side: threads of one wait for the core that another has.
    torch.set_num_threads(1)
    # The tensors are tiny, too: some of them go the way of large ones.
    reshard.move.jobs.DEFAULT = reshard.move.jobs.Sizes(small=1000)
    # Nobody else writes to the outputs of a test in this process: what is in the way will not go away.
    reshard.publishing.staging.PATIENCE = 0.1


def pytest_unconfigure(config: pytest.Config) -> None:
    """What the run has made goes with it."""
    if not hasattr(config, "workerinput"):
        store.end()


LONG = ("test_interleavings", "test_installed", "test_forward", "test_encoder_decoder", "test_fsdp",
        "test_bucket_interleavings", "test_folder", "test_stages_forward", "test_faults", "test_cli",
        "test_experts", "test_wire", "test_programs", "test_launch", "test_output", "test_readme", "test_help",
        "test_how_to", "test_resuming", "test_replacing", "test_own_plans", "test_hub", "test_fuzz",
        "test_quantized_forward", "test_tp_plan", "test_uneven_forward", "test_limits", "test_ranges",
        "test_combinations", "test_engine")  # fmt: skip
"""Files with tests of many seconds: run first, so that at the end no process waits long for another's last test."""


def _place(item: pytest.Item) -> tuple[bool, bool, int]:
    is_of_ranks = "fork_server" in getattr(item, "fixturenames", ())
    place = LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG)
    return item.path.stem != "test_routes", not is_of_ranks, place


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The routes first (10 s each), then those of ranks, then the long ones, then the others as they come.

    Each of pytest's processes gets a part of the list as it stands, so that most of them start no fork server.
    Each law is thorough as well: there it has all its examples.
    """
    if config.option.markexpr == "thorough":
        for item in items:
            if isinstance(item, pytest.Function) and getattr(item.obj, "is_hypothesis_test", False):
                item.add_marker("thorough")
    items.sort(key=_place)


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Browser"]:
    """A browser, for tests of pages."""
    from tests.verify import browser

    program = browser.find()
    if program is None:
        assert not os.environ.get("CI"), "no Chromium, and CI must have one: apt-get install chromium"
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with browser.Browser(program, tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="session")
def fork_server() -> None:
    begin_fork_server()
