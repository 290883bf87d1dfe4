"""Pools of ranks: what goes in comes out by rank, and no failure of a rank goes unnoticed or leaves anything behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dilated_attention
from dilated_attention.ranks import Pool, RanksFailed, pool
from tests.over_ranks import alive

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64,
    torch.int32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """A pool that no test may break. When it is closed, once or again, no rank is left."""
    with Pool(2, timeout=20.0) as ranks:
        yield ranks
        assert not ranks.broken
        assert all(map(alive, ranks.pids))
    assert not any(map(alive, ranks.pids))
    assert ranks.broken
    ranks.close()


@dataclass
class Box:
    content: Any


# --- what the ranks are asked to do -----------------------------------------------------------------------------


def describe(*args: Any) -> tuple[int, int, int, int, tuple[Any, ...]]:
    return dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), os.getpid(), args


def echo(thing: Any) -> Any:
    return thing


def rank_sum() -> float:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def apply(function: Callable[[Any], Any], box: Box) -> Box:
    return Box(function(box.content))


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise KeyError("the needle")
    return dist.get_rank()


def fail_before_meeting(rank: int) -> float:
    fail_on(rank)
    return rank_sum()


SENT: list[Any] = []  # gloo forgets a message that nobody waits for


def fail_before_receiving(value: float) -> float:
    """Rank 0 sends; rank 1 receives unless the value is negative."""
    tensor = torch.full((4,), value)
    if dist.get_rank() == 0:
        SENT.append(dist.isend(tensor, 1))
        return value
    fail_on(1 if value < 0 else -1)
    dist.recv(tensor, 0)
    return tensor[0].item()


def give_outcome() -> None:
    pytest.fail("not an Exception")


def return_a_lambda() -> Any:
    return lambda: None


def end_by(way: str) -> int:
    if dist.get_rank() == 1:
        if way == "exit":
            sys.exit(3)
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    return dist.get_rank()


# --- calls ------------------------------------------------------------------------------------------------------


def test_results_come_by_rank_from_ranks_that_stay(pair: Pool) -> None:
    first, second = pair.pids
    assert pair.run(describe, "a", 2) == [(0, 2, 1, first, ("a", 2)), (1, 2, 1, second, ("a", 2))]
    assert os.getpid() not in pair.pids
    assert pair.run(rank_sum) == [3.0, 3.0]  # the group spans the ranks
    assert pair.run(apply, echo, Box(Box(1))) == [Box(Box(1))] * 2  # functions and classes of this file
    outcomes = pair.run(time.sleep, 0.1, check=False)
    for rank, x in enumerate(outcomes):
        assert x.rank == rank
        assert x.error is x.error_type is x.exitcode is x.value is None
        assert 0.1 <= x.seconds < 10


def file_of_the_package() -> str | None:
    return dilated_attention.__file__


def test_ranks_run_the_package_that_is_tested(pair: Pool) -> None:
    """Though a server imports it for all of them, before any test asks."""
    assert set(pair.run(file_of_the_package)) == {dilated_attention.__file__}


def test_tensors_come_back_as_they_were(pair: Pool) -> None:
    raw = {x: torch.randint(0, 2 if x == torch.bool else 256, (6 * x.itemsize,), dtype=torch.uint8) for x in DTYPES}
    tensors = [bits.view(dtype).view(2, 3) for dtype, bits in raw.items()]
    leaf, shared, large = torch.nn.Parameter(torch.randn(3)), torch.randn(4), torch.randn(3, 1000, 1000)
    strided = [
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.empty(0, 3),
        large.transpose(0, 2),
        large[1:, ::7],
    ]
    for back, parameter, sparse, both, others in pair.run(
        echo, (tensors, leaf, torch.eye(3).to_sparse(), [shared, shared[1:]], strided)
    ):
        for one, tensor in zip(back, tensors, strict=True):
            assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(one.view(torch.uint8), tensor.view(torch.uint8)), one.dtype
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad
        assert torch.equal(parameter, leaf)
        assert torch.equal(sparse.to_dense(), torch.eye(3))
        both[0].fill_(7.0)
        assert (both[1] == 7.0).all()
        for one, tensor in zip(others, strided, strict=True):
            assert torch.equal(one, tensor)
            assert one.stride() == tensor.stride()


def threads_of_a_new_group() -> int:
    dist.all_reduce(torch.ones(1), group=dist.new_group())
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads as Linux lists them")
def test_a_new_group_ends_the_threads_of_those_that_calls_made(pair: Pool) -> None:
    first, _ = pair.run(threads_of_a_new_group)
    pair.run(threads_of_a_new_group)
    pids = pair.pids
    pair.renew()
    assert pair.pids == pids
    assert pair.run(threads_of_a_new_group)[0] <= first


def test_bad_calls_are_refused(pair: Pool) -> None:
    with pytest.raises(ValueError, match="at least one rank, got size=0"):
        Pool(0)
    with pytest.raises(ValueError, match=r"top level of a module"):
        pair.run(lambda: 1)
    assert pair.run(rank_sum) == [3.0, 3.0]


# --- failures after which the pool goes on ----------------------------------------------------------------------


def test_an_exception_is_reported_and_the_others_return(pair: Pool) -> None:
    with pytest.raises(RanksFailed, match="failed on 1 of 2 ranks") as caught:
        pair.run(fail_on, 1)
    assert "rank 1: KeyError: 'the needle'" in str(caught.value)
    assert 'raise KeyError("the needle")' in str(caught.value)  # the traceback
    assert list(caught.value.errors) == [1]
    assert (caught.value.errors[1].error_type, caught.value.errors[1].error) == ("KeyError", "'the needle'")
    fine, failed = pair.run(fail_on, 1, check=False)
    assert (fine.value, fine.error) == (0, None)
    assert (failed.value, failed.error_type, failed.exitcode) == (None, "KeyError", None)
    assert pair.run(rank_sum) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("function", "error"), [(give_outcome, "Failed"), (return_a_lambda, "PicklingError|Attribute")]
)
def test_unusual_errors_are_reported(pair: Pool, function: Callable[[], Any], error: str) -> None:
    with pytest.raises(RanksFailed, match=f"(?s)2 of 2.*rank 1: ({error})"):
        pair.run(function)


def test_a_failed_call_leaves_no_message_for_the_next(pair: Pool) -> None:
    with pytest.raises(RanksFailed):
        pair.run(fail_before_receiving, -1.0)
    assert pair.run(fail_before_receiving, 5.0) == [5.0, 5.0]


def test_ranks_left_waiting_report_the_timeout_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dilated_attention.ranks.GRACE", 120.0)  # a starved machine takes its time to raise
    with Pool(3, timeout=4.0) as ranks:  # in which they must also meet, on a busy machine
        outcomes = ranks.run(fail_before_meeting, 1, check=False)
        assert outcomes[1].error_type == "KeyError"
        for rank in (0, 2):
            assert outcomes[rank].error_type == "RuntimeError"
            assert "rank_sum" in outcomes[rank].traceback
        assert ranks.run(rank_sum) == [6.0, 6.0, 6.0]


# --- failures that break the pool -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "error_type", "code"),
    [
        ("exit", "died", 3),
        ("kill", "died", -signal.SIGKILL),
        ("stubborn", "hung", -signal.SIGKILL),
    ],
)
def test_a_lost_rank_is_reported_in_time_and_breaks_the_pool(way: str, error_type: str, code: int) -> None:
    with Pool(2) as ranks:
        ranks.run(rank_sum)  # the first call imports this file
        start = time.monotonic()
        fine, lost = ranks.run(end_by, way, timeout=1.5 if error_type == "hung" else 20.0, check=False)
        assert time.monotonic() - start < 10
        assert (fine.value, fine.error_type) == (0, None)
        assert (lost.value, lost.error_type, lost.exitcode) == (None, error_type, code)
        assert ("in end_by" in lost.traceback) == (error_type == "hung")  # where it hung
        assert ranks.broken
        with pytest.raises(RuntimeError, match="broken"):
            ranks.run(rank_sum)
        assert not any(map(alive, ranks.pids))


def test_a_rank_that_dies_between_calls_breaks_the_pool() -> None:
    with Pool(2) as ranks:
        os.kill(ranks.pids[0], signal.SIGKILL)
        while not ranks.broken:
            time.sleep(0.01)
        with pytest.raises(RuntimeError, match="broken"):
            ranks.run(rank_sum)


def exit_before_meeting() -> float:
    end_by("exit")
    return rank_sum()


def test_pool_is_cached_and_made_anew_if_broken() -> None:
    """Peers of a lost rank do not wait for the timeout."""
    first = pool(2)
    assert pool(2) is first
    with pytest.raises(RanksFailed, match=r"rank 1: died: the process ended with exit code 3"):
        first.run(exit_before_meeting)
    second = pool(2)
    assert second is not first
    assert second.run(rank_sum) == [3.0, 3.0]
    second.close()


# --- the end ----------------------------------------------------------------------------------------------------


PARENT = """
import os, signal, threading, time
from dilated_attention import ranks
if __name__ == "__main__":
    ranks.PRELOADED[:] = ["torch"]  # the rest takes seconds
    ranks = ranks.Pool(2)
    ranks.run(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=ranks.run, args=(time.sleep, 50), daemon=True).start()
    time.sleep(0.5)
    print(*ranks.pids, flush=True)
"""


def test_ranks_end_with_their_parent(tmp_path: Path) -> None:
    """Whether it exits or is killed; also ranks that are busy and refuse SIGTERM. No file stays either."""
    source = Path(dilated_attention.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source), "TMPDIR": str(tmp_path)}
    codes = [PARENT, PARENT + "    os.kill(os.getpid(), signal.SIGKILL)"]
    parents = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for code in codes
    ]
    pids = [int(word) for parent in parents for word in parent.communicate(timeout=300)[0].split()]
    assert [parent.returncode for parent in parents] == [0, -signal.SIGKILL]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
    assert not list(tmp_path.glob("ranks-*"))
