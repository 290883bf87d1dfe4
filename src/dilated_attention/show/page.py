"""A view as one page: script, style and data are inside, and the browser may load nothing else."""

from __future__ import annotations

import html

from dilated_attention import charts
from dilated_attention.show.chart import choosable
from dilated_attention.show.view import COLOURS, View

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; } }
body { margin: 1.5rem auto; max-width: 46rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .3rem 0; color: var(--soft); }
#chart { display: flex; flex-direction: column-reverse; align-items: flex-start; margin: 1rem 0; }
.vega-bindings { display: flex; flex-wrap: wrap; gap: .4rem 1.5rem; margin-bottom: .8rem; }
.vega-bind-name { color: var(--soft); }
.vega-bind-radio label { margin-right: .6rem; }
select { font: inherit; max-width: 16rem; }
#vg-tooltip-element { position: fixed; visibility: hidden; z-index: 1; padding: .4rem .6rem; pointer-events: none;
  background: var(--paper); border: 1px solid var(--line); border-radius: 4px; font-size: .85rem; }
#vg-tooltip-element.visible { visibility: visible; }
#vg-tooltip-element td.key { color: var(--soft); padding-right: .6rem; }
"""

SCRIPT = """
const { specification, captions, cells, embed } = JSON.parse(document.getElementById("data").textContent);
const box = document.getElementById("chart"), caption = document.getElementById("caption");
const dark = matchMedia("(prefers-color-scheme: dark)");
const say = (name, colour) => { caption.textContent = captions[colour]; };
async function draw() {
  const room = Math.min(560, box.clientWidth - 90);
  const side = cells > room ? room : cells * Math.floor(room / cells);  // whole pixels per cell
  const view = { fill: dark.matches ? "#161b22" : "#f5f6f8", stroke: null };
  const legend = { layout: { bottom: { direction: "vertical", anchor: "start" } } };
  const config = { background: "transparent", view, legend };
  const options = { ...embed, renderer: "canvas", theme: dark.matches ? "dark" : undefined, config };
  const result = await vegaEmbed(box, { ...specification, width: side, height: side }, options);
  result.view.addSignalListener("colour", say);
  window.shown = result.view;
}
say("colour", specification.params.find((one) => one.name === "colour").value);
dark.addEventListener("change", draw);
draw();
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>{subtitle}</p>
<div id="chart"></div>
<p id="caption" aria-live="polite"></p>
{facts}
<p>The mouse wheel zooms, dragging moves, and a double click shows everything again.</p>
<noscript><p>This picture is drawn by the script inside the page.</p></noscript>
<script type="application/json" id="data">{data}</script>
<script>{vega}</script>
<script>{script}</script>
</body>
</html>
"""


def page(view: View) -> str:
    data = {
        "specification": choosable(view).to_dict(),
        "captions": {colour: view.caption(colour) for colour in COLOURS},
        "cells": len(view.edges) - 1,
        "embed": charts.EMBED,
    }
    facts = [*view.facts(), *view.left_out(view.pictures())]
    return PAGE.format(
        policy=charts.policy([charts.scripts(), SCRIPT], [STYLE]),
        title=html.escape(view.title),
        subtitle=html.escape(view.subtitle),
        facts="\n".join(f"<p>{html.escape(fact)}</p>" for fact in facts),
        style=STYLE,
        data=charts.as_json(data),
        vega=charts.scripts(),
        script=SCRIPT,
    )
