"""A view as one page: script, style and data are inside, and the browser may load nothing else."""

from __future__ import annotations

from pathlib import Path

from dilated_attention import charts
from dilated_attention.show.chart import choosable
from dilated_attention.show.view import COLOURS, View


def page(view: View) -> str:
    data = {
        "specification": choosable(view).to_dict(),
        "captions": {colour: view.caption(colour) for colour in COLOURS},
        "cells": len(view.edges) - 1,
        "embed": charts.EMBED,
    }
    facts = [*view.facts(), *view.left_out(view.pictures())]
    return charts.page(Path(__file__).parent, data, scripts=[charts.scripts()], view=view, facts=facts)
