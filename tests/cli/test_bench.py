"""`bench` and `report`: what is kept whatever happens, what is printed, and the exit code."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from dilated_attention.bench import suites
from dilated_attention.bench.conclude import conclusions
from dilated_attention.cli.bench import print_results
from dilated_attention.cli.output import watching

Results = dict[str, Any]
Act = Callable[[Any, Results], None]  # with the function that saves results, and what it should save


@pytest.fixture
def bench(run: Any, no_pictures: None, monkeypatch: pytest.MonkeyPatch, results: Results, tmp_path: Path) -> Any:
    """The command line, with ``act`` instead of a run. Its ``calls`` are the arguments of those."""
    calls: list[dict[str, Any]] = []

    def command(*options: object, act: Act = lambda save, found: save(found)) -> Any:
        def measure(names: Any, device: Any, dtypes: Any = None, *, save: Any, watch: Any, **more: Any) -> None:
            calls.append({"suites": names, "device": device, "dtypes": dtypes, **more})
            watch("measuring", 0.5)
            act(save, results)

        monkeypatch.setattr(suites, "run", measure)
        return run("bench", "--device", "cpu", "--out", tmp_path, *options)

    command.calls = calls  # type: ignore[attr-defined]
    return command


def written(folder: Path) -> Results:
    found: Results = json.loads((folder / "results.json").read_text())
    return found


def test_a_run(bench: Any, results: Results, tmp_path: Path) -> None:
    code, out, err = bench("--out", tmp_path / "new")
    assert code == 0, err
    assert "[50%] measuring\n" in err
    assert bench.calls == [
        {"suites": ["quick"], "device": torch.device("cpu"), "dtypes": None, "seconds": None, "commit": None}
    ]
    assert written(tmp_path / "new") == results
    assert (tmp_path / "new" / "index.html").is_file()
    for said in ("CPU 9000", "0.90 / 2.7", "It is fast.", "results.json", "index.html"):
        assert said in out
    ran = bench("--out", tmp_path / "new", "--json")
    assert json.loads(ran.out) == results
    assert f"written: {tmp_path / 'new/index.html'}" in ran.err


def test_the_help_names_every_suite(run: Any) -> None:
    listed = run("bench", "-h").out.partition("Suites:\n")[2].partition("\n\n")[0]
    assert sorted(line.split()[0] for line in listed.splitlines()) == sorted(suites.SUITES)
    assert "the six from copies to optimisations" in listed
    assert (len(suites.ALL), suites.ALL[0], suites.ALL[-1]) == (6, "copies", "optimisations")


def test_with_pytorch_alone_it_still_measures(tmp_path: Path) -> None:
    """Results.json is written, and a report can be made elsewhere."""
    code = (
        "import sys\nfor name in ('rich', 'altair', 'jinja2'): sys.modules[name] = None\n"
        "from dilated_attention.bench import suites\nfrom dilated_attention.cli import main\n"
        "suites.run = lambda names, *_, save, **more: save({'machine': dict(dirty=False, commit='abc', device='CPU', "
        "threads=1, load=0, versions={}), 'answer': ','.join(names), 'checks': [], 'measurements': []})\n"
        "code = main(sys.argv[1:])\nassert code == 0, code\n"
        "for wrong in (['--seconds', 'nan'], ['--out', '/dev/null/x'], ['--suite', 'fast']):\n"
        "    assert main(['bench', *wrong]) == 2\n"
    )
    line = f"bench --suite copies,ring --suite decode --out {tmp_path} --device cpu"
    done = subprocess.run([sys.executable, "-c", code, *line.split()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "copies,ring,decode" in done.stdout
    assert written(tmp_path)["answer"] == "copies,ring,decode"
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    for line, says in zip(told, ("--seconds: 'nan'", "/dev/null", "fast"), strict=True):
        assert says in line


def test_options_reach_the_run(bench: Any) -> None:
    line = ("--suite", "copies,ring", "--suite", "profile", "--dtype", "bf16,float32", "--seconds", "1.5")
    assert bench(*line, "--commit", "abc").code == 0
    assert bench.calls == [
        {"suites": ["copies", "ring", "profile"], "device": torch.device("cpu"),
         "dtypes": [torch.bfloat16, torch.float32], "seconds": 1.5, "commit": "abc"},
    ]  # fmt: skip


def test_a_second_run_keeps_the_first_and_says_what_changed(bench: Any, results: Results, tmp_path: Path) -> None:
    bench()
    before = (tmp_path / "results.json").read_bytes()
    results["machine"] |= {"too_busy": True, "others": 0.46, "load_max": 5.0}
    out = bench().out
    assert (tmp_path / "previous.json").read_bytes() == before
    assert "too busy to trust these times: other work took 46% of its cores" in out
    assert "compared with the run before" in out
    assert " same" in out
    assert out.rstrip().endswith("index.html")


@pytest.mark.parametrize("part", ["checks", "measurements"])
def test_one_of_ours_is_wrong(bench: Any, results: Results, part: str) -> None:
    one = next(x for x in results[part] if x["implementation"] == "longnet, auto")
    one |= {"verdict": "wrong", "status": "wrong"}
    ran = bench()
    assert ran.code == 1
    assert ("longnet, auto" in ran.out.partition("what is wrong has no time")[2]) == (part == "checks")


def test_interrupted(bench: Any, tmp_path: Path) -> None:
    """What there is was written, says so, and has its report."""

    def act(save: Any, results: Results) -> None:
        save({**results, "measurements": results["measurements"][:2], "complete": False})
        raise KeyboardInterrupt

    ran = bench(act=act)
    assert ran.code == 130
    assert len(written(tmp_path)["measurements"]) == 2
    assert "interrupted" in (tmp_path / "index.html").read_text()
    assert "The run was interrupted" in ran.out


def printed(results: Results, width: int = 160, **options: Any) -> str:
    screen = Console(file=io.StringIO(), width=width, highlight=False, markup=False, **options)
    print_results(screen, results)
    return screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "line",
    [
        r"quick: float32, B=1 H=8 D=64, w=256,1024 r=1,4",
        r"tokens +1,024 +2,048 +4,096 +8,192",
        r"longnet, auto +0\.90 / 2\.7 +1\.8 / 5\.4 +3\.6 / 10\.8 +7\.2 / 22",
        r" +4.00 / 8.00 +8.00 / 16.0 +16.0 / 32.0 +32.0 / 64.0",
        r"longnet, eager +3\.0 / 9\.0 +6\.0 / 18 +12\.0 / 36 +out of memory",
        r"gather-pad-scatter +2.0 / wrong .*",
        r".*longnet, eager: out of memory, 9 GiB wanted\.",
        r"index \[by mask\] +wrong +gradient of k: inf with a limit of 5.0e-06, float32 +The mask is shifted\.",
        r"steps: Splitting heads",
        r"einops +1,230 +yes",
        r"By reshape\.",
        r"training +.*DilatedPattern.head_groups\(w, r\)\) +1.2 ms +head_groups, sdpa +copy and gather, slicing, 2.*",
        r"It is fast\. All is right\.",
    ],
)
def test_lines(results: Results, line: str) -> None:
    text = printed(results)
    assert re.search(f"^{line} *$", text, re.MULTILINE), text
    assert "interrupted" not in text
    assert "interrupted" in printed({**results, "complete": False})


def test_what_cannot_run_here_and_what_was_not_measured_is_not_printed(results: Results) -> None:
    results["measurements"][0]["status"] = results["measurements"][1]["status"] = "skipped"
    assert re.search("^dense SDPA +– +4.0 / 12.0", printed(results), re.MULTILINE)
    empty = {name: [] if isinstance(value, list) else value for name, value in results.items()}
    assert printed({**empty, "answer": ""}).strip() == ""


def test_a_narrow_terminal_cuts_nothing(results: Results) -> None:
    text = printed(results, width=60, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in text
    assert "…" not in text
    assert "64.0" in "".join(part for part in text.split() if not part.startswith("\x1b"))


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv("TERM", "xterm")
    with watching() as watch:
        watch("checking [one]", 0.25, 52.0)
        watch("one: exact")  # what stays is drawn above the bar, and draws the bar again
    for said in ("checking [one]", "52 s left", "one: exact", f"m{5 * '━'}\x1b"):  # a quarter of the bar
        assert said in written.getvalue()


def test_a_report_beside_its_results(run: Any, results: Results, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(results))
    code, out, err = run("report", file)
    assert (code, err) == (0, "")
    assert "longnet, auto" in (tmp_path / "index.html").read_text(encoding="utf-8")
    assert {file.name for file in (tmp_path / "plots").iterdir()} >= {"time.svg", "time.png"}
    assert f"written: {tmp_path / 'index.html'}" in out
    assert json.loads(file.read_text()) == results


@pytest.mark.usefixtures("no_pictures")
def test_a_report_draws_conclusions_anew_when_asked(run: Any, results: Results, tmp_path: Path) -> None:
    file, page = tmp_path / "results.json", tmp_path / "a/b/index.html"
    file.write_text(json.dumps({**results, "answer": "An old answer."}))
    assert run("report", tmp_path, "--out", page.parent).code == 0
    assert "An old answer." in page.read_text(encoding="utf-8")
    assert {*tmp_path.iterdir()} == {tmp_path / "a", file}
    assert run("report", tmp_path, "--conclude").code == 0
    new = json.loads(file.read_text())
    assert {**new, **conclusions(new)} == new
    assert new["measurements"] == results["measurements"]
    assert "An old answer." not in new["answer"] + (tmp_path / "index.html").read_text(encoding="utf-8")


def test_a_report_without_what_draws_says_what_to_install(
    refused: Any, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results))
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    assert "a chart needs vl_convert, which is not installed: pip install" in refused("report", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]
