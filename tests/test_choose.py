"""The choice between our kernels and the library's: what was measured, what is refused and in which words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from dilated_attention import Dense, Dilated, DilatedPattern, Pattern, Window
from dilated_attention.backends import choose, sdpa, triton
from dilated_attention.backends.triton import dispatch, nesting
from dilated_attention.backends.triton.dispatch import TileConfig
from dilated_attention.branches import Branch
from dilated_attention.call import Call
from dilated_attention.plan import plan
from tests import test_triton_gpu

CUDA = torch.device("cuda", 0)

FORMS = {  # what a call is measured as
    "dense": DilatedPattern.longnet([16], [1]),
    "": DilatedPattern.longnet([16], [2]),
    "apart": DilatedPattern.longnet([16, 40], [1, 2]),
    "nested": DilatedPattern.longnet([512, 1024], [1, 2]),
}


def call_for(rows: int = 8192, *, form: str = "nested", samples: int = 1, heads: int = 1, **given: Any) -> Call:
    """A call with so many rows in all."""
    tokens = rows // samples // heads
    sizes = {"samples": samples, "queries": tokens, "keys": tokens, "total": tokens, "heads": heads, "kv_heads": heads}
    plain = Call(FORMS[form], scale=0.1, head_dim=64, dtype=torch.bfloat16, device=CUDA, **sizes)
    return plain._replace(**given)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Say which compute capability the device has; no device is needed."""
    choose.choose.cache_clear()
    yield lambda *capability: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choose.choose.cache_clear()


@pytest.fixture
def h200(device: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INSTALLED", True)
    device(9, 0)


def give_table(monkeypatch: pytest.MonkeyPatch, **rows: Any) -> None:
    monkeypatch.setattr(dispatch, "measured", lambda: {"9.0": rows})


@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "changes", "expected"),
    [
        (1_000_001, 16, 48, {}, 2),  # 183 MiB a head
        (2**20, 12, 64, {}, 1),  # 256 MiB a head
        (1_000_001, 16, 24, {}, 4),  # 92 MiB a head: 3 would be enough, and leave 1 for the last launch
        (200_001, 16, 48, {}, 8),  # 37 MiB a head: 7 would be enough, and leave 2
        (2**17, 12, 64, {}, 8),  # 32 MiB a head: the other 4 are as many as half of them
        (2**13, 12, 64, {}, 12),
        (2**20, 12, 64, {"kv_heads": 4}, 1),
        (2**20, 12, 64, {"dtype": torch.float32}, 12),  # out itself is in float32
        (2**20, 12, 64, {"pattern": FORMS["nested"]}, 12),  # one launch
    ],
)
def test_heads_share_launches_until_they_fill_256_mib(
    tokens: int, heads: int, head_dim: int, changes: dict[str, Any], expected: int
) -> None:
    call = call_for(tokens * heads, form="apart", heads=heads, head_dim=head_dim, **changes)
    assert nesting.heads_at_once(call) == expected


# --- what is refused --------------------------------------------------------------------------------------------


REFUSED: list[tuple[dict[str, Any], str]] = [  # a call, and why: "" where it runs
    ({}, ""),
    ({"in_parts": True}, "whole calls on one device"),
    ({"memory_cap_id": 1}, "it takes calls whole, and a cap on memory asks for parts"),
    ({"dtype": torch.float64}, "float64"),
    ({"head_dim": 257}, "up to 256, not 257"),
    ({"device": torch.device("meta")}, "it runs on CUDA, not on meta"),
    ({"queries": 3, "dropout_p": 0.5}, "its decoding has no dropout"),
    ({"installed": False}, "triton is not installed"),
    ({"capability": (7, 5), "dtype": torch.float16, "head_dim": 256}, ""),
    ({"capability": (7, 5), "dtype": torch.float32, "head_dim": 128}, ""),
    # the shared memory of such a device is small
    ({"capability": (7, 5), "dtype": torch.float32, "head_dim": 129}, "head_dim over 128"),
    ({"capability": (7, 5), "dtype": torch.bfloat16}, "compute capability"),
    ({"capability": (7, 0), "dtype": torch.float16}, "compute capability"),
    ({"capability": (8, 0), "dtype": torch.bfloat16}, ""),
    ({"capability": (12, 0), "dtype": torch.bfloat16}, ""),
]


@pytest.mark.parametrize(("given", "words"), REFUSED)
def test_what_is_refused(h200: None, device: Any, monkeypatch: pytest.MonkeyPatch, given: Any, words: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given = dict(given)
    device(*given.pop("capability", (9, 0)))
    monkeypatch.setattr(dispatch, "INSTALLED", given.pop("installed", True))
    reasons = triton.unsupported(call_for(**given), False)
    assert len(reasons) == bool(words)
    if words:
        assert words in reasons[0]
        with pytest.raises(ValueError, match=f"backend 'triton' cannot run this call: .*{words}.* Use backend='auto'"):
            choose.choose(call_for(backend="triton", **given))


# --- what is preferred ------------------------------------------------------------------------------------------


TURING = {"dtype": torch.float16, "capability": (7, 5)}
PREFERENCES: list[tuple[dict[str, Any], Any, bool, str]] = [  # a call, from which rows the library is faster; and we
    ({"has_padding": True}, 1, True, "padding mask"),  # what the library does not take is ours
    ({"dropout_p": 0.5}, 1, True, "dropout"),
    ({"deterministic": True}, 1, True, "use_deterministic_algorithms"),
    ({"dtype": torch.float32}, None, False, "float32"),
    (TURING, None, False, "tensor cores"),
    ({**TURING, "has_padding": True}, None, True, "padding mask"),
    ({}, None, True, "at every length"),
    ({}, 1, False, "from 1 rows on"),
    ({}, 8192, False, "from 8,192 rows on"),
    ({}, 8193, True, "from 8,193 rows on"),
    ({"cu_seqlens": (0, 4096, 8192)}, 8192, True, "from 8,192 rows on"),  # they share a launch: the library has none
    ({"rows": 16384, "cu_seqlens": (0, 4096, 16384)}, 8192, False, "from 8,192 rows on"),
    ({"is_causal": True}, 1, True, "not measured"),
    ({"head_dim": 200}, 1, False, "not measured"),
    ({"device": torch.device("cpu")}, 1, True, "not measured"),  # in the interpreter, without compute capability
    ({}, "none", True, "not measured"),
    ({"form": ""}, "none", False, "not measured"),
    ({"head_dim": 65}, "none", False, "not measured"),  # tiles that fit everywhere are small for it
]


@pytest.mark.parametrize(("given", "first", "ours", "words"), PREFERENCES)
def test_every_preference_has_a_reason(
    h200: None, device: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], first: Any, ours: bool, words: str
) -> None:
    give_table(monkeypatch, library_from={} if first == "none" else {"forward 64 nested": first})
    assert "was not measured" in triton.preference(call_for(), True)[1]
    given = dict(given)
    device(*given.pop("capability", (9, 0)))
    preferred, reason = triton.preference(call_for(**given), False)
    assert preferred is ours
    assert words in reason
    assert len(reason.split()) > 4


MEASURED_FROM: list[tuple[Any, ...]] = [  # the table, form, head dim; rows that are found
    ({"forward 64": None, "forward 64 dense": 4096, "forward 64 apart": 4096}, "dense", 64, 4096),
    ({"forward 64": None, "forward 64 dense": 4096, "forward 64 apart": 4096}, "", 64, 0),
    ({"forward 64": 7}, "dense", 64, 7),  # what holds for several branches in one launch
    ({"forward 64": 7}, "nested", 64, None),
    ({"forward 64": 7}, "apart", 24, 7),  # nor was a smaller head dim measured
    ({"forward 64": 7}, "apart", 80, None),
    ({"forward 128": 7, "forward 48": 9}, "dense", 80, 7),
    ({"forward 128": 7, "forward 48": 9}, "dense", 40, 9),  # its own comes first
    ({"forward 64 apart": None, "forward 64 apart thin": 9}, "apart thin", 64, 9),
    ({"forward 64 apart": None, "forward 64 apart thin": 9}, "apart thin", 48, 0),  # another head dim is no guide to it
    ({"forward 64 apart": 9}, "apart thin", 64, 9),
    ({"forward 64 apart thin": 9}, "apart", 64, None),
]


@pytest.mark.parametrize(("table", "form", "head_dim", "expected"), MEASURED_FROM)
def test_what_was_not_measured_has_what_holds_for_others(
    h200: None, monkeypatch: pytest.MonkeyPatch, table: dict[str, Any], form: str, head_dim: int, expected: int | None
) -> None:
    give_table(monkeypatch, library_from=table)
    assert dispatch.torch_faster_from(call_for(head_dim=head_dim), form, False) == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    {"longnet": ("dense", "", "apart", "nested"), "torchscale": ("dense", "", "apart", "apart"),
     "head_groups": ("dense", "", "", "")}.items(),
)  # fmt: skip
def test_what_a_call_is_measured_as(rule: str, expected: tuple[str, ...]) -> None:
    patterns = (((16,), (1,)), ((16,), (2,)), ((16, 40), (1, 2)), ((512, 1024), (1, 2)))
    for (lengths, rates), form in zip(patterns, expected, strict=True):
        asked = call_for(pattern=DilatedPattern(rule, lengths, rates))
        assert dispatch.form_of(asked, alone=False) == form
        # each branch draws anew
        assert dispatch.form_of(asked, alone=True) == ("apart" if form == "nested" else form)
    few, more = (DilatedPattern(rule, (w, 2 * w, 4 * w), (1, 2, 4)) for w in (1024, 2048))  # 1,792 keys a row; 3,584
    assert dispatch.measured_as(call_for(pattern=more)) == ("apart" if rule == "torchscale" else form)
    assert dispatch.measured_as(call_for(pattern=few)) == ("apart thin" if rule == "torchscale" else form)


@pytest.mark.parametrize(
    ("branches", "form"),
    [
        ([Dense()], "dense"), ([Dilated(4096)], "dense"), ([Dilated(4096, 2)], "band"), ([Dense(heads=[0])], "dense"),
        ([Dense(), Dense()], "band"), ([Window(99)], "band"),
    ],
)  # fmt: skip
def test_patterns_that_are_dense_problems_run_where_these_are_fastest(
    h200: None, monkeypatch: pytest.MonkeyPatch, branches: list[Any], form: str
) -> None:
    """Of other patterns that are no DilatedPattern torch's kernels take none."""
    give_table(monkeypatch, library_from={"forward 64 dense": 1, "backward 64 dense": 1})
    for is_backward in (False, True):
        asked = call_for(pattern=Pattern(branches))
        assert dispatch.form_of(asked, alone=True) == dispatch.measured_as(asked) == form
        assert triton.preference(asked, is_backward)[0] == (form == "band")


@pytest.mark.parametrize("branch", [Dense(), Dense(heads=[1]), Dilated(24, 2), Dilated(9), Window(3)])
def test_a_pattern_without_masks_may_have_kernels_that_take_none(
    h200: None, monkeypatch: pytest.MonkeyPatch, branch: Branch
) -> None:
    """A dense layer once ran on the slowest of torch's kernels, the only one that takes masks."""
    monkeypatch.setattr(sdpa, "_refusals", lambda *_: [])
    asked = call_for(40, pattern=Pattern([branch]), heads=2)
    takes_masks = isinstance(branch, Window)
    assert [x.takes_bias for x in sdpa.kernels(asked, False)] == ([True] if takes_masks else [False, False, True])
    parts = [
        asked._replace(start=a, queries=b, key_start=c, keys=d)
        for a, b, c, d in ((0, 20, 0, 20), (19, 1, 0, 20), (7, 5, 0, 20), (7, 5, 0, 7), (7, 5, 7, 5), (3, 9, 6, 14))
    ]
    calls = [one._replace(is_causal=is_causal) for one in parts for is_causal in (False, True)]
    packed = asked._replace(cu_seqlens=(0, 6, 20))
    assert any(block.has_mask for one in (*calls, packed) for block in plan(one).blocks) == takes_masks


def test_every_measured_tile_is_tested() -> None:
    """And has a name that is looked for: one with a slip of the pen would never be found."""
    for capability, found in dispatch.measured().items():
        tested = {
            config
            for tiles in test_triton_gpu.make_tiles()
            if tiles.capability == capability
            for config in tiles.configs
        }
        assert {TileConfig(*numbers) for numbers in found["tiles"].values()} <= tested
        sizes = tuple(itertools.product(dispatch.SMALL, (False, True)))
        kinds = itertools.product(dispatch.KERNELS, sizes, test_triton_gpu.FORMS)
        assert set(found["tiles"]) <= {dispatch.key(kernel, *size, *form) for kernel, size, form in kinds}
        ways = itertools.product(("forward", "backward"), sizes, (*FORMS, "apart thin"))
        assert set(found["library_from"]) <= {dispatch.key(way, *size, form) for way, size, form in ways}


def test_auto_follows_the_table(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_reasons", lambda kernel, request: [])
    give_table(monkeypatch, library_from={"forward 64 nested": 8192, "backward 64 nested": None}, tiles={})
    rows = {4096: "triton", 8191: "triton", 8192: "sdpa", 8193: "sdpa"}
    assert choose.choose(call_for(8192, samples=4)).name == "sdpa"  # as many in all
    assert choose.choose(call_for(8192, heads=4)).name == "sdpa"  # so are these
    for count, name in rows.items():
        asked = call_for(count)
        assert choose.choose(asked).name == name
        assert choose.choose(asked._replace(backend="triton")).name == "triton"  # one asked for by name runs
        assert choose.choose(asked, backward=True).name == "triton"
    asked = call_for()
    told = choose.why_not(choose.choose(asked), asked)
    assert told["triton"][0].startswith("it could run, but sdpa")
    for given in ({"in_parts": True}, {"dtype": torch.float64}, {"head_dim": 300}):
        assert choose.choose(call_for(**given)).name == "sdpa"


# --- tiles ------------------------------------------------------------------------------------------------------


def test_the_tile_of_a_call(h200: None, device: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    tiles = {"dq 64 causal": [64, 64, 4, 3], "dq 64 causal short": [32, 64, 4, 2], "dq 64 nested": [128, 64, 8, 2],
             "dq 64 causal dense": [128, 64, 4, 3], "forward 64 nested": [16, 32, 4, 3]}  # fmt: skip
    give_table(monkeypatch, tiles=tiles)

    def tile(form: str = "", short: bool = False, **given: Any) -> TileConfig:
        asked = call_for(8192 if short else dispatch.FEW_ROWS, **{"head_dim": 56, "is_causal": True, **given})
        return dispatch.config("dq", asked, form)

    assert tile() == TileConfig(64, 64, 4, 3)
    assert tile(short=True) == TileConfig(32, 64, 4, 2)
    assert tile("nested", short=True, is_causal=False) == TileConfig(128, 64, 8, 2)  # no short ones were measured
    assert tile("dense") == TileConfig(128, 64, 4, 3)
    assert tile("dense", short=True) == TileConfig(32, 64, 4, 2)
    assert tile("band", short=True) == TileConfig(32, 64, 4, 2)
    tiles["dq 64 causal band"] = [128, 32, 8, 2]
    assert tile("band", short=True) == TileConfig(128, 32, 8, 2)
    assert tile("apart") == TileConfig(64, 64, 4, 3)  # nor those of one branch a launch
    assert tile("nested") == dispatch.DEFAULTS["dq", 64]
    assert tile(head_dim=65) == dispatch.DEFAULTS["dq", 96]
    assert tile(dtype=torch.float32) == dispatch.WITHOUT_TENSOR_CORES[64]
    assert tile(device=torch.device("cpu")) == dispatch.SMALL[64]
    assert triton.kernels(call_for(), False) == ("tiles of 16 queries x 32 keys",)  # which explain() tells
    for capability, expected in (((8, 6), dispatch.DEFAULTS["dq", 64]), ((7, 5), dispatch.SMALL[64])):
        device(*capability)
        assert tile() == expected
