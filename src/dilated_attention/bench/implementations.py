"""Everything that is compared: the yardstick, ours, and the baselines, each with the oracle it is checked against.

Over ranks an implementation is built inside a rank for its shard of the tokens, and the oracle is that of the whole
sequence.

Legend: query, key, value (B, N, H, D); x, out (B, N, E) with E = H * D for the modules that project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from dilated_attention import compat
from dilated_attention.backends import triton
from dilated_attention.bench import baselines
from dilated_attention.bench.run import Attention, oracle
from dilated_attention.bench.setting import Build, Implementation, Setting, Subject
from dilated_attention.call import Call
from dilated_attention.distributed.sequence import shard_sequence
from dilated_attention.functional import dilated_attention
from dilated_attention.nn import DilatedAttention, MultiheadDilatedAttention
from dilated_attention.nn.ring import RingDilatedAttention, RingMultiheadDilatedAttention
from dilated_attention.pattern import RULES, DilatedPattern

COMPILED = "auto, compiled"  # one opaque op in a compiled graph, whatever the backend
BACKENDS = ("auto", "triton", "sdpa", "eager", COMPILED)
RANKS = (2, 4)
DENSE, OVER_HEADS = "dense SDPA", "attention over heads"
GATHER, SLICES = "copy and gather, index_select", "copy and gather, slicing"
RELEASED = "gather-pad-scatter"
Module = TypeVar("Module", bound=nn.Module)
MODULES: dict[type[Any], str] = dict.fromkeys((
    DilatedAttention, compat.ImprovedDilatedAttention, RingDilatedAttention, compat.RingDilatedAttentionV2Collective,
    compat.RingDilatedAttentionProduction,
), "head_groups") | {compat.RingAttentionV2Simple: "dense"}  # fmt: skip
PROJECTING = (MultiheadDilatedAttention, compat.ImprovedMultiheadDilatedAttention, RingMultiheadDilatedAttention)


def everything() -> list[Implementation]:
    """The yardstick first, then ours, then the baselines."""
    modules = [
        *(Implementation(x.__name__, "module", rule, partial(_module, x, rule)) for x, rule in MODULES.items()),
        *(Implementation(x.__name__, "multihead", "head_groups", partial(projecting, x)) for x in PROJECTING),
    ]
    over_ranks = [  # the same with the sequence over processes, which meet over gloo; checked against one device
        replace(one, name=f"{one.name}, {ranks} ranks", kind="ring", build=partial(_sharded, one.build),
                whole=one.build, ranks=ranks)
        for ranks in RANKS for one in modules if one.name.startswith("Ring")
    ]  # fmt: skip
    mesh = Implementation(
        "RingAdvancedDistributedDilatedAttention, 4 ranks", "ring", "head_groups", _on_mesh, ranks=4,
        whole=partial(projecting, MultiheadDilatedAttention), why_not=_no_mesh,
    )  # fmt: skip
    functions = [
        Implementation(f"{rule}, {how}", "function", rule, partial(_ours, rule, how), why_not=partial(_cannot, how))
        for rule, how in product(RULES, BACKENDS)
    ]
    yardstick = Implementation(DENSE, "baseline", "dense", _dense, ours=False)
    return [yardstick, *functions, *modules, *over_ranks, mesh, *_baselines()]


def named(*names: str) -> list[Implementation]:
    found = {one.name: one for one in everything()}
    return [found[name] for name in names]


def _baselines() -> list[Implementation]:
    kernels = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
               "memory-efficient": SDPBackend.EFFICIENT_ATTENTION}  # fmt: skip
    return [
        *(Implementation(f"dense {name}", "baseline", "dense", partial(_dense, kernel=x), False, why_not=_cuda_half)
          for name, x in kernels.items()),
        Implementation("nn.MultiheadAttention", "multihead", "dense", _torchs, False),
        _way(GATHER, "head_groups", baselines.copy_and_gather),
        _way(SLICES, "head_groups", baselines.copy_slices),
        _way(RELEASED, "torchscale", baselines.gather_pad_scatter, why_not=_half_on_cuda),
        _way(f"{RELEASED}, cuDNN", "torchscale", partial(baselines.gather_pad_scatter, kernel="cudnn"),
             why_not=_cuda_half),
        _way("FlexAttention", "head_groups", baselines.flex, why_not=_cuda_half),
        _way(OVER_HEADS, "head_groups", baselines.over_heads),
    ]  # fmt: skip


def _way(name: str, rule: str, function: Callable[..., Tensor], **more: Any) -> Implementation:
    return Implementation(name, "baseline", rule, partial(_function, function, rule), False, **more)


def _half_on_cuda(setting: Setting) -> str | None:
    if setting.on_cuda and setting.dtype.itemsize != 2:
        return f"its kernel takes float16 and bfloat16 on CUDA, not {setting.dtype_name}"
    return None


def _cuda_half(setting: Setting) -> str | None:
    return _half_on_cuda(setting) if setting.on_cuda else "it runs on CUDA only"


def _no_mesh(setting: Setting) -> str | None:
    return "gloo gathers no CUDA tensors for DTensor, and NCCL wants a GPU for each rank" if setting.on_cuda else None


def _cannot(how: str, setting: Setting) -> str | None:
    if how == COMPILED and setting.on_cuda and not triton.INSTALLED:
        return "torch.compile needs triton on CUDA"
    if how != "triton":
        return None
    call, shape = Call(DilatedPattern.longnet([1], [1]), setting.causal), (1, 1, 1, setting.head_dim)
    call = call.with_shapes(shape, shape, setting.dtype, setting.device, has_padding=False, start=0)
    return "; ".join(triton.unsupported(call, False)) or None


def subject(function: Callable[..., Tensor], pattern: DilatedPattern, setting: Setting) -> Subject:
    return Subject(function, oracle(pattern, setting.causal), pattern, *setting.inputs())


def _function(function: Callable[..., Tensor], rule: str, setting: Setting) -> Subject:
    pattern = setting.pattern(rule)
    return subject(lambda *qkv: function(*qkv, pattern, is_causal=setting.causal), pattern, setting)


def _ours(rule: str, how: str, setting: Setting) -> Subject:
    if how != COMPILED:
        return _function(partial(dilated_attention, backend=how), rule, setting)
    made = _function(dilated_attention, rule, setting)
    # one graph or an error: a fallback to plain Python would be timed under the wrong name
    return replace(made, attention=torch.compile(made.attention, fullgraph=True, dynamic=False))


def _dense(setting: Setting, **options: Any) -> Subject:
    return subject(partial(baselines.dense, is_causal=setting.causal, **options), setting.pattern("dense"), setting)


def _module(kind: type[Any], rule: str, setting: Setting) -> Subject:
    made = kind() if rule == "dense" else kind(*setting.segments(rule))
    return subject(partial(made, is_causal=setting.causal), setting.pattern(rule), setting)


def projecting(kind: type[MultiheadDilatedAttention], setting: Setting) -> Subject:
    return _projecting(filled(kind(setting.width, setting.heads, *setting.segments("head_groups")), setting), setting)


def _projecting(made: Any, setting: Setting) -> Subject:
    return _with_parameters(made, made.pattern, lambda x: made(x, is_causal=setting.causal)[0], setting)


def _torchs(setting: Setting) -> Subject:
    """nn.MultiheadAttention, which is dense; when causal, its users hand it the mask, N x N and made once."""
    made, mask = filled(nn.MultiheadAttention(setting.width, setting.heads, batch_first=True), setting), None
    if setting.causal:
        mask = nn.Transformer.generate_square_subsequent_mask(setting.tokens, setting.device, setting.dtype)
    options: dict[str, Any] = {"need_weights": False, "attn_mask": mask, "is_causal": setting.causal}
    return _with_parameters(made, setting.pattern("dense"), lambda x: made(x, x, x, **options)[0], setting)


def filled(made: Module, setting: Setting) -> Module:
    """Random parameters, biases and gains too: at 0 and 1 they would hide mistakes. The same on every rank."""
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=setting.width**-0.5, generator=generator)
    return made.to(setting.device, setting.dtype)


def _with_parameters(made: nn.Module, pattern: DilatedPattern, attention: Attention, setting: Setting) -> Subject:
    """The oracle is projections, the reference, the norm where there is one, and the projection of the output."""
    parameters = dict(made.named_parameters())

    def exact(x: Tensor, *given: Tensor) -> Tensor:
        of = dict(zip(parameters, given, strict=True))
        q, k, v = (torch.unflatten(p, -1, (setting.heads, setting.head_dim)) for p in _projected(x, of))
        out = oracle(pattern, setting.causal)(q, k, v).flatten(2)
        if "norm.weight" in of:
            out = F.layer_norm(out, x.shape[-1:], of["norm.weight"], of["norm.bias"])
        return F.linear(out, of["out_proj.weight"], of["out_proj.bias"])

    (query, *_), dout = setting.inputs()
    return Subject(attention, exact, pattern, (query.flatten(2),), dout.flatten(2), parameters)


def _projected(x: Tensor, of: dict[str, Tensor]) -> tuple[Tensor, ...]:
    for name in ("qkv_proj.", "in_proj_"):
        if f"{name}weight" in of:
            return F.linear(x, of[f"{name}weight"], of[f"{name}bias"]).chunk(3, dim=-1)
    return tuple(F.linear(x, of[f"{p}_proj.weight"], of[f"{p}_proj.bias"]) for p in "qkv")


def _sharded(build: Build, setting: Setting, group: dist.ProcessGroup | None = None) -> Subject:
    """With its shard of the inputs. A module finds its group when it is called."""
    group, whole = group or dist.group.WORLD, build(setting)
    assert group is not None
    inputs = tuple(shard_sequence(x, group) for x in whole.inputs)
    return replace(whole, inputs=inputs, dout=shard_sequence(whole.dout, group), group=group)


def _on_mesh(setting: Setting) -> Subject:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict  # takes a while

    mesh = init_device_mesh(setting.device.type, (2, 2), mesh_dim_names=("sequence", "heads"))
    sizes = (setting.width, setting.heads, *setting.segments("head_groups"))
    made = compat.RingAdvancedDistributedDilatedAttention(*sizes, mesh, device=setting.device, dtype=setting.dtype)
    state = filled(MultiheadDilatedAttention(*sizes), setting).state_dict()
    set_model_state_dict(made, state, options=StateDictOptions(full_state_dict=True))
    return _sharded(partial(_projecting, made), setting, mesh.get_group("sequence"))
