"""Runs tests against each mutant and writes down which test fails first.

    python tests/mutants/run.py --out tests/mutants/after.json [--only NAME ...] [--tests FILE ...] [--map FILE]

Each mutant is applied to a copy of the tree, in which pytest runs: whatever a test starts (ranks, scripts, Triton's
interpreter) imports that copy, too. The table is written after every mutant; started again with the same --out, the
script goes on with the mutants that are missing. In the end every test that failed runs once on the code as it is, and
must pass.

--map: a JSON file {test id: {source file below src/dilated_attention: [lines]}}, from a coverage run with a context per
test. Of the test files that it knows, only tests that reach a mutant's line run.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis  # noqa: F401 - so that it is there in every new process
import pytest
import torch
from mutants import MUTANTS, Mutant, tests_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/dilated_attention")
COPIED = ("src", "tests", "benchmarks", "docs", "examples", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
INTERPRETED = "interpreted:"
OPTIONS = ("-p", "no:cacheprovider", "--color=no", "-x", "-v", "--tb=short")
WITHOUT_A_GPU = ("-m", "not gpu")  # in the interpreter, paths of a GPU run as well
WRONG_CODE = 99  # pytest has codes from 0 to 5
NO_TESTS = 5
Map = dict[str, dict[str, list[int]]]


class Outcome(NamedTuple):
    ended: str  # "passed", "failed", "hung" (no word for too long) or "unfinished" (passed until the time was over)
    by: str  # the last test, if not all passed
    tests: int  # that began
    says: str = ""  # the first line of the error
    cpu: float = 0.0  # seconds


class Order:
    """A pytest plugin: some tests of each file first, of each function one after the other; ``runs`` says which.

    ``paths``: of the table of cases, no others are made; empty: all.
    """

    def __init__(self, runs: Callable[[str], bool], paths: frozenset[str] = frozenset()) -> None:
        self.runs, self.paths = runs, paths

    def pytest_pycollect_makemodule(self, module_path: Path) -> None:
        if self.paths and module_path.name == "test_cases.py":
            from tests.table import PATHS

            for name in set(PATHS) - self.paths:
                del PATHS[name]

    def wanted(self, test: str) -> bool:
        if self.paths and test.startswith("tests/test_cases.py::"):
            return "::test_against_the_oracle[" in test and self.runs(test)
        return self.runs(test)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files: dict[Path, dict[str, list[pytest.Item]]] = {}
        for item in items:
            if self.wanted(item.nodeid):
                files.setdefault(item.path, {}).setdefault(item.nodeid.split("[")[0], []).append(item)
        spread = []
        for functions in files.values():
            for some in functions.values():
                random.Random(0).shuffle(some)
            turns = itertools.zip_longest(*functions.values())
            spread.append([item for turn in turns for item in turn if item is not None])
        items[:] = [*(item for some in spread for item in some[:40]), *(item for some in spread for item in some[40:])]


class Tree:
    """A copy of the tree in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log.txt"
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / name)
        code = "import dilated_attention; print(dilated_attention.__file__)"
        seen = subprocess.run([sys.executable, "-c", code], cwd="/", env=self.environment(False), capture_output=True)
        assert seen.stdout.decode().strip() == str(folder / PACKAGE / "__init__.py"), seen

    def environment(self, interpreted: bool) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "CHUNK")}
        given |= {"PYTHONPATH": str(self.folder / "src"), "PYTHONUNBUFFERED": "1"}
        return given | ({"TRITON_INTERPRET": "1"} if interpreted else {})

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        path = self.folder / PACKAGE / mutant.file
        text = path.read_text()
        assert text.count(mutant.old) == 1, f"{mutant.name}: its text occurs {text.count(mutant.old)} times"
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            yield
        finally:
            path.write_text(text)
            shutil.rmtree(self.folder / ".hypothesis", ignore_errors=True)  # failing examples of this mutant

    def run(
        self, tests: Sequence[str], interpreted: bool, order: Order, limit: float, patience: float
    ) -> Outcome:  # fmt: skip
        self.log.write_text("")
        files = dict.fromkeys(test.partition("@")[0] for test in tests)
        paths = frozenset(path for test in tests for path in test.partition("@")[2].split(",") if path)
        options = (*OPTIONS, *(() if interpreted else WITHOUT_A_GPU), *files)
        process = os.fork()  # torch is imported already, and nothing of the library
        if process == 0:
            self.become_pytest([*options], Order(order.runs, paths), interpreted)
        try:
            ended, code, spent = _wait(process, self.log, limit, patience)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)  # ranks of a pool, too
        text = self.log.read_text(errors="replace")
        begun = [line for line in text.splitlines() if re.match(r"tests/\S+::", line)]
        last = begun[-1].partition(" Fatal Python error")[0].strip() if begun else "before the first test"
        assert code != WRONG_CODE, f"another copy of the library was imported, or pytest failed:\n{text[-3000:]}"
        if ended is not None:
            return Outcome(ended, last, len(begun), cpu=spent)
        if code in (0, NO_TESTS):
            return Outcome("passed", "", len(begun), cpu=spent)
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
        assert failed or begun, f"pytest could not run:\n{text[-3000:]}"
        says = re.search(r"^E +(.+)$", text, re.MULTILINE)
        by = failed[1] if failed else last  # without a summary: the process died
        return Outcome("failed", by, len(begun), says[1][:160] if says else "", spent)

    def become_pytest(self, arguments: list[str], order: Order, interpreted: bool) -> None:
        """In a new process: run tests, and end."""
        code = WRONG_CODE
        try:
            os.setsid()
            stream = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            os.dup2(stream, 1)
            os.dup2(stream, 2)
            os.chdir(self.folder)
            given = self.environment(interpreted)
            os.environ.clear()
            os.environ.update(given)
            sys.path[0] = ""
            sys.modules["__main__"] = types.ModuleType("__main__")  # ranks would import this script
            code = int(pytest.main(arguments, plugins=[order]))
            library = sys.modules.get("dilated_attention")
            if library is not None and not str(library.__file__).startswith(str(self.folder)):
                code = WRONG_CODE
        finally:
            sys.stdout.flush()
            os._exit(code)


def _wait(process: int, log: Path, limit: float, patience: float) -> tuple[str | None, int, float]:
    """Why the process was ended, if it was, its exit code, and the CPU seconds of all that it started."""
    size, waited, spent, spent_then, ended = 0, 0.0, 0.0, 0.0, None
    while True:
        done, status = os.waitpid(process, os.WNOHANG if ended is None else 0)
        if done:
            return ended, os.waitstatus_to_exitcode(status), round(spent, 1)
        time.sleep(0.1)
        waited += 0.1  # not by the clock: this process may be stopped for a while
        spent = max(spent, _cpu_seconds(process))
        if log.stat().st_size != size:
            size, waited, spent_then = log.stat().st_size, 0.0, spent
        hung = spent - spent_then > patience or waited > 6 * patience
        if hung or spent > limit:
            ended = "hung" if hung else "unfinished"
            os.killpg(process, signal.SIGKILL)


def _cpu_seconds(session: int) -> float:
    """What the processes of a session took so far: on a busy machine a clock would tell little."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[3]) == session:
                ticks += sum(map(int, fields[11:15]))  # with children that ended
    return ticks / os.sysconf("SC_CLK_TCK")


def order_for(mutant: Mutant, covered: Map) -> Order:
    text = (ROOT / PACKAGE / mutant.file).read_text()
    first = text[: text.index(mutant.old)].count("\n") + 1
    lines = set(range(first, first + mutant.old.rstrip("\n").count("\n") + 1))
    known = {one.split("::")[0] for one in covered}
    return Order(
        lambda test: test.split("::")[0] not in known or bool(lines & set(covered.get(test, {}).get(mutant.file, ())))
    )


def attack(mutant: Mutant, tests: Sequence[str], tree: Tree, order: Order, limit: float, patience: float) -> Outcome:
    """The first of the tests, then all others; likewise those in Triton's interpreter."""
    plain = [one for one in tests if not one.startswith(INTERPRETED)]
    kernels = [one.removeprefix(INTERPRETED) for one in tests if one not in plain]
    count, spent = 0, 0.0
    with tree.changed(mutant):
        for interpreted, some in ((False, plain[:1]), (False, plain[1:]), (True, kernels[:1]), (True, kernels[1:])):
            if some:
                found = tree.run(some, interpreted, order, limit - spent, patience)
                count, spent = count + found.tests, spent + found.cpu
                if found.ended != "passed":
                    break
    return found._replace(tests=count, cpu=round(spent, 1))


def about() -> dict[str, str]:
    commit = subprocess.run(["git", "log", "-1", "--format=%H", "--", "src"], cwd=ROOT, capture_output=True, text=True)
    return {
        "code": commit.stdout.strip(), "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.machine(), "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def write(path: Path, table: dict[str, Any]) -> None:
    found = table["mutants"]
    table["killed"] = sum(one["ended"] in ("failed", "hung") for one in found.values())
    table["survivors"] = [name for name, one in found.items() if one["ended"] == "passed"]
    table["unfinished"] = [name for name, one in found.items() if one["ended"] == "unfinished"]
    table["not run"] = [mutant.name for mutant in MUTANTS if mutant.name not in found]
    new = path.with_suffix(".new")
    new.write_text(json.dumps(table, indent=1) + "\n")
    new.replace(path)


def _is_interpreted(test: str) -> bool:
    return test.startswith("tests/triton_kernels/") or bool(re.search(r"::test_against_the_oracle\[\w*triton", test))


def check_killers(tree: Tree, table: dict[str, Any]) -> None:
    """Every test that noticed a mutant passes on the code as it is."""
    killers = {one["by"] for one in table["mutants"].values() if one["ended"] in ("failed", "hung")}
    for interpreted in (False, True):
        ids = sorted(one for one in killers if "::" in one and _is_interpreted(one) == interpreted)
        if ids:
            found = tree.run(ids, interpreted, Order(lambda test: True), 3600, 600)
            assert found.ended == "passed", f"on the code as it is, {found.by} {found.ended}"
    table["killers pass on the code as it is"] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutants alone, and again")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these tests instead of those in the table")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/mutants/after.json")
    parser.add_argument("--map", type=Path, help="which test reaches which line")
    parser.add_argument("--limit", type=float, default=200, help="CPU seconds for one mutant")
    parser.add_argument("--patience", type=float, default=100, help="CPU seconds without a word that are a hang")
    given = parser.parse_args()
    table = json.loads(given.out.read_text()) if given.out.exists() else {**about(), "mutants": {}}
    covered: Map = json.loads(given.map.read_text()) if given.map else {}
    unknown = set(given.only) - {mutant.name for mutant in MUTANTS}
    assert not unknown, f"no such mutants: {sorted(unknown)}"
    order = sorted(
        MUTANTS, key=lambda mutant: random.Random(mutant.name).random()
    )  # so a part of the table is a sample
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve())
        for mutant in order:
            wanted = mutant.name in given.only if given.only else mutant.name not in table["mutants"]
            if not wanted or (mutant.gpu and not torch.cuda.is_available()):
                continue
            tests, began = given.tests or tests_of(mutant), time.monotonic()
            found = attack(mutant, tests, tree, order_for(mutant, covered), given.limit, given.patience)
            seconds = round(time.monotonic() - began, 1)
            table["mutants"][mutant.name] = {
                "breaks": mutant.breaks, "file": mutant.file, **found._asdict(), "seconds": seconds
            }  # fmt: skip
            table.pop("killers pass on the code as it is", None)
            write(given.out, table)
            print(
                f"{mutant.name:40} {found.ended:10} {found.by} ({found.tests} tests, {found.cpu} s, {seconds} s)",
                flush=True,
            )
        if not given.only:
            check_killers(tree, table)
        write(given.out, table)
    print(f"{table['killed']} killed, survivors: {table['survivors']}, unfinished: {table['unfinished']}")


if __name__ == "__main__":
    main()
