"""Set-up of all tests. Helpers that tests share live in ``dilated_attention.testing``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from dilated_attention import _courses, _fused

# Tensors this small gain nothing from threads, and on a busy machine each wait for them takes milliseconds.
torch.set_num_threads(1)

# The first call of an operator can take a second: a time limit per example would fail at random.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class Chunk:
    """With CHUNK=i/n, the i-th of n parts, counted from 0, of the tests that are left when all else has chosen."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        part, parts = (int(number) for number in os.environ.get("CHUNK", "0/1").split("/"))
        assert 0 <= part < parts, f"CHUNK must be i/n with i from 0 to n - 1, got {part}/{parts}"
        items[:] = items[len(items) * part // parts : len(items) * (part + 1) // parts]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Chunk())


@pytest.fixture
def always_nested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Branches share a table wherever they can: those that are short enough for a test would not gain by it."""
    with monkeypatch.context() as patch:
        patch.setattr(_courses, "TILE", 1)
        _forget_launches()
        yield
    _forget_launches()


def _forget_launches() -> None:
    _fused._ready.clear()
    _fused._held.clear()
    _courses.launches.cache_clear()
    _courses.form_of.cache_clear()
