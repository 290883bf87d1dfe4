"""Set-up of all tests. Helpers that tests share live in ``dilated_attention.testing``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Tensors this small gain nothing from threads, and on a busy machine each wait for them takes milliseconds.
torch.set_num_threads(1)

# The first call of an operator can take a second: a time limit per example would fail at random.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
