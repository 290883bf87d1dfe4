"""Mistakes that stay exact are told once, at the caller's line; what is meant is not."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import dilated_attention as da
from dilated_attention import testing

PATTERN = da.DilatedPattern.longnet([16, 64], [1, 4])
QKV = testing.make_qkv(2, 32, 4, 8)
HEADS_FIRST = testing.make_qkv(2, 4, 32, 8)
NO_KEYS = torch.ones(2, 32, dtype=torch.bool)


def said(function: Any) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", da.DilatedAttentionWarning)
        for _ in range(3):
            function()
    return [x for x in caught if x.category is da.DilatedAttentionWarning]


WRONG = {
    "swapped": (lambda: da.DilatedPattern.longnet([1, 2], [512, 1024]), "swapped: give the segment lengths first"),
    "swapped in a module": (lambda: da.MultiheadDilatedAttention(8, 2, [2, 4], [2, 8]), "lists are probably swapped"),
    "heads first": (lambda: da.dilated_attention(*HEADS_FIRST, PATTERN), r"pass query.transpose(1, 2)"),
    "heads first in a module": (lambda: da.DilatedAttention(pattern=PATTERN)(*HEADS_FIRST), "more heads than tokens"),
    "no keys": (lambda: da.dilated_attention(*QKV, PATTERN, key_padding_mask=NO_KEYS), "pass ~mask if True means keep"),
}
MEANT = {
    "a rate as long as one segment": lambda: da.DilatedPattern.longnet([4, 64], [4, 4]),
    "segments of one token": lambda: da.DilatedPattern.longnet([1, 1], [1, 1]),
    "short segments": lambda: da.dilated_attention(*HEADS_FIRST, da.DilatedPattern.longnet([2, 64], [1, 4])),
    "the first token": lambda: da.dilated_attention(*(x[:, :1] for x in QKV), PATTERN),
    "decoding": lambda: da.dilated_attention(QKV[0][:, :2], *QKV[1:], PATTERN),
    "one sample without keys": lambda: da.dilated_attention(*QKV, PATTERN, key_padding_mask=NO_KEYS.tril()),
    "explain": lambda: da.explain(*QKV, PATTERN, key_padding_mask=NO_KEYS),
    "no tokens": lambda: da.dilated_attention(*(x[:, :0] for x in QKV), PATTERN, key_padding_mask=NO_KEYS[:, :0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_probable_mistake_is_told_once_at_the_callers_line(name: str) -> None:
    function, text = WRONG[name]
    (one,) = said(function)
    assert text in str(one.message)
    assert Path(one.filename) == Path(__file__)


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_is_not_warned_of(name: str) -> None:
    assert not said(MEANT[name])


@pytest.mark.parametrize("options", [{}, {"key_padding_mask": NO_KEYS}], ids=["heads first", "no keys"])
def test_compiled_code_tells_nothing(options: dict[str, Any]) -> None:
    """Also not what the maker of the pattern was told, and did not want to hear."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", da.DilatedAttentionWarning)
        swapped = da.DilatedPattern.longnet([1, 2], [7, 9])
    for pattern in (PATTERN, swapped):
        attend = functools.partial(da.dilated_attention, pattern=pattern, **options)
        compiled = torch.compile(attend, fullgraph=True, backend="eager")
        assert not said(functools.partial(compiled, *(QKV if options else HEADS_FIRST)))
