"""The table of cases: which values each path takes on each axis, and a sampler that covers them.

A path is a way to run the operation. `cover` deals the values of its axes to few cases: any two values meet in some
case, and so do any three of the axes that the path names for that, and all of those that it names for that.
test_cases.py runs every case against the float64 oracle, and checks the coverage itself.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dilated_attention.pattern import RULES
from tests.cases import EXCHANGES, INTERPRETED, LAYOUTS, PATTERNS, UNIONS, Case


@dataclass(frozen=True)
class Path:
    axes: Mapping[str, tuple[Any, ...]]
    triples: tuple[str, ...] = ()  # axes of which any three values meet, too
    together: tuple[str, ...] = ()  # axes of which all values meet
    on_gpu: bool = False


RULED = {"rule": RULES, "is_causal": (False, True)}
MASKS = ("none", "random", "right", "sample")
DOUTS = ("plain", "expanded", "strided", "cut", "reversed")
CALL: dict[str, tuple[Any, ...]] = {
    **RULED,
    "pattern": tuple(PATTERNS),
    "tokens": (1, 2, 5, 17, 63, 64, 65, 97, 129),
    "mask": MASKS,
    "heads": ("one", "several", "grouped"),
    "samples": (1, 2, 3),
    "head_dim": (1, 4, 8),
    "dtype": ("f64", "f32"),
    "layout": LAYOUTS,
    "dlse": (True, False),
    "scale": (None, 0.0, 0.7),
}
FEW_PATTERNS = ("dense", "nested", "sparse", "odd", "rate_over_length", "ones", "twice", "gigapath")
SHARDED: dict[str, tuple[Any, ...]] = {
    **CALL,
    "pattern": FEW_PATTERNS,
    "tokens": (1, 5, 17, 64, 300),
    "mask": (*MASKS, "hidden"),
    "scale": (None,),
    "dropout_p": (0.0, 0.3),
    "exchange": EXCHANGES,
    "shards": ("even", "unequal", "empty"),
    "recompute": (True, False),
}
PACKED: dict[str, tuple[Any, ...]] = {"packing": ("even", "mixed", "ones", "empty"), "mask": ("none",), "samples": (1,)}
LITTLE: dict[str, tuple[Any, ...]] = {  # the path "triton" has the rest
    "head_dim": (1, 16, 20), "pattern": ("nested", "odd", "twice", "far"), "layout": LAYOUTS[:3],
}  # fmt: skip
KERNEL: dict[str, tuple[Any, ...]] = {
    **CALL,
    "pattern": ("nested", "sparse_nested", "odd", "rate_over_length", "twice", "far"),
    "tokens": (17, 33),
    "samples": (1, 2),
    "head_dim": (1, 16, 20, 200),
    "dtype": ("f32", "f16"),  # the interpreter knows no bfloat16
    "layout": ("contiguous", "transposed", "expanded", "odd"),
    "dropout_p": (0.0, 0.3),
    "dout": ("expanded", "strided", "cut"),
}
# In half precision sums of few terms cancel to nothing in the oracle alone: short sequences are for float32.
# Head dims are larger than on a CPU, so a scale of 0.7 would give scores that float32 itself rounds too coarsely.
ON_GPU = {
    "tokens": (17, 64, 129, 1000, 1025), "head_dim": (8, 64, 80, 128), "unit": (4,), "samples": (1, 2), "dout": DOUTS,
    "scale": (None, 0.0, 0.2),
}  # fmt: skip
HALVES = {**CALL, **ON_GPU, "dtype": ("bf16", "f16"), "mask": ("none",), "pattern": FEW_PATTERNS}
OURS = {
    **KERNEL, **ON_GPU, "dtype": ("bf16", "f16", "f32"), "tokens": (17, 127, 129, 1000, 2055),
    "head_dim": (8, 20, 64, 80, 256),
}  # fmt: skip

PATHS = {
    "function": Path(
        {
            **CALL, "backend": ("sdpa", "eager", "auto"), "dout": DOUTS, "head_dim": (1, 3, 8, 20),
            "heads": ("one", "several", "grouped", "many"), "scale": (None, 0.0, 1e-46, 0.7, 1.5),
        },
        ("rule", "is_causal", "pattern", "tokens", "mask", "backend"),
    ),
    "long": Path(
        {
            **RULED, "pattern": ("nested", "odd", "gigapath"), "tokens": (400, 1025), "heads": ("one", "grouped"),
            "samples": (1,), "mask": ("none", "random", "right"), "backend": ("sdpa", "eager"),
            "dtype": ("f64", "f32", "bf16", "f16"),
        },
    ),
    "dropout": Path(
        {**CALL, "dropout_p": (0.1, 0.6, 0.9), "backend": ("auto", "eager"), "tokens": (17, 40, 65)},
        ("rule", "is_causal", "pattern"),
    ),
    "packed": Path(
        {**CALL, **PACKED, "backend": ("auto", "eager"), "dropout_p": (0.0, 0.3)},
        ("rule", "is_causal", "pattern", "packing"),
    ),
    "few": Path(
        {
            **CALL, "tokens": (17, 61, 97), "rows": ("last", "first", "inside", "many", "each", "each32"),
            "backend": ("sdpa", "eager"), "heads": ("one", "several", "grouped", "many"),
        },
        ("rule", "is_causal", "pattern", "rows", "mask"),
    ),
    "few_dropout": Path(
        {**CALL, "pattern": FEW_PATTERNS, "tokens": (37,), "rows": ("last", "many", "each"), "dropout_p": (0.4,)}
    ),
    "stream": Path(
        {
            **CALL, "mask": ("none",), "dlse": (False,), "tokens": (5, 53, 97), "backend": ("sdpa", "eager"),
            "dtype": ("f64", "f32", "bf16", "f16"),
            "cuts": ("ones", "whole", "halves", "some", "with empty ones"),
        },
        ("rule", "is_causal", "pattern", "cuts"),
    ),
    "threads": Path(
        {**SHARDED, "ranks": (1, 2, 3, 6)},
        ("rule", "is_causal", "pattern", "exchange", "shards", "ranks"),
        ("rule", "is_causal", "mask", "exchange"),
    ),
    "ranks": Path(
        {**SHARDED, "ranks": (1, 2, 3, 4, 8), "exchange": (*EXCHANGES, "auto"), "copied": (False, True)},
        ("rule", "is_causal", "exchange"),
    ),
    "packed_threads": Path(
        {**SHARDED, **PACKED, "ranks": (2, 3, 6)}, ("rule", "is_causal", "exchange", "packing", "ranks")
    ),
    "packed_ranks": Path(
        {**SHARDED, **PACKED, "ranks": (2, 4), "exchange": (*EXCHANGES, "auto"), "tokens": (64, 300)},
    ),
    "module": Path(
        {**CALL, "pattern": ("nested", "odd"), "tokens": (3, 17), "scale": (None,), "dlse": (False,)},
        ("rule", "is_causal", "mask"),
    ),
    "compiled": Path(
        {
            **RULED, "pattern": ("nested", "odd"), "tokens": (24,), "mask": ("none", "random"),
            "heads": ("several", "grouped"), "dtype": ("f32",), "dropout_p": (0.0, 0.4), "scale": (None, 0.3),
        },
    ),
    "packed_compiled": Path(
        {
            **RULED, **PACKED, "pattern": ("nested", "odd"), "tokens": (24,), "heads": ("several", "grouped"),
            "dtype": ("f32",), "dropout_p": (0.0, 0.4),
        },
    ),
    "packed_triton": Path(
        {
            **(OURS if not INTERPRETED else KERNEL), **PACKED,
            **({**LITTLE, "tokens": (32,)} if INTERPRETED else {}),
        },
        on_gpu=True,
    ),
    "packed_flash": Path({**HALVES, **PACKED}, on_gpu=True),
    "triton": Path(OURS if not INTERPRETED else KERNEL, ("rule", "is_causal"), on_gpu=True),
    "triton_few": Path(
        {
            **(OURS if not INTERPRETED else KERNEL), "rows": ("last", "inside", "each", "many"), "dropout_p": (0.0,),
            "tokens": (37, 509), "dlse": (False,),
            **({**LITTLE, "tokens": (37,)} if INTERPRETED else {}),
        },
        on_gpu=True,
    ),
    "cudnn": Path({**HALVES, "head_dim": (64, 128), "samples": (1,)}, on_gpu=True),
    "flash": Path(HALVES, on_gpu=True),
    "efficient": Path({**HALVES, "dtype": ("bf16", "f16", "f32"), "mask": MASKS}, on_gpu=True),
    "cuda_eager": Path(
        {**CALL, **ON_GPU, "dtype": ("bf16", "f16", "f32", "f64"), "pattern": FEW_PATTERNS, "dropout_p": (0.0, 0.3)},
        on_gpu=True,
    ),
    "cuda_few": Path(
        {
            **HALVES, "pattern": ("nested", "odd", "gigapath"), "tokens": (509,),
            "rows": ("last", "inside", "each", "many"), "head_dim": (64, 80),
            "dtype": ("bf16", "f16", "f32"), "mask": MASKS, "backend": ("sdpa", "eager"), "dlse": (False, True),
        },
        on_gpu=True,
    ),
    "cuda_ranks": Path(
        {
            **SHARDED, "ranks": (2, 3, 4), "tokens": (5, 300, 599), "head_dim": (32,), "dtype": ("bf16", "f32"),
            "pattern": ("dense", "nested", "odd", "gigapath"), "unit": (4,), "samples": (2,), "layout": LAYOUTS[:2],
        },
        on_gpu=True,
    ),
    "cuda_stream": Path(
        {
            **CALL, "mask": ("none",), "dlse": (False,), "tokens": (848,), "unit": (4,), "dtype": ("bf16",),
            "head_dim": (20, 64), "pattern": ("nested", "odd", "gigapath"), "cuts": ("halves", "some"),
        },
        on_gpu=True,
    ),
}  # fmt: skip
PATHS |= {  # the same with patterns of any branches
    f"union_{name}": Path({**PATHS[name].axes, "rule": ("once", "sum"), "pattern": tuple(UNIONS)}, triples)
    for name, triples in (
        ("function", ("rule", "is_causal", "pattern", "mask")), ("dropout", ()), ("compiled", ()), ("module", ()),
        ("packed", ("rule", "is_causal", "pattern")), ("few", ("rule", "is_causal", "pattern", "rows")),
    )
}  # fmt: skip
# queries of these see all later tokens, for which no stream can wait
AHEAD = ("strided", "by heads", "global", "dense", "whole")
PATHS |= {
    "union_stream": Path(
        {
            **PATHS["stream"].axes,
            "rule": ("once", "sum"),
            "tokens": (5, 53),
            "pattern": tuple(name for name in UNIONS if name not in AHEAD),
        },
        ("rule", "is_causal", "pattern"),
    ),
    "union_causal_stream": Path(
        {**PATHS["stream"].axes, "rule": ("once", "sum"), "tokens": (5, 53), "pattern": AHEAD, "is_causal": (True,)}
    ),
}
UNION_EXCHANGES = {"exchange": ("ring", "allgather")}
PATHS |= {
    f"union_{name}": Path(
        {**PATHS[name].axes, "rule": ("once", "sum"), "pattern": tuple(UNIONS), **UNION_EXCHANGES}, triples,
    )
    for name, triples in (
        ("threads", ("rule", "is_causal", "pattern", "exchange", "ranks")),
        ("packed_threads", ("is_causal", "pattern", "exchange")),
        ("ranks", ("is_causal", "pattern", "exchange")), ("packed_ranks", ()),
    )
}  # fmt: skip
PATHS["union_triton"] = Path(
    {
        **PATHS["triton"].axes, "rule": ("once", "sum"),
        "pattern": ("window", "far", "strided", "segments", "prefix", "blocks"),
    },
    ("rule", "is_causal", "pattern"), on_gpu=True,
)  # fmt: skip
PATHS["union_triton_few"] = Path(
    {**PATHS["triton_few"].axes, "rule": ("once", "sum"), "pattern": tuple(UNIONS)}, on_gpu=True
)


# --- few cases that cover them ----------------------------------------------------------------------------------

Values = tuple[tuple[str, Any], ...]  # (axis, value) of several axes


def groups(path: Path) -> Iterator[tuple[str, ...]]:
    """Axes whose values meet: each two, each three of those named for that, and those that are all named together."""
    yield from itertools.combinations(path.axes, 2)
    yield from itertools.combinations([axis for axis in path.axes if axis in path.triples], 3)
    if path.together:
        yield tuple(axis for axis in path.axes if axis in path.together)


def tuples(path: Path, values: Mapping[str, Any]) -> list[Values]:
    """What a case of the path with these values covers."""
    return [tuple((axis, values[axis]) for axis in some) for some in groups(path)]


def wanted(path: Path) -> list[Values]:
    """All of the path."""
    return [
        tuple(zip(some, values, strict=True))
        for some in groups(path)
        for values in itertools.product(*(path.axes[axis] for axis in some))
    ]


def dealt(path: Path, seed: str, tries: int = 12) -> Iterator[dict[str, Any]]:
    """Each case is the best of some drawn ones that have the first pair or triple that is still missing."""
    draw = random.Random(seed)
    # in order: every process must make the same cases
    missing = {axes: dict.fromkeys(itertools.product(*map(path.axes.get, axes))) for axes in groups(path)}
    while missing:
        axes, left = next(iter(missing.items()))
        first = dict(zip(axes, next(iter(left)), strict=True))
        drawn = [
            {axis: first.get(axis, draw.choice(values)) for axis, values in path.axes.items()} for _ in range(tries)
        ]
        pick = {axes: operator.itemgetter(*axes) for axes in missing}  # groups that are complete cost no more time
        best = max(drawn, key=lambda values: sum(pick[axes](values) in left for axes, left in missing.items()))
        for axes in pick:
            missing[axes].pop(pick[axes](best), None)
            if not missing[axes]:
                del missing[axes]
        yield best


@functools.cache
def cover(name: str) -> tuple[Case, ...]:
    """The cases of a path."""
    device = "cuda" if PATHS[name].on_gpu and not INTERPRETED else "cpu"
    return tuple(Case(name, i, device=device, **values) for i, values in enumerate(dealt(PATHS[name], name)))
