"""Memory of a fresh process: at least what the results take, in proportion to length; an error where it is capped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from dilated_attention.bench import implementations, memory
from dilated_attention.bench.implementations import named
from dilated_attention.bench.memory import OutOfMemory
from dilated_attention.bench.setting import Setting
from dilated_attention.bench.subject import BOTH, DIRECTIONS, FORWARD, Subject
from dilated_attention.ranks import Outcome

CPU = torch.device("cpu")
MIB = 1 << 20
pytestmark = pytest.mark.skipif(not memory.RESET.exists(), reason="the system does not tell a process its peak")


def setting(tokens: int) -> Setting:
    return Setting(tokens, (256, 512), (1, 2), CPU, heads=4, head_dim=64)  # 1 MiB a tensor for 1024 tokens


def holding(count: int, kept: bool, given: Setting) -> Subject:
    """Makes ``count`` tensors like the query on the way; keeps them all until the end, or one at a time."""

    def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = []
        for number in range(count):
            new = query + number
            made = [*made, new] if kept else [new]
        return made[-1]

    return implementations._subject(attention, given.pattern("longnet"), given)


@pytest.mark.parametrize("tokens", [1024, 16384])
@pytest.mark.parametrize(("count", "kept", "expected"), [(1, True, 1), (5, True, 5), (9, False, 2)])
def test_the_peak_is_what_was_held_at_once(tokens: int, count: int, kept: bool, expected: int) -> None:
    found = memory.peaks(partial(holding, count, kept), setting(tokens), [FORWARD])[FORWARD]
    assert found is not None
    megabytes = tokens / 1024
    assert found / MIB == pytest.approx(expected * megabytes, abs=0.75 + 0.02 * megabytes)


def test_no_figure_is_less_than_the_results() -> None:
    one = named("head_groups, sdpa")[0]
    found = memory.peaks(one.build, setting(2048), DIRECTIONS)
    assert found[FORWARD] >= 2 * MIB  # out
    assert found[BOTH] >= 6 * MIB  # dq, dk, dv
    assert found[BOTH] > found[FORWARD]


def test_over_ranks_each_has_its_share() -> None:
    one, two = named("head_groups, sdpa")[0], named("RingDilatedAttention, 2 ranks")[0]
    alone = memory.peaks(one.build, setting(16384), [BOTH])[BOTH]
    shared = memory.peaks(two.build, setting(16384), [BOTH], ranks=2)[BOTH]
    assert 0.4 < shared / alone < 0.75


def test_a_cap_is_out_of_memory_and_not_the_end() -> None:
    one = named("head_groups, sdpa")[0]
    with pytest.raises(OutOfMemory, match="allocate"):
        memory.peaks(one.build, setting(1 << 18), [FORWARD], limit=300 * MIB)
    assert memory.peaks(one.build, setting(1024), [FORWARD])[FORWARD] > 0


def test_other_errors_are_not_called_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="rank 1: ValueError: no") as error:
        memory.raise_if_failed([Outcome(0), Outcome(1, error="no", error_type="ValueError")])
    assert not isinstance(error.value, OutOfMemory)
    with pytest.raises(RuntimeError, match="no answer") as error:  # hung, so that we killed it
        memory.raise_if_failed([Outcome(0), Outcome(1, error="no answer", error_type="hung", exitcode=-9)])
    assert not isinstance(error.value, OutOfMemory)
    for gone in ({"error": "ended", "error_type": "died", "exitcode": -9}, {"error": "", "error_type": "MemoryError"}):
        with pytest.raises(OutOfMemory):
            memory.raise_if_failed([Outcome(0), Outcome(1, **gone)])


def test_what_counts_as_out_of_memory() -> None:
    assert memory.ran_out("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    assert memory.ran_out("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.")
    assert memory.ran_out("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert not memory.ran_out("shapes do not match")
