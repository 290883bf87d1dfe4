"""A wrong implementation is caught, listed with its error, and gets no time; the command says so in its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dilated_attention import dilated_attention
from dilated_attention.bench import __main__ as command
from dilated_attention.bench import cases
from dilated_attention.bench.cases import DENSE, Implementation, Setting, Subject
from dilated_attention.bench.compare import FAR, Result, compare

SETTING = Setting(64, (16, 32, 64), (1, 2, 4), torch.device("cpu"), heads=3, head_dim=8)
Change = Callable[[Tensor], Tensor]


def changed(change: Change, lengths_seen: list[int] | None = None, only_at: int | None = None) -> Implementation:
    """Ours, with something done to its out; it writes down the lengths at which it was called."""

    def build(setting: Setting) -> Subject:
        subject = cases._ours("longnet", "sdpa", setting)

        def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if lengths_seen is not None:
                lengths_seen.append(query.shape[1])
            out = subject.attention(query, key, value)
            return change(out) if only_at in (None, query.shape[1]) else out

        return replace(subject, attention=attention)

    return Implementation("changed", build)


def one(implementation: Implementation, setting: Setting = SETTING) -> Result:
    (result,) = compare([implementation], setting, seconds=0.0)
    return result


@pytest.mark.parametrize(
    "change",
    [lambda out: out * 1.001, lambda out: out.roll(1, dims=1), lambda out: out / 0 * 0, lambda out: out[:, :-1]],
    ids=["scaled", "shifted", "nan", "short"],
)
def test_a_wrong_out_gets_no_time(change: Change) -> None:
    seen: list[int] = []
    padded = partial(_like_dout, change)
    result = one(changed(padded, seen))
    assert result.verdict == "wrong"
    assert result.forward is None
    assert result.forward_backward is None
    assert SETTING.tokens not in seen  # it never even ran at the length that is timed


def _like_dout(change: Change, out: Tensor) -> Tensor:
    """A change of shape would stop the backward: what is cut off comes back as zeros."""
    new = change(out)
    return torch.cat([new, torch.zeros_like(out[:, new.shape[1] :])], 1)


def test_wrong_gradients_get_no_backward_time() -> None:
    result = one(changed(lambda out: (out + out.detach()) / 2))
    assert result.verdict == "wrong gradients"
    assert result.forward is not None
    assert result.forward_backward is None
    assert result.check.gradient_error > 1e-2


def test_an_error_at_the_full_length_only_is_caught() -> None:
    result = one(changed(lambda out: out * 1.01, only_at=SETTING.tokens))
    assert result.check.verdict == "exact"
    assert result.verdict == FAR
    assert result.forward is None
    assert result.forward_backward is None


def test_what_is_exact_gets_both_times() -> None:
    result = one(changed(lambda out: out))
    assert result.verdict == "exact"
    assert result.forward is not None
    assert result.forward_backward is not None
    assert min(result.forward.median, result.forward_backward.median) > 0


def test_wrong_gradients_of_parameters_are_caught() -> None:
    def build(setting: Setting) -> Subject:
        subject = cases._multihead(cases.MultiheadDilatedAttention, setting)
        weight = subject.parameters["out_proj.weight"]
        return replace(subject, attention=lambda x: subject.attention(x) + weight.sum() - weight.sum().detach())

    result = one(Implementation("changed", build))
    assert result.verdict == "wrong gradients"
    assert result.check.right("out", "d x", "d q_proj.weight")


def test_all_implementations_but_the_released_way_are_exact() -> None:
    every = [i for i in cases.implementations() if "compiled" not in i.name]  # compiling takes long: see the next
    results = compare(every, SETTING, seconds=0.0)
    assert {r.name: r.verdict for r in results if r.verdict != "exact"} == {"gather-pad-scatter": "wrong gradients"}
    names = [i.name for i in cases.implementations()]
    assert len(set(names)) == len(names)
    assert names[0] == DENSE
    assert {"DilatedAttention", "ImprovedDilatedAttention"} < set(names)
    assert {"MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention"} < set(names)
    for rule in ("longnet", "torchscale", "head_groups"):
        for backend in ("eager", "sdpa"):
            assert {f"{rule}, {backend}", f"{rule}, {backend}, compiled"} < set(names)


def test_a_compiled_one_is_exact() -> None:
    by_name = {i.name: i for i in cases.implementations()}
    assert one(by_name["longnet, sdpa, compiled"]).verdict == "exact"


# --- the command ------------------------------------------------------------------------------------------------


def few(*more: Implementation) -> list[Implementation]:
    names = (DENSE, "head_groups, sdpa", "gather-pad-scatter")
    return [*(i for i in cases.implementations() if i.name in names), *more]


def run_command(which: list[Implementation], file: Path) -> int:
    return command.main(["--tokens", "128", "--seconds", "0", "--out", str(file)], which)


def test_the_command_writes_what_a_number_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "bench.json"
    assert run_command(few(), file) == 0  # a baseline may be wrong
    written = json.loads(file.read_text())
    assert {"date", "command", "commit", "dirty", "device", "cores", "load", "versions"} <= set(written["machine"])
    assert written["setting"]["tokens"] == 128
    assert written["setting"]["dtype"] == "torch.float32"
    by_name = {record["implementation"]: record for record in written["results"]}
    assert by_name[DENSE]["forward_x_dense"] == 1.0
    ours = by_name["head_groups, sdpa"]
    assert ours["verdict"] == "exact"
    assert ours["forward_backward"]["median"] > 0
    assert ours["tokens_per_s"] == pytest.approx(128 / ours["forward_backward"]["median"] * 1000)
    released = by_name["gather-pad-scatter"]
    assert released["verdict"] == "wrong gradients"
    assert released["forward_backward"] is None
    assert released["errors"]["d q"] > released["limits"]["d q"]
    shown = capsys.readouterr().out
    assert "wrong gradients" in shown
    assert written["machine"]["commit"][:12] in shown


def test_one_of_ours_being_wrong_is_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert run_command(few(changed(lambda out: out / 0)), file) == 1
    record = json.loads(file.read_text())["results"][-1]  # strict JSON: infinity is a string
    assert (record["implementation"], record["verdict"], record["errors"]["out"]) == ("changed", "wrong", "inf")
    assert record["forward"] is None
    assert "OURS changed: wrong" in capsys.readouterr().out


def test_a_length_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64, got 100"):
        Setting.of_tokens(100, torch.device("cpu"), torch.float32)


def test_ours_goes_through_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(cases, "dilated_attention", lambda *x, **o: seen.append(o) or dilated_attention(*x, **o))
    subject = cases._ours("longnet", "eager", SETTING)
    subject.attention(*subject.inputs)
    assert seen == [{"backend": "eager"}]
