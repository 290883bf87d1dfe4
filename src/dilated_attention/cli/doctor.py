"""`doctor`: what is installed, which kernels run where and why not others, and a short check against the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import TYPE_CHECKING

from rich.text import Text

from dilated_attention.cli.output import console

if TYPE_CHECKING:
    import torch


def doctor() -> int:
    """Say what is installed, and check that it works.

    It prints PyTorch's own report on this machine, says which kernels run here and why others do not, and compares
    results with the oracle, a slow float64 reference. The exit code is 1 if a check fails. Paste the output into a bug
    report.

    Example: dilated-attention doctor
    """
    import torch
    from torch.utils.collect_env import get_pretty_env_info

    import dilated_attention

    screen, progress = console(), console(stderr=True)
    with progress.status("asking this machine"):
        screen.print(get_pretty_env_info(), soft_wrap=True)  # type: ignore[no-untyped-call]
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]
    screen.print(
        Text(f"\ndilated_attention {dilated_attention.__version__}: what runs here, and why not others", "bold")
    )
    for line in kernels(devices):
        screen.print(f"  {line}", soft_wrap=True)
    screen.print(Text("\nchecks against the float64 oracle, gradients included", "bold"))
    with progress.status("checking"):
        verdicts = list(checks(devices))
    for what, why in verdicts:
        screen.print(Text(f"  {what}: {why or 'exact'}", "bold red" if why else ""), soft_wrap=True)
    return int(any(why for _, why in verdicts))


def kernels(devices: list[torch.device]) -> Iterator[str]:
    """What a plain call would run on each device in each dtype, and why no other does."""
    import torch

    from dilated_attention._explain import explain
    from dilated_attention.pattern import DilatedPattern

    for device, dtype in product(devices, (torch.float32, torch.bfloat16, torch.float16, torch.float64)):
        x = torch.zeros(1, 64, 4, 16, dtype=dtype, device=device)
        first, *others = str(explain(x, x, x, DilatedPattern.longnet([16, 32], [1, 2]))).splitlines()
        yield f"{device} {str(dtype).removeprefix('torch.')} {first}"
        yield from (f"    {line}" for line in others)


def checks(devices: list[torch.device]) -> Iterator[tuple[str, str]]:
    """Each check, and what is wrong if anything is. The length is one that no segment divides."""
    import torch

    from dilated_attention import testing
    from dilated_attention.pattern import RULES, DilatedPattern

    kinds = ((torch.float32, False), (torch.bfloat16, True))
    for device, (dtype, is_causal), rule in product(devices, kinds, RULES):
        what = f"{rule} {str(dtype).removeprefix('torch.')} on {device}{', causal' if is_causal else ''}"
        qkv = testing.make_qkv(2, 100, 6, 16, kv_heads=3, dtype=dtype, device=device)
        try:
            testing.check(qkv, DilatedPattern.of(rule, [16, 32, 64], [1, 2, 3]), is_causal=is_causal)
        except (AssertionError, RuntimeError) as error:  # torch's own errors, too: a kernel that fails is a finding
            yield what, f"failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        else:
            yield what, ""
