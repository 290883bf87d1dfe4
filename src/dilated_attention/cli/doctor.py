"""`doctor`: what is installed, which kernels run where and why not others, and a short check against the oracle.

Made to be pasted into a bug report.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import product

import torch
import torch.distributed as dist
from rich.text import Text

from dilated_attention import testing
from dilated_attention._explain import explain
from dilated_attention.bench import machine
from dilated_attention.cli.output import console
from dilated_attention.pattern import RULES, DilatedPattern, Rule
from dilated_attention.ring.cost import size

OPTIONAL = ("typer", "rich", "matplotlib", "numpy", "safetensors", "transformers", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SECONDS = 10.0


@dataclass(frozen=True)
class Case:
    """One check: a rule on a device, with gradients, at a length that no segment divides."""

    rule: Rule
    device: torch.device
    dtype: torch.dtype
    is_causal: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.rule} {dtype} on {self.device}{', causal' if self.is_causal else ''}"

    def check(self) -> str | None:
        """What is wrong, if anything. Torch's own errors count: a kernel that fails is what this looks for."""
        qkv = testing.make_qkv(2, 100, 6, 16, kv_heads=3, dtype=self.dtype, device=self.device)
        try:
            testing.check(qkv, DilatedPattern.of(self.rule, [16, 32, 64], [1, 2, 3]), is_causal=self.is_causal)
        except (AssertionError, RuntimeError) as error:
            return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return None


def doctor() -> int:
    """Say what is installed, and check that it works.

    It lists versions and devices, says which kernels run and why others do not, and checks results against the oracle
    for ten seconds. The exit code is 1 if a check fails. Paste the output into a bug report.

    Example: dilated-attention doctor
    """
    screen = console()
    for title, lines in (("versions", versions()), ("devices", devices()), ("kernels", kernels())):
        screen.print(Text(title, "bold"))
        for line in lines:
            screen.print(f"  {line}", soft_wrap=True)
    screen.print(Text("self-check against the float64 oracle, gradients included", "bold"))
    cases = list(all_cases(found_devices()))
    began = time.monotonic()
    with console(stderr=True).status("checking") as status:
        ran, failed = self_check(cases, SECONDS, lambda case: status.update(f"checking {case}"))
    for case, why in failed:
        screen.print(Text(f"  failed: {case}: {why}", "bold red"), soft_wrap=True)
    short = "" if ran == len(cases) else f"; the {SECONDS:.0f} s were over before the other {len(cases) - ran}"
    screen.print(f"  {ran - len(failed)} of {ran} cases are exact, in {time.monotonic() - began:.1f} s{short}")
    return int(bool(failed))


def all_cases(devices: Iterable[torch.device]) -> Iterator[Case]:
    """Float32 everywhere first: what time is left goes to half precision."""
    for dtype, is_causal, device, rule in product(DTYPES[:2], (False, True), list(devices), RULES):
        yield Case(rule, device, dtype, is_causal)


def self_check(
    cases: Sequence[Case], seconds: float, say: Callable[[Case], None], clock: Callable[[], float] = time.monotonic
) -> tuple[int, list[tuple[Case, str]]]:
    """How many ran, and those that failed with why. None is started once the time is over."""
    end = clock() + seconds
    failed: list[tuple[Case, str]] = []
    for index, case in enumerate(cases):
        if clock() >= end:
            return index, failed
        say(case)
        why = case.check()
        if why is not None:
            failed.append((case, why))
    return len(cases), failed


def found_devices() -> list[torch.device]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(gpus))]


def versions() -> Iterator[str]:
    git = machine.git_state()
    yield from (f"{name} {number}" for name, number in machine.versions(found_devices()[-1]).items())
    yield f"commit {git['commit']}{' + changes' if git['dirty'] else ''}"
    yield f"system {platform.platform()}"
    for name in OPTIONAL:
        yield f"{name} {_version(name)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed" if importlib.util.find_spec(package) is None else "of unknown version"


def devices() -> Iterator[str]:
    yield f"CPU: {machine.cpu_model()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads for torch"
    for device in found_devices()[1:]:
        found = torch.cuda.get_device_properties(device)
        yield f"{device}: {found.name}, {size(found.total_memory)}, capability {found.major}.{found.minor}"
    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield f"no CUDA device; torch is built {built}"
    available = dist.is_available()
    for name, is_there in (
        ("gloo", available and dist.is_gloo_available()),
        ("nccl", available and dist.is_nccl_available()),
    ):
        yield f"process groups over {name}: {'yes' if is_there else 'no'}"


def kernels() -> Iterator[str]:
    """What a plain call would run on each device in each dtype, and why no other does."""
    pattern = DilatedPattern.longnet([16, 32], [1, 2])
    for device, dtype in product(found_devices(), DTYPES):
        x = torch.zeros(1, 64, 4, 16, dtype=dtype, device=device)
        first, *others = str(explain(x, x, x, pattern)).splitlines()
        yield f"{device} {str(dtype).removeprefix('torch.')} {first}"
        yield from (f"    {line}" for line in others)
