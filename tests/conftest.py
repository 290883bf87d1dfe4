"""Set-up of all tests. Helpers that tests share live in ``dilated_attention.testing``."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from dilated_attention import ranks
from dilated_attention.backends.triton import nesting
from dilated_attention.backends.triton.cache import CACHE
from tests.cases import INTERPRETED
from tests.triton_kernels.interpreter import quicken

# What would change what is printed or where it is written, here and in every process that a test starts.
for name in ("FORCE_COLOR", "NO_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ |= {"LC_ALL": "C.UTF-8", "PYTHONUTF8": "1", "TZ": "UTC", "LOGNAME": "tests"}
time.tzset()
os.umask(0o022)

# Tensors this small gain nothing from threads, and on a busy machine each wait for them takes milliseconds.
torch.set_num_threads(1)

# What the functions of tests need on a rank: imported once, not by every rank. (This package too, as the server finds
# the one under test: test_ranks.py asks.)
ranks.PRELOADED += ["pytest", "hypothesis", "dilated_attention", "tests.cases"]

if INTERPRETED:
    quicken()

NEIGHBOURS = 7  # tests
if "CHUNK" in os.environ:  # tests/run_gpu.py; these have no test for a GPU, whose machine may have little beside torch
    collect_ignore = ["bench/test_browser.py", "bench/test_regress.py", "bench/test_report.py", "test_docs.py"]
# Files that take longest come first: begun last, such a file would keep one process busy while the other has ended.
FIRST = ("test_triton.py", "test_cases.py", "test_faults.py", "test_docs.py", "test_transformers.py", "test_ranks.py")
LONGEST = {name: at for at, name in enumerate(FIRST)}

# The first call of an operator can take a second: a time limit per example would fail at random.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Imports drop next to nothing: looking for it in between took a fifth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    has_device = torch.cuda.is_available() or INTERPRETED
    for item in items:
        if item.get_closest_marker("gpu") and not has_device:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
    yield
    if "CHUNK" in os.environ:
        items[:] = dealt(items, *map(int, os.environ["CHUNK"].split("/")))
    else:
        items.sort(key=lambda item: LONGEST.get(item.path.name, len(LONGEST)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """At once, where time may run out before the end."""
    if report.failed and "CHUNK" in os.environ:
        print(report.longreprtext, flush=True)


def dealt(items: list[pytest.Item], share: int, shares: int) -> list[pytest.Item]:
    """A share of so many, dealt in blocks: neighbours share kernels, and files differ in length.

    Those of the benchmark and of the sanitizer take minutes each, and are dealt first, one by one.
    """
    long = [item for item in items if item.path.parent.name == "bench" or item.path.name == "test_sanitizer.py"]
    rest = [item for item in items if item not in long]
    return [*long[share::shares], *(item for at, item in enumerate(rest) if at // NEIGHBOURS % shares == share)]


@pytest.fixture(autouse=True, scope="module")
def cheap_idling() -> Iterator[None]:
    """Of a process with thousands of tests and many ranks."""
    gc.freeze()  # what was imported and collected so far is never freed: gc.collect() takes half a second to see that
    yield
    for pool in ranks.POOLS.values():
        if pool.used and not pool.broken:
            pool.join()  # groups that calls made end, with their polling threads


@pytest.fixture(scope="module")
def pools_that_end() -> Iterator[None]:
    """For modules with FSDP or DTensor: torch keeps their meshes, whose threads poll as long as they live."""
    yield
    ranks.close_pools()


@pytest.fixture
def always_nested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Branches share a table wherever they can: those that are short enough for a test would not gain by it."""
    with monkeypatch.context() as patch:
        patch.setattr(nesting, "TILE", 1)
        CACHE.clear()
        nesting.groups.cache_clear()
        yield
    CACHE.clear()
    nesting.groups.cache_clear()
