// A log-log plot as an SVG with values to read. No library; drawn again whenever the selection or the width changes.
// Text of the results only ever becomes a text node or an attribute of no effect: names may hold any markup.
"use strict";

// --- elements and words -------------------------------------------------------------------------------------------

const byId = (id) => document.getElementById(id);
const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const count = (x) => x.toLocaleString("en");
const plain = (x) => Number(x.toPrecision(3)).toString();
const digits = (x) => (x >= 100 ? count(Math.round(x)) : x >= 10 ? x.toFixed(1) : x.toPrecision(3));
const percent = (x) => `${digits(100 * x)} %`;
const withUnit = (x, units, step, say = digits) => {
  let index = 0;
  while (index + 1 < units.length && x >= step) [x, index] = [x / step, index + 1];
  return `${say(x)} ${units[index]}`;
};
const duration = (ms, say) => withUnit(1e6 * ms, ["ns", "µs", "ms", "s"], 1000, say);
const size = (bytes, say) => withUnit(bytes, ["B", "KiB", "MiB", "GiB", "TiB"], 1024, say);
const rate = (tflops, say) => withUnit(1e6 * tflops, ["MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"], 1000, say);
const tokens = (n) => (n >= 2 ** 20 ? `${plain(n / 2 ** 20)}M` : n >= 1024 ? `${plain(n / 1024)}k` : plain(n));

// --- scales -------------------------------------------------------------------------------------------------------

/** Log scale over the values, with some room: value → pixel. */
function scale(values, from, to, room) {
  let [low, high] = [Math.min(...values) / room, Math.max(...values) * room];
  if (high / low < 4) [low, high] = [low / 2, high * 2];
  const at = (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
  return Object.assign(at, { low, high });
}

/** Powers of two from low to high, at most so many. */
function doublings(low, high, most) {
  const [first, last] = [Math.ceil(Math.log2(low)), Math.floor(Math.log2(high))];
  const step = Math.max(1, Math.ceil((last - first + 1) / most));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, i) => 2 ** (first + i * step));
}

/** 1, 2, 5, 10 … from low to high, or powers of ten where those would be more than asked for. */
function decades(low, high, most) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const step of [1, 2, 5]) found.push({ step, value: Number(`${step}e${power}`) });
  const inside = found.filter(({ value }) => low <= value && value <= high);
  const tens = inside.filter(({ step }) => step === 1);
  const every = Math.ceil(tens.length / most);
  const kept = inside.length <= most || tens.length < 2 ? inside : tens.filter((_, i) => i % every === 0);
  return kept.map(({ value }) => value);
}

// --- the picture --------------------------------------------------------------------------------------------------

const HUES = 7; // colours --s0 … --s6 of the style; with as many markers, 49 series differ
const MARKS = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
  "M-3.7,-3.7h7.4v7.4h-7.4z",
  "M0,-4.8L4.6,3.6H-4.6z",
  "M0,-5.2L4.6,0L0,5.2L-4.6,0z",
  "M0,4.8L4.6,-3.6H-4.6z",
  "M-1.7,-5h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3v-3.4h3.3z",
  "M0,-5.8L1.5,-1.9L5.6,-1.8L2.4,0.8L3.5,4.8L0,2.5L-3.5,4.8L-2.4,0.8L-5.6,-1.8L-1.5,-1.9z",
];
const CROSS = "M-4.5,-4.5L4.5,4.5M4.5,-4.5L-4.5,4.5";
const markOf = (style) => MARKS[(style + Math.floor(style / HUES)) % MARKS.length];
const classOf = (style, ours) => `curve s${style % HUES} ${ours ? "ours" : "theirs"}`;

/**
 * Draws into host. x, y: {ticks, say, label}; curves: [{name, style, ours, points, end}] with a point {x, y, low, high,
 * kind, lines}, and where a series ran out of memory an end without y; roofs: [{line: [{x, y}, {x, y}], label, at}].
 * The lines of a point are what there is to say about it: name, value, and more.
 */
function plot(host, { x, y, curves, roofs = [], joined = true, nothing }) {
  const points = curves.flatMap((curve) => curve.points);
  const ends = curves.filter((curve) => curve.end).map((curve) => curve.end);
  if (!points.length && !ends.length) return host.replaceChildren(html("p", { class: "nothing" }, nothing));
  const width = Math.max(host.clientWidth, 240);
  const height = Math.round(Math.min(440, Math.max(300, 0.76 * width)));
  const box = { left: 62, right: width - 8, top: ends.length ? 40 : 10, bottom: height - 44 };
  const corners = roofs.flatMap(({ line }) => line);
  const ys = [...points.flatMap((p) => [p.low ?? p.y, p.high ?? p.y]), ...corners.map((p) => p.y)];
  const sx = scale([...points, ...ends, ...corners].map((p) => p.x), box.left, box.right, 1.18);
  const sy = scale(ys.length ? ys : [1], box.bottom, box.top, 1.25);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group" });
  picture.setAttribute("aria-label", host.previousElementSibling.textContent);
  picture.append(...axes(box, sx, sy, x, y));
  if (ends.length) picture.append(svg("text", { x: box.left, y: 12 }, "out of memory"));
  const rows = curves.map((curve) => curveOf(picture, curve, { sx, sy, box, ends, joined }));
  picture.append(...roofs.flatMap((roof) => roofOf(roof, sx, sy)));
  const tip = html("div", { class: "tip", role: "tooltip", hidden: "" });
  host.replaceChildren(picture, tip);
  listen(host, picture, tip, rows);
}

function axes(box, sx, sy, x, y) {
  const made = [];
  for (const value of x.ticks(sx.low, sx.high, Math.floor((box.right - box.left) / 50))) {
    const at = sx(value);
    made.push(svg("line", { class: "grid", x1: at, x2: at, y1: box.top, y2: box.bottom }));
    made.push(svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, x.say(value)));
  }
  for (const value of y.ticks(sy.low, sy.high, 8)) {
    const at = sy(value);
    made.push(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: at, y2: at }));
    made.push(svg("text", { x: box.left - 8, y: at + 4, "text-anchor": "end" }, y.say(value)));
  }
  const middle = (box.left + box.right) / 2;
  made.push(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  made.push(svg("text", { x: middle, y: box.bottom + 38, "text-anchor": "middle" }, x.label));
  return made;
}

/** A ceiling, with its label above its left end or to the right of its middle: where points are few. */
function roofOf({ line, label, at }, sx, sy) {
  const [from, to] = line.map((p) => ({ x: sx(p.x), y: sy(p.y) }));
  const place =
    at === "start"
      ? { x: from.x, y: from.y - 8 }
      : { x: (from.x + to.x) / 2 + 10, y: (from.y + to.y) / 2 + 12 };
  return [svg("path", { class: "roof", d: `M${from.x},${from.y}L${to.x},${to.y}` }), svg("text", place, label)];
}

/** Draws a series into the picture; returns its spots, left to right: where a value can be read. */
function curveOf(picture, { name, style, ours, points, end }, { sx, sy, box, ends, joined }) {
  const group = svg("g", { class: classOf(style, ours), "data-series": name });
  const spots = points.map((p) => ({ ...p, px: sx(p.x), py: sy(p.y) }));
  if (joined && spots.length > 1)
    group.append(svg("path", { class: "path", d: `M${spots.map((p) => `${p.px},${p.py}`).join("L")}` }));
  for (const { px, low, high } of spots)
    if (low && high > low) group.append(svg("path", { class: "bar", d: `M${px},${sy(low)}V${sy(high)}` }));
  if (end) {
    const level = ends.filter((other) => other.x === end.x); // side by side where several end at one length
    const px = sx(end.x) + 13 * (level.indexOf(end) - (level.length - 1) / 2);
    const last = spots.at(-1);
    spots.push({ ...end, px: Math.min(box.right - 5, px), py: 26 });
    if (last) group.append(svg("path", { class: "path lost", d: `M${last.px},${last.py}L${spots.at(-1).px},26` }));
  }
  for (const spot of spots) {
    const attributes = { class: `point ${spot.kind}`, role: "img", tabindex: -1, "data-x": spot.x };
    const mark = svg("path", { class: "mark", d: spot.kind === "end" ? CROSS : markOf(style) });
    spot.node = svg("g", { ...attributes, transform: `translate(${spot.px},${spot.py})` }, mark);
    spot.node.setAttribute("aria-label", spot.lines.join("; "));
    group.append(spot.node);
  }
  picture.append(group);
  return spots;
}

// --- reading values: pointer, touch, keys -------------------------------------------------------------------------

function listen(host, picture, tip, rows) {
  const spots = rows.flat();
  let shown = null;
  const show = (spot) => {
    if (spot === shown) return;
    for (const node of picture.querySelectorAll(".lit")) node.classList.remove("lit");
    picture.classList.toggle("dimmed", spot !== null);
    tip.hidden = spot === null;
    shown = spot;
    if (!spot) return;
    spot.node.classList.add("lit");
    spot.node.parentNode.classList.add("lit");
    tip.replaceChildren(...spot.lines.map((line, index) => html(["b", "strong"][index] ?? "span", {}, line)));
    const left = spot.px > host.clientWidth / 2 ? spot.px - tip.offsetWidth - 14 : spot.px + 14;
    tip.style.left = `${Math.max(0, Math.min(left, host.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, spot.py - tip.offsetHeight / 2)}px`;
  };
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const far = (spot) => Math.hypot(spot.px - (event.clientX - box.left), spot.py - (event.clientY - box.top));
    const spot = spots.reduce((best, one) => (far(one) < far(best) ? one : best));
    show(far(spot) < 26 ? spot : null);
  };
  picture.addEventListener("pointermove", nearest);
  picture.addEventListener("pointerdown", nearest);
  // a finger that is lifted leaves, too: what it tapped stays to be read until another place is tapped
  picture.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && show(null));
  picture.addEventListener("dismiss", () => show(null));
  // not on the picture: browsers let one that listens for focus take the focus itself
  for (const spot of spots) {
    spot.node.addEventListener("focus", () => show(spot));
    spot.node.addEventListener("blur", () => shown === spot && show(null));
  }
  // one stop for the tab key, then arrows: along a series, and across to the next one
  spots[0].node.setAttribute("tabindex", 0);
  picture.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show(null);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    const row = rows.findIndex((found) => found.some((spot) => spot.node === event.target));
    if (!step || row < 0) return;
    event.preventDefault();
    const column = rows[row].findIndex((spot) => spot.node === event.target);
    const across = rows[(row + step[0] + rows.length) % rows.length];
    const next = across[Math.max(0, Math.min(column + step[1], across.length - 1))];
    event.target.setAttribute("tabindex", -1);
    next.node.setAttribute("tabindex", 0);
    next.node.focus();
  });
}
