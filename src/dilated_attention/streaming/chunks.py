"""stream(): one long sequence in chunks, exact.

A period is a run of tokens in which the segments of all branches begin and end together. Whole periods of a chunk are
one call of `dilated_attention`, where they lie. What is left over waits, by copy, until all that it sees has come. When
`causal` nothing waits. Earlier tokens leave only those K and V rows that later ones can see.

Legend: a chunk is query (B, n, H, D), key and value (B, n, Hk, D); its output (B, n, H, D).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from dilated_attention.backends.choose import Backend, choose
from dilated_attention.backends.problem import Inputs
from dilated_attention.branches.base import FOREVER
from dilated_attention.call import Call
from dilated_attention.checks import check_int
from dilated_attention.pattern import Pattern
from dilated_attention.resolve import Options, check_options, resolve
from dilated_attention.streaming.kv_cache import KVCache, any_mode
from dilated_attention.units import bytes_text

Chunk = tuple[Tensor, Tensor, Tensor]


def stream(
    chunks: Iterable[Chunk], pattern: Pattern, *, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, backend: Backend = "auto", max_bytes: int | None = None, num_tokens: int | None = None,
) -> Iterator[Tensor]:  # fmt: skip
    """Computes `dilated_attention` of one long sequence that comes in chunks.

    It yields one output per chunk, with as many tokens as the chunk. A causal stream yields an output right after its
    chunk. Otherwise an output may come some chunks later: when all segments that its tokens belong to are complete. A
    chunk may be overwritten once the next one is asked for. Inference only: there are no gradients.

    Args:
        chunks: an iterable of tuples: query (B, n, H, D), key and value (B, n, Hk, D). n may differ from chunk to
            chunk; batch, heads, head_dim, dtype and device may not. Chunks that begin and end at multiples of all
            segment lengths are fastest, as nothing of them is copied.
        pattern: which head sees which tokens, of the whole sequence. A stream that is not causal takes only patterns
            whose queries see no farther ahead than their segment, a window, a prefix or listed blocks.
        is_causal: a query sees no later token. The stream then keeps only the key and value rows that later tokens see.
        scale, enable_gqa, backend: as in `dilated_attention`; but "triton" takes no stream that is causal, of the rule
            torchscale, of segments that straddle one another, or of windows and other branches without segments.
        max_bytes: the most bytes that the stream may keep from one chunk to the next; memory for the computation comes
            on top. By default half of what is free on a CUDA device, half of a CPU's memory, and no limit elsewhere.
        num_tokens: an upper limit for the length of the sequence, if you know it; more tokens are an error. Where a
            segment is longer than that, the check of ``max_bytes`` takes its length to be num_tokens.

    Raises:
        ValueError: at the first chunk, if the stream would have to keep more than ``max_bytes``. A causal stream keeps
            the key and value rows that later tokens see; any other stream keeps one segment of the longest length. Rows
            that grow with the sequence are checked as they come.

    Examples:
        >>> chunks = (torch.randn(3, 1, 256, 4, 8).unbind(0) for _ in range(4))  # (query, key, value) of 256 tokens
        >>> pattern = da.DilatedPattern.longnet([64, 512], [1, 8])
        >>> [out.shape[1] for out in da.stream(chunks, pattern, is_causal=True)]
        [256, 256, 256, 256]
    """
    options = Options(pattern, is_causal, scale, enable_gqa=enable_gqa, backend=backend, decodes=False)
    check_options(options)
    if not isinstance(chunks, Iterable):
        raise TypeError(f"chunks must be an iterable of (query, key, value), got {type(chunks).__name__}")
    max_bytes = None if max_bytes is None else check_int("max_bytes", max_bytes)
    most = FOREVER if num_tokens is None else check_int("num_tokens", num_tokens)
    return _outputs(iter(chunks), options, max_bytes, most)


def _outputs(chunks: Iterator[Chunk], options: Options, max_bytes: int | None, most: int) -> Iterator[Tensor]:
    work: Stream | None = None
    index = 0
    for chunk in chunks:
        call, qkv = _checked(index, chunk, options)
        with any_mode():
            if work is None:
                work = Stream(call, max_bytes, most)
            if _kind(call) != _kind(work.call):
                raise ValueError(f"chunk {index} has {_kind(call)}, and chunk 0 {_kind(work.call)}: make all alike")
            if (tokens := work.position + qkv[0].shape[1]) > most:
                raise ValueError(f"with chunk {index} there are {tokens:,} tokens, and num_tokens is {most:,}")
            work.take(*qkv)
        del chunk, qkv  # or two chunks would be there while the next one is made
        index += 1  # noqa: SIM113 - enumerate() would hold on to the chunk
        yield from work.ready()
    if work is not None:
        with any_mode():
            work.compute(work.position)  # there are no more tokens: the last ones see no others
        yield from work.ready()


def _kind(call: Call) -> str:
    """What all chunks of a stream share."""
    heads = f"{call.heads} query and {call.kv_heads} key/value heads of {call.head_dim}"
    return f"batch {call.samples}, {heads}, {call.dtype} on {call.device}"


def _checked(index: int, chunk: Chunk, options: Options) -> tuple[Call, Chunk]:
    """The call without tokens, and the chunk in the dtype that is computed in, or an error that names it."""
    if not isinstance(chunk, tuple | list) or len(chunk) != 3:
        got = f"{len(chunk)} entries" if isinstance(chunk, tuple | list) else type(chunk).__name__
        raise TypeError(
            f"chunk {index} must be (query, key, value), got {got}. A stream takes no key_padding_mask: "
            "give sequences of different lengths each a stream of their own"
        )
    try:
        call = resolve(Inputs(*chunk), options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"chunk {index}: {error}") from error
    if torch.is_grad_enabled() and any(x.requires_grad for x in chunk):
        raise ValueError(
            f"chunk {index} requires grad, and stream() computes no gradients: iterate under torch.no_grad(), "
            "detach() what the chunks hold, or train with dilated_attention()"
        )
    query, key, value = (x.to(call.dtype) for x in chunk)
    return call._replace(queries=0, keys=0, total=0), (query, key, value)


class Stream:
    """The work of a stream. Tokens wait, copied, until all that they see has come; of a causal one, none does.

    Those up to ``done`` have their outputs; those up to ``position`` have come.
    """

    def __init__(self, call: Call, max_bytes: int | None, most: int) -> None:
        """``call``: has the shapes of no tokens, alike for all chunks. ``most``: there are no more tokens."""
        self.call, self.most = call, most
        like = torch.empty(call.samples, 0, call.kv_heads, call.head_dim, dtype=call.dtype, device=call.device)
        self.cache = KVCache(call.pattern, like, tokens=1)
        self.ahead = 0 if call.is_causal else max(some[0].ahead for some in self.cache.kept)
        if self.ahead >= FOREVER:
            raise NotImplementedError(f"a stream that is not causal would wait for all tokens, with {call.pattern}")
        self.position = self.done = 0
        self.waiting: list[list[Tensor]] = [[], [], []]  # q, k and v
        self.lengths: deque[int] = deque()  # of the chunks that wait for their outputs,
        self.begun: list[Tensor] = []  # what there is of the first,
        self.finished: deque[Tensor] = deque()  # and outputs of whole chunks
        self.limit = half_of_memory(call.device) if max_bytes is None else max_bytes
        self.check_held()
        if call.is_causal or call.adds_zeros or self.ahead != self.cache.period:
            choose(call._replace(in_parts=True))  # a backend that takes only whole calls says so now

    def check_held(self) -> None:
        """Raise if the most that is held from one chunk to the next does not fit; of rows that have no limit, those of
        the tokens so far."""
        call, tokens = self.call, min(self.cache.full, self.most)
        tokens = self.position if tokens == FOREVER else tokens
        rows = self.cache.rows_for(tokens) if self.ahead != self.cache.period else 0
        rows = 2 * rows + min(self.ahead, self.most) * (call.heads + 2 * call.kv_heads)
        held = rows * call.samples * call.head_dim * call.dtype.itemsize
        if self.limit is None or held <= self.limit:
            return
        what, causal = "the longest segment", "is_causal=True, "
        if call.is_causal:
            what, causal = "the keys and values that later tokens see", ""
        raise ValueError(
            f"{what} would take {held:,} bytes ({bytes_text(held)}), and max_bytes is {self.limit:,}: use shorter "
            f"segments, {causal}fewer samples at a time or a larger max_bytes; if the stream is shorter than its "
            "segments, give num_tokens"
        )

    def take(self, *qkv: Tensor) -> None:
        """The next chunk: to the end of the period, and what is after it, of which whole periods are not copied."""
        self.lengths.append(qkv[0].shape[1])
        self.deliver(qkv[0][:, :0])  # all of an empty chunk, if no other waits
        first = min(qkv[0].shape[1], -self.position % self.cache.period)
        for part in slice(0, first), slice(first, None):
            some = [x[:, part] for x in qkv]
            for waiting, x in zip(self.waiting, some, strict=True):
                waiting.append(x)
            self.position += some[0].shape[1]
            known = min(some[0].known(self.position) for some in self.cache.kept)
            self.compute(self.position if self.call.is_causal else known)

    def compute(self, known: int) -> None:
        """Deliver the outputs of the tokens up to this one, and hold what is left."""
        at, count = self.done, known - self.done
        if count > 0:
            if self.cache.full == FOREVER:
                self.check_held()
            for waiting in self.waiting:
                if len(waiting) > 1:
                    waiting[:] = [torch.cat(waiting, 1)]
            q, k, v = (waiting.pop() for waiting in self.waiting)
            self.deliver(self.cache.chunk(self.call, q[:, :count], k, v, at)[0])
            self.cache.reserve(known)
            self.cache.keep_chunk(k[:, :count], v[:, :count], at)
            self.done, self.waiting = known, [[x[:, count:]] for x in (q, k, v)]
        for waiting in self.waiting:  # a chunk may be overwritten
            waiting[-1:] = [x.clone() for x in waiting[-1:] if x.shape[1]]

    def deliver(self, result: Tensor) -> None:
        """The output of the next tokens, a tensor of its own; it is given as it is where it is all of a chunk's."""
        result = whole = torch.cat([*self.begun, result], 1) if self.begun else result
        while self.lengths and self.lengths[0] <= result.shape[1]:
            length = self.lengths.popleft()
            self.finished.append(whole if 0 < length == whole.shape[1] else result[:, :length].clone())
            result = result[:, length:]
        self.begun = [result.clone()] if result.shape[1] else []

    def ready(self) -> Iterator[Tensor]:
        while self.finished:
            yield self.finished.popleft()


def half_of_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # held by torch's allocator
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return None
