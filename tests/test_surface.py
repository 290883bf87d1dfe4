"""What the package shows and what it pulls in: its names, its imports in a fresh process, its layers."""

from __future__ import annotations

import ast
import functools
import graphlib
import math
import operator
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dilated_attention
from dilated_attention import compat

PACKAGE = Path(dilated_attention.__file__).parent
ROOT = Path(__file__).parents[1]
NAME = "dilated_attention"

PUBLIC = [
    "Blocks", "CommunicationError", "ContextParallel", "Dense", "Dilated", "DilatedAttention",
    "DilatedAttentionWarning", "DilatedPattern", "Explanation", "Global", "MultiheadDilatedAttention", "Pattern",
    "Prefix", "RingDilatedAttention", "RingMultiheadDilatedAttention", "Strided", "Window", "attention_mass",
    "dilated_attention", "explain", "gather_sequence", "global_mean", "global_mean_for_ddp", "local_positions",
    "naming_lost_ranks", "plan_cost", "shard_sequence", "stream",
]  # fmt: skip

# A module imports only what stands before it. A new module takes its place here.
LAYERS = [
    "units", "checks", "branches", "shown", "pattern", "dropout", "merge", "call", "blocks", "bands", "plan",
    "backends", "autograd", "distributed", "context_parallel", "resolve", "ring", "functional", "streaming",
    "reference", "testing", "ranks", "nn", "compat", "show", "models", "slides", "integrations",
    "advice", "bench", "cli", "__main__",
]  # fmt: skip

OPTIONAL = [
    "altair", "vl_convert", "jinja2", "rich", "selenium", "transformers", "safetensors",
    "huggingface_hub", "peft", "h5py", "triton", "pytest", "hypothesis",
]  # fmt: skip


def test_the_public_names_are_these_and_only_they_are_shown() -> None:
    assert sorted(dilated_attention.__all__) == dir(dilated_attention) == PUBLIC
    for name in PUBLIC:
        found = getattr(dilated_attention, name)
        assert found.__module__.startswith(NAME)
        assert found.__doc__, name
    assert dilated_attention.__version__
    assert (PACKAGE / "py.typed").is_file(), "types are shipped"


def test_the_old_names_still_import() -> None:
    """Those of compat: in no list of names, and the same objects."""
    for name in compat.__all__:
        assert getattr(dilated_attention, name) is getattr(compat, name)
        assert name not in {*PUBLIC, *dilated_attention.nn.__all__}
    assert len(compat.__all__) == 7


# --- imports in a fresh process ---------------------------------------------------------------------------------


def fresh_process(code: str) -> str:
    path = os.pathsep.join(filter(None, [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_brings_in_nothing_optional_and_changes_no_setting_of_torch() -> None:
    """Beyond what `import torch` itself brings in."""
    code = f"""
import sys, torch, warnings
def settings():
    return (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.initial_seed(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cudnn.allow_tf32, len(warnings.filters))
torch.manual_seed(0)
before, state, modules = settings(), torch.get_rng_state(), set(sys.modules)
import {NAME}
assert settings() == before, (before, settings())
assert torch.equal(state, torch.get_rng_state())
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - modules}}))
"""
    new = set(fresh_process(code).split())
    assert NAME in new
    assert not new.intersection(OPTIONAL)
    outside = {name for name in new if name not in sys.stdlib_module_names} - {NAME, "torch"}
    assert outside <= {"numpy"}, f"imports {outside}"


def test_it_works_where_nothing_optional_is_installed() -> None:
    code = f"""
import sys, torch
for name in {OPTIONAL!r}:
    if name not in sys.modules:
        sys.modules[name] = None
from {NAME} import DilatedPattern, testing
testing.check(testing.make_qkv(2, 20, 4, 8), DilatedPattern.torchscale([8, 16], [1, 3]))
"""
    fresh_process(code)


# --- layers -----------------------------------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    """Dotted name without the package's to file, e.g. backends.sdpa; the package itself is ''."""
    files = {file.relative_to(PACKAGE).with_suffix("").parts: file for file in sorted(PACKAGE.rglob("*.py"))}
    return {".".join(parts[: -1 if parts[-1] == "__init__" else None]): file for parts, file in files.items()}


# Where methods open the tools above their file: `DilatedPattern.suggest` and `plot`.
DOORS = {"pattern": ("suggest", "plot")}


def imports_of(module: str, file: Path, known: set[str]) -> set[str]:
    """The modules of this package that a file imports, wherever in the file but in its DOORS, and however written."""
    names: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    doors = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name in DOORS.get(module, ())]
    for node in {*ast.walk(tree)}.difference(*map(ast.walk, doors)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name.partition(".")[2] in known else str(node.module) for name in inside}
    return known & {name.partition(".")[2] for name in names if name.partition(".")[0] == NAME}


@functools.cache
def graph() -> dict[str, set[str]]:
    files = modules()
    return {module: imports_of(module, file, set(files)) for module, file in files.items()}


def test_there_are_no_circles() -> None:
    assert "backends.sdpa" in graph()["backends.choose"]
    # a package's __init__ may import its own modules, and those name the package only by importing from it
    graphlib.TopologicalSorter(graph()).prepare()


def test_a_module_imports_only_what_is_above_it() -> None:
    # the package itself stands behind nn
    places = {layer: at for at, layer in enumerate(LAYERS)} | {"": LAYERS.index("nn") + 0.5}
    for module, others in graph().items():
        layer = module.split(".")[0]
        assert layer in places, f"{layer} has no place in the order of modules"
        below = {x for x in others if x.split(".")[0] != layer and places[x.split(".")[0]] >= places[layer]}
        assert not module or not below, f"{module} imports {below}"


WALLS = {  # what may not import what
    # a backend is named in its folder only, and in tools
    r"(?!backends|slides|show|advice|bench|cli|ranks|__main__)": r"backends\.(triton|sdpa|eager|aten)",
    # what computes dense problems knows nothing of patterns
    r"backends\.(problem|aten|sdpa|eager)$": r"(pattern|blocks|plan)$",
    r"distributed": r"(?!distributed)",
    # the oracle shares no code with what it checks, but the definitions
    r"reference$": r"(?!(pattern|dropout|branches)$)",
}


@pytest.mark.parametrize(("these", "those"), WALLS.items())
def test_walls(these: str, those: str) -> None:
    inside = {module: others for module, others in graph().items() if re.match(these, module)}
    assert inside
    assert not {module: bad for module, others in inside.items() if (bad := {x for x in others if re.match(those, x)})}


# --- sizes ------------------------------------------------------------------------------------------------------

PARTS = {
    **dict.fromkeys(("models", "integrations", "slides"), "top"),
    **dict.fromkeys(("bench", "cli", "show", "advice", "ranks"), "tools"),
    **{"tests": "tests", "benchmarks": "benchmarks_examples", "examples": "benchmarks_examples"},
    **{"docs": "docs", "CONTRIBUTING": "docs", "README": "readme"},
}
NOT_YET = {"core": [10_937, 60_331]}  # larger than their budget, and no larger than this


def nodes(text: str) -> int:
    """Of the syntax tree: unlike lines, long lines do not hide them."""
    return sum(not isinstance(node, ast.Constant | ast.Load | ast.Store) for node in ast.walk(ast.parse(text)))


def test_each_part_keeps_its_budget() -> None:
    """[tool.budget] of pyproject.toml."""
    budget = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["budget"]
    found = {part: [0, 0] for part in budget}  # lines; nodes of Python, words of pages
    code = [file for folder in ("src", "tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    for file in [*code, ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        text, place = file.read_text(encoding="utf-8"), file.relative_to(ROOT).parts
        total = found[PARTS.get(place[2 if place[0] == "src" else 0].partition(".")[0], "core")]
        total[0] += text.count("\n")
        total[1] += nodes(text) if file.suffix == ".py" else len(text.split())
    most = {
        **budget,
        "benchmarks_examples": [budget["benchmarks_examples"], math.inf],
        "docs": [math.inf, budget["docs"]],
    }
    too_large = {part for part in most if any(map(operator.gt, found[part], most[part]))}
    assert too_large == NOT_YET.keys(), found
    assert not any(any(map(operator.gt, found[part], NOT_YET[part])) for part in NOT_YET), found
