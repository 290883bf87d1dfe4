"""Runs tests against each mutant and writes down which test fails first: record.json.

    python tests/mutants/run.py [--only NAME ...] [--out FILE]

Each mutant is applied to a copy of the tree, in which pytest runs: whatever a test starts (ranks, scripts, Triton's
interpreter) imports that copy, too. The test that noticed the mutant by the last record comes first. The record is
written after every mutant; started again with the same --out, the script goes on with the mutants that are missing. All
tests must pass on the code as it is: see that first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from mutants import MUTANTS, RECORD, ROOT, Mutant, tests_of

PACKAGE = Path("src/dilated_attention")
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-x", "-v", "--tb=short")
NO_TESTS = 5  # pytest's exit code
PATIENCE = 1800.0  # seconds, of a machine that may be busy


class Outcome(NamedTuple):
    ended: str  # "passed", "failed" or "hung"
    by: str = ""  # the test that failed
    says: str = ""  # the first line of its error


class Tree:
    """A copy of the tree in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, folder / name)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / PACKAGE / mutant.file
        text = path.read_text("utf-8")
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        try:
            yield
        finally:
            path.write_text(text, "utf-8")
            shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # failing examples of this mutant

    def run(self, test: str, interpreted: bool) -> Outcome:
        """A test, a file, or as `mutants.TESTS` names them paths of the table of cases."""
        file, _, paths = test.partition("@")
        chosen = " or ".join(f"[{path}" for path in paths.split(",") if path)
        # in the interpreter, paths of a GPU run as well
        options = ["-k", chosen, "-m", "" if interpreted else "not gpu"]
        environment = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CHUNK")}
        environment |= {"PYTHONPATH": str(self.folder / "src")} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
        log, hung = self.folder / "log.txt", False
        with log.open("w") as stream:
            process = subprocess.Popen(
                [*PYTEST, *options, file], cwd=self.folder, env=environment, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                hung = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks of a pool, too
            code = process.wait()
        text = log.read_text("utf-8", errors="replace")
        if not hung and (code in (0, NO_TESTS) or re.search(r"^ERROR: .*not found: ", text, re.MULTILINE)):
            return Outcome("passed")
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
        # without a summary, the process died in the last test
        failed += reversed(re.findall(r"^(tests/\S+::.+?)(?: Fatal Python error.*| [A-Z]+ .*)?$", text, re.MULTILINE))
        assert failed, f"pytest could not run:\n{text[-3000:]}"
        says = re.search(r"^E +(.+)$", text, re.MULTILINE)
        return Outcome("hung" if hung else "failed", failed[0].strip(), says[1][:160] if says else "")


def attack(mutant: Mutant, tree: Tree, killer: str) -> Outcome:
    """By the last killer, then by the tests of the mutant's file one by one."""
    with tree.changed(mutant):
        for test in filter(None, (killer, *tests_of(mutant))):
            found = tree.run(test.removeprefix("interpreted:"), is_interpreted(test))
            if found.by:
                break
    return found


def is_interpreted(test: str) -> bool:
    is_kernel = "test_against_the_oracle[" in test and "triton" in test
    return is_kernel or test.startswith(("interpreted:", "tests/triton_kernels/"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these mutants alone, and again")
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    told = ["git", "log", "-1", "--format=%H", "--", "src"]
    commit = subprocess.run(told, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    none = {"code": commit, "mutants": {}}
    last, record = (json.loads(path.read_text("utf-8")) if path.exists() else none for path in (RECORD, given.out))
    killers = {name: one["by"] for name, one in last["mutants"].items()}
    todo = [x for x in MUTANTS if (x.name in given.only if given.only else x.name not in record["mutants"])]
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve())
        for mutant in todo:
            if mutant.gpu and not torch.cuda.is_available():
                continue
            found = attack(mutant, tree, killers.get(mutant.name, ""))
            record["mutants"][mutant.name] = found._asdict()
            given.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            print(f"{mutant.name:40} {found.ended:7} {found.by}", flush=True)
    print("not noticed:", [name for name, one in record["mutants"].items() if one["ended"] == "passed"])


if __name__ == "__main__":
    main()
