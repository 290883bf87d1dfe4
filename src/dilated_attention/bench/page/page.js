// The page at work: what is selected, the three plots of it, the legend, and in words what is not drawn.

const { measurements, series, facets, start, hidden: atFirst, enough, ceilings } = JSON.parse(byId("data").textContent);
const chosen = { ...start }; // facet → value, null: all
const hidden = new Set(atFirst); // names of the series that the legend hides
let relative = false; // times as multiples of the fastest that is shown

const WORDS = {
  direction: (name) => name.replaceAll("_", " + "),
  causal: (yes) => (yes ? "causal" : "not causal"),
  ranks: (n) => (n === null ? "all ranks" : n === 1 ? "1 rank" : `${n} ranks`),
  suite: (name) => `suite ${name}`,
};
const OPTION = { direction: WORDS.direction, causal: (yes) => (yes ? "yes" : "no"), ranks: (n) => n ?? "all" };
const word = (facet, value) => (WORDS[facet] ?? String)(value);
const selection = () => facets.map(({ key }) => word(key, chosen[key])).join(", ");
const matches = (m, picked) => facets.every(({ key }) => picked[key] === null || m[key] === picked[key]);
const spread = ({ lower, upper, repeats: n }) =>
  n === 1 ? "once" : n < enough ? `${n} repeats` : `${duration(lower)} – ${duration(upper)}, ${n} repeats`;

/** What there is to say about a measurement: the name, the value, and more. */
function description(m) {
  const where = `${count(m.tokens)} tokens, ${word("direction", m.direction)}, ${word("causal", m.causal)}, ${m.dtype}`;
  if (!m.ms) return [m.series, m.status, where, m.why].filter(Boolean);
  const lines = [m.series, `${duration(m.ms.median)} (${spread(m.ms)})`, where];
  if (m.peak_bytes !== null) lines.push(`${size(m.peak_bytes)} beyond the inputs`);
  if (m.tflops) lines.push(rate(m.tflops) + (m.of_matmul ? `, ${percent(m.of_matmul)} of matmul` : ""));
  if (m.tokens_per_s) lines.push(`${count(Math.round(m.tokens_per_s))} tokens/s`);
  return lines;
}

// --- plots --------------------------------------------------------------------------------------------------------

function curvesOf(seen, place, withEnds) {
  const pointOf = (m) => ({ kind: m.ms.repeats < enough ? "few" : "many", lines: description(m), ...place(m) });
  return series
    .map(({ name, ours }, style) => {
      const mine = seen.filter((m) => m.series === name).sort((a, b) => a.tokens - b.tokens);
      const points = mine.filter((m) => m.ms).map(pointOf).filter(({ x, y }) => x > 0 && y > 0);
      const lost = withEnds && mine.find((m) => m.status === "out of memory");
      const end = lost ? { x: lost.tokens, kind: "end", lines: description(lost) } : null;
      return { name, ours, style, points, end };
    })
    .filter((curve) => curve.points.length || curve.end);
}

/** Time, with quartiles where there were repeats enough to have any. */
function times({ tokens: x, ms }) {
  return ms.repeats < enough ? { x, y: ms.median } : { x, y: ms.median, low: ms.lower, high: ms.upper };
}

function multiples(seen) {
  const fastest = new Map();
  for (const { tokens: x, ms } of seen) if (ms) fastest.set(x, Math.min(ms.median, fastest.get(x) ?? Infinity));
  return (m) => {
    const { x, y, low, high } = times(m);
    const by = fastest.get(x);
    const lines = description(m);
    lines[1] += `, ${plain(y / by)} × the fastest shown`;
    return { x, y: y / by, lines, ...(low && { low: low / by, high: high / by }) };
  };
}

function draw() {
  const here = measurements.filter((m) => matches(m, chosen));
  const seen = here.filter((m) => !hidden.has(m.series));
  const nothing = (what) => {
    if (!measurements.length) return "Nothing was measured.";
    const all = here.some((m) => m.ms) && !seen.some((m) => m.ms);
    return all ? "Every series is hidden: click one in the legend." : `${what} was measured for ${selection()}.`;
  };
  const x = { ticks: doublings, say: tokens, label: "tokens" };
  plot(byId("time").lastElementChild, {
    x,
    y: { ticks: decades, say: (y) => (relative ? `${plain(y)} ×` : duration(y, plain)) },
    curves: curvesOf(seen, relative ? multiples(seen) : times, true),
    nothing: nothing("No time"),
  });
  plot(byId("memory").lastElementChild, {
    x,
    y: { ticks: doublings, say: (bytes) => size(bytes, plain) },
    curves: curvesOf(seen, (m) => ({ x: m.tokens, y: m.peak_bytes }), true),
    nothing: nothing("No memory"),
  });
  const rates = curvesOf(seen, (m) => ({ x: m.flops / m.bytes, y: m.tflops }), false);
  plot(byId("rate").lastElementChild, {
    x: { ticks: decades, say: plain, label: "flops of the pattern per byte of least traffic" },
    y: { ticks: decades, say: (tflops) => rate(tflops, plain).replace("FLOP/s", "") },
    curves: rates,
    roofs: roofs(rates.flatMap((curve) => curve.points.map((p) => p.x))),
    joined: false,
    nothing: nothing("No rate"),
  });
  say(here);
  legend(here);
}

/** What a copy and a matrix product reach, from the least to the largest intensity that is drawn. */
function roofs(xs) {
  const found = ceilings.find((ceiling) => ceiling.dtype === chosen.dtype);
  byId("no-ceiling").hidden = found !== undefined || !xs.length;
  if (!found || !xs.length) return [];
  const bend = (1000 * found.matmul_tflops) / found.copy_gb_per_s;
  const [low, high] = [Math.min(...xs, bend / 3), Math.max(...xs, bend * 3)];
  const foot = { x: low, y: (found.copy_gb_per_s * low) / 1000 };
  const [ridge, flat] = [bend, high].map((intensity) => ({ x: intensity, y: found.matmul_tflops }));
  return [
    { line: [foot, ridge], label: `copy, ${digits(found.copy_gb_per_s)} GB/s`, at: "middle" },
    { line: [ridge, flat], label: `matmul, ${rate(found.matmul_tflops)}`, at: "start" },
  ];
}

// --- in words -----------------------------------------------------------------------------------------------------

/** The selection; where it is empty, a way to the nearest one that is not; and what has no time, and why. */
function say(here) {
  const measured = here.filter((m) => m.ms);
  if (measured.length) {
    const names = new Set(measured.map((m) => m.series));
    byId("selection").replaceChildren(`Shown: ${selection()}; ${names.size} series, ${measured.length} points.`);
  } else if (!measurements.some((m) => m.ms)) {
    byId("selection").replaceChildren("Nothing was measured.");
  } else {
    const jump = html("button", { type: "button" }, "Show the nearest that was.");
    jump.addEventListener("click", () => choose(nearestSelection()));
    byId("selection").replaceChildren(`Nothing was measured for ${selection()}. `, jump);
  }
  const groups = new Map();
  for (const m of here.filter((one) => !one.ms)) {
    const key = `${m.series}: ${m.status}. ${m.why}`;
    groups.set(key, [...(groups.get(key) ?? []), tokens(m.tokens)]);
  }
  const items = [...groups].map(([key, lengths]) => html("li", {}, `${key} (${lengths.join(", ")} tokens)`));
  byId("without").hidden = !items.length;
  byId("without").firstElementChild.replaceChildren(`Without a time in this selection, and why: ${items.length}`);
  byId("without").lastElementChild.replaceChildren(...items);
}

function nearestSelection() {
  const likeness = (m) => facets.filter(({ key }) => chosen[key] === null || m[key] === chosen[key]).length;
  const found = measurements.filter((m) => m.ms).reduce((best, m) => (likeness(m) > likeness(best) ? m : best));
  return Object.fromEntries(facets.map(({ key }) => [key, chosen[key] === null ? null : found[key]]));
}

// --- legend and toggles -------------------------------------------------------------------------------------------

function legend(here) {
  const names = new Set(here.filter((m) => m.ms || m.status === "out of memory").map((m) => m.series));
  const shown = [...names].filter((name) => !hidden.has(name));
  const buttons = series.flatMap(({ name, ours }, style) => {
    if (!names.has(name)) return [];
    const line = svg("path", { class: "path", d: "M0,7H28" });
    const mark = svg("path", { class: "mark", d: markOf(style), transform: "translate(14,7)" });
    const swatch = svg("svg", { viewBox: "0 0 28 14", "aria-hidden": "true" });
    swatch.append(svg("g", { class: classOf(style, ours) }, line, mark));
    const button = html("button", { type: "button", "aria-pressed": !hidden.has(name) }, swatch, name);
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      redraw(name);
    });
    return [button];
  });
  const some = shown.length < names.size; // then all can be shown, else all hidden
  const all = html("button", { type: "button", class: "all" }, some ? "show all" : "hide all");
  all.addEventListener("click", () => {
    for (const name of names) some ? hidden.delete(name) : hidden.add(name);
    redraw(null);
  });
  byId("legend").replaceChildren(...buttons, ...(buttons.length > 1 ? [all] : []));
}

/** Draws anew and gives the focus back to the button that was pressed, or to the last one. */
function redraw(name) {
  draw();
  const buttons = [...byId("legend").children];
  (buttons.find((button) => button.textContent === name) ?? buttons.at(-1)).focus();
}

function choose(picked) {
  Object.assign(chosen, picked);
  const names = measurements.filter((m) => m.ms && matches(m, chosen)).map((m) => m.series);
  if (names.every((name) => hidden.has(name))) for (const name of names) hidden.delete(name); // rather all than none
  for (const input of byId("facets").elements) {
    if (!(input.name in chosen)) continue; // the fieldsets, and how times are shown
    const value = JSON.parse(input.value);
    const some = measurements.some((m) => m.ms && matches(m, { ...chosen, [input.name]: value }));
    input.checked = chosen[input.name] === value;
    input.parentNode.classList.toggle("without", !some);
    input.parentNode.title = some ? "" : "nothing measured with the rest of the selection";
  }
  draw();
}

/** Some radio buttons in a row. */
function toggle(key, title, options, label, change) {
  const choices = options.map((value) => {
    const input = html("input", { type: "radio", name: key, value: JSON.stringify(value) });
    input.addEventListener("change", () => change(value));
    return html("label", {}, input, html("span", {}, label(value)));
  });
  byId("facets").append(html("fieldset", {}, html("legend", {}, title), html("div", { class: "choices" }, ...choices)));
}

function toggles() {
  for (const { key, title, options } of facets.filter((facet) => facet.options.length > 1))
    toggle(key, title, key === "ranks" ? [null, ...options] : options, OPTION[key] ?? String, (value) => choose({ [key]: value }));
  if (!measurements.some((m) => m.ms)) return;
  toggle("times", "times", [false, true], (yes) => (yes ? "relative" : "absolute"), (yes) => {
    relative = yes;
    draw();
  });
  byId("facets").elements.times[0].checked = true;
}

document.documentElement.classList.add("js");
for (const node of document.querySelectorAll(".if-measured")) node.hidden = !measurements.length;
toggles();
choose({});
table(); // after the plots: a long one takes the browser a while
let drawnWidth = byId("plots").clientWidth;
new ResizeObserver(() => {
  if (byId("plots").clientWidth === drawnWidth) return;
  drawnWidth = byId("plots").clientWidth;
  draw();
}).observe(byId("plots"));
document.addEventListener("pointerdown", (event) => {
  for (const picture of document.querySelectorAll(".plot svg"))
    if (!picture.contains(event.target)) picture.dispatchEvent(new Event("dismiss"));
});
