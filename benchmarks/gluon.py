"""Attention's forward pass in Triton's Gluon for Hopper, beside our kernel and cuDNN's: python benchmarks/gluon.py

A trial: segments of dense or causal attention, in bfloat16, with 128 channels. Three segments of each side are held
against the oracle before it is timed; cuDNN's gives no lse.

A program takes one tile after another: 128 queries of a segment and head. One warp loads: it has the copy engine bring
queries, keys and values into buffers. Two groups of four warps compute 64 queries each, with the same keys. A buffer
has two barriers: `full`, where a group waits for the copy, and `empty`, where the loader waits until all groups have
read the one before. A barrier knows only whether it was passed an even number of times: use i of a buffer waits for
full with phase i & 1, and for empty with the other phase, which at first passes at once.

Legend: N tokens, H heads, D head dim; q, k, v, out (1, N, H, D), for the kernel (N, H * D); lse (H, N).
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dilated_attention import Dense, DilatedPattern, Pattern, dilated_attention, reference, testing
from dilated_attention.bench import machine, run

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError as problem:
    raise SystemExit(f"nothing is measured: no Gluon for Hopper, which Triton 3.6 has ({problem})") from None

D, QUERIES, KEYS = gl.constexpr(128), gl.constexpr(128), gl.constexpr(128)  # of a tile, and of a block of keys
GROUPS, ROWS, STAGES = gl.constexpr(2), gl.constexpr(64), gl.constexpr(2)  # ROWS queries a group, STAGES buffers
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS.value, 16]))  # of scores
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D.value, 16]))
P_LAYOUT = gl.constexpr(gl.DotOperandLayout(0, O_LAYOUT.value, 2))  # of weights, which stay in registers
S_ROWS, O_ROWS = (gl.constexpr(gl.SliceLayout(1, x.value)) for x in (S_LAYOUT, O_LAYOUT))
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # of a group; before Triton 3.7 the second


@gluon.jit
def buffers(desc, COUNT: gl.constexpr, READERS: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.bfloat16, [COUNT, desc.block_shape[0], D], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return smem, full, empty


@gluon.jit
def fill(buffers, i, phase, desc, row, column):
    smem, full, empty = buffers
    mbarrier.wait(empty.index(i), phase)
    mbarrier.expect(full.index(i), desc.block_shape[0] * D * 2)  # bytes
    tma.async_copy_global_to_shared(desc, [row, column], full.index(i), smem.index(i))


@gluon.jit
def filled(buffers, i, phase):
    smem, full, _ = buffers
    mbarrier.wait(full.index(i), phase)
    return smem.index(i)


@gluon.jit
def place(tile, SEGMENT: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr):
    """Of a tile: the first token of its segment, the head, the first query in the segment, and the blocks of keys."""
    parts: gl.constexpr = SEGMENT // QUERIES
    pair = tile // parts
    part = (tile + pair) % parts  # turned by the pair: each program gets tiles with few and with many blocks
    blocks = SEGMENT // KEYS
    if CAUSAL:
        blocks = (part * QUERIES + QUERIES) // KEYS
    return (pair // HEADS) * SEGMENT, pair % HEADS, part * QUERIES, blocks


@gluon.jit
def load(descs, queries, keys, values, tiles, SEGMENT: gl.constexpr, HEADS: gl.constexpr, CAUSAL: gl.constexpr):
    """The warp that loads. It begins the next tile while the groups still compute this one."""
    done = 0  # tiles
    count = 0  # blocks, over all tiles
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        start, head, first, blocks = place(tile, SEGMENT, HEADS, CAUSAL)
        for g in gl.static_range(GROUPS):
            fill(queries, g, (done & 1) ^ 1, descs[0], start + first + g * ROWS, head * D)
        for i in range(blocks):
            row = start + (blocks - 1 - i) * KEYS  # from the last, which may be masked, to the first
            phase = ((count // STAGES) & 1) ^ 1
            fill(keys, count % STAGES, phase, descs[1], row, head * D)
            fill(values, count % STAGES, phase, descs[2], row, head * D)
            count += 1
        done += 1  # noqa: SIM113 - Triton has no enumerate


@gluon.jit
def soften(scores, top, total, scale):
    """The maxima and sums with one more block, its weights, and the factor of all before. log2(e) is in the scale."""
    new = gl.maximum(top, gl.max(scores, 1))
    shift = new * scale
    weights = gl.exp2(scores * scale - shift[:, None])
    factor = gl.exp2(top * scale - shift)
    return new, total * factor + gl.sum(weights, 1), weights, factor


@gluon.jit
def attend(o_desc, lse, scale, tokens, queries, keys, values, o_smem, tiles, SEGMENT: gl.constexpr,
           HEADS: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """A group that computes. The tensor cores do not wait for the softmax of a block: they are first given its scores,
    then the product of the weights before with their values, and the softmax runs beside that product."""
    q_empty, k_empty, v_empty = queries[2], keys[2], values[2]
    none = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    done = 0
    count = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        start, head, first, blocks = place(tile, SEGMENT, HEADS, CAUSAL)
        first += GROUP * ROWS
        q = filled(queries, GROUP, done & 1)
        k = filled(keys, count % STAGES, (count // STAGES) & 1)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(count % STAGES), count=1)
        if CAUSAL:  # the diagonal is in this block only
            row = first + gl.arange(0, ROWS, layout=S_ROWS)
            column = (blocks - 1) * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, S_LAYOUT))
            s = gl.where(row[:, None] >= column[None, :], s, float("-inf"))
        top, total = gl.full([ROWS], float("-inf"), gl.float32, S_ROWS), gl.zeros([ROWS], gl.float32, S_ROWS)
        top, total, p, factor = soften(s, top, total, scale)
        p = gl.convert_layout(p.to(gl.bfloat16), P_LAYOUT)
        acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)

        for _ in range(1, blocks):
            before = count % STAGES
            phase = (count // STAGES) & 1
            count += 1
            k = filled(keys, count % STAGES, (count // STAGES) & 1)
            s = hopper.warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            acc = hopper.warpgroup_mma(p, filled(values, before, phase), acc, is_async=True)
            s = hopper.warpgroup_mma_wait(1, deps=[s])  # acc may still be under way
            mbarrier.arrive(k_empty.index(count % STAGES), count=1)
            top, total, p_next, factor = soften(s, top, total, scale)
            filled(values, before, phase)  # they are; but without this branch, ptxas waits for acc before the softmax
            acc = hopper.warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(before), count=1)
            acc = acc * gl.convert_layout(factor, O_ROWS)[:, None]
            p = gl.convert_layout(p_next.to(gl.bfloat16), P_LAYOUT)

        mbarrier.arrive(q_empty.index(GROUP), count=1)
        v = filled(values, count % STAGES, (count // STAGES) & 1)
        acc = hopper.warpgroup_mma_wait(0, deps=[hopper.warpgroup_mma(p, v, acc, is_async=True)])
        mbarrier.arrive(v_empty.index(count % STAGES), count=1)
        count += 1
        done += 1  # noqa: SIM113
        acc = acc * gl.convert_layout(1.0 / total, O_ROWS)[:, None]
        at = head * tokens + start + first + gl.arange(0, ROWS, layout=S_ROWS)
        gl.store(lse + at, (top * scale + gl.log2(total)) * 0.6931471805599453)
        tma.store_wait(0)  # the tile before has left the buffer
        meet()
        o_smem.index(GROUP).store(acc.to(gl.bfloat16))
        hopper.fence_async_shared()  # or the copy engine may not see what was stored
        meet()
        tma.async_copy_shared_to_global(o_desc, [start + first, head * D], o_smem.index(GROUP))
    tma.store_wait(0)


@gluon.jit
def attention_kernel(q_desc, k_desc, v_desc, o_desc, lse, scale, tokens, tiles, SEGMENT: gl.constexpr,
                     HEADS: gl.constexpr, CAUSAL: gl.constexpr):  # fmt: skip
    queries = buffers(q_desc, GROUPS, 1)
    o_smem = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, ROWS, D], o_desc.layout)
    keys, values = buffers(k_desc, STAGES, GROUPS), buffers(v_desc, STAGES, GROUPS)
    hopper.fence_async_shared()
    meet()
    given = (o_desc, lse, scale, tokens, queries, keys, values, o_smem, tiles, SEGMENT, HEADS, CAUSAL)
    first, second = given + (gl.constexpr(0),), given + (gl.constexpr(1),)  # noqa: RUF005 - Triton knows no stars here
    loads = ((q_desc, k_desc, v_desc), queries, keys, values, tiles, SEGMENT, HEADS, CAUSAL)
    # Four warps for the second group and one that loads, which the GPU counts as four: each of 384 threads begins with
    # 168 registers. Those that load keep 24, so that each group gets 240: with that nothing is spilled.
    gl.warp_specialize([(attend, first), (attend, second), (load, loads)], [4, 1], [240, 24])


def sides(qkv: tuple[Tensor, ...], segment: int, causal: bool) -> dict[str, Any]:
    """By name, calls that give out and lse."""
    _, tokens, heads, dim = qkv[0].shape
    out, lse = torch.full_like(qkv[0], torch.nan), qkv[0].new_full((heads, tokens), torch.nan, dtype=torch.float32)
    blocks = [[rows.value, dim] for rows in (ROWS, KEYS, KEYS, ROWS)]
    layouts = [gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16) for block in blocks]
    descs = [*map(TensorDescriptor.from_tensor, (x.flatten(2)[0] for x in (*qkv, out)), blocks, layouts)]
    sizes = (dim**-0.5 * 1.4426950408889634, tokens, tokens // QUERIES.value * heads, segment, heads, causal)
    grid = (torch.cuda.get_device_properties(0).multi_processor_count,)

    def ours() -> tuple[Tensor, Tensor]:
        attention_kernel[grid](*descs, lse, *sizes, num_warps=4)
        return out, lse.T[None]

    def cudnn() -> tuple[Tensor, None]:
        cut = (x.view(-1, segment, heads, dim).transpose(1, 2) for x in qkv)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*cut, is_causal=causal).transpose(1, 2), None

    options = {"is_causal": causal, "backend": "triton", "return_lse": True}
    segments = DilatedPattern.longnet([segment], [1])
    return {"Gluon": ours, "triton": lambda: dilated_attention(*qkv, segments, **options), "cuDNN": cudnn}


def check(results: tuple[Any, ...], qkv: tuple[Tensor, ...], segment: int, causal: bool) -> run.Check:
    """In the first segment, the middle one and the last one."""
    count, given = qkv[0].shape[1] // segment, {"pattern": Pattern([Dense()]), "is_causal": causal}
    cut = [x if x is None else x.reshape(count, segment, *x.shape[2:])[[0, count // 2, -1]] for x in (*qkv, *results)]
    oracles = (reference.attention(*cut[:3], **given, dtype=dtype) for dtype in (torch.float64, None))
    exact, plain = (dict(zip(("out", "lse"), x, strict=True)) for x in oracles)
    got = {name: x for name, x in zip(exact, cut[3:], strict=True) if x is not None}
    return run.Expected(exact, testing.limits(exact, plain, torch.bfloat16)).compare(got)


def main(words: list[str] | None = None) -> None:
    parser = common.parser(__doc__, "report/gluon.json")
    parser.add_argument("--shape", nargs=3, type=int, default=(64, 2048, 16), help="segments, tokens of each, heads")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each mask")
    options = parser.parse_args(words)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("nothing is measured: this needs a Hopper GPU, of compute capability 9.0")
    device, (segments, segment, heads) = torch.device("cuda"), options.shape
    qkv = testing.make_qkv(1, segments * segment, heads, D.value, dtype=torch.bfloat16, device=device)
    found: dict[str, Any] = {"shape": options.shape, "sides": {}, "machine": machine.describe(device, options.commit)}
    for mask, causal in (("dense", False), ("causal", True)):
        calls = sides(qkv, segment, causal)
        checks = {name: check(call(), qkv, segment, causal) for name, call in calls.items()}
        right = {name: call for name, call in calls.items() if checks[name].right()}
        times = run.time_calls(right, device, seconds=options.seconds)
        work = 4e-9 * segments * segment**2 * heads * D.value / (2 if causal else 1)
        for name, one in checks.items():
            row = found["sides"].setdefault(name, {})[mask] = {"errors": one.errors}
            if name in right:
                row |= {"ms": round(times[name].median, 4), "TFLOP/s": round(work / times[name].median, 1)}
            print(name, mask, row if name in right else f"is wrong: {row}", flush=True)
        machine.write_json(options.out, found)


if __name__ == "__main__":
    main()
