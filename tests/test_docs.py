"""Every code block of the documentation is held to what the code does. What the fences mean:

python                            runs, in order, in one namespace a page, in the folder of its commands
python title="on 2 ranks"         runs on so many gloo ranks, with the tensors, modules and patterns made above it
python title="train.py"           a file in the folder where the page's commands run
console                           ``$ dilated-attention ...`` and ``$ torchrun ...`` run, and print what stands below
console title="in a terminal"  the programs, scripts, targets and options that it names are there
text                              what the block above printed; ``...`` stands for anything

There is no other fence and no indented code, so no block goes unread. API pages hold no code. The
examples in docstrings of the names on them, and of their methods, run on one rank, with the modules
that docs/api/index.md imports, and ``group``.
"""

from __future__ import annotations

import contextlib
import doctest
import hashlib
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import statistics
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn

import dilated_attention as da
from dilated_attention import DilatedPattern
from dilated_attention.bench.claims import conclusions
from dilated_attention.bench.page import page
from dilated_attention.bench.report import table
from dilated_attention.bench.suites import ALL
from dilated_attention.models.presets import slide_pattern
from dilated_attention.ranks import pool

API_MODULES = ("merge", "models", "reference", "testing")  # that examples on API pages use
ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?$')
NOT_RUN = "in a terminal"
TITLES = {"python": r"on \d ranks|\w+\.py", "console": re.escape(NOT_RUN), "text": r"(?!)"}


@dataclass(frozen=True)
class Block:
    """``code`` begins on line ``line`` of the page, counted from 0."""

    language: str
    title: str
    line: int
    code: str


def blocks_of(text: str) -> list[Block]:
    """All fenced blocks. Raises on code that nothing would run or check."""
    found: list[Block] = []
    opened: tuple[str, str] | None = None
    start, lines = 0, text.splitlines()
    for number, line in enumerate(lines, 1):
        if opened is not None:
            if line == "```":
                found.append(Block(*opened, start, "\n".join(lines[start : number - 1]) + "\n"))
                opened = None
        elif fence := FENCE.match(line):
            language, title = fence[1], fence[2] or ""
            known = language in TITLES and (not title or re.fullmatch(TITLES[language], title))
            assert known, f"line {number}: nothing runs or checks {line}"
            opened, start = (language, title), number
        else:
            assert not re.match(r"\s*(```|~~~)", line), f"line {number}: a fence that is not read: {line}"
            assert not re.match(r"( {4}|\t)", line), f"line {number}: indented code, which nothing runs: {line}"
    assert opened is None, f"line {start}: a fence that is never closed"
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    if page.parent.name != "api":
        assert blocks, f"{page.name} shows no code"
    check(blocks, page.name, tmp_path)


def check(blocks: list[Block], page: str, folder: Path) -> None:
    """Run a page from top to bottom."""
    names: dict[str, Any] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks:
        if block.language == "text":
            assert printed is not None, f"{page}, line {block.line}: nothing above has printed this"
            assert_printed(block.code, printed, f"{page}, line {block.line}")
        elif block.language == "console":
            printed = run_console(block, folder, page)
        elif block.title.endswith(".py"):
            (folder / block.title).write_text(block.code, encoding="utf-8")
            printed = None
        elif block.title:
            printed = run_on_ranks(block, page, names)
        else:
            with contextlib.chdir(folder):
                printed = run_python(block, page, names)


def compiled(block: Block, page: str) -> CodeType:
    """Line numbers are those of the page."""
    return compile("\n" * block.line + block.code, page, "exec")


def run_python(block: Block, page: str, names: dict[str, Any]) -> str:
    """What the block printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
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


API_PAGES = "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/api").glob("*.md")))
ON_API_PAGES = re.findall(r"^::: (dilated_attention\.\S+)$", API_PAGES, re.MULTILINE)


def documented(path: str) -> Iterator[tuple[str, str]]:
    """The docstrings of a name and of its methods, by their paths."""
    value = pkgutil.resolve_name(path)
    yield path, value.__doc__ or ""
    for name, one in vars(value).items() if isinstance(value, type) else ():
        if isinstance(one, FunctionType | classmethod | staticmethod | property) and not name.startswith("_"):
            yield f"{path}.{name}", one.__doc__ or ""


def wrong_examples(paths: list[str]) -> dict[str, str]:
    """For every public name whose docstring has no example, or whose examples or those of its methods fail: why."""
    wrong = {}
    names = {name: importlib.import_module(f"dilated_attention.{name}") for name in API_MODULES}
    for name, text in [found for path in paths for found in documented(path)]:
        said = io.StringIO()
        given = {"torch": torch, "da": da, "group": dist.group.WORLD if dist.is_initialized() else None, **names}
        examples = doctest.DocTestParser().get_doctest(text, given, name, None, None)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        with warnings.catch_warnings():
            failed = runner.run(examples, out=said.write).failed
        if failed or (name.rpartition(".")[2] in da.__all__ and not examples.examples):
            wrong[name] = said.getvalue() or "no example"
    return wrong


def test_examples_on_the_api_pages_run() -> None:
    """With a single rank."""
    assert {f"dilated_attention.{name}" for name in da.__all__} <= {*ON_API_PAGES}
    assert pool(1).run(wrong_examples, ON_API_PAGES) == [{}]


def test_examples_find_the_imports_that_the_api_page_names() -> None:
    [line] = re.findall(r"`from dilated_attention import ([\w, ]+)`", (ROOT / "docs/api/index.md").read_text())
    assert line == ", ".join(API_MODULES)


@pytest.mark.parametrize("name", da.__all__)
def test_a_docstring_opens_with_one_sentence(name: str) -> None:
    first, *rest = (getattr(da, name).__doc__ or "").splitlines()
    assert first.endswith(".")
    assert ". " not in first
    assert not rest or not rest[0]


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
            check_command(words)
            continue
        said = run_torchrun(words, folder) if words[0] == "torchrun" else run_ours(words, folder)
        if output.strip():
            assert_printed(output, said, f"{page}: {' '.join(words)}")
    return said


def run_ours(words: list[str], folder: Path) -> str:
    """A command of this package, in this process."""
    from dilated_attention.cli import main

    assert words[0] == "dilated-attention", f"only commands of this package run here, got {words[0]}"
    raw = io.BytesIO()
    said = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
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


def check_command(words: list[str]) -> None:
    """Raise unless what the command names is there."""
    while re.match(r"\w+=", words[0]):  # NAME=value in front of it
        words = words[1:]
    program, *arguments = words
    known = {
        "make": check_make,
        "pip": check_pip,
        "torchrun": check_torchrun,
        "python": check_python,
        "dilated-attention": check_ours,
    }
    assert program in known, f"no check for {program}"
    known[program](arguments)


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    wanted = [word for word in arguments if "=" not in word]
    assert wanted, "make without a target"
    assert set(wanted) <= set(targets), f"the Makefile has no {set(wanted) - set(targets)}"


def check_pip(arguments: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for word in arguments[1:]:
        wanted = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        assert wanted, f"pip installs this package from its folder here, got {word}"
        assert set((wanted[1] or "").split(",")) <= {"", *extras}, f"no such extra: {word}"


def check_torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(arguments)
    script = ROOT / options.training_script
    if options.training_script == "train.py":  # the reader's
        return
    assert script.is_file(), f"there is no {options.training_script}"
    source = script.read_text(encoding="utf-8")
    for word in options.training_script_args:
        assert not word.startswith("--") or f'add_argument("{word}"' in source, f"{script.name} has no option {word}"


def check_python(arguments: list[str]) -> None:
    """A script of this project, as for torchrun."""
    check_torchrun(arguments)


def check_ours(arguments: list[str]) -> None:
    """Typer reads the options as in a run, and stops there."""
    import typer

    from dilated_attention.cli.app import app

    command, *rest = arguments
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert command in commands, f"dilated-attention has no command {command}"
    commands[command].make_context(command, rest)


# --- what this file would notice --------------------------------------------------------------------------------

ESCAPES = {
    "```\nx\n```": "nothing runs or checks",
    "```sh\nls\n```": "nothing runs or checks",
    '```python title="later"\nx\n```': "nothing runs or checks",
    "``` python\nx\n```": "not read",
    "- a list\n\n  ```python\n  x\n  ```": "not read",
    "~~~python\nx\n~~~": "not read",
    "text\n\n    x = 1": "indented",
    "```python\nx": "never closed",
}
WRONG = {
    "```python\nraise AssertionError('a fault')\n```": "a fault",
    "```python\nprint(1)\n```\n```text\n2\n```": r"says\s+2",
    "```python\nprint(1)\n```\n```text\n...\n```": "says nothing",
    "```text\n2\n```": "nothing above",
    "```console\nls\n```": "begin with",
    "```console\n$ ls\n```": "only commands of this package",
    "```console\n$ dilated-attention suggest -n 64q\n```": "ended with 2",
    "```console\n$ dilated-attention --version\nversion\n```": r"says\s+version",
}
NOT_THERE = {
    "ls": "no check for ls",
    "make fog": "no {'fog'}",
    "pip install .[fog]": "no such extra",
    "pip install torch": "from its folder",
    "torchrun --fog 1 train.py": "2",
    "torchrun benchmarks/fog.py": "there is no",
    "torchrun benchmarks/ring.py --fog": "no option --fog",
    "dilated-attention fog": "no command fog",
    "dilated-attention plan -n 1M -w 2k -r 1 --fog": "--fog",
}


@pytest.mark.parametrize("text", ESCAPES)
def test_no_block_escapes(text: str) -> None:
    with pytest.raises(AssertionError, match=ESCAPES[text]):
        blocks_of(text)


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_block_fails(text: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=WRONG[text]):
        check(blocks_of(text), "page.md", tmp_path)


@pytest.mark.parametrize("command", NOT_THERE)
def test_a_command_that_names_what_is_not_there_fails(command: str) -> None:
    from dilated_attention.cli.app import USAGE_ERROR

    with pytest.raises((AssertionError, SystemExit, USAGE_ERROR)) as caught:
        check_command(command.split())
    assert NOT_THERE[command] in str(getattr(caught.value, "message", caught.value))


# --- the README -------------------------------------------------------------------------------------------------


def test_readme_is_short_and_its_map_true() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    table = text[text.index("| in `src/dilated_attention/`") : text.index("| Where is")]
    listed = {
        name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([\w./]+)`", cell)
    }
    source = ROOT / "src/dilated_attention"
    there = {p.name for p in source.glob("*.py") if p.name != "__init__.py"}
    there |= {f"{p.name}/" for p in source.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert listed == there


def places(page: Path) -> list[tuple[str, str]]:
    """All `file::name` of a page."""
    return re.findall(r"`([\w/]+)\.py::([\w.]+)`", page.read_text(encoding="utf-8"))


def test_what_the_readme_places_is_there() -> None:
    found = places(ROOT / "README.md")
    assert len(found) >= 16
    for file, name in found:
        if "triton" in file and importlib.util.find_spec("triton") is None:
            continue
        thing = importlib.import_module(f"dilated_attention.{file.replace('/', '.')}")
        for part in name.split("."):
            thing = getattr(thing, part)


def test_the_words_of_the_design_are_names_of_the_code() -> None:
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    table = text[text.index("| word |") : text.index("## How do I add")]
    words = [
        word for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", cell)
    ]
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "src").rglob("*.py"))
    assert len(words) <= 25
    for word in words:
        assert re.search(rf"^class {word}\b", source, re.MULTILINE), word


@pytest.mark.parametrize(
    ("results", "page"),
    [
        ("h200/results.json", "docs/benchmark.md"),
        ("cpu/results.json", "docs/benchmark.md"),
        ("kernels/results.json", "docs/benchmark.md"),
        ("ring.json", "docs/scaling.md"),
    ],
)
def test_the_figures_shown_are_those_that_were_measured(results: str, page: str) -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/table.py"))
    printed = script["page_table"](json.loads((ROOT / "benchmarks/results" / results).read_text(encoding="utf-8")))
    assert printed in (ROOT / page).read_text(encoding="utf-8"), "paste what benchmarks/table.py prints"


def test_what_is_said_of_kernels_is_what_was_measured() -> None:
    found = json.loads((ROOT / "benchmarks/results/kernels/results.json").read_text(encoding="utf-8"))
    tables = {one["title"]: one["rows"] for one in found["tables"]}
    pages = {name: " ".join((ROOT / f"docs/{name}.md").read_text("utf-8").split()) for name in ("backends", "faq")}
    short = {(row[0], row[1]): row[3] for row in tables["Short calls"]}
    ways = ("eager", "eager, autograd without its thread", "CUDA graph", "default", "reduce-overhead")
    eager, alone, graph, default, reduced = (short["head_groups, auto", way] for way in ways)
    assert (
        f"took {eager:.2f} ms without `torch.compile`, {alone:.2f} ms with the backward pass on the calling thread, "
        f"and {graph:.2f} ms as a CUDA graph" in pages["backends"]
    )
    assert f"took {default:.2f} ms in the default mode and {reduced:.2f} ms with" in pages["backends"]
    block = {(row[0], row[1]): row[2] for row in tables["A transformer block"]}
    (eager, default, reduced), (slow, plain, graph) = (
        [block[name, mode] for mode in ("eager", "default", "reduce-overhead")]
        for name in ("longnet, auto", "dense SDPA")
    )
    assert f"| without `torch.compile` | {eager:.1f} ms | {slow:.1f} ms |" in pages["faq"]
    assert f"| default mode | {default:.1f} ms | {plain:.1f} ms |" in pages["faq"]
    assert f'| `mode="reduce-overhead"` | {reduced:.1f} ms | {graph:.1f} ms |' in pages["faq"]
    assert found["machine"]["commit"] in pages["faq"]


def test_what_is_said_of_one_branch_is_what_was_measured() -> None:
    """Beside the dense kernel, in the cases that are long enough."""
    found = json.loads((ROOT / "benchmarks/results/kernels/results.json").read_text(encoding="utf-8"))
    times = {
        (x["implementation"], x["heads"], x["direction"]): x["ms"]["median"]
        for x in found["measurements"] if x["samples"] > 4 and not x["causal"]
    }  # fmt: skip
    ratios = [times["head_groups, auto", *case] / dense for (name, *case), dense in times.items() if "dense" in name]
    told = f"of cases A and B, `auto` takes {min(ratios):.3f} to {max(ratios):.3f} times as long as cuDNN."
    assert len(ratios) == 4
    assert told in " ".join((ROOT / "docs/benchmark.md").read_text(encoding="utf-8").split())


def test_the_speed_that_is_claimed_is_what_was_measured() -> None:
    """In README and "When should I use this?", at two digits."""
    found = json.loads((ROOT / "benchmarks/results/h200/results.json").read_text(encoding="utf-8"))
    times = {
        (x["implementation"], x["tokens"], x["direction"]): x["ms"]
        for x in found["measurements"]
        if x["suite"] == "scaling" and x["ms"] and not x["causal"] and x["lengths"] == [1024, 2048, 4096]
        and (x["dtype"], x["samples"], x["heads"]) == ("bfloat16", 1, 8)
    }  # fmt: skip
    readme, when, shown = (
        " ".join((ROOT / name).read_text(encoding="utf-8").split())
        for name in ("README.md", "docs/when.md", "docs/benchmark.md")
    )

    def median(name: str, tokens: int, way: str = "forward_backward") -> float:
        return float(times[name, tokens, way]["median"])

    one, every = (
        float(f"{median('dense SDPA', 1 << 18) / median(f'{rule}, auto', 1 << 18):.2g}")
        for rule in ("head_groups", "longnet")
    )
    assert f"dense attention takes [about {one:.0f} times](docs/when.md) as long" in readme
    assert f"and {every:.0f} times if every head runs all" in readme
    assert f"took about {one:.0f} times as long as this library under `head_groups`" in when
    assert f"and about {every:.0f} times as long as under `longnet`" in when
    copies = min(median(f"copy and gather, {way}", 1 << 20) for way in ("slicing", "index_select"))
    assert round(copies / median("head_groups, auto", 1 << 20)) == 2, "README says twice as fast"
    (flex, flex_both), (ours, both) = (
        [median(name, 8192, way) for way in ("forward", "forward_backward")]
        for name in ("FlexAttention", "head_groups, auto")
    )
    assert f"FlexAttention takes {flex:.1f} ms forward, {flex_both:.1f} ms with backward" in readme
    spread = times["head_groups, auto", 8192, "forward_backward"]
    half = (spread["upper"] - spread["lower"]) / 2
    assert f"this library takes {ours:.2f} and {both:.2f} ± {half:.2f} ms" in readme
    assert f"{flex:.2f} / {flex_both:.2f} ms" in shown
    assert f"were between {spread['lower']:.2f} and {spread['upper']:.2f} ms" in shown
    for rule in ("head_groups", "longnet", "torchscale"):
        faster = [median(f"{rule}, auto", n) < median("dense SDPA", n) for n in (2048, 4096, 8192, 16384, 32768)]
        assert faster == [False, False, True, True, True], "as docs/when.md says"


@pytest.mark.parametrize("machine", ["h200", "cpu"])
def test_the_pages_shown_are_of_the_results_beside_them(machine: str) -> None:
    folder = ROOT / "benchmarks/results" / machine
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert results["complete"]
    assert {**results, **conclusions(results)} == results, f"run: dilated-attention report --conclude {folder}"
    assert results["suites"] == ALL
    shown = (folder / "index.html").read_text(encoding="utf-8")
    assert shown == page(results), f"run: dilated-attention report {folder.relative_to(ROOT)}"
    assert (folder / "results.csv").read_text(encoding="utf-8") == table(results["measurements"])


def test_the_pictures_of_the_report_are_of_the_results_that_are_committed() -> None:
    measured = hashlib.sha256((ROOT / "benchmarks/results/h200/results.json").read_bytes()).hexdigest()
    names = re.findall(r'<img src="(images/[^"]+)"', (ROOT / "docs/benchmark.md").read_text(encoding="utf-8"))
    assert names
    for name in names:
        with Image.open(ROOT / "docs" / name) as picture:
            assert picture.text["results"] == measured, "run: benchmarks/screenshots.py"  # type: ignore[attr-defined]


def test_the_figures_of_streaming_and_decoding_are_the_measured_ones() -> None:
    found = json.loads((ROOT / "benchmarks/results/decode-stream/results.json").read_text(encoding="utf-8"))
    steps, calls, (plain, causal) = (table["rows"] for table in found["tables"])
    page = " ".join((ROOT / "docs/streaming.md").read_text(encoding="utf-8").split())
    assert f"took {plain[3]:.1f} s, and {causal[3]:.1f} s causal: {plain[4]:.0f} and {causal[4]:.0f} million" in page
    assert (
        f"was {max(plain[6], causal[6]):.1f} GiB. All {plain[7] + causal[7]} rows that were checked were right" in page
    )
    assert all(check["verdict"] == "exact" for check in found["checks"])
    told = " ".join((ROOT / "docs/operation.md").read_text(encoding="utf-8").split())
    assert f"takes {statistics.median(row[3] for row in steps):.1f} µs of kernel time" in told
    assert f"and {calls[0][1]:.0f} µs as a call" in told
    assert all(f"commit {found['machine']['commit'][:7]}" in text for text in (page, told))


def test_the_page_of_language_models_has_what_was_measured() -> None:
    page = (ROOT / "docs/language-models.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/language/results.json").read_text(encoding="utf-8"))
    far = json.loads((ROOT / "benchmarks/results/language-512k/results.json").read_text(encoding="utf-8"))
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    training = [*tables["A training step"], *far["tables"][0]["rows"]]  # of the same row, the last one counts
    measured = {("125M", row[0], row[1]): [*row[3:5], 100 * row[5]] for row in training}
    for x in tables["A training step of a larger model"]:
        measured["0.6B", x[0], x[1].replace("0.6B", "longnet")] = [*x[3:5], 100 * x[5]]
    lines = [row.split("|")[1:-1] for row in page.splitlines() if re.match(r"\| `(125M|0.6B)` \| \d+,\d", row)]
    said = {}
    for size, tokens, longnet, dense, peaks, used in lines:
        cells = (("longnet", longnet, 0), ("dense SDPA", dense, 0), ("longnet", used, 2), ("longnet", peaks, 1))
        for name, cell, column in cells:
            for way, number in zip((name, f"{name}, compiled"), cell.split("/"), strict=True):
                said[size.strip(" `"), int(tokens.replace(",", "")), way, column] = number.strip().replace(",", "")
    for (size, tokens, way, column), number in said.items():
        row = measured.pop((size, tokens, way), None) if column == 1 else measured.get((size, tokens, way))
        limits = {"rel": 0.005, "abs": 0.5 if column == 2 else 0.05}
        assert number == "–" if row is None else float(number) == pytest.approx(row[column], **limits)
    graphs = [
        measured.pop(("125M", 8192, f"{name}, compiled, in a CUDA graph"))[0] for name in ("longnet", "dense SDPA")
    ]
    assert all("dense" in way for _, _, way in measured)
    text = " ".join(page.split())
    assert (
        "{:,.0f} tokens per second with LongNet, and {:,.0f} with dense".format(*(round(x, -3) for x in graphs)) in text
    )
    assert all(f"commit {one['machine']['commit'][:7]}" in text for one in (found, far))
    (_, _, fast, *_), (_, _, slow, *_) = far["tables"][0]["rows"]
    assert f"it takes {slow / fast:.0f} times as long: {slow:.1f} s and {fast:.2f} s" in text
    seconds = {(row[0], row[1]): row[2] for rows in tables.values() for row in rows if len(row) > 3}
    slower = seconds[131072, "dense SDPA, compiled"] / seconds[131072, "longnet, compiled"]
    assert f"takes {slower:.1f} times as long as one with LongNet" in text
    assert f"on 1,048,576 tokens takes {seconds[1 << 20, '0.6B, compiled']:.1f} s." in text
    (short, slow), (far, fast) = ((row[0], row[2]) for row in tables["Generation"])
    told = f"{slow:.0f} tokens per second after a prompt of {short:,} tokens, and {fast:.0f} after {far:,}"
    assert told in text


def test_the_page_of_digit_slides_has_what_was_measured() -> None:
    page = (ROOT / "docs/digit-slides.md").read_text(encoding="utf-8")
    small, large = (
        json.loads((ROOT / f"benchmarks/results/tasks/digit-slides-{form}.json").read_text(encoding="utf-8"))
        for form in ("small", "large")
    )
    [few, few_weights, mean], (*lines, weights) = small["printed"], large["printed"]
    for told, name in (([mean, *large["mean"]["printed"]], "mean of the tiles"), ([few, *lines], "slide encoder")):
        scores = " | ".join(re.findall(r"AUC ([\d.]+)", line)[0] for line in told)
        assert re.search(rf"^\| {name} [^|]*\| {re.escape(scores)} \|$", page, re.MULTILINE)
    seconds = [re.findall(r"trained in ([0-9]+) s", line)[0] for line in (few, lines[0])]
    told = f"trained in {seconds[0]} s on one CPU thread, the one for up to 10,000 tiles in {seconds[1]} s"
    assert told in " ".join(page.split())
    for tiles, shares, nines in (("500", few_weights, 1.2), ("10,000", weights, 0.06)):
        layers = [", ".join(f"{100 * one:.0f}" for one in heads) for heads in json.loads(shares.partition(": ")[2])]
        assert f"| {tiles} tiles | {layers[0]} % | {layers[1]} % | {nines} % |" in page


def test_the_page_of_slides_has_what_was_measured() -> None:
    page = (ROOT / "docs/slides.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/slides/results.json").read_text(encoding="utf-8"))
    assert f"commit {found['machine']['commit']}" in page
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    cells = [row.split("|")[1:-1] for row in page.splitlines() if re.match(r"\| [\d,]+ \|", row)]
    said = {int(row[0].replace(",", "")): " / ".join(row[1:]).split("/") for row in cells}
    ways = ("this library", "released way")
    for tiles, numbers in said.items():
        attention = {row[2]: row[3:6] for row in tables["Attention of slides"] if row[:2] == [48, tiles]}
        model = {
            row[2]: row[3:5] for row in tables["Whole slide encoders, forward"] if row[1] == tiles and "768" in row[0]
        }
        both = {way: [*attention[way], *model[way]] for way in ways}
        measured = [both[way][column] for column in range(5) for way in ways]
        for number, exact in zip(map(str.strip, numbers), measured, strict=True):
            assert number == ("–" if exact is None else f"{exact:.{len(number.partition('.')[2])}f}")
    assert len(said) == 4
    cpu = json.loads((ROOT / "benchmarks/results/slides-cpu/results.json").read_text(encoding="utf-8"))
    assert f"commit {cpu['machine']['commit']}" in page
    whole = next(table["rows"] for table in cpu["tables"] if table["title"] == "Whole slide encoders, forward")
    (mine, *_), (theirs, *_) = ([row[3:5] for row in whole if row[1:3] == [10_000, way]] for way in ways)
    told = " ".join(page.split())
    assert f"takes {mine[0] / 1000:.1f} s and {mine[1]:.2f} GiB for 10,000 tiles" in told
    assert f"the released way takes {theirs[0] / 1000:.1f} s and {theirs[1]:.2f} GiB" in told
    # of 12 layers; 4 operations for each pair and channel
    text, most = told, max(said)
    attention = next(row[3] for row in tables["Attention of slides"] if row[:3] == [48, most, ways[0]])
    encoder = next(
        row[3] for row in tables["Whole slide encoders, forward"] if row[1:3] == [most, ways[0]] and "768" in row[0]
    )
    assert f"attention takes {1200 * attention / encoder:.0f} % of the encoder's time" in text
    rate = 4 * 48 * slide_pattern().pairs(most + 1, 16) / attention / 1e9
    assert f"computes {round(rate, -1):.0f} TFLOP/s" in text
    for _, _, *figures in tables["A fine-tuning step and a rollout"]:
        for milliseconds, gib in (figures[:2], figures[2:]):
            assert f"{milliseconds:.0f} ms and {gib:.1f} GiB" in " ".join(page.split())


def test_recipes_have_what_was_measured_of_packed_sequences() -> None:
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "benchmarks/results/packed/results.json").read_text(encoding="utf-8"))
    assert f"commit {found['machine']['commit']}" in page
    rows = found["tables"][0]["rows"]  # slides, then documents
    said = [row.split("|")[2:-1] for row in page.splitlines() if re.search(r"\| [\d,]{7,} \|", row)]
    for row, measured in zip(said, rows[2:] + rows[:2], strict=True):
        for cell, number in zip(map(str.strip, row), measured[2:6], strict=True):
            assert cell == ("" if number is None else f"{number:,.{len(cell.partition('.')[2])}f}")


def test_pages_have_what_a_first_call_took() -> None:
    page, other = (
        " ".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8").split()) for name in ("faq", "backends")
    )
    found = json.loads((ROOT / "benchmarks/results/first-call.json").read_text(encoding="utf-8"))["seconds"]
    seconds = [one for some in found.values() for one in some]
    assert f"the first forward and backward of a call took {min(seconds):.1f} to {max(seconds):.1f} s" in page
    assert f"that took {min(seconds):.1f} to {max(seconds):.1f} s" in other
