"""The list of small faults stays in step with the code: each can be put in, and the tests named for it are there."""

from __future__ import annotations

import json

from tests.mutants import mutants
from tests.mutants.mutants import AFTER, BEFORE, MUTANTS, ROOT, TABLE


def test_every_mutant_can_be_put_in() -> None:
    found = {x.name: (ROOT / "src/dilated_attention" / x.file).read_text("utf-8").count(x.old) for x in MUTANTS}
    assert found == {x.name: 1 for x in MUTANTS}
    assert len(found) == len(MUTANTS)


def test_every_mutant_that_was_noticed_is_noticed() -> None:
    """And none by a name that is not there: its killer would not have noticed the fault."""
    before, after = (json.loads(path.read_text("utf-8"))["mutants"] for path in (BEFORE, AFTER))
    slips = ("NameError", "SyntaxError", "IndentationError", "ImportError", "UnboundLocalError")
    assert not [name for name, one in after.items() if any(slip in one["says"] for slip in slips)]
    names = {x.name for x in MUTANTS}
    assert not [name for name, one in before.items() if name in names and one["by"] and not after[name]["by"]]
    assert {name for name, one in before.items() if one["by"]} <= names, "a mutant that was noticed is gone"


def test_the_table_says_what_is_recorded() -> None:
    assert TABLE.read_text("utf-8") == mutants.table_text()


def test_the_tests_named_for_a_mutant_are_there() -> None:
    for test in {test for x in MUTANTS for test in mutants.tests_of(x)}:
        file, _, function = test.removeprefix("interpreted:").partition("@")[0].partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text("utf-8"), test
