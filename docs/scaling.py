"""Prints the table of docs/scaling.md and draws docs/scaling.svg. Run: .venv/bin/python docs/scaling.py [--table]

With --table it only prints. All numbers are modelled by plan_cost; nothing here was measured.
"""

import sys
from pathlib import Path

from dilated_attention import DilatedPattern, plan_cost
from dilated_attention.ring.cost import EXCHANGES, LINKS, PlanCost
from dilated_attention.units import bytes_text, seconds_text

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
# those of the report, so that each has a form for dark pages
COLOURS = {
    "ring": "#0969da",
    "allgather": "#116329",
    "alltoall": "#bc4c00",
    "naive ring": "#6e7781",
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
            f"2^{power}", f"{ranks:,}", bytes_text(ring.bytes_received_max), seconds_text(ring.seconds),
            seconds_text(allgather.seconds), bytes_text(alltoall.bytes_received_max), seconds_text(alltoall.seconds), found.best,
            bytes_text(found.naive_ring_bytes), seconds_text(found.naive_ring_seconds),
            seconds_text(found.naive_ring_seconds - (found.naive_ring_hops - 1) * LINKS["nccl"][0]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw() -> None:
    import altair as alt
    from dilated_attention.bench.plots import styled, svg

    rows = []
    for ranks in (8, 64, 1024):
        for power in range(20, 31):
            found = cost(2**power, ranks)
            both = {
                name: (one.bytes_received_max, one.seconds)
                for name, one in found.exchanges.items()
            }
            both["naive ring"] = (
                found.naive_ring_bytes,
                found.naive_ring_seconds,
            )
            rows += [
                {"ranks": ranks, "power": power, "exchange": name}
                | {"bytes": received, "seconds": seconds}
                for name, (received, seconds) in both.items()
            ]
    scale = alt.Scale(domain=list(COLOURS), range=list(COLOURS.values()))
    base = (
        alt.Chart(alt.Data(values=rows))
        .mark_line(strokeWidth=2)
        .encode(
            x=alt.X("power:Q", title="tokens").axis(
                values=[20, 25, 30], labelExpr="'2^' + datum.value"
            ),
            color=alt.Color("exchange:N", title=None, scale=scale),
            # ring and allgather receive the same: one line lies on the other
            strokeDash=alt.condition(
                "datum.exchange == 'allgather'",
                alt.value([5, 4]),
                alt.value([1, 0]),
            ),
        )
        .properties(width=190, height=170)
    )
    log = alt.Scale(type="log", nice=False)
    axis = alt.Axis(format="~s", tickCount=5)
    charts = [
        base.encode(y=alt.Y(f"{key}:Q", title=title, scale=log, axis=axis))
        for key, title in (
            ("bytes", "bytes received per rank"),
            ("seconds", "modelled seconds, forward"),
        )
    ]
    both_rows = alt.vconcat(
        *(
            chart.facet(
                column=alt.Column("ranks:N", title=None).header(
                    labelExpr="format(datum.value, ',') + ' ranks'"
                )
            )
            for chart in charts
        )
    )
    Path(__file__).with_name("scaling.svg").write_bytes(svg(styled(both_rows)))


if __name__ == "__main__":
    print(table())
    if "--table" not in sys.argv[1:]:
        draw()
