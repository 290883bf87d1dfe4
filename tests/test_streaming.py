"""stream() against the whole, for any pattern and cuts; what it holds and copies, when it answers, what it refuses."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dilated_attention as da
from dilated_attention import DilatedPattern, reference, testing
from tests.cases import Recorder

Chunk = tuple[Tensor, Tensor, Tensor]

NESTED = ((4, 8, 16), (1, 2, 4))
STRADDLING = ((5, 7, 12), (1, 2, 3))
PATTERNS = {"nested": NESTED, "straddling": STRADDLING, "rates do not divide": ((8, 16), (3, 5)), "one": ((10,), (3,))}
BOTH = pytest.mark.parametrize("is_causal", [False, True])
TWO = pytest.mark.parametrize(
    "pattern", [DilatedPattern.longnet(*NESTED), DilatedPattern.longnet(*STRADDLING)], ids=repr
)
CUTS = {
    "one by one": [1] * 53,
    "primes": [2, 3, 5, 7, 11, 13, 12],
    "with empty ones": [0, 0, 16, 0, 20, 0, 0, 17, 0, 0],
    "across periods": [17, 33, 3],
}


def cut(qkv: Iterable[Tensor], lengths: list[int]) -> list[Chunk]:
    q, k, v = (x.split(lengths, 1) for x in qkv)
    return list(zip(q, k, v, strict=True))


# --- the numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, False, False, True)], ids=str)
@pytest.mark.parametrize("cuts", CUTS)
@TWO
@BOTH
def test_chunks_are_taken_in_any_mode(is_causal: bool, pattern: DilatedPattern, cuts: str, modes: Any) -> None:
    """What is held from chunk to chunk may not be an inference tensor: it could not be written to outside that mode."""
    qkv = testing.make_qkv(2, 53, 6, 4, dtype=torch.float64)
    chunks = ([x.clone() for x in chunk] for chunk in cut(qkv, CUTS[cuts]))  # made in the mode of the moment
    outputs, outs = da.stream(chunks, pattern, is_causal=is_causal), []
    for _, turn in zip(CUTS[cuts], itertools.cycle(modes), strict=False):
        with torch.inference_mode(turn):
            outs.append(next(outputs))
    assert next(outputs, None) is None
    expected, _ = reference.attention(*qkv, pattern, is_causal=is_causal)
    assert testing.error(torch.cat([x.clone() for x in outs], 1), expected) <= 1e-12


@BOTH
def test_autocast_is_that_of_the_whole(is_causal: bool) -> None:
    qkv, pattern = testing.make_qkv(1, 40, 3, 8), DilatedPattern.torchscale(*STRADDLING)
    with torch.autocast("cpu", torch.bfloat16):
        whole = da.dilated_attention(*qkv, pattern, is_causal=is_causal)
        got = torch.cat(list(da.stream(cut(qkv, [13, 27]), pattern, is_causal=is_causal)), 1)
    assert got.dtype is whole.dtype is torch.bfloat16
    assert testing.error(got, whole) < 2**-7


# --- what is held -----------------------------------------------------------------------------------------------


def bytes_of_new_tensors() -> int:
    """Of every storage that Python can reach and that was made since gc.freeze()."""
    found = (x.untyped_storage() for x in gc.get_objects() if type(x) is Tensor)
    return sum({x.data_ptr(): x.nbytes() for x in found}.values())


def held_while_streaming(pattern: DilatedPattern, chunk: int, count: int, **options: Any) -> list[int]:
    """Bytes that are there whenever a chunk is asked for, outputs being dropped at once."""
    held = []

    def chunks() -> Iterator[Chunk]:
        for index in range(count):
            held.append(bytes_of_new_tensors())
            yield testing.make_qkv(1, chunk, 3, 8, seed=index)

    gc.collect()
    gc.freeze()
    try:
        outputs = da.stream(chunks(), pattern, **options)
        assert [next(outputs).shape[1] for _ in range(count)] == [chunk] * count
    finally:
        gc.unfreeze()
    return held


ROW = 3 * 8 * 4  # bytes of one token in q, k or v: H = 3, D = 8, float32
WAITING = (128 * 3 + 2 * (50 + 64)) * ROW
NUMBERS = 5000  # about the branches and the slots, for each size that the room has had
FAR = 2 * ROW * (16 + 7 * 30 // 64 + 1)
longnet, torchscale = DilatedPattern.longnet, DilatedPattern.torchscale
HELD: dict[str, tuple[DilatedPattern, int, int, dict[str, Any], int, int]] = {  # chunks, options, least and most bytes
    # q, k, v, and one chunk's output that is not yet complete
    "the longest segment": (longnet([16, 32, 128], [1, 2, 4]), 7, 50, {}, 120 * 3 * ROW, (128 * 3 + 7) * ROW),
    # and rows that later tokens see
    "straddling": (
        torchscale([16, 50, 128], [1, 2, 4]), 7, 50, {}, 120 * 3 * ROW, (135 * 3 + 2 * (16 + 25 + 32)) * ROW + NUMBERS
    ),
    # its period, 3200 tokens here, may be far longer than a segment; outputs that are not yet complete
    "not a long chunk": (
        longnet([50, 128], [1, 2]), 1000, 5, {"max_bytes": WAITING}, 1, WAITING + 2000 * ROW + NUMBERS
    ),
    "nothing of whole periods": (longnet([32, 64], [1, 2]), 128, 5, {}, 0, 0),
    "nothing of whole causal periods": (longnet([32, 64], [1, 2]), 128, 5, {"is_causal": True}, 0, 0),
    "causal: dilated rows alone": (
        longnet([16, 128], [1, 4]), 7, 40, {"is_causal": True}, 2 * ROW * 40, 2 * ROW * (16 + 128 // 4) + NUMBERS
    ),
    # of which 1 / 64 is kept; a limit that those keep; room is doubled when there is need
    "a million tokens": (
        longnet([16, 2**20], [1, 64]), 7, 30, {"is_causal": True, "max_bytes": FAR, "num_tokens": 210}, 1, 2 * FAR
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_what_is_held(name: str) -> None:
    pattern, chunk, count, options, least, most = HELD[name]
    assert least <= max(held_while_streaming(pattern, chunk, count, **options)) <= most


@BOTH
@TWO
def test_chunks_are_let_go_at_once_and_may_be_overwritten(pattern: DilatedPattern, is_causal: bool) -> None:
    lengths, alive, outs = (7, 5, 5, 16, 15, 3, 40, 2, 1), list[weakref.ref[Tensor]](), list[Tensor]()
    qkv = testing.make_qkv(1, sum(lengths), 3, 8, dtype=torch.float64)

    def chunks() -> Iterator[Chunk]:
        for chunk in cut(qkv, [*lengths]):
            assert torch.is_grad_enabled()  # modes are those of the consumer
            assert not any(ref() is not None for ref in alive), "the chunk before is still there"
            copies = [x.clone() for x in chunk]
            alive.extend(map(weakref.ref, copies))
            yield tuple(copies)
            assert all(map(torch.equal, copies, chunk)), "a chunk is written to"
            for x in copies:
                x.fill_(torch.nan)
            del copies, x

    for out in da.stream(chunks(), pattern, is_causal=is_causal):
        assert torch.is_grad_enabled()
        assert not out.requires_grad
        assert out.untyped_storage().nbytes() == out.numel() * out.itemsize, "an output holds more than itself"
        outs.append(out)
    assert testing.error(torch.cat(outs, 1), reference.attention(*qkv, pattern, is_causal=is_causal)[0]) < 1e-12


# --- what is copied ---------------------------------------------------------------------------------------------


def calls(outputs: Iterator[Tensor]) -> list[tuple[str, list[int]]]:
    """The operators that the next output takes, and where their first tensors lie."""
    with Recorder() as recorder:
        next(outputs)
    return [(name, [x.data_ptr() for x in tensors[:3]]) for name, tensors in recorder.ran]


@BOTH
@pytest.mark.parametrize(("name", "length"), [("nested", 64), ("straddling", 420)])
def test_whole_periods_are_one_call_where_they_lie(name: str, length: int, is_causal: bool) -> None:
    chunks = cut(testing.make_qkv(2, 3 * length, 3, 4), [0, length, 2 * length])
    outputs = da.stream(chunks, DilatedPattern.longnet(*PATTERNS[name]), is_causal=is_causal)
    assert next(outputs).shape[1] == 0  # by now all is set up
    for chunk in chunks[1:]:
        assert calls(outputs) == [("dilated_attention::forward_2", [x.data_ptr() for x in chunk])]


# --- when it answers --------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("cuts", CUTS)
def test_outputs_come_as_soon_as_they_are_known(name: str, cuts: str, is_causal: bool) -> None:
    """That is with the chunk in which the last segment of the last token ends."""
    lengths, pattern = CUTS[cuts], DilatedPattern.longnet(*PATTERNS[name])
    stops = list(itertools.accumulate(lengths))
    given = 0

    def chunks() -> Iterator[Chunk]:
        nonlocal given
        for chunk in cut(testing.make_qkv(1, 53, 3, 4), lengths):
            given += 1
            yield chunk

    outputs = da.stream(chunks(), pattern, is_causal=is_causal)
    assert given == 0
    latest = 0
    for index, (length, stop, _) in enumerate(zip(lengths, stops, outputs, strict=True)):
        # the tokens whose segments end last need not be the last ones
        tokens = range(stop - length, stop)
        known = max([token - token % w + w for token in tokens for w in pattern.segment_lengths], default=0)
        known = stop if is_causal else known
        enough = next((i for i, stop in enumerate(stops) if stop >= known), len(lengths) - 1)
        latest = max(latest, index, enough)  # in order: none comes before those before it
        assert given == latest + 1


# --- what is refused --------------------------------------------------------------------------------------------

GOOD = DilatedPattern.longnet([8], [1])


def nothing_to_take() -> Iterator[Chunk]:
    raise AssertionError("a chunk was asked for")
    yield


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"pattern": [8]}, TypeError, "must be a Pattern or a DilatedPattern, got list"),
        ({"chunks": 3}, TypeError, "iterable of .query, key, value., got int"),
        ({"enable_gqa": "no"}, TypeError, "enable_gqa must be True or False, got 'no'"),
        ({"max_bytes": 1.5}, TypeError, "max_bytes must be a whole number, got 1.5"),
    ],
)
def test_arguments_are_checked_at_the_call(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        da.stream(**{"chunks": nothing_to_take(), "pattern": GOOD, **arguments})


def like(**changes: Any) -> Chunk:
    made: dict[str, Any] = {"samples": 1, "tokens": 5, "heads": 4, "head_dim": 4, "kv_heads": 2, **changes}
    return testing.make_qkv(**made)


@pytest.mark.parametrize(
    ("chunk", "error", "says"),
    [
        (torch.zeros(1, 5, 4, 4), TypeError, "chunk 1 must be .query, key, value., got Tensor"),
        ((*like(), torch.zeros(1, 5)), TypeError, "got 4 entries. A stream takes no key_padding_mask"),
        ((1, 2, 3), TypeError, "chunk 1: query must be a tensor"),
        ((like(tokens=6)[0], *like()[1:]), ValueError, "chunk 1: query has 6 tokens and key 5"),
        (like(samples=2), ValueError, "chunk 1 has batch 2, .*and chunk 0 batch 1"),
        (like(dtype=torch.float64), ValueError, "torch.float64 on cpu, and chunk 0 .*torch.float32 on cpu"),
        (tuple(x.to("meta") for x in like()), ValueError, "torch.float32 on meta"),
    ],
)
@BOTH
def test_a_chunk_that_is_not_like_the_first(chunk: Any, error: type[Exception], says: str, is_causal: bool) -> None:
    outputs = da.stream([like(tokens=8), chunk], GOOD, is_causal=is_causal, enable_gqa=True)
    assert next(outputs).shape == (1, 8, 4, 4)
    with pytest.raises(error, match=says):
        next(outputs)


def test_what_is_wrong_with_the_first_chunk_or_the_length() -> None:
    with pytest.raises(ValueError, match=r"chunk 0: .*enable_gqa=True"):
        next(da.stream([like()], GOOD))
    chunk = like()
    chunk[2].requires_grad_()
    with pytest.raises(ValueError, match=r"chunk 0 requires grad, and stream\(\) computes no gradients"):
        next(da.stream([chunk], GOOD, enable_gqa=True))
    with torch.no_grad():
        next(da.stream([chunk], GOOD, enable_gqa=True))
    outputs = da.stream([like(tokens=8), like(tokens=3)], GOOD, num_tokens=10, enable_gqa=True)
    next(outputs)
    with pytest.raises(ValueError, match="with chunk 1 there are 11 tokens, and num_tokens is 10"):
        next(outputs)


@pytest.mark.parametrize(("pattern", "is_causal"), [(GOOD, True), (DilatedPattern.torchscale([8], [1]), False)])
def test_a_backend_that_cannot_run_says_so(pattern: DilatedPattern, is_causal: bool) -> None:
    """With the first chunk, not where a segment is first cut: our kernels take no parts of segments."""
    options: dict[str, Any] = {"enable_gqa": True, "is_causal": is_causal}
    with pytest.raises(ValueError, match=r"'triton' cannot run this call: it takes whole calls .*'auto'|runs on CUDA"):
        next(da.stream([like(tokens=8)], pattern, backend="triton", **options))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), pytest.raises(ValueError, match="sdpa"):
        next(da.stream([like(tokens=8)], pattern, backend="sdpa", **options))


def test_a_segment_that_does_not_fit_names_its_bytes() -> None:
    """Before anything is computed; and in the limit it fits."""
    nested, straddling = (DilatedPattern.longnet([125, w, 1000], [1, 2, 4]) for w in (500, 300))
    chunks = cut(testing.make_qkv(2, 20, 4, 8, kv_heads=2), [20])
    row = 2 * 8 * 4
    wants = {
        (nested, False): 1000 * (4 + 2 + 2) * row,
        (straddling, False): (1000 * (4 + 2 + 2) + (125 + 150 + 250) * 2 * 2) * row,
        (nested, True): (125 + 250 + 250) * 2 * 2 * row,
    }
    for (pattern, is_causal), size in wants.items():
        options: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
        match = f"would take {size:,} bytes .*, and max_bytes is {size - 1:,}"
        with Recorder() as recorder, pytest.raises(ValueError, match=match):
            next(da.stream(chunks, pattern, max_bytes=size - 1, **options))
        assert all("empty" in name for name in recorder.names)
        assert len(list(da.stream(chunks, pattern, max_bytes=size, **options))) == 1
        assert len(list(da.stream(chunks, pattern, max_bytes=size // 8, num_tokens=20, **options))) == 1


@BOTH
def test_a_segment_larger_than_the_machine_is_refused_by_default(is_causal: bool) -> None:
    """The table has streams of such segments, and of as many tokens as are told."""
    with pytest.raises(ValueError, match=r"would take \d[\d,]+ bytes"):
        next(da.stream([like()], DilatedPattern.longnet([2**48], [1]), is_causal=is_causal, enable_gqa=True))


def test_a_stream_that_would_wait_for_its_end_is_refused() -> None:
    for branch in (da.Strided(3), da.Global(1), da.Dense()):
        pattern = da.Pattern([da.Window(2), branch])
        with pytest.raises(NotImplementedError, match=r"not causal would wait for all tokens, with Pattern\(\[Window"):
            next(da.stream([like()], pattern, enable_gqa=True))


def test_rows_that_grow_are_checked_as_they_come() -> None:
    """Or at once, if it is known how long the stream will be."""
    pattern, size = da.Pattern([da.Strided(2)]), 2 * 2 * 4 * 4  # k and v of two heads
    given: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "max_bytes": 5 * size}
    outputs = da.stream([like(tokens=10)] * 2, pattern, **given)
    assert next(outputs).shape[1] == 10
    with pytest.raises(ValueError, match=f"would take {10 * size:,} bytes .*, and max_bytes is {5 * size:,}"):
        next(outputs)
    with pytest.raises(ValueError, match=f"would take {6 * size:,} bytes"):
        next(da.stream([like(tokens=10)], pattern, **given, num_tokens=12))
