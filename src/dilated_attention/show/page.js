"use strict";
// Draws the page from the data inside it. A cell off the diagonal is a product of two numbers of rows (see cells.py).

const data = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const stretches = data.edges.length - 1;
const state = { head: data.head, colouring: "count", on: data.branches.map(() => true), cell: null, list: null };

const find = (id) => document.getElementById(id);
const say = (id, text) => { find(id).textContent = text; };
const theme = () => (dark.matches ? "dark" : "light");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const count = (number) => BigInt(number).toLocaleString("en-GB");

const sentence = (text) => text[0].toUpperCase() + text.slice(1);

function add(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  if (className) made.className = className;
  parent.append(made);
  return made;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let number = Number(bytes), at = 0;
  for (; number >= 1000 && at < units.length - 1; at++) number /= 1000;
  return `${at && number < 1000 ? Number(number.toPrecision(3)) : Math.round(number).toLocaleString("en-GB")} ${units[at]}`;
}

function percent(share) {
  if (share > 0 && share < 0.0001) return `1 in ${Math.round(1 / share).toLocaleString("en-GB")}`;
  return `${Number((100 * share).toPrecision(3))} %`;
}

/** The colour at a place from 0 to 1 of the ramp, whose first entry means nothing. */
function blend(place) {
  const ramp = data.ramp[theme()].slice(1);
  const at = Math.min(Math.floor(place * (ramp.length - 1)), ramp.length - 2);
  const rest = place * (ramp.length - 1) - at;
  const channel = (text, i) => parseInt(text.slice(i, i + 2), 16);
  return `rgb(${[1, 3, 5].map((i) => Math.round(channel(ramp[at], i) * (1 - rest) + channel(ramp[at + 1], i) * rest))})`;
}

const nothing = () => data.ramp[theme()][0];

/** A canvas with as many pixels as it takes on the screen: its context and its size. */
function prepared(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  if (height) canvas.style.height = `${height}px`;
  height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.clearRect(0, 0, canvas.width, canvas.height);
  return { context, width: canvas.width, height: canvas.height, scale };
}

/** Fill rows x columns of a canvas; a gap where cells are large. */
function fillGrid({ context, width, height, scale }, rows, columns, colourOf) {
  const x = (i) => Math.round((i * width) / columns), y = (i) => Math.round((i * height) / rows);
  const gap = Math.min(width / columns, height / rows) >= 12 * scale ? Math.round(scale) : 0;
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      context.fillStyle = colourOf(row, column);
      context.fillRect(x(column), y(row), x(column + 1) - x(column) - gap, y(row + 1) - y(row) - gap);
    }
  }
}

/** Frame some cells of a row. Around a single cell a second line keeps the first visible on every colour. */
function frame({ context, width, height, scale }, rows, columns, row, column, across, name) {
  const w = width / columns, h = height / rows, out = 1.5 * scale;
  const left = Math.max(column * w - out, out), top = Math.max(row * h - out, out);
  const right = Math.min((column + across) * w + out, width - out), bottom = Math.min((row + 1) * h + out, height - out);
  for (const [line, thick] of [["--paper", 5], [name, 2]].slice(across > 1 ? 1 : 0)) {
    context.strokeStyle = colour(line);
    context.lineWidth = thick * scale;
    context.strokeRect(left, top, right - left, bottom - top);
  }
}

// --- which keys each query sees ---------------------------------------------------------------------------------------

const kindOf = (head) => data.kinds.find((kind) => kind.heads.includes(head));
const running = (kind) => kind.branches.map((branch, i) => [branch, i]).filter(([branch, i]) => branch && state.on[i]);
const tokensOf = (i) => data.edges[i + 1] - data.edges[i];

function pairs(branch, row, column, number) {
  if (row === column) return number(branch.own[row]);
  if (data.causal && column > row) return number(0);
  const earlier = Math.min(row, column), later = Math.max(row, column);
  if (branch.last[earlier] !== branch.first[later]) return number(0);
  return number(branch.back[earlier]) * number(branch.front[later]);
}

/** Of each cell the number of branches that show something, and the pairs they show as a share of all. */
function counted(kind) {
  const found = { counts: new Uint8Array(stretches ** 2), shares: new Float64Array(stretches ** 2) };
  for (const [branch] of running(kind)) {
    for (let row = 0; row < stretches; row++) {
      for (let column = 0; column < stretches; column++) {
        const here = pairs(branch, row, column, Number);
        if (!here) continue;
        found.counts[row * stretches + column] += 1;
        found.shares[row * stretches + column] += here / (tokensOf(row) * tokensOf(column));
      }
    }
  }
  return found;
}

function limits(shares) {
  const some = shares.filter((share) => share > 0);
  return some.length ? [some.reduce((a, b) => Math.min(a, b)), some.reduce((a, b) => Math.max(a, b))] : [1, 1];
}

function placeOf(share, [low, high]) {
  return high > low ? Math.log(share / low) / Math.log(high / low) : 1;
}

function drawCells() {
  const kind = kindOf(state.head), { counts, shares } = counted(kind), range = limits(shares);
  const canvas = prepared(find("cells")), levels = data.levels[theme()];
  fillGrid(canvas, stretches, stretches, (row, column) => {
    const at = row * stretches + column;
    if (!counts[at]) return nothing();
    return state.colouring === "count" ? levels[counts[at]] : blend(placeOf(shares[at], range));
  });
  if (data.queryStretch !== null) frame(canvas, stretches, stretches, data.queryStretch, 0, stretches, "--query");
  if (state.cell) frame(canvas, stretches, stretches, ...state.cell, 1, "--ink");
  drawScale(levels, range);
  find("cells").setAttribute("aria-label", `What ${kind.name} see: ${stretches} by ${stretches} cells`);
}

function drawScale(levels, [low, high]) {
  const scale = find("scale");
  scale.replaceChildren();
  const swatch = (background, text) => {
    const item = add(scale, "span");
    add(item, "i", "", "swatch").style.background = background;
    if (text) add(item, "span", text);
  };
  if (state.colouring === "count") {
    const step = Math.max(1, Math.ceil((levels.length - 1) / 8));
    levels.forEach((level, i) => { if (i % step === 0 || i === levels.length - 1) swatch(level, String(i)); });
  } else {
    swatch(nothing(), "0");
    const places = high > low ? [0, 0.25, 0.5, 0.75, 1] : [1];
    for (const place of places) swatch(blend(place), place === 0 ? percent(low) : place === 1 ? percent(high) : "");
  }
}

const rangeText = (i) => {
  const [first, last] = [data.edges[i], data.edges[i + 1] - 1];
  return first === last ? count(first) : `${count(first)}–${count(last)}`;
};

function tellCell() {
  if (!state.cell) return;
  const [row, column] = state.cell, kind = kindOf(state.head);
  const area = BigInt(tokensOf(row)) * BigInt(tokensOf(column));
  const words = [`${tokensOf(row) > 1 ? "Queries" : "Query"} ${rangeText(row)}, ${tokensOf(column) > 1 ? "keys" : "key"} ${rangeText(column)}`];
  for (const [branch, i] of running(kind)) {
    const here = pairs(branch, row, column, BigInt);
    if (!here) continue;
    const share = percent(Number(here) / Number(area));
    words.push(area > 1n ? `${data.branches[i]}: ${count(here)} of ${count(area)} pairs (${share})` : `seen by ${data.branches[i]}`);
  }
  if (words.length === 1) words.push("No branch shows any of it.");
  say("cell-text", words.join("\n"));
}

function chooseHead() {
  const kind = kindOf(state.head);
  find("head").value = String(state.head);
  say("head-name", `${state.head}${kind.heads.length > 1 ? ` (${kind.name} see the same)` : ""}`);
  const facts = find("head-facts");
  facts.replaceChildren();
  for (const text of [kind.offsets, kind.coverage, kind.zeros]) {
    if (text) add(facts, "p", `${sentence(text)}.`);
  }
  if (data.query !== null) {
    const line = add(facts, "p");
    add(line, "span", `Query ${count(data.query)} `, "query");
    line.append(`has ${kind.keys}.`);
  }
  drawCells();
  tellCell();
}

// --- pointing ---------------------------------------------------------------------------------------------------------

/** Pointer, touch and arrow keys choose a [row, column] of a canvas. */
function choosing(canvas, rows, columns, current, chosen) {
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const place = (offset, length, many) => Math.max(0, Math.min(many - 1, Math.floor((offset / length) * many)));
    chosen([place(event.clientY - box.top, box.height, rows), place(event.clientX - box.left, box.width, columns)]);
  };
  canvas.addEventListener("pointermove", at);
  canvas.addEventListener("pointerdown", at);
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = current() || [0, 0];
    const move = (place, by, many) => Math.max(0, Math.min(many - 1, place + by));
    chosen(current() ? [move(row, step[0], rows), move(column, step[1], columns)] : [0, 0]);
  });
}

// --- reach ------------------------------------------------------------------------------------------------------------

let reachCell = null;

function drawReach() {
  const layers = data.reach.layers;
  if (!layers.length) return;
  const canvas = prepared(find("reach"), 26 * layers.length);
  fillGrid(canvas, layers.length, stretches, (row, column) => {
    const reached = layers[row].cells[column];
    return reached ? blend(reached / tokensOf(column)) : nothing();
  });
  if (reachCell) frame(canvas, layers.length, stretches, ...reachCell, 1, "--ink");
}

function tellReach() {
  if (!reachCell) return;
  const [layer, column] = reachCell, here = data.reach.layers[layer].cells[column];
  say("reach-text", `After layer ${layer + 1}: ${count(here)} of ${count(tokensOf(column))} tokens of ${rangeText(column)}`);
}

// --- ranks ------------------------------------------------------------------------------------------------------------

let matrixCell = null, matrix = null;

function fillMatrix() {
  const { ranks, lists } = data.travel;
  matrix = { parts: new Map(), bytes: new Float64Array(ranks ** 2) };
  for (const message of lists[state.list]) {
    const at = message[0] * ranks + message[1];
    matrix.parts.set(at, [...(matrix.parts.get(at) || []), message]);
    matrix.bytes[at] += Number(message[4]);
  }
  drawMatrix();
  tellMatrix();
}

function drawMatrix() {
  if (!matrix) return;
  const { ranks } = data.travel, canvas = prepared(find("matrix")), most = matrix.bytes.reduce((a, b) => Math.max(a, b), 0);
  fillGrid(canvas, ranks, ranks, (row, column) => {
    const bytes = matrix.bytes[row * ranks + column];
    return bytes ? blend(bytes / most) : nothing();
  });
  if (canvas.width / ranks >= 58 * canvas.scale) writeSizes(canvas, ranks, most);
  if (matrixCell) frame(canvas, ranks, ranks, ...matrixCell, 1, "--ink");
}

/** Where cells are large enough, what they hold. */
function writeSizes({ context, width, height, scale }, ranks, most) {
  context.font = `${12 * scale}px system-ui, sans-serif`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  matrix.bytes.forEach((bytes, at) => {
    if (!bytes) return;
    context.fillStyle = bytes > most / 2 ? colour("--paper") : colour("--ink");
    context.fillText(size(bytes), ((at % ranks) + 0.5) * (width / ranks), (Math.floor(at / ranks) + 0.5) * (height / ranks));
  });
}

function tellMatrix() {
  if (!matrixCell) return;
  const [from, to] = matrixCell, parts = matrix.parts.get(from * data.travel.ranks + to) || [];
  const lines = parts.map(([, , branch, rows, bytes]) => {
    const what = `${count(rows)} rows of branch ${data.branches[branch]}, ${size(bytes)}`;
    return state.list === "whose rows" ? `rank ${to} needs ${what}, of rank ${from}` : `rank ${from} sends ${what}, to rank ${to}`;
  });
  say("matrix-text", lines.join("\n") || `rank ${from} sends nothing to rank ${to}`);
}

function setUpTravel() {
  const travel = data.travel;
  find("travel").hidden = false;
  say("travel-about", `Here: ${travel.title}.`);
  for (const fact of travel.facts) add(find("travel-facts"), "p", `${sentence(fact)}.`);
  for (const cells of travel.branches) {
    const row = add(find("crossing").tBodies[0], "tr");
    for (const cell of travel.listed ? cells : cells.slice(0, 2)) add(row, "td", cell);
  }
  for (const cell of [...find("crossing").tHead.rows[0].cells].slice(travel.listed ? 4 : 2)) cell.remove();
  const most = travel.sums.reduce((a, sums) => Math.max(a, Number(sums[1]), Number(sums[2])), 0);
  for (const [name, ...sums] of travel.sums) {
    const row = add(find("sums").tBodies[0], "tr");
    add(row, "td", name);
    for (const bytes of sums) {
      const cell = add(row, "td", Number(bytes) ? size(bytes) : "–");
      if (most) add(add(cell, "div", "", "bar"), "div").style.width = `${(100 * Number(bytes)) / most}%`;
    }
  }
  if (!travel.listed || !most) {
    find("matrix-box").hidden = find("matrix-text").hidden = true;
    return;
  }
  say("rank-last", String(travel.ranks - 1));
  const names = Object.keys(travel.lists);
  state.list = names[0];
  for (const name of names.length > 1 ? names : []) {
    const label = add(find("travel-lists"), "label"), radio = add(label, "input");
    Object.assign(radio, { type: "radio", name: "list", value: name, checked: name === state.list });
    label.append(` ${name}`);
    radio.addEventListener("change", () => { state.list = name; fillMatrix(); });
  }
  find("matrix").setAttribute("aria-label", `Bytes from each of ${travel.ranks} ranks to each other`);
  choosing(find("matrix"), travel.ranks, travel.ranks, () => matrixCell, (cell) => { matrixCell = cell; drawMatrix(); tellMatrix(); });
  fillMatrix();
}

// --- all together -----------------------------------------------------------------------------------------------------

function setUp() {
  say("title", data.title);
  say("subtitle", data.subtitle);
  say("legend", `${sentence(data.legend)}.`);
  say("key-first", count(data.edges[0]));
  for (const id of ["key-last", "reach-last"]) say(id, count(data.edges[stretches] - 1));
  say("reach-first", count(data.edges[0]));
  const slider = find("head");
  slider.max = String(data.heads - 1);
  slider.disabled = data.heads === 1;
  slider.addEventListener("input", () => { state.head = Number(slider.value); chooseHead(); });
  for (const radio of document.getElementsByName("colouring")) {
    radio.addEventListener("change", () => { state.colouring = radio.value; drawCells(); });
  }
  data.branches.forEach((name, i) => {
    const label = add(find("branches"), "label"), box = add(label, "input");
    Object.assign(box, { type: "checkbox", checked: true });
    label.append(` ${name}`);
    box.addEventListener("change", () => { state.on[i] = box.checked; drawCells(); tellCell(); });
  });
  choosing(find("cells"), stretches, stretches, () => state.cell, (cell) => { state.cell = cell; drawCells(); tellCell(); });

  for (const [heads, rows, covered] of data.coverage) {
    const item = add(find("coverage"), "li", `${sentence(heads)}: ${rows}.`);
    add(add(item, "div", "", "bar"), "div").style.width = `${(100 * covered) / data.tokens}%`;
  }
  if (data.kinds.length > 1) say("coverage-all", `All heads together: ${data.together}.`);

  say("reach-about", `Here: ${data.reach.title}. The strip has a line for each layer, and says how much of each stretch of tokens is reached.`);
  for (const layer of data.reach.layers) add(find("reach-layers"), "li", layer.text.replace(/^after layer \d+: /, ""));
  say("reach-end", `${sentence(data.reach.end)}.`);
  const layers = data.reach.layers.length;
  find("reach").hidden = find("reach-text").hidden = !layers;
  find("reach").setAttribute("aria-label", `Tokens reached after each of ${layers} layers`);
  if (layers) choosing(find("reach"), layers, stretches, () => reachCell, (cell) => { reachCell = cell; drawReach(); tellReach(); });

  if (data.travel) setUpTravel();
  chooseHead();
  drawReach();
}

const drawAll = () => { drawCells(); drawReach(); drawMatrix(); };

setUp();
dark.addEventListener("change", drawAll);
window.addEventListener("resize", drawAll);
