"""Every code block of the documentation is held to what the code does. What the fences mean:

python                            runs, in order, in one namespace a page, in the folder of its commands
python title="on 2 ranks"         runs on so many gloo ranks, with the tensors, modules and patterns made above it
python title="train.py"           a file in the folder where the page's commands run
console                           ``$ dilated-attention ...`` and ``$ torchrun ...`` run, and print what stands below
console title="in a terminal"     the programs, scripts, targets and options that it names are there
text                              what the block above printed; ``...`` stands for anything

There is no other fence and no indented code, so no block goes unread. API pages hold no code. The examples in
docstrings of the names on them, and of their methods, run on one rank, with the modules that docs/api/index.md imports,
and ``group``.

A comment ``<!-- benchmarks/results/FILE.json: WORDS -->`` is an f-string over what the file holds. Its value must be on
the page.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.run import get_args_parser

import dilated_attention as da
from dilated_attention import DilatedPattern
from dilated_attention.cli import main
from dilated_attention.cli.app import parsers
from dilated_attention.ranks import pool

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TEXTS = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in PAGES}
FENCED = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
NOT_RUN = "in a terminal"
TITLES = {"python": r"on \d ranks|\w+\.py", "console": re.escape(NOT_RUN), "text": r"(?!)"}
API_MODULES = ("merge", "models", "reference", "testing")  # that examples on API pages use


@dataclass(frozen=True)
class Block:
    """``code`` begins on line ``line`` of the page, counted from 0."""

    language: str
    title: str
    line: int
    code: str


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks. Raises on code that nothing would run or check."""
    blocks = [Block(x[1], x[2] or "", 1 + text[: x.start()].count("\n"), x[3]) for x in FENCED.finditer(text)]
    for block in blocks:
        known = block.language in TITLES and (not block.title or re.fullmatch(TITLES[block.language], block.title))
        assert known, f"line {block.line}: nothing runs or checks {block}"
    rest = re.sub(r"^(::: .*)(?:\n {4}.*)+", r"\1", FENCED.sub("", text), flags=re.MULTILINE)  # options of an API page
    unread = re.findall(r"^(?: *(?:```|~~~)| {4}|\t).*", rest, re.MULTILINE)
    assert not unread, f"code that is not read: {unread}"
    return blocks


@pytest.mark.parametrize("name", TEXTS)
def test_code_blocks(name: str, tmp_path: Path) -> None:
    """Run from top to bottom."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks_of(TEXTS[name]):
        if block.language == "text":
            assert_printed(block.code, printed, f"{name}, line {block.line}")
        elif block.language == "console":
            printed = run_console(block, tmp_path, name)
        elif block.title.endswith(".py"):
            (tmp_path / block.title).write_text(block.code, encoding="utf-8")
        elif block.title:
            printed = run_on_ranks(block, name, names)
        else:
            with contextlib.chdir(tmp_path):
                printed = run_python(block, name, names)


def compiled(block: Block, page: str) -> CodeType:
    """Line numbers are those of the page."""
    return compile("\n" * block.line + block.code, page, "exec")


def run_python(block: Block, page: str, names: dict[str, Any]) -> str:
    """What the block printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compiled(block, page), names)
    return said.getvalue()


def run_on_ranks(block: Block, page: str, names: dict[str, Any]) -> str:
    """What the first rank printed."""
    used = {name: names[name] for name in compiled(block, page).co_names if name in names}
    modules = {name: value.__name__ for name, value in used.items() if isinstance(value, ModuleType)}
    values = {name: value for name, value in used.items() if isinstance(value, Tensor | nn.Module | DilatedPattern)}
    first: str = pool(int(block.title.split()[1])).run(run_on_rank, block, page, modules, values)[0]
    return first


def run_on_rank(block: Block, page: str, modules: dict[str, str], values: dict[str, Any]) -> str:
    imported = {name: importlib.import_module(module) for name, module in modules.items()}
    return run_python(block, page, {"__name__": "__main__", **imported, **values})


def assert_printed(wanted: str, got: str, where: str) -> None:
    wanted, got = ("".join(f"{line.rstrip()}\n" for line in text.strip().splitlines()) for text in (wanted, got))
    assert wanted.replace("...", "").strip(), f"{where} says nothing"
    same = doctest.OutputChecker().check_output(wanted, got, doctest.ELLIPSIS)
    assert same, f"{where} says\n{wanted}but this was printed\n{got}"


# --- docstrings -------------------------------------------------------------------------------------------------

ON_API_PAGES = [
    path
    for name, text in TEXTS.items()
    if name.startswith("docs/api")
    for path in re.findall(r"^::: (dilated_attention\.\S+)$", text, re.MULTILINE)
]


def wrong_examples(paths: list[str]) -> dict[str, str]:
    """For every public name whose docstring has no example, or whose examples or those of its methods fail: why."""
    wrong, finder = {}, doctest.DocTestFinder(exclude_empty=False)
    given = {name: importlib.import_module(f"dilated_attention.{name}") for name in API_MODULES}
    given |= {"torch": torch, "da": da, "group": dist.group.WORLD}  # type: ignore[dict-item]
    for test in [test for path in paths for test in finder.find(pkgutil.resolve_name(path), path, False, given)]:
        said = io.StringIO()
        with warnings.catch_warnings():
            failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.write).failed
        if failed or (test.name.rpartition(".")[2] in da.__all__ and not test.examples):
            wrong[test.name] = said.getvalue() or "no example"
    return wrong


def test_examples_on_the_api_pages_run() -> None:
    [line] = re.findall(r"`from dilated_attention import ([\w, ]+)`", " ".join(TEXTS["docs/api/index.md"].split()))
    assert line == ", ".join(API_MODULES)
    inherited = ["dilated_attention.shown.Shown"]  # by Pattern
    assert pool(1).run(wrong_examples, [*ON_API_PAGES, *inherited]) == [{}]


# --- commands ---------------------------------------------------------------------------------------------------


def commands_of(block: Block) -> Iterator[tuple[list[str], str]]:
    """Each command, and what the page shows of its output. A backslash at the end of a line goes on in the next."""
    first, *parts = re.split(r"^\$ ", block.code.replace("\\\n", " "), flags=re.MULTILINE)
    assert not first.strip(), f"line {block.line}: commands begin with $, got {first}"
    for part in parts:
        line, _, output = part.partition("\n")
        yield shlex.split(re.sub(r"\$[A-Z_]+", "1", line), comments=True), output


def run_console(block: Block, folder: Path, page: str) -> str:
    said = ""
    for words, output in commands_of(block):
        if block.title == NOT_RUN:
            assert not output, f"{page}, line {block.line}: output of a command that is not run: {output}"
            check_command(*words)
            continue
        said = run_torchrun(words, folder) if words[0] == "torchrun" else run_ours(words, folder)
        if output.strip():
            assert_printed(output, said, f"{page}: {' '.join(words)}")
    return said


def run_ours(words: list[str], folder: Path) -> str:
    """A command of this package, in this process."""
    assert words[0] == "dilated-attention", f"only commands of this package run here, got {words[0]}"
    said = io.TextIOWrapper(raw := io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(said):
        code = main(words[1:])
    printed = raw.getvalue().decode()
    assert code == 0, f"{' '.join(words)} ended with {code}:\n{printed}"
    return printed


def run_torchrun(words: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words[1:]],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_command(program: str, *words: str) -> None:
    """Raise unless what the command names is there."""
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), words
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        extra = re.fullmatch(r"\.(?:\[(\w+)\])?", words[1])  # of this package, from its folder
        assert extra, words
        assert extra[1] in {None, *project["optional-dependencies"]}
    elif program == "dilated-attention":
        for command, *given in map(shlex.split, shlex.join(words).split(" '|' dilated-attention ")):
            parsers()[command].parse_intermixed_args(given)  # reads the options as in a run, and stops there
    else:
        assert program in ("python", "torchrun")
        options = get_args_parser().parse_args(words)
        if options.training_script != "train.py":  # the reader's
            source = (ROOT / options.training_script).read_text(encoding="utf-8")
            if "common.parser(" in source:
                source += (ROOT / "benchmarks/common.py").read_text(encoding="utf-8")
            for word in options.training_script_args:
                assert not word.startswith("--") or f'("{word}"' in source or f'number("{word[2:]}"' in source, word


# --- what pages say of the code and of measurements -------------------------------------------------------------


def test_the_map_of_the_code_is_true() -> None:
    """It names every file and folder of the package, and each `file::name` of the page is there."""
    text = TEXTS["docs/design.md"]
    source = ROOT / "src/dilated_attention"
    listed = {*re.findall(r"`(\w+(?:\.py|/))`", text[text.index("## Map") : text.index("## Where")])}
    there = {file.name + "/" * file.is_dir() for file in source.iterdir() if not file.name.startswith("__")}
    assert listed == there - {"py.typed"}
    for file, name in re.findall(r"`([\w/]+)\.py::([\w.]+)`", text):
        if "triton" not in file or importlib.util.find_spec("triton") is not None:
            pkgutil.resolve_name(f"dilated_attention.{file.replace('/', '.')}:{name}")


FIGURES = [
    (name, *figure)
    for name, text in TEXTS.items()
    for figure in re.findall(r"<!-- (benchmarks/results/\S+\.json): (.*?) -->", text, re.DOTALL)
]


@pytest.mark.parametrize(("name", "file", "words"), FIGURES, ids=[f"{one[0]} {one[1]}" for one in FIGURES])
def test_the_figures_shown_are_those_that_were_measured(name: str, file: str, words: str) -> None:
    results = json.loads((ROOT / file).read_text(encoding="utf-8"))
    made = runpy.run_path(str(ROOT / "benchmarks/table.py"))["page_table"]
    told = eval(f"f'''{words}'''", {**results, "results": results, "page_table": made, "median": median})
    shown = re.sub(r"<!--.*?-->", "", TEXTS[name], flags=re.DOTALL)
    assert " ".join(told.split()) in " ".join(shown.split())
