"""Prints the table of docs/scaling.md and draws docs/scaling.svg. Run: .venv/bin/python docs/scaling.py [--table]

With --table it only prints. All numbers are modelled by plan_cost; nothing here was measured.
"""

import sys
from pathlib import Path

from dilated_attention import DilatedPattern, plan_cost
from dilated_attention.ring.cost import (
    EXCHANGES,
    LINKS,
    PlanCost,
    duration,
    size,
)

SHORTEST, HEADS, DIM = 2048, 12, 64
ROWS = [
    (20, 8),
    (20, 64),
    (24, 64),
    (24, 256),
    (27, 256),
    (27, 1024),
    (30, 1024),
]  # log2 of the tokens, ranks
COLOURS = {
    "ring": "#5d9bd0",
    "allgather": "#1f4e79",
    "alltoall": "#d07f2e",
    "naive ring": "#9a9a96",
}


def cost(tokens: int, ranks: int) -> PlanCost:
    """Segments double from 2048 to the whole sequence, each with 2048 rows per head."""
    lengths = [SHORTEST]
    while lengths[-1] < tokens:
        lengths.append(2 * lengths[-1])
    pattern = DilatedPattern.longnet(
        lengths, [length // SHORTEST for length in lengths]
    )
    return plan_cost(pattern, tokens, ranks, num_heads=HEADS, head_dim=DIM)


def table() -> str:
    lines = [
        "| tokens | ranks | K/V received | ring | all-gather | all-to-all received | all-to-all | `auto` "
        "| all K/V received | naive ring | plain all-gather |",
        "|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    for power, ranks in ROWS:
        found = cost(2**power, ranks)
        ring, allgather, alltoall = (
            found.exchanges[name] for name in EXCHANGES
        )
        cells = [
            f"2^{power}", f"{ranks:,}", size(ring.bytes_received_max), duration(ring.seconds),
            duration(allgather.seconds), size(alltoall.bytes_received_max), duration(alltoall.seconds), found.best,
            size(found.naive_ring_bytes), duration(found.naive_ring_seconds),
            duration(found.naive_ring_seconds - (found.naive_ring_hops - 1) * LINKS["nccl"][0]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw() -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    from pictures import DARK, LINES, adapt, settings

    mpl.rcParams.update({**settings(), "font.size": 9})
    figure, axes = plt.subplots(
        2, 3, figsize=(8, 5), sharex=True, sharey="row", layout="constrained"
    )
    powers = range(20, 31)
    for (top, bottom), ranks in zip(axes.T, (8, 64, 1024), strict=True):
        costs = [cost(2**power, ranks) for power in powers]
        for name, colour in COLOURS.items():
            if name == "naive ring":
                received, seconds = (
                    [x.naive_ring_bytes for x in costs],
                    [x.naive_ring_seconds for x in costs],
                )
            else:
                received = [x.exchanges[name].bytes_received_max for x in costs]
                seconds = [x.exchanges[name].seconds for x in costs]
            dashes = "--" if name == "allgather" else "-"
            top.plot(
                powers, received, dashes, color=colour, label=name
            )  # ring and allgather: one line on the other
            bottom.plot(powers, seconds, dashes, color=colour, label=name)
        top.set(yscale="log", title=f"{ranks:,} ranks")
        bottom.set(
            yscale="log",
            xlabel="tokens",
            xticks=[20, 25, 30],
            xticklabels=["2^20", "2^25", "2^30"],
        )
        for axis in (top, bottom):
            axis.grid(color=LINES, linewidth=0.6)
            axis.minorticks_off()
    axes[0, 0].set_ylabel("bytes received by a rank")
    axes[1, 0].set_ylabel("modelled seconds, forward")
    axes[0, 0].legend(fontsize=8, frameon=False)
    file = Path(__file__).with_name("scaling.svg")
    figure.savefig(file, metadata={"Date": None})
    adapt(file, {**DARK, COLOURS["allgather"]: "#c4e7ff"})


if __name__ == "__main__":
    print(table())
    if "--table" not in sys.argv[1:]:
        draw()
