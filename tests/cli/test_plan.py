"""`plan`: the numbers of `plan_cost`, and what to change."""

from __future__ import annotations

import re
from typing import Any

import torch

from dilated_attention import DilatedPattern, Pattern, Prefix, Window
from dilated_attention.advice import Workload
from dilated_attention.context_parallel import EXCHANGES
from dilated_attention.units import bytes_text

PATTERN = ("-w", "2k,32k,1M", "-r", "1,16,512")
SAME = DilatedPattern.longnet([2048, 32768, 2**20], [1, 16, 512])


def row(out: str, name: str) -> list[str]:
    found = next(line for line in out.splitlines() if line.startswith(name))
    return [cell for cell in re.split(r"\s{2,}", found.removeprefix(name).strip()) if cell]


def test_every_option_reaches_the_plan(run: Any) -> None:
    line = "--heads 8 --kv-heads 4 --head-dim 32 --batch 3 --dtype float32 --rule torchscale --causal"
    speeds = "--latency 1ms --bandwidth 8Gbit/s --flops-per-second 1T"
    code, out, err = run("plan", "-n", 100_000, "--ranks", 4, *PATTERN, *line.split(), *speeds.split())
    assert (code, err) == (0, "")
    pattern = DilatedPattern.torchscale(SAME.segment_lengths, SAME.dilation_rates)
    workload = Workload(100_000, 8, 32, 4, 4, 3, torch.float32, True, 1e-3, 1e9, 1e12)
    cost = workload.cost(pattern)
    for title, *cells in cost.rows():
        assert row(out, title) == [cell for cell in cells if cell]
    for note in (repr(pattern), *cost.notes()):
        assert note in out
    needs = [workload.need(cost, name) for name in EXCHANGES]
    assert row(out, "memory to train") == [bytes_text(need.training) for need in needs]
    assert row(out, "memory to infer") == [bytes_text(need.inference) for need in needs]
    assert "fits" not in out


def test_any_pattern_over_ranks(run: Any) -> None:
    text, pattern = "Window(1023), Prefix(4)", Pattern([Window(1023), Prefix(4)])
    out = run("plan", "-n", "64k", "--pattern", text, "--ranks", 4, "--causal").out
    cost = Workload(2**16, 8, 64, ranks=4, is_causal=True).cost(pattern)
    for title, *cells in cost.rows():
        assert row(out, title) == [cell for cell in cells if cell]
    assert repr(pattern) in out


def test_one_device_sends_nothing(run: Any) -> None:
    out = run("plan", "-n", "64k", "-w", "2k", "-r", 1).out
    assert "received" not in out
    assert "exchange" not in out
    assert row(out, "busiest rank") == ["one device"]


def test_what_fits(run: Any) -> None:
    """It is judged with the speeds that were asked for: where hops are dear, another exchange is best."""
    line = ("plan", "-n", "1M", "--ranks", 8, *PATTERN, "--heads", 12, "--memory")
    workload = Workload(2**20, 12, 64, ranks=8)
    need = workload.need(workload.cost(SAME), "alltoall").training
    assert f"training fits: it needs {bytes_text(need)} of 80 GiB" in run(*line, "80GiB").out
    out = run(*line, "1GiB").out
    assert row(out, "trains in 1 GiB") == ["no"] * 3
    assert f"training does not fit: it needs {bytes_text(need)}, and there are 1 GiB" in out
    assert "training fits with 16 ranks instead of 8: " in out
    out = run(*line, f"{need}B", "--latency", "1s").out
    assert "best exchange: allgather" in out
    assert row(out, f"trains in {bytes_text(need)}") == ["no", "no", "yes"]
    assert f"training fits with exchange='alltoall' instead of 'allgather': {bytes_text(need)}" in out
