"""The list of small faults stays in step with the code: each can be put in, and the tests named for it are there."""

from __future__ import annotations

import json
from pathlib import Path

from tests.mutants import mutants
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).parents[1]


def test_every_mutant_can_be_put_in() -> None:
    found = {one.name: (ROOT / "src/dilated_attention" / one.file).read_text().count(one.old) for one in MUTANTS}
    assert found == {one.name: 1 for one in MUTANTS}
    assert len(found) == len(MUTANTS)


def test_what_is_recorded_of_mutants_is_of_this_code() -> None:
    """None dies of a name that is not there: its killer would not have noticed the fault."""
    found = json.loads((ROOT / "tests/mutants/after.json").read_text())["mutants"]
    assert not [name for name, one in found.items() if not (ROOT / "src/dilated_attention" / one["file"]).exists()]
    slips = ("NameError", "SyntaxError", "IndentationError", "ImportError", "UnboundLocalError")
    assert not [name for name, one in found.items() if any(slip in one.get("says", "") for slip in slips)]


def test_the_table_says_what_is_recorded() -> None:
    found = [json.loads((ROOT / f"tests/mutants/{name}.json").read_text())["mutants"] for name in ("before", "after")]

    def killer(one: dict[str, str] | None) -> str:
        if one is None or one["ended"] == "unfinished":
            return "–"
        return f"`{one['by'].partition('[')[0].removeprefix('tests/')}`" if one["by"] else "none"

    rows = [f"| {x.name}: {x.breaks} | {' | '.join(killer(one.get(x.name)) for one in found)} |" for x in MUTANTS]
    assert (ROOT / "tests/mutants/table.md").read_text().splitlines()[8:] == rows


def test_the_tests_named_for_a_mutant_are_there() -> None:
    for test in {test for one in MUTANTS for test in mutants.tests_of(one)}:
        file, _, function = test.removeprefix("interpreted:").partition("@")[0].partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text(), test
