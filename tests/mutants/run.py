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
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mutants import MUTANTS, Mutant, tests_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path("src/dilated_attention")
COPIED = ("src", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile")
INTERPRETED = "interpreted:"
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "-m", "not gpu")
Map = dict[str, dict[str, list[int]]]


class Tree:
    """A copy of the tree in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.collected: dict[str, list[str]] = {}
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, folder / name)
        code = "import dilated_attention; print(dilated_attention.__file__)"
        seen = subprocess.run([sys.executable, "-c", code], cwd="/", env=self.environment(), capture_output=True)
        assert seen.stdout.decode().strip() == str(folder / PACKAGE / "__init__.py"), seen

    def environment(self, interpreted: bool = False) -> dict[str, str]:
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

    def ids(self, file: str) -> list[str]:
        """The ids of a file's tests, each function's spread out, one of each function after the other."""
        if file not in self.collected:
            self.collected[file] = _spread(self.collect(file))
        return self.collected[file]

    def collect(self, file: str) -> list[str]:
        command = [*PYTEST, "--collect-only", "-q", file.removeprefix(INTERPRETED)]
        environment = self.environment(file.startswith(INTERPRETED))
        found = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        ids = [line for line in found.stdout.splitlines() if re.match(r"tests/\S+::", line)]
        assert ids, f"no tests in {file}:\n{found.stdout[-2000:]}{found.stderr[-1000:]}"
        return ids

    def run(self, ids: list[str], interpreted: bool, limit: float, patience: float) -> tuple[str, str, int]:
        """How it ended ("passed", "failed", "hung", "unfinished"), the test it ended with, and how many tests began."""
        listed, log = self.folder / "ids.txt", self.folder / "log.txt"
        listed.write_text("\n".join(ids))
        command = [*PYTEST, "-x", "-v", "--tb=short", f"@{listed}"]
        with log.open("w") as stream:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(interpreted), stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                ended = _wait(process, log, limit, patience)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # ranks of a pool, too
                process.wait()
        text = log.read_text(errors="replace")
        begun = [line for line in text.splitlines() if re.match(r"tests/\S+::", line)]
        if ended is not None:
            return ended, begun[-1].strip() if begun else "before the first test", len(begun)
        if process.returncode == 0:
            return "passed", "", len(begun)
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", text, re.MULTILINE)
        if failed is None and process.returncode > 0 and not begun:
            raise RuntimeError(f"pytest could not run:\n{text[-3000:]}")
        return "failed", failed[1] if failed else begun[-1], len(begun)  # without a summary: the process died


def _wait(process: subprocess.Popen[bytes], log: Path, limit: float, patience: float) -> str | None:
    began = grew = time.monotonic()
    size = 0
    while process.poll() is None:
        time.sleep(0.2)
        now, new = time.monotonic(), log.stat().st_size
        if new != size:
            size, grew = new, now
        if now - grew > patience:
            return "hung"
        if now - began > limit:
            return "unfinished"
    return None


def _spread(ids: Iterable[str]) -> list[str]:
    functions: dict[str, list[str]] = {}
    for one in ids:
        functions.setdefault(one.split("[")[0], []).append(one)
    for some in functions.values():
        random.Random(0).shuffle(some)
    return [one for turn in itertools.zip_longest(*functions.values()) for one in turn if one is not None]


class Stage(NamedTuple):
    """Tests that run in one process."""

    ids: list[str]
    interpreted: bool


def stages(mutant: Mutant, files: Sequence[str], tree: Tree, covered: Map) -> Iterator[Stage]:
    """The tests for a mutant: those of the first file, then some of each other file and then the rest of them."""
    text = (ROOT / PACKAGE / mutant.file).read_text()
    first = text[: text.index(mutant.old)].count("\n") + 1
    lines = set(range(first, first + mutant.old.rstrip("\n").count("\n") + 1))
    known = {one.split("::")[0] for one in covered}

    def of(file: str) -> list[str]:
        ids = tree.ids(file)
        if ids[0].split("::")[0] not in known:
            return ids
        return [one for one in ids if lines & set(covered.get(one, {}).get(mutant.file, ()))]

    plain = [file for file in files if not file.startswith(INTERPRETED)]
    yield Stage([one for file in plain[:1] for one in of(file)], False)
    others = [of(file) for file in plain[1:]]
    yield Stage([*(one for ids in others for one in ids[:40]), *(one for ids in others for one in ids[40:])], False)
    yield Stage([one for file in files if file not in plain for one in of(file)], True)


def about() -> dict[str, str]:
    commit = subprocess.run(["git", "log", "-1", "--format=%H", "--", "src"], cwd=ROOT, capture_output=True, text=True)
    return {
        "code": commit.stdout.strip(), "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.machine(), "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def write(path: Path, table: dict[str, Any]) -> None:
    found = table["mutants"].values()
    table["killed"] = sum(one["ended"] in ("failed", "hung") for one in found)
    table["survivors"] = [name for name, one in table["mutants"].items() if one["ended"] in ("passed", "unfinished")]
    table["not run"] = [mutant.name for mutant in MUTANTS if mutant.name not in table["mutants"]]
    new = path.with_suffix(".new")
    new.write_text(json.dumps(table, indent=1) + "\n")
    new.replace(path)


def check_killers(tree: Tree, table: dict[str, Any], patience: float) -> None:
    """Every test that noticed a mutant passes on the code as it is."""
    for interpreted in (False, True):
        some = {x["by"] for x in table["mutants"].values() if x["ended"] in ("failed", "hung")}
        ids = sorted(one for one in some if "::" in one and ("_cases.py" in one) == interpreted)
        if ids:
            ended, by, _ = tree.run(ids, interpreted, 3600, patience)
            if ended != "passed":
                raise RuntimeError(f"{by} {ended} on the code as it is: it cannot tell that a mutant is wrong")
    table["killers pass on the code as it is"] = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these mutants alone, and again")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these test files instead of those in the table")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/mutants/after.json")
    parser.add_argument("--map", type=Path, help="which test reaches which line")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant")
    parser.add_argument("--patience", type=float, default=100, help="seconds without a word that are a hang")
    given = parser.parse_args()
    table = json.loads(given.out.read_text()) if given.out.exists() else {**about(), "mutants": {}}
    covered: Map = json.loads(given.map.read_text()) if given.map else {}
    order = sorted(
        MUTANTS, key=lambda mutant: random.Random(mutant.name).random()
    )  # so a part of the table is a sample
    unknown = set(given.only) - {mutant.name for mutant in MUTANTS}
    assert not unknown, f"no such mutants: {sorted(unknown)}"
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder).resolve())
        for file in {one.split("::")[0] for one in covered}:
            tree.collected[file] = _spread(one for one in covered if one.startswith(f"{file}::"))
        for mutant in order:
            wanted = mutant.name in given.only if given.only else mutant.name not in table["mutants"]
            if not wanted or (mutant.gpu and not torch.cuda.is_available()):
                continue
            seconds, count, ended, by = 0.0, 0, "passed", ""
            for stage in stages(mutant, given.tests or tests_of(mutant), tree, covered):
                if stage.ids and ended == "passed":
                    began = time.monotonic()
                    with tree.changed(mutant):
                        ended, by, ran = tree.run(*stage, given.limit - seconds, given.patience)
                    seconds, count = round(seconds + time.monotonic() - began, 1), count + ran
            found = {"breaks": mutant.breaks, "file": mutant.file, "ended": ended, "by": by}
            table["mutants"][mutant.name] = {**found, "tests": count, "seconds": seconds}
            table.pop("killers pass on the code as it is", None)
            write(given.out, table)
            print(f"{mutant.name:45} {ended:10} {by} ({count} tests, {seconds} s)", flush=True)
        check_killers(tree, table, given.patience)
        write(given.out, table)
    print(f"{table['killed']} killed, survivors: {table['survivors']}, not run: {table['not run']}")


if __name__ == "__main__":
    main()
