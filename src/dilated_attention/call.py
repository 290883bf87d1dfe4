"""Call: all about a call that is not a tensor. It is made once, at the door, and everything below is a function of it.

Legend: query (B, n, H, D); key, value (B, N, Hk, D); padding (B, N), True = ignore.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.backends.cuda import cudnn_sdp_enabled, flash_sdp_enabled, mem_efficient_sdp_enabled
from torch.nn.attention import current_flash_attention_impl

from dilated_attention.branches import Branch
from dilated_attention.branches.overlap import Remainder
from dilated_attention.checks import Ints
from dilated_attention.pattern import DilatedPattern, Pattern

ON_DEVICE = -1  # the start of a call whose positions are in a tensor
KERNELS = ("flash", "cudnn", "efficient")  # of torch
DEFAULT_SCALE = -1.0  # stands for 1/sqrt(head_dim) until the tensors are known

CuSeqlens = Sequence[int] | Tensor  # where packed sequences begin, and the end of the last
Settings = tuple[bool, tuple[str, ...], str | None, bool]  # of torch, as the last fields of a `Call` have them


class Call(NamedTuple):
    """All about a call that is not a tensor; hashable, so that plans, choices and launches are found by it.

    The queries are at the positions [start, start + queries) of a sequence of ``total`` tokens, the keys at
    [key_start, key_start + keys). A whole call has the same for both; a rank has a shard, and few queries have a place
    among all keys. The tokens are one sequence, or several that are packed one after the other.
    """

    pattern: Pattern
    is_causal: bool = False
    scale: float = DEFAULT_SCALE
    dropout_p: float = 0.0
    backend: str = "auto"
    # --- the tensors
    samples: int = 0
    queries: int = 0
    keys: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    has_padding: bool = False
    # --- their place in the sequence, and among the heads of all processes
    start: int = 0
    key_start: int = 0
    total: int = 0
    first_head: int = 0  # of the key/value heads here
    total_heads: int = 0  # 0: the heads here are all
    cu_seqlens: Ints = ()  # where packed sequences begin, and the end of the last; (): all is one sequence
    # --- how it is computed
    in_parts: bool = False  # other ranks or chunks add to the results, so whole-call kernels are out of question
    memory_cap_id: int = 0  # the number of a `MemoryCap` on memory; 0: none
    deterministic: bool = False  # torch's settings at the time of the call
    switched_off: tuple[str, ...] = ()
    flash: str | None = None
    tf32: bool = False

    @property
    def dilated(self) -> DilatedPattern:
        """The pattern, where other patterns were refused."""
        assert isinstance(self.pattern, DilatedPattern)
        return self.pattern

    @property
    def q_per_kv(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def is_decode(self) -> bool:
        """Whether the queries are some rows among the keys."""
        return (self.start, self.queries) != (self.key_start, self.keys)

    @property
    def drops(self) -> bool:
        return self.dropout_p > 0

    @property
    def adds_zeros(self) -> bool:
        """Whether zero keys fill up segments with fewer rows than others; when causal they come after every query."""
        return self.pattern.adds_zeros and not self.is_causal

    @property
    def rows(self) -> int:
        """Query rows of all samples and heads."""
        return self.samples * self.queries * self.heads

    @property
    def computed(self) -> torch.dtype:
        """The dtype that block backends compute in: on a CPU without instructions for half precision float32, which is
        far faster, and nearer."""
        if self.device.type != "cpu" or self.dtype.itemsize != 2:
            return self.dtype
        # with AMX, bfloat16 is faster than float32; no CPU was found where float16 is
        return self.dtype if self.dtype is torch.bfloat16 and _has_amx() else torch.float32

    @property
    def sum_dtype(self) -> torch.dtype:
        return accumulate_dtype(self.dtype)

    @property
    def model_heads(self) -> int:
        """The key/value heads of all processes."""
        return self.total_heads or self.kv_heads

    @property
    def branches(self) -> tuple[Branch, ...]:
        return self.pattern.branches_for(self.model_heads)

    @property
    def full_cu_seqlens(self) -> Ints:
        """Where sequences begin, and the end of the last."""
        return self.cu_seqlens or (0, self.total)

    def placed(self, index: int) -> list[tuple[int, int]]:
        """(head as counted here, offset) of each head here that runs a branch."""
        branch, first, mine = self.branches[index], self.first_head, range(self.kv_heads)
        return [(head - first, branch.offset_of(head)) for head in branch.members if head - first in mine]

    def looks(self, head: int) -> Ints:
        """`Pattern.looks` of a head, as counted here."""
        return self.pattern.looks(self.first_head + head, self.model_heads)

    def parts(self, index: int, head: int, queries: range, n: int) -> Iterator[Remainder]:
        """`Pattern.parts` of a branch and a head, as counted here."""
        given = self.model_heads, self.is_causal, self.drops
        return self.pattern.parts(index, self.first_head + head, queries, n, *given)

    def of(self, query: Tensor, key: Tensor, padding: Tensor | None, start: int) -> Call:
        """This call with all that its tensors and torch's settings tell. ``start``: of the queries among the keys."""
        return self.with_shapes(query.shape, key.shape, query.dtype, query.device, padding is not None, start)

    def with_shapes(
        self, query: Ints, key: Ints, dtype: torch.dtype, device: torch.device,
        has_padding: bool, start: int,
    ) -> Call:  # fmt: skip
        """The same, of tensors of these shapes."""
        samples, queries, heads, head_dim = query
        keys, kv_heads = key[1], key[2]
        scale = 1.0 / math.sqrt(head_dim) if self.scale == DEFAULT_SCALE else self.scale
        deterministic, switched_off, flash, tf32 = settings(dtype, device)
        return self._replace(
            scale=scale, samples=samples, queries=queries, keys=keys, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, device=device, has_padding=has_padding, start=start, key_start=0, total=keys,
            deterministic=deterministic, switched_off=switched_off, flash=flash, tf32=tf32,
        )  # fmt: skip

    def now(self, query: Tensor) -> Call:
        """The same call later, or with more samples, which vmap gives. A backward pass repeats every bit if torch says
        so at its own time; the kernels that were switched off for the forward pass stay off."""
        samples, deterministic = query.shape[0], are_deterministic_algorithms_enabled()
        tf32 = _tf32(self.dtype)
        if (samples, deterministic, tf32) == (self.samples, self.deterministic, self.tf32):
            return self
        return self._replace(samples=samples, deterministic=deterministic, tf32=tf32)

    def packed(self) -> tuple[list[int], float, float, str]:
        """All that the caller chose, as a registered op takes it, for `unpacked`. Numbers stay numbers: a compiler may
        hold symbols in their place."""
        numbers = [self.start, self.first_head, self.total_heads, self.memory_cap_id]
        text = f"{self.pattern.text} {'causal' if self.is_causal else 'all'} {self.backend}"
        return numbers, self.scale, self.dropout_p, text


def outside(name: str, at: int, queries: int, keys: int) -> str:
    """Why queries cannot begin there."""
    return f"{name} is {at}, and must be from 0 to {keys - queries}, so that {queries} queries fit among {keys} keys"


def checked_cu_seqlens(given: CuSeqlens, tokens: int | None) -> Ints:
    """`Call.cu_seqlens` of those given, without empty sequences; one alone is as if nothing was given. ``tokens`` is
    None where other ranks have some of them."""
    numbers = given.tolist() if isinstance(given, Tensor) else list(given)
    falls = any(after < before for before, after in itertools.pairwise(numbers))
    if not numbers or numbers[0] != 0 or falls or (tokens is not None and numbers[-1] != tokens):
        end = "the number of tokens of all ranks" if tokens is None else f"{tokens}, the number of tokens"
        shown = numbers if len(numbers) < 9 else f"{numbers[:4]} ... {numbers[-4:]}"
        raise ValueError(f"cu_seqlens must begin with 0, never fall, and end with {end}, got {shown}")
    different = tuple(dict.fromkeys(numbers))
    return different if len(different) > 2 or (tokens is None and len(different) > 1) else ()


@functools.lru_cache(maxsize=1024)
def unpacked(
    numbers: Sequence[int], scale: float, dropout_p: float, text: str, tensors: tuple[Any, ...], now: Settings
) -> Call:
    """The call that `Call.packed` wrote, of ``tensors`` as `Call.with_shapes` takes them. Made once for equal
    arguments: making it takes as long as the rest of a short compiled step."""
    pattern, is_causal, backend = text.rsplit(" ", 2)
    _, first_head, total_heads, memory_cap_id = numbers
    return Call(
        Pattern.from_dict(json.loads(pattern)), is_causal == "causal", scale, dropout_p, backend, first_head=first_head,
        total_heads=total_heads, memory_cap_id=memory_cap_id,
    ).with_shapes(*tensors)  # fmt: skip


def settings(dtype: torch.dtype, device: torch.device) -> Settings:
    """What torch is set to now: the last four fields of a `Call`."""
    on = (flash_sdp_enabled(), cudnn_sdp_enabled(), mem_efficient_sdp_enabled())  # type: ignore[no-untyped-call]
    off = () if on == (True, True, True) else tuple([KERNELS[i] for i in range(3) if not on[i]])  # by sdpa_kernel(...)
    flash = current_flash_attention_impl() if device.type == "cuda" else None
    return are_deterministic_algorithms_enabled(), off, flash, _tf32(dtype)


def _tf32(dtype: torch.dtype) -> bool:
    return dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of sums."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@functools.cache
def _has_amx() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def sample_ends(padding: Tensor, start: int = 0) -> Tensor:
    """(B,) one more than the last position that is not padding, 0 where all is; the first token is at ``start``."""
    count = torch.arange(start + 1, start + padding.shape[1] + 1, device=padding.device)
    if not len(count):
        return padding.new_zeros(padding.shape[0], dtype=torch.int64)
    return torch.where(padding, 0, count).amax(1)
