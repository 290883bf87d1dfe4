"""All tests that need a GPU, in many processes: python tests/run_gpu.py [--jobs 16] [--share 1/2] [arguments of pytest]

Nearly all their time goes into compiling kernels, on one core each. Each process takes its share of the tests, which
tests/conftest.py deals by CHUNK; those that need tens of GiB of device memory run first, and alone. Besides a log for
each process there is one file with all of them, logs.tar.gz, for machines that hand back few files. Machines without a
network take what is missing there, such as transformers, from a folder of wheels: --wheels build/wheels, which `make
gpu-wheels` fills.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider")


def start(mark: str, share: str, log: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            [*PYTEST, "-m", mark, *arguments], cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT,
            # in each of so many processes, a compiler that starts one for each core is slower than one that starts none
            env={**os.environ, "CHUNK": share, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
        )  # fmt: skip


def unpack(wheels: Path) -> None:
    """They are found before what the machine has, on which nothing is changed."""
    site = tempfile.mkdtemp()
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    os.environ["PYTHONPATH"] = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])


def main() -> int:
    parser = argparse.ArgumentParser(description="Run all tests that need a GPU, in many processes.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once (default: cores)")
    parser.add_argument("--out", type=Path, default=ROOT / "report/gpu", help="folder of the logs")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, to be unpacked and imported from")
    parser.add_argument("--share", default="1/1", help="a part of the tests, as 1/2 and 2/2 for two calls")
    options, arguments = parser.parse_known_args()
    share, shares = map(int, options.share.split("/"))
    if options.wheels:
        unpack(options.wheels)
    options.out.mkdir(parents=True, exist_ok=True)
    logs = [options.out / f"{name}.log" for name in ("large", *range(options.jobs))]
    first, total = (share - 1) * options.jobs, shares * options.jobs
    codes = [start("gpu and large", f"{share - 1}/{shares}", logs[0], arguments).wait()]
    running = [start("gpu and not large", f"{i}/{total}", log, arguments) for i, log in enumerate(logs[1:], first)]
    codes += [process.wait() for process in running]
    with tarfile.open(options.out / "logs.tar.gz", "w:gz") as whole:
        for log in logs:
            whole.add(log, log.name)
    for log, code in zip(logs, codes, strict=True):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[-1:]
        print(f"{log.name}, exit {code}:", *told, sep="\n  ", flush=True)
    return max(0 if code == 5 else code for code in codes)  # 5: no test was left for this share


if __name__ == "__main__":
    sys.exit(main())
