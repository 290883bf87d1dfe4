"""A view as one page that needs nothing else: data, style and script are inside, and nothing is fetched.

The browser may run the one script and use the one style sheet that are written here, by their hashes, and load nothing.
Numbers that JavaScript would round are written as strings.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files

from dilated_attention.show import colours, words
from dilated_attention.show.cells import BranchCells
from dilated_attention.show.seen import View
from dilated_attention.show.travel import Sent, Travel

MOST_BARS = 32  # ranks, or groups of them, that get a line of their own


def page(view: View) -> str:
    """The page as HTML."""
    here = files("dilated_attention.show")
    parts = {name: here.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    hashes = {name: base64.b64encode(hashlib.sha256(parts[name].encode()).digest()).decode() for name in ("css", "js")}
    policy = (
        f"default-src 'none'; style-src 'sha256-{hashes['css']}'; script-src 'sha256-{hashes['js']}'; "
        "base-uri 'none'; form-action 'none'"
    )
    data = as_json(_data(view))
    fill = {"policy": policy, "title": html.escape(words.title(view)), "style": parts["css"], "script": parts["js"]}
    return re.sub(r"\{\{(\w+)\}\}", lambda found: {**fill, "data": data}[found[1]], parts["html"])


def as_json(data: object) -> str:
    """What can stand inside a script element: nothing in it ends the element."""
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _exact(number: int) -> int | str:
    return number if number < 2**53 else str(number)


def _data(view: View) -> dict[str, object]:
    most = len(view.pattern.branches)
    kinds = [
        {
            "name": words.heads_name(kind.heads),
            "heads": kind.heads,
            "offsets": words.offsets(view, kind),
            "coverage": words.coverage(kind.coverage),
            "zeros": words.zeros(view, kind),
            "keys": words.keys(view, kind) if view.query is not None else "",
            "branches": [None if branch is None else _branch(branch) for branch in kind.branches],
        }
        for kind in view.kinds
    ]
    return {
        "title": words.title(view),
        "subtitle": words.subtitle(view),
        "legend": words.legend(view),
        "branches": [words.branch_name(view, branch) for branch in range(most)],
        "edges": view.edges,
        "causal": view.is_causal,
        "tokens": view.tokens,
        "heads": view.heads,
        "head": view.head or 0,
        "query": view.query,
        "queryStretch": view.query_stretch,
        "kinds": kinds,
        "coverage": [
            [heads, sentence, next(x.coverage.least for x in view.kinds if words.coverage(x.coverage) == sentence)]
            for heads, sentence in words.told_once(view.kinds, [words.coverage(kind.coverage) for kind in view.kinds])
        ],
        "together": words.coverage(view.coverage),
        "levels": {theme: colours.levels(most, theme) for theme in colours.RAMP},
        "ramp": {theme: [colours.NOTHING[theme], *colours.RAMP[theme]] for theme in colours.RAMP},
        "reach": {
            "query": view.reach.query,
            "title": words.reach_title(view),
            "end": words.reach_end(view),
            "layers": [
                {"text": text, "cells": layer.cells}
                for text, layer in zip(words.reach_layers(view.reach), view.reach.layers, strict=True)
            ],
        },
        "travel": None if view.travel is None else _travel(view, view.travel),
    }


def _branch(branch: BranchCells) -> dict[str, object]:
    return {
        "first": branch.first,
        "last": branch.last,
        "front": branch.front,
        "back": branch.back,
        "own": [_exact(pairs) for pairs in branch.own],
    }


def _travel(view: View, travel: Travel) -> dict[str, object]:
    ranks = travel.shards.ranks
    step = 1 if ranks <= MOST_BARS else -(-ranks // MOST_BARS)
    sums = []
    for first in range(0, ranks, step):
        some = travel.of_rank[first : first + step]
        name = f"rank {first}" if len(some) == 1 else f"ranks {first}–{first + len(some) - 1}"
        sent, received = sum(one.bytes_sent for one in some), sum(one.bytes_received for one in some)
        sums.append([name, _exact(sent), _exact(received)])
    lists = {"who sends": travel.sent}
    if travel.needed != travel.sent:
        lists["whose rows"] = travel.needed
    return {
        "title": words.travel_title(travel),
        "ranks": ranks,
        "listed": travel.is_listed,
        "facts": words.travel_facts(travel),
        "branches": words.travel_branches(view, travel),
        "lists": {name: [_message(one) for one in some] for name, some in lists.items()},
        "sums": sums,
    }


def _message(one: Sent) -> list[int | str]:
    return [one.source, one.target, one.branch, _exact(one.rows), _exact(one.bytes)]
