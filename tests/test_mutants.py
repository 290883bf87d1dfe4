"""The list of small faults stays in step with the code: each can be put in, and some test noticed it."""

from __future__ import annotations

import json

from tests.mutants import mutants
from tests.mutants.mutants import MUTANTS, RECORD, ROOT


def test_every_mutant_can_be_put_in() -> None:
    found = {x.name: (ROOT / "src/dilated_attention" / x.file).read_text("utf-8").count(x.old) for x in MUTANTS}
    assert found == {x.name: 1 for x in MUTANTS}
    assert len(found) == len(MUTANTS)


def test_every_mutant_was_noticed() -> None:
    """And none by a name that is not there: its killer would not have noticed the fault."""
    record = json.loads(RECORD.read_text("utf-8"))["mutants"]
    assert {x.name for x in MUTANTS if not x.gpu} <= record.keys() <= {x.name for x in MUTANTS}
    slips = ("NameError", "SyntaxError", "IndentationError", "ImportError", "UnboundLocalError")
    for name, one in record.items():
        assert one["by"], name
        assert not any(slip in one["says"] for slip in slips), name


def test_the_tests_named_for_a_mutant_are_there() -> None:
    for test in {test for x in MUTANTS for test in mutants.tests_of(x)}:
        file, _, function = test.removeprefix("interpreted:").partition("@")[0].partition("::")
        assert (ROOT / file).exists(), test
        assert not function or f"def {function}(" in (ROOT / file).read_text("utf-8"), test
