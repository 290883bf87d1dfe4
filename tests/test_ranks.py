"""Pools of ranks: no failure of a rank goes unnoticed, or leaves anything behind.

Ranks that are lost in the middle of a call are in tests/distributed/test_faults.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dilated_attention
from dilated_attention.ranks import Pool, RanksFailed, pool
from tests.over_ranks import alive


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """A pool that no test may break. When it is closed, no rank is left."""
    ranks = Pool(2)
    yield ranks
    assert not ranks.broken
    assert all(map(alive, ranks.pids))
    ranks.close()
    assert not any(map(alive, ranks.pids))
    assert ranks.broken


def file_of_the_package() -> str:
    return dilated_attention.__file__


def rank_sum() -> float:
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise KeyError("the needle")
    return dist.get_rank()


def test_ranks_run_the_package_under_test(pair: Pool) -> None:
    """Though a server imports it for all of them before any test asks."""
    assert pair.run(file_of_the_package) == [dilated_attention.__file__] * 2


def test_an_exception_is_reported_and_the_others_return(pair: Pool) -> None:
    with pytest.raises(RanksFailed, match="fail_on failed on 1 of 2 ranks: rank 1: KeyError: 'the needle'") as e:
        pair.run(fail_on, 1)
    assert 'raise KeyError("the needle")' in str(e.value), "the traceback"
    fine, failed = pair.run(fail_on, 1, check=False)
    assert (fine.value, fine.error) == (0, None)
    assert (failed.value, failed.error_type, failed.exitcode) == (None, "KeyError", None)
    with pytest.raises(RanksFailed, match=r"2 of 2(?s:.)*rank 1: Failed: not an Exception"):
        pair.run(pytest.fail, "not an Exception")
    with pytest.raises(RanksFailed, match=r"2 of 2(?s:.)*rank 1: \w+: [Cc]an('t|not) pickle"):
        pair.run(threading.Lock)
    assert pair.run(rank_sum) == [3.0, 3.0]


def test_a_rank_that_dies_between_calls_breaks_the_pool() -> None:
    ranks = pool(1)
    os.kill(ranks.pids[0], signal.SIGKILL)
    while not ranks.broken:
        time.sleep(0.01)
    assert pool(1).run(rank_sum) == [1.0]


PARENT = """
import os, signal, threading, time
from dilated_attention import ranks
if __name__ == "__main__":
    ranks.PRELOADED[:] = ["torch"]  # the rest takes seconds
    pool = ranks.pool(2)
    pool.run(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=pool.run, args=(time.sleep, 50), daemon=True).start()
    time.sleep(0.5)
    print(*pool.pids, flush=True)
"""


def test_ranks_end_with_their_parent() -> None:
    """Whether it exits or is killed; also ranks that are busy and refuse SIGTERM."""
    environment = {**os.environ, "PYTHONPATH": str(Path(dilated_attention.__file__).parents[1])}
    codes = [PARENT, PARENT + "    os.kill(os.getpid(), signal.SIGKILL)"]
    parents = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for code in codes
    ]
    pids = [int(word) for parent in parents for word in parent.communicate(timeout=300)[0].split()]
    assert [parent.returncode for parent in parents] == [0, -signal.SIGKILL]
    assert len(pids) == 4
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, pids))
