"""Runs tests against each mutant and writes down which test fails first: record.json.

    python tests/mutants/run.py [--only NAME ... | --again] [--out FILE]

Each mutant is applied to a copy of the tree, in which pytest runs: whatever a test starts (ranks, scripts, Triton's
interpreter) imports that copy, too. The test that noticed the mutant by the last record comes first. The record is
written after every mutant; started again with the same --out, the script goes on with the mutants that are missing, or,
with --again, takes all. In the end every test that noticed a mutant runs once on the code as it is, and must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis  # noqa: F401 - so that it is there in every new process
import pytest
import torch
from mutants import MUTANTS, RECORD, ROOT, Mutant, tests_of

PACKAGE = Path("src/dilated_attention")
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
INTERPRETED = "interpreted:"
WRONG_CODE = 99  # pytest has codes from 0 to 5
NO_TESTS = 5
PATIENCE = 1800.0  # seconds, of a machine that may be busy


class Outcome(NamedTuple):
    ended: str  # "passed", "failed" or "hung"
    by: str = ""  # the test that failed
    says: str = ""  # the first line of its error


class Order:
    """A pytest plugin: the tests of each file in any order. Of the table of cases, these paths alone (none: all)."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = set(paths)

    def pytest_pycollect_makemodule(self, module_path: Path) -> None:
        if self.paths and module_path.name == "test_cases.py":
            from tests.table import PATHS

            for name in PATHS.keys() - self.paths:
                del PATHS[name]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.paths:
            items[:] = [x for x in items if x.path.name != "test_cases.py" or x.name.startswith("test_against_the_ora")]
        places = list(dict.fromkeys(item.path for item in items))
        random.Random(0).shuffle(items)  # neighbours are alike: they pass together
        items.sort(key=lambda item: places.index(item.path))


class Tree:
    """A copy of the tree in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
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

    def run(self, tests: Sequence[str], interpreted: bool) -> Outcome:
        if not tests:
            return Outcome("passed")
        self.log.write_text("")
        # forked: torch is imported already, and nothing of the library
        process = multiprocessing.get_context("fork").Process(target=self._become_pytest, args=(tests, interpreted))
        process.start()
        process.join(PATIENCE)
        hung = process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # ranks of a pool, too
        process.join()
        text = self.log.read_text("utf-8", errors="replace")
        assert process.exitcode != WRONG_CODE, f"the library is not the copy, or pytest failed:\n{text[-3000:]}"
        if not hung and (process.exitcode in (0, NO_TESTS) or re.search(r"^ERROR: .*not found: ", text, re.MULTILINE)):
            return Outcome("passed")
        failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
        # without a summary, the process died in the last test
        failed += reversed(re.findall(r"^(tests/\S+::.+?)(?: Fatal Python error.*| [A-Z]+ .*)?$", text, re.MULTILINE))
        assert failed, f"pytest could not run:\n{text[-3000:]}"
        says = re.search(r"^E +(.+)$", text, re.MULTILINE)
        return Outcome("hung" if hung else "failed", failed[0].strip(), says[1][:160] if says else "")

    def _become_pytest(self, tests: Sequence[str], interpreted: bool) -> None:
        code = WRONG_CODE
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(os.open(self.log, os.O_WRONLY | os.O_APPEND), stream)
            os.chdir(self.folder)
            for name in ("TRITON_INTERPRET", "CHUNK"):
                os.environ.pop(name, None)
            os.environ |= {"PYTHONPATH": str(self.folder / "src")} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
            sys.path[0] = ""
            sys.modules["__main__"] = types.ModuleType("__main__")  # ranks would import this script
            files = dict.fromkeys(test.partition("@")[0] for test in tests)
            options = ["-p", "no:cacheprovider", "--color=no", "-x", "-v", "--tb=short"]
            # in the interpreter, paths of a GPU run as well
            options += [] if interpreted else ["-m", "not gpu"]
            order = Order(path for test in tests for path in test.partition("@")[2].split(",") if path)
            code = int(pytest.main([*options, *files], plugins=[order]))
            if not str(sys.modules["dilated_attention"].__file__).startswith(str(self.folder)):
                code = WRONG_CODE
        finally:
            sys.stdout.flush()
            os._exit(code)


def attack(mutant: Mutant, tree: Tree, killer: str) -> Outcome:
    """The last killer, its file, the first of the tests, then all others; likewise those in Triton's interpreter."""
    file = killer.partition("::")[0]
    plain = [one for one in tests_of(mutant) if not one.startswith(INTERPRETED)]
    kernels = [one.removeprefix(INTERPRETED) for one in tests_of(mutant) if one not in plain]
    with tree.changed(mutant):
        for interpreted, some in (
            *((is_interpreted(killer), [x]) for x in (killer, file) if x not in ("", "tests/test_cases.py")),
            (False, plain[:1]), (False, plain[1:]), (True, kernels[:1]), (True, kernels[1:]),
        ):  # fmt: skip
            found = tree.run(some, interpreted)
            if found.by:
                break
    return found


def is_interpreted(test: str) -> bool:
    return test.startswith("tests/triton_kernels/") or ("test_against_the_oracle[" in test and "triton" in test)


def check_killers(tree: Tree, record: dict[str, Any]) -> None:
    """Every test that noticed a mutant passes on the code as it is."""
    killers = {one["by"] for one in record["mutants"].values() if "::" in one["by"]}
    for interpreted in (False, True):
        found = tree.run(sorted(x for x in killers if is_interpreted(x) == interpreted), interpreted)
        assert found.ended == "passed", f"on the code as it is, {found.by} {found.ended}: {found.says}"
    record["killers pass on the code as it is"] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="these mutants alone, and again")
    parser.add_argument("--again", action="store_true", help="all mutants, and again")
    parser.add_argument("--out", type=Path, default=RECORD)
    given = parser.parse_args()
    told = ["git", "log", "-1", "--format=%H", "--", "src"]
    commit = subprocess.run(told, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    none = {"code": commit, "mutants": {}}
    last, record = (json.loads(path.read_text("utf-8")) if path.exists() else none for path in (RECORD, given.out))
    record = none if given.again else record
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
        if not given.only:
            check_killers(tree, record)
            given.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    print("not noticed:", [name for name, one in record["mutants"].items() if one["ended"] == "passed"])


if __name__ == "__main__":
    main()
