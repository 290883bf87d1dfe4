"""All tests that need a GPU, many processes at once: python tests/run_gpu.py [--jobs 16] [--seconds 1800]

Nearly all their time goes into compiling kernels, on one core each. So every file is cut into chunks of neighbours,
which share kernels, and a pool of processes works through them; NVIDIA's compute-sanitizer, where there is one, runs
beside. What needs tens of GiB is one job of its own, and the first.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 28  # tests: some twenty cases of the table share their kernels
# Files that are cut otherwise; they go first, as they take longest. Ranks are processes already.
CHUNKS = {
    "tests/bench/test_gpu.py": 1, "tests/test_triton.py": 1, "tests/test_streaming.py": 4,
    "tests/test_decode_gpu.py": 14, "tests/distributed/test_gpu.py": 10**6, "tests/test_triton_gpu.py": CHUNK,
}  # fmt: skip
PYTEST = (sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider")
SANITIZER = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


class Job(NamedTuple):
    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


class Ended(NamedTuple):
    code: int | None  # None: no time was left to start it
    seconds: float
    last: str  # line that it wrote


def make_jobs() -> Iterator[Job]:
    """Those that take longest first."""
    yield Job("large", (*PYTEST, "-m", "gpu and large", "tests"), {})
    program = next(filter(None, map(shutil.which, SANITIZER)), None)
    if program is None:
        print("no compute-sanitizer was found: memcheck and racecheck do not run", flush=True)
    for tool in ("memcheck", "racecheck") if program else ():
        command = (program or "", "--tool", tool, "--error-exitcode", "1", sys.executable, "tests/sanitizer_cases.py")
        yield Job(tool, command, {"PYTHONPATH": "src", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    listed = subprocess.run(
        [*PYTEST[:3], "--collect-only", "-qq", "-m", "gpu and not large", "tests"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listed.returncode:
        raise SystemExit(f"the tests cannot be collected:\n{listed.stdout[-2000:]}{listed.stderr[-2000:]}")
    files = dict(re.findall(r"^(tests/\S+): (\d+)$", listed.stdout, re.MULTILINE))
    for file in [file for file in CHUNKS if file in files] + [file for file in files if file not in CHUNKS]:
        chunks = math.ceil(int(files[file]) / CHUNKS.get(file, CHUNK))
        for i in range(chunks):
            name = f"{Path(file).parent.name}-{Path(file).stem}-{i}"
            yield Job(name, (*PYTEST, "-m", "gpu and not large", file), {"CHUNK": f"{i}/{chunks}"})


def work(job: Job, end: float, folder: Path) -> Ended:
    start = time.monotonic()
    if start >= end:
        return Ended(None, 0.0, "not run: the time was up")
    log = folder / f"{job.name}.log"
    with log.open("w", encoding="utf-8") as stream:
        process = subprocess.Popen(
            job.command, cwd=ROOT, env=os.environ | job.environment, stdout=stream, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(timeout=end - start)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then tells how far it came
            code = _after(process)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return Ended(code, time.monotonic() - start, lines[-1] if lines else "")


def _after(process: subprocess.Popen[bytes]) -> int:
    """The exit code of what was interrupted."""
    try:
        return process.wait(timeout=10) or 1
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run all tests that need a GPU, many processes at once.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: cores)")
    parser.add_argument("--seconds", type=float, default=1800, help="at most (default: 1800)")
    parser.add_argument("--out", type=Path, default=ROOT / "report/gpu", help="folder of the logs")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    return run_all(list(make_jobs()), options.jobs, end, options.out)


def run_all(jobs: list[Job], processes: int, end: float, folder: Path) -> int:
    """The exit code: 0 if every job ran to its end and was right."""
    counts, bad = Counter[str](), []
    with ThreadPoolExecutor(processes) as pool:
        running = {pool.submit(work, job, end, folder): job for job in jobs}
        try:
            for done, future in enumerate(as_completed(running), 1):
                job, ended = running[future], future.result()
                told = re.findall(r"(\d+) (passed|failed|errors?|skipped)", ended.last)
                counts.update({word: int(number) for number, word in told})
                if ended.code != 0:
                    bad.append(job.name)
                about = f"{ended.seconds:.0f} s, exit {ended.code}, {ended.last}"
                print(f"[{done}/{len(jobs)}] {job.name}: {about}", flush=True)
        except KeyboardInterrupt:  # those that run are told so by the terminal
            pool.shutdown(cancel_futures=True)
            return 130
    print(", ".join(f"{number} {word}" for word, number in counts.items()))
    for name in bad:
        print(f"not right: {name}, see {folder / name}.log")
    if not counts["passed"]:
        print("nothing passed: is there a GPU?")
    return int(bool(bad) or not counts["passed"])


if __name__ == "__main__":
    sys.exit(main())
