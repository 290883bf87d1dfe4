"""The transformer of LongNetLM and LongNetEncoder: its config, its blocks, rotary positions.

A block does not know how tokens attend: it is given a function that does. Training, a group of ranks, packed documents
and a cache are different functions; the block is the same.

Legend: E = dim; x (B, n, E); q (B, n, H, D); k, v (B, n, Hk, D); lse (B, n, H); positions (n,) or (B, n).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dilated_attention.backends.choose import Backend
from dilated_attention.checks import check_int
from dilated_attention.functional import with_sinks
from dilated_attention.models.parts import Tensors, in_parts, is_long
from dilated_attention.models.saved_attention import Room, SavedAttention, layers_kept
from dilated_attention.pattern import DilatedPattern, Pattern

Attend = Callable[[Tensor, Tensor, Tensor], Tensors]  # (q, k, v) -> (out, lse), of each of the layer's calls

# Modules that draw numbers only at one of RATES. (nn.RReLU needs none, but PyTorch itself cannot checkpoint it.)
CALM = ("torch.", "dilated_attention.", "peft.tuners.lora.layer")
NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
FAR = -4.0  # the learned weight of far branches at first, before the sigmoid
RATES = ("p", "dropout", "drop_path")  # of what is dropped
PAPER = {"norm": "layer", "sub_norm": True, "ffn": "gelu", "vocab_size": 50304}
SIZES: dict[str, dict[str, Any]] = {
    "125M": {**PAPER, "dim": 768, "depth": 12, "heads": 12},
    "350M": {**PAPER, "dim": 1024, "depth": 24, "heads": 16},
    "760M": {**PAPER, "dim": 1536, "depth": 24, "heads": 16},
    "2.7B": {**PAPER, "dim": 2560, "depth": 32, "heads": 32},
    "0.6B": {
        "dim": 1024, "depth": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "ffn": "swiglu", "ffn_dim": 3072,
        "norm": "rms", "norm_eps": 1e-6, "sub_norm": False, "qk_norm": True, "rotary_base": 1e6, "vocab_size": 151936,
    },
}  # fmt: skip


@dataclass(frozen=True)
class LMConfig:
    """Holds the sizes and options of a model.

    It is frozen. Group, backend and checkpointing are not part of it: they are given to the model.

    Args:
        vocab_size: the number of tokens in the vocabulary.
        dim: the channels of a token.
        depth: the number of layers.
        heads: the query heads.
        pattern: one for all layers, or one per layer.
        kv_heads: the key/value heads, as many as heads by default.
        head_dim: the channels of a head, dim // heads by default.
        ffn: the feed-forward network, "gelu" or "swiglu".
        ffn_dim: its inner width, 4 * dim by default.
        norm, norm_eps: "layer" (LayerNorm) or "rms" (RMSNorm), and their epsilon.
        sub_norm: one more norm before each output projection, and the initialisation of MAGNETO (arXiv:2210.06423).
        qk_norm: a norm over each head of q and k.
        rotary_base: the base of rotary positions; None: the model has no positions.
        tied: the output projection is the embedding.
        sinks: add an attention sink to each head: a learned score that takes part in every softmax, with a zero vector
            as its value.
        near: how many branches of the pattern, the first ones, are near. Each head then learns how much the others
            count: the weight of a key that only they show is multiplied by sigmoid(x). At first x is -4, so that far
            keys, which are noise to an untrained model, count little. Near branches are computed twice.

    Examples:
        >>> models.LMConfig.of("125M", da.DilatedPattern.longnet([2048, 8192], [1, 4]), tied=False).dim
        768
    """

    vocab_size: int
    dim: int
    depth: int
    heads: int
    pattern: Pattern | tuple[Pattern, ...]
    kv_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    ffn: Literal["gelu", "swiglu"] = "gelu"
    ffn_dim: int = None  # type: ignore[assignment]
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-5
    sub_norm: bool = True
    qk_norm: bool = False
    rotary_base: float | None = 10_000.0
    tied: bool = True
    sinks: bool = False
    near: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "depth", "heads"):
            check_int(name, getattr(self, name))
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of heads if head_dim is not given, got {self.dim}, {self.heads}")
        defaults = {"kv_heads": self.heads, "head_dim": self.dim // self.heads, "ffn_dim": 4 * self.dim}
        for name, default in defaults.items():
            given = getattr(self, name)
            object.__setattr__(self, name, check_int(name, default if given is None else given))
        for name, allowed in (("ffn", ("gelu", "swiglu")), ("norm", NORMS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.rotary_base is not None:
            if not 0 < self.rotary_base < math.inf:
                raise ValueError(f"rotary_base must be a finite number above 0, or None, got {self.rotary_base}")
            if self.head_dim % 2:
                raise ValueError(f"rotary positions need an even head_dim, got {self.head_dim}")
        object.__setattr__(self, "pattern", read_pattern(self.pattern))
        for calls in self.calls:
            calls[0].check_heads(self.heads, self.kv_heads)

    @classmethod
    def of(cls, size: str, pattern: Pattern | tuple[Pattern, ...], **changes: Any) -> LMConfig:
        """Makes a config of a named size: "125M", "350M", "760M" or "2.7B" of the LongNet paper, or "0.6B" of Qwen3.

        ``changes`` are further fields, which override those of the size.
        """
        if size not in SIZES:
            raise ValueError(f"unknown size {size!r}: use one of {', '.join(SIZES)}, or LMConfig(...)")
        return cls(**{**SIZES[size], "pattern": pattern, **changes})

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The pattern of each layer."""
        return per_layer(self.pattern, self.depth)

    @property
    def calls(self) -> tuple[tuple[Pattern, ...], ...]:
        """What each layer computes: its pattern, and if ``near`` is given also the pattern of its near branches."""
        return tuple((x,) if self.near is None else (x, near_part(x, self.near)) for x in self.patterns)

    def to_dict(self) -> dict[str, Any]:
        """Returns this config as a dict that JSON can store. ``LMConfig.from_dict`` reads it back."""
        return {**vars(self), "pattern": written(self.pattern)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> LMConfig:
        """Reads what `to_dict` wrote."""
        return cls(**found)


def written(pattern: Any) -> Any:
    """What `read_pattern` takes, as JSON gives it back."""
    read = read_pattern(pattern)
    found = read.to_dict() if isinstance(read, Pattern) else [one.to_dict() for one in read]
    return json.loads(json.dumps(found))


def read_pattern(found: Any) -> Any:
    """What `written` was given, a pattern or a tuple of them; patterns are taken as they are."""
    if isinstance(found, Pattern):
        return found
    if isinstance(found, list | tuple):
        return tuple(map(read_pattern, found))
    if not isinstance(found, dict):
        raise TypeError(f"pattern must be a Pattern or a DilatedPattern, or a list of one per layer, got {found!r}")
    return Pattern.from_dict(found)


def per_layer(found: Any, layers: int) -> tuple[Pattern, ...]:
    """The pattern of each layer: the one that all share, or those listed."""
    read = read_pattern(found)
    patterns = (read,) * layers if isinstance(read, Pattern) else read
    if len(patterns) != layers:
        raise ValueError(f"{len(patterns)} patterns for {layers} layers: give one for all, or a list of one per layer")
    return patterns


def near_part(pattern: Pattern, near: int) -> Pattern:
    """The pattern with its first ``near`` branches alone."""
    if check_int("near", near) >= len(pattern.branches):
        raise ValueError(
            f"near must be less than the number of branches, so that some are far, got {near} of {pattern}"
        )
    if not isinstance(pattern, DilatedPattern):
        return Pattern(pattern.branches[:near], counts=pattern.counts)
    if pattern.rule != "longnet":
        raise ValueError(f"near needs a pattern of the rule 'longnet', or Pattern([...]), got {pattern}")
    return DilatedPattern.longnet(*zip(*pattern.branches[:near], strict=True))


def rotary(positions: Tensor, dim: int, base: float, dtype: torch.dtype) -> Tensors:
    """cos and sin of each position. Angles are in float64: in float32 they are off by 0.06 at a million tokens."""
    rates = base ** -(torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)

    def waves(positions: Tensor) -> Tensors:
        angles = positions[..., None, None] * rates
        return angles.cos().to(dtype), angles.sin().to(dtype)

    return in_parts(waves, (torch.atleast_2d(positions),), ())  # type: ignore[no-untyped-call]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q or k with the first and second half of each head turned by its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class TransformerBlock(nn.Module):
    """One layer: attention and a feed-forward network, each normalised before, and inside if ``sub_norm``."""

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        E, H, Hk, D, inner = config.dim, config.heads, config.kv_heads, config.head_dim, config.ffn_dim
        self.counts, self.head_dim, self.ffn = (H, Hk, Hk), D, config.ffn
        linear: Any = partial(nn.Linear, bias=False, **factory)

        def norm(width: int, wanted: bool = True) -> Any:
            return NORMS[config.norm](width, eps=config.norm_eps, **factory) if wanted else nn.Identity()

        self.attention_norm, self.qkv = norm(E), linear(E, (H + 2 * Hk) * D)
        self.q_norm, self.k_norm = norm(D, config.qk_norm), norm(D, config.qk_norm)
        self.sink = nn.Parameter(torch.zeros(H, **factory)) if config.sinks else None
        self.far = None if config.near is None else nn.Parameter(torch.empty(H, **factory))
        self.inner_norm, self.out = norm(H * D, config.sub_norm), linear(H * D, E)
        self.ffn_norm, self.up = norm(E), linear(E, 2 * inner if config.ffn == "swiglu" else inner)
        self.ffn_inner_norm, self.down = norm(inner, config.sub_norm), linear(inner, E)
        self._compiled: dict[Any, Any] = {}

    def forward(
        self, x: Tensor, waves: Tensors, attend: Attend, again: bool = False, is_late: bool = False, apart: bool = False
    ) -> Any:
        """``again``: a checkpoint is around this. A long row then goes in parts through what follows attention, and
        if ``is_late`` also through what comes before it. ``apart``: ``attend`` is never compiled with the block."""
        if not (apart or (again and is_long(x))):
            return self._run(whole, x, attend, waves)
        first, given = partial(self._run, before), (x, *waves)
        q, k, v = in_parts(first, given, self.parameters(), again) if is_late else first(*given)
        return in_parts(partial(self._run, after), (x, self.attended(attend(q, k, v))), self.parameters(), again)[0]

    def attended(self, found: Tensors) -> Tensor:
        """What attention gives, with the learned weights of far keys, and with the sinks."""
        out, lse = found if self.far is None else with_far(self.far, *found)
        return out if self.sink is None else with_sinks(out, lse, self.sink)[0]

    def _run(self, step: Callable[..., Any], *inputs: Any) -> Any:
        return self._compiled.get(step, step)(self, *inputs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the block as ``nn.Module.compile`` does, and also its parts before and after attention.

        The parts run alone for long rows with checkpointing, and with a cache.
        """
        self._compiled = {step: torch.compile(step, *args, **kwargs) for step in (whole, before, after)}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": {}}  # a copy is not compiled, as for any module

    @torch.no_grad()
    def reset_parameters(self, depth: int) -> None:
        """MAGNETO's: Xavier normal, the value, output and feed-forward weights with a gain of sqrt(log(2 depth)).
        Without sub_norm: normal of 0.02, outputs divided by sqrt(2 depth)."""
        q, k, v = torch.split(self.qkv.weight, [count * self.head_dim for count in self.counts])
        branches = [v, self.out.weight, *self.up.weight.chunk(2 if self.ffn == "swiglu" else 1), self.down.weight]
        start: Any = nn.init.xavier_normal_
        scaled, factor = branches, math.sqrt(math.log(2 * depth))
        if isinstance(self.inner_norm, nn.Identity):
            start = partial(nn.init.normal_, std=0.02)
            scaled, factor = [self.out.weight, self.down.weight], (2 * depth) ** -0.5
        for weight in (q, k, *branches):
            start(weight)
        for weight in scaled:
            weight.mul_(factor)
        if self.sink is not None:
            nn.init.zeros_(self.sink)
        if self.far is not None:
            nn.init.constant_(self.far, FAR)


def with_far(far: Tensor, out: Tensor, lse: Tensor, near: Tensor, near_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to all keys, (out, lse), with the weight of those that are not near multiplied by sigmoid(far).

    ``far``: (H,). The sum of the weights is sigmoid(far) of that of all keys, and 1 - sigmoid(far) of the near ones':
    no difference is taken, in which the weight of few far keys would be lost.
    """
    far, nothing = far.to(lse.dtype), lse == -torch.inf  # a query that sees no key; near ones are among all
    parts = (lse.masked_fill(nothing, 0.0) + F.logsigmoid(far), near_lse + F.logsigmoid(-far))
    total = torch.logaddexp(*parts)
    share = (parts[1] - total).exp().unsqueeze(-1)
    mixed = out + (near - out) * share
    return mixed.to(out.dtype), total.masked_fill(nothing, -torch.inf)


def whole(block: TransformerBlock, x: Tensor, attend: Attend, waves: Tensors) -> Tensor:
    q, k, v = before(block, x, *waves)
    return after(block, x, block.attended(attend(q, k, v)))[0]


def before(block: TransformerBlock, x: Tensor, *waves: Tensor) -> Tensors:
    """q, k and v of each token."""
    qkv = block.qkv(block.attention_norm(x))
    q, k, v = torch.split(qkv.view(*x.shape[:-1], sum(block.counts), block.head_dim), list(block.counts), dim=-2)
    q, k = block.q_norm(q), block.k_norm(k)
    return (rotated(q, *waves), rotated(k, *waves), v) if waves else (q, k, v)


def after(block: TransformerBlock, x: Tensor, out: Tensor) -> tuple[Tensor]:
    """The rest of the block, which sees each token alone as well."""
    x = x + block.out(block.inner_norm(out.flatten(-2)))
    up = block.up(block.ffn_norm(x))
    if block.ffn == "swiglu":
        gate, up = up.chunk(2, dim=-1)
        up = F.silu(gate) * up
    else:
        up = F.gelu(up)
    return (x + block.down(block.ffn_inner_norm(up)),)


def checkpointed(block: nn.Module, *inputs: Any) -> Any:
    """block(*inputs), which the backward pass computes again. The state of random numbers is kept only if the block
    draws some: it costs time on the host, and no CUDA graph can hold that."""
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=is_random(block))


def is_random(block: nn.Module) -> bool:
    """Whether a block may draw random numbers: someone has put dropout into it, or a module of an unknown kind."""
    return any(
        not type(module).__module__.startswith(CALM)
        or any(isinstance(rate := getattr(module, name, 0), int | float) and rate > 0 for name in RATES)
        for module in block.modules()
        if module.training
    )


class Trunk(nn.Module):
    """Embedding, blocks and the last norm: from tokens to states."""

    def __init__(self, config: LMConfig, *, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        # True: compute each block again in the backward pass, instead of keeping what it needs. A number of bytes, or
        # "auto" on a GPU: the same, but out and lse of attention are kept for as many blocks as there is room
        self.checkpointing: bool | int | Literal["auto"] = False
        self._room = Room()
        self.checkpoint: Callable[..., Any] = checkpointed
        self.backend: Backend = "auto"
        self.embed = nn.Embedding(config.vocab_size, config.dim, **factory)
        self.blocks: Any = nn.ModuleList(TransformerBlock(config, **factory) for _ in range(config.depth))
        self.norm = NORMS[config.norm](config.dim, eps=config.norm_eps, **factory)
        # as in MAGNETO's models: small weights for the tied output, and an input of size 1
        self.scale = config.dim**0.5 if config.sub_norm else 1.0
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.embed.weight, std=self.config.dim**-0.5 if self.config.sub_norm else 0.02)
        for block in self.blocks:
            block.reset_parameters(self.config.depth)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()

    def states(self, x: Tensor, positions: Tensor, attends: Sequence[Attend], apart: bool = False) -> Tensor:
        """The normalised states after the last block, of token ids (B, n) or of embedded tokens (B, n, E).

        ``attends``: how tokens attend in each block. A block has no number, so that all can share compiled code.
        ``apart``: these functions are not compiled with a block, since they keep rows or look at values.
        """
        if not x.is_floating_point():
            x = self.embed(x) * self.scale
        base = self.config.rotary_base
        waves = () if base is None else rotary(positions, self.config.head_dim, base, x.dtype)
        again = self.checkpointing is not False and torch.is_grad_enabled()
        kept = layers_kept(self.checkpointing, self._room, x, self.config) if again else 0
        for number, (block, attend) in enumerate(zip(self.blocks, attends, strict=True), start=1):
            # When the backward pass comes to the late blocks, the inputs of almost all blocks are still kept: memory is
            # shortest then. It begins with the last one, which would be computed again at once.
            is_late = number > len(self.blocks) * 3 // 4
            may_cut = again and not is_random(block)  # a part that is computed again would draw other random numbers
            run = partial(self.checkpoint, block) if again and number < len(self.blocks) else block
            keeps = len(self.blocks) > number >= len(self.blocks) - kept  # the late ones, which are needed first
            x = run(x, waves, SavedAttention(attend) if keeps else attend, may_cut, is_late, keeps or apart)
            if number == 1 and again and self.checkpointing == "auto":
                self._room.watch(x)
        return self.norm(x)  # type: ignore[no-any-return]
