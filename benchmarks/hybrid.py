"""Training steps of hybrid decoders on one GPU, beside PyTorch's own attention: python benchmarks/hybrid.py

The shapes are those of Gemma-3-1B (five windows of 512 to one full layer) and of gpt-oss (windows of 128 and full
layers by turns; its experts are one dense network of as many active weights, and its sinks are left out, as PyTorch's
kernels have none). Window layers run on our attention, on the windows of FlashAttention-2 in PyTorch, or on
FlexAttention; full layers of the other sides on PyTorch's scaled_dot_product_attention. Each side is held against the
oracle before it is timed. A step is forward and backward of one row, with checkpointing and the loss in chunks.

With --windows, windows alone are timed too. With --prompts, Gemma-3-1B as transformers has it, with random weights,
writes on from prompts with each kind of cache.

Results are written after each row. The same command goes on where it was cut.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import common
import torch
import turns
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dilated_attention import Dense, Pattern, Window, testing
from dilated_attention.bench import machine
from dilated_attention.bench.suites.models import operations
from dilated_attention.models import LMConfig, LongNetLM, shifted, summed_loss
from dilated_attention.models.layers import Sequences, attend_whole

LIKE_BOTH: dict[str, Any] = {
    "vocab_size": 8192, "ffn": "swiglu", "norm": "rms", "norm_eps": 1e-6, "sub_norm": False, "rotary_base": 1e6,
}  # fmt: skip
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {  # window, every how many layers one is full, sizes
    "gemma-3-1b": (512, 6, {
        "dim": 1152, "depth": 26, "heads": 4, "kv_heads": 1, "head_dim": 256, "ffn_dim": 6912, "qk_norm": True,
    }),
    "gpt-oss": (128, 2, {"dim": 2880, "depth": 4, "heads": 64, "kv_heads": 8, "head_dim": 64, "ffn_dim": 11_520}),
}  # fmt: skip
WINDOWS = (  # tokens, heads, channels of a head, tokens of the window
    (1 << 17, 16, 128, 1024), (1 << 17, 16, 128, 4096), (1 << 20, 12, 64, 512), (1 << 20, 12, 64, 1024),
)  # fmt: skip
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of q (B, N, H, D), k and v (B, N, Hk, D)
FULL = Pattern([Dense()])
FEW = 3  # calls that are timed, at least


def config_of(name: str, shrink: int) -> tuple[int, LMConfig]:
    """The window of a model, and its config; layers are full at the end of each turn, as in Gemma 3."""
    window, turn, sizes = SHAPES[name]
    if shrink > 1:
        sizes = sizes | {"dim": 64, "depth": turn, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_dim": 128}
    window = max(2, window // shrink)
    near = Pattern([Window(window - 1)])
    layers = tuple(FULL if (i + 1) % turn == 0 else near for i in range(sizes["depth"]))
    return window, LMConfig(**LIKE_BOTH, **sizes, pattern=layers)


def ours(pattern: Pattern) -> Attention:
    return lambda q, k, v: attend_whole(pattern, True, Sequences(), None, q, k, v)[0]


def sdpa(*qkv: Tensor) -> Tensor:
    turned = (x.transpose(1, 2) for x in qkv)
    return F.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True).transpose(1, 2)


def flash(window: int) -> Attention:
    """FlashAttention-2's window, which PyTorch has without a public function."""

    def attend(*qkv: Tensor) -> Any:
        n, sides = qkv[0].shape[1], {"window_size_left": window - 1, "window_size_right": 0}
        return torch.ops.aten._flash_attention_forward(*qkv, None, None, n, n, 0.0, True, False, **sides)[0]

    return attend


def flex(window: int) -> Attention:
    """Compiled; its mask is made once for each length."""
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    @functools.cache
    def mask(n: int, device: torch.device) -> Any:
        def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (query - key < window)

        # compiled, or the mask is made whole, with a byte for each pair of tokens
        return torch.compile(create_block_mask)(sees, None, None, n, n, device=device)

    def attend(*qkv: Tensor) -> Any:
        q, k, v = (x.transpose(1, 2) for x in qkv)
        return compiled(q, k, v, block_mask=mask(q.shape[2], q.device), enable_gqa=True).transpose(1, 2)

    return attend


def sides_of(window: int, device: torch.device) -> dict[str, tuple[Attention, Attention]]:
    """By name, the attention of window layers and of full layers. PyTorch's windows have gradients on CUDA only."""
    found = {"this library": (ours(Pattern([Window(window - 1)])), ours(FULL))}
    others = {"FlexAttention": (flex(window), sdpa), "FlashAttention-2": (flash(window), sdpa)}
    return found | (others if device.type == "cuda" else {})


def check(attend: Attention, pattern: Pattern, **given: Any) -> None:
    """Raises AssertionError if out or a gradient is not the oracle's. ``given``: heads, channels, dtype and device."""
    qkv = testing.make_qkv(1, 1061, **given)
    dout = torch.randn_like(qkv[0])
    oracles = (testing.oracle(qkv, pattern, dout, dtype=dtype, is_causal=True) for dtype in (torch.float64, None))
    testing.assert_exact(testing.run(attend, qkv, dout), *(one._replace(lse=None) for one in oracles))


def measured(name: str, tokens: int, side: str, shrink: int, given: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Milliseconds of each kind of layer's attention, forward and with backward, and of a whole step."""
    torch.compiler.reset()  # or FlexAttention gives up compiling after eight lengths and modes
    window, config = config_of(name, shrink)
    near, full = sides_of(window, given["device"])[side]
    kinds = {"window": (near, config.patterns[0]), "full": (full, FULL)}
    shape = {"heads": config.heads, "head_dim": config.head_dim, "kv_heads": config.kv_heads, **given}
    row: dict[str, Any] = {"model": name, "tokens": tokens, "attention": side}
    for attend, pattern in kinds.values():
        check(attend, pattern, **shape)
    for kind, (attend, _) in kinds.items():
        turns.measure(row, kind, attend, testing.make_qkv(1, tokens, **shape), "eager", seconds, FEW)
    torch.manual_seed(0)
    with torch.device(given["device"]):
        model = LongNetLM(config, dtype=given["dtype"])
    model.checkpointing = True
    row["step"] = turns.timed(step_of(model, tokens, near, full), seconds, FEW)
    row["layers"] = {"full": config.patterns.count(FULL), "window": config.depth - config.patterns.count(FULL)}
    # the backward pass computes a layer again, the last one excepted
    parts = {kind: count * sum(row[f"{kind}, {way}"][1] for way in ("forward", "forward + backward"))
             for kind, count in row["layers"].items()}  # fmt: skip
    row["share"] = {kind: round(ms / row["step"][1], 3) for kind, ms in parts.items()}
    row["TFLOP"] = operations(config, sum(x.numel() for x in model.parameters()), tokens) / 1e12
    return row


def window_alone(tokens: int, heads: int, head_dim: int, window: int, side: str, given: Any, seconds: float) -> Any:
    torch.compiler.reset()
    attend, shape = sides_of(window, given["device"])[side][0], {"heads": heads, "head_dim": head_dim, **given}
    check(attend, Pattern([Window(window - 1)]), **shape)
    row = {"tokens": tokens, "heads": heads, "head_dim": head_dim, "window": window, "attention": side}
    turns.measure(row, "window", attend, testing.make_qkv(1, tokens, **shape), "eager", seconds)
    return row


def step_of(model: LongNetLM, tokens: int, near: Attention, full: Attention) -> Callable[[], None]:
    ids = torch.randint(model.config.vocab_size, (1, tokens), device=model.embed.weight.device)
    labels, positions = shifted(ids), torch.arange(tokens, device=ids.device)
    kinds = [full if pattern == FULL else near for pattern in model.config.patterns]
    attends = [lambda q, k, v, attend=attend: (attend(q, k, v), q.new_empty(0)) for attend in kinds]

    def step() -> None:
        model.zero_grad(set_to_none=True)
        states = model.states(ids, positions, attends)
        torch.autograd.backward(summed_loss(states, model.head.weight, labels) / tokens)

    return step


CACHES = (("DilatedCache", "dilated"), ("DynamicCache", "dilated"), ("DynamicCache", "sdpa"), ("StaticCache", "sdpa"))


@torch.no_grad()
def generated(prompt: int, cache: str, attention: str, shrink: int, given: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second after a prompt: the time of many new tokens less that of few."""
    import transformers

    from dilated_attention.integrations import transformers as ours

    ours.register()
    window, config = config_of("gemma-3-1b", shrink)
    kinds = ["full_attention" if one == FULL else "sliding_attention" for one in config.patterns]
    theirs = transformers.Gemma3TextConfig(
        vocab_size=config.vocab_size, hidden_size=config.dim, intermediate_size=config.ffn_dim, layer_types=kinds,
        num_hidden_layers=config.depth, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, sliding_window=window, max_position_embeddings=2 * prompt, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(given["device"]):
        make = transformers.AutoModelForCausalLM.from_config
        model = make(theirs, attn_implementation=attention, dtype=given["dtype"]).eval()
    ids = torch.randint(1, config.vocab_size, (1, prompt), device=given["device"])  # 0 is padding
    few, many = 8, 8 + max(8, 128 // shrink)

    def write(count: int) -> None:
        more: dict[str, Any] = {"StaticCache": {"cache_implementation": "static"}}.get(cache, {})
        if cache == "DilatedCache":
            more["past_key_values"] = ours.DilatedCache(theirs)
        model.generate(ids, do_sample=False, min_new_tokens=count, max_new_tokens=count, **more)

    # the static cache has its size from the count, and is compiled for each
    ms = [turns.timed(functools.partial(write, count), 0.0, FEW)[1] for count in (few, many)]
    speed = (many - few) / (ms[1] - ms[0]) * 1000
    return {"prompt": prompt, "cache": cache, "attention": attention, "tokens_per_second": round(speed, 1)}


def main(words: list[str] | None = None) -> None:
    parser = common.parser(__doc__, "report/hybrid.json")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--lengths", nargs="*", type=int, default=[32_768, 131_072], help="tokens of a row")
    parser.add_argument("--windows", action="store_true", help="time windows alone, too")
    parser.add_argument("--prompts", nargs="*", type=int, default=[], help="tokens of prompts, to time caches after")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, at least")
    parser.add_argument("--shrink", type=int, default=1, help="divide windows by this, and make layers small")
    options = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device}
    found = common.read(options.out) | {"machine": machine.describe(device, options.commit)}
    sides, small = sides_of(2, device), {"shrink": options.shrink, "given": given}
    wide = [(n // options.shrink, *shape, max(2, w // options.shrink)) for n, *shape, w in WINDOWS if options.windows]
    make_step = functools.partial(measured, **small, seconds=options.seconds)
    make_window = functools.partial(window_alone, given=given, seconds=options.seconds)
    # beyond so many tokens, the mask of FlexAttention would not fit into memory
    alone = [(*shape, side) for shape in wide for side in sides if side != "FlexAttention" or shape[0] <= 1 << 17]
    for part, make, cases in (
        ("rows", make_step, [(name, n, side) for n in options.lengths for name in options.models for side in sides]),
        ("windows", make_window, alone),
        ("generation", functools.partial(generated, **small), [(n, *x) for n in options.prompts for x in CACHES]),
    ):
        rows = found.setdefault(part, [])
        for case in cases:
            if case not in [tuple(row.values())[: len(case)] for row in rows]:
                print(part, *case, "...", file=sys.stderr, flush=True)
                rows.append(make(*case))
                machine.write_json(options.out, found)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
