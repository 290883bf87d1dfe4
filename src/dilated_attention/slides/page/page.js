// Draws the tiles on a canvas. The state is what the controls say, the query, and which part of the slide is shown.

const byId = (id) => document.getElementById(id);
const data = JSON.parse(byId("data").textContent);
const { tiles, layers, heads, queries, coords, tileSize, frame, step } = data;
const { elements } = byId("controls");
const canvas = byId("map"), context = canvas.getContext("2d"), hover = byId("hover");
const picture = data.thumbnail ? Object.assign(new Image(), { onload: () => view && draw(), src: data.thumbnail }) : null;
const STOPS = [[0, 0, 4], [87, 16, 110], [188, 55, 84], [249, 142, 9], [252, 255, 164]]; // dark to bright
const COLOURS = Array.from({ length: 64 }, (_, index) => {
  const at = (index / 63) * 4, low = Math.min(3, Math.floor(at));
  return `rgb(${STOPS[low].map((from, i) => Math.round(from + (at - low) * (STOPS[low + 1][i] - from))).join()})`;
});
let query = 0; // index into queries
let view = null; // canvas pixels = (slide pixels - left) * scale
let weights = new Float64Array(tiles);

// --- weights --------------------------------------------------------------------------------------------------------

let decoded = { of: -1 };

/** The codes of a query: layers × heads × tiles. A bit says for each whether it is 0; those that are not follow. */
function codes(index) {
  if (decoded.of !== index) {
    const [bits, bytes] = data.rows[index].map((text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
    const found = new Uint16Array(bytes.buffer), all = new Uint16Array(layers * heads * tiles), row = Math.ceil(tiles / 8);
    let next = 0;
    for (let at = 0; at < all.length; at++) {
      const tile = at % tiles, byte = bits[((at - tile) / tiles) * row + (tile >> 3)];
      if ((byte >> (7 - (tile & 7))) & 1) all[at] = found[next++];
    }
    decoded = { of: index, all };
  }
  return decoded.all;
}

const largest = () => weights.reduce((a, b) => Math.max(a, b), 0);
const chosen = () => ({ layer: Number(elements.layer.value), head: Number(elements.head.value) - 1 }); // -1: the mean

function choose() {
  const { layer, head } = chosen();
  const all = codes(query), from = head < 0 ? 0 : head, to = head < 0 ? heads : head + 1;
  const mean = (shares) => shares.slice(layer * heads + from, layer * heads + to).reduce((a, b) => a + b) / (to - from);
  weights = new Float64Array(tiles);
  for (let one = from; one < to; one++) {
    const start = (layer * heads + one) * tiles;
    for (let tile = 0; tile < tiles; tile++) {
      const code = all[start + tile];
      if (code) weights[tile] += Math.exp((code - 65535) * step) / (to - from);
    }
  }
  elements.layerName.value = `${layer} of 0–${layers - 1}`;
  elements.headName.value = head < 0 ? "mean of all" : `${head} of 0–${heads - 1}`;
  const name = queries[query] < 0 ? "the class token" : `tile ${queries[query].toLocaleString("en")}`;
  const zero = mean(data.zeroShare[query]), cls = mean(data.clsShare[query]);
  const share = (value) => `${(100 * value).toPrecision(3)} %`;
  byId("about").textContent = `Query: ${name}. Of its weight, ${share(Math.max(0, 1 - zero - cls))} is on tiles, ` +
    `${share(cls)} on the class token and ${share(zero)} on zero keys. The largest weight of a tile is ` +
    `${largest().toPrecision(3)}.`;
  draw();
}

// --- drawing --------------------------------------------------------------------------------------------------------

function whole() {
  const [left, top, width, height] = frame;
  const scale = Math.min(canvas.width / width, canvas.height / height);
  view = { scale, left: left - (canvas.width / scale - width) / 2, top: top - (canvas.height / scale - height) / 2 };
}

function draw() {
  const { scale, left, top } = view, side = Math.max(1, tileSize * scale);
  const place = (tile) => [(coords[2 * tile] - left) * scale, (coords[2 * tile + 1] - top) * scale];
  const most = largest() || 1;
  const empty = getComputedStyle(document.documentElement).getPropertyValue("--empty");
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (picture) context.drawImage(picture, -left * scale, -top * scale, frame[2] * scale, frame[3] * scale);
  context.globalAlpha = picture ? elements.opacity.value / 100 : 1;
  const gap = side > 8 ? 1 : 0;
  for (let tile = 0; tile < tiles; tile++) {
    if (picture && !weights[tile]) continue;
    const [x, y] = place(tile);
    if (x > canvas.width || y > canvas.height || x + side < 0 || y + side < 0) continue;
    context.fillStyle = weights[tile] ? COLOURS[Math.round(63 * Math.sqrt(weights[tile] / most))] : empty;
    context.fillRect(x, y, side - gap, side - gap);
  }
  context.globalAlpha = 1;
  for (const [index, tile] of queries.entries()) {
    if (tile < 0) continue;
    const [x, y] = place(tile);
    context.strokeStyle = index === query ? "#00b7ff" : "#4c9f70";
    context.lineWidth = index === query ? 3 : 1.5;
    context.beginPath();
    context.arc(x + side / 2, y + side / 2, Math.max(5, 0.6 * side), 0, 7);
    context.stroke();
  }
  window.shown = { query: queries[query], ...chosen(), weights, view, place };
}

// --- what the reader does -------------------------------------------------------------------------------------------

/** Canvas pixels of a pointer. */
function at(event) {
  const box = canvas.getBoundingClientRect();
  return [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
}

const onSlide = ([x, y]) => [x / view.scale + view.left, y / view.scale + view.top];

/** The tile there, the last of several; or -1. */
function tileAt([x, y]) {
  for (let tile = tiles - 1; tile >= 0; tile--) {
    const dx = x - coords[2 * tile], dy = y - coords[2 * tile + 1];
    if (dx >= 0 && dy >= 0 && dx < tileSize && dy < tileSize) return tile;
  }
  return -1;
}

function point(event) {
  const tile = tileAt(onSlide(at(event)));
  hover.hidden = tile < 0;
  if (tile < 0) return;
  const number = (value) => value.toLocaleString("en");
  const seen = weights[tile] ? weights[tile].toPrecision(3) : "0";
  hover.textContent = `tile ${number(tile)}\n(${number(coords[2 * tile])}, ${number(coords[2 * tile + 1])})\nweight ${seen}`;
  const box = byId("frame").getBoundingClientRect();
  hover.style.left = `${Math.min(event.clientX - box.left + 14, box.width - hover.offsetWidth)}px`;
  hover.style.top = `${event.clientY - box.top + 14}px`;
}

/** The nearest query there is to a place on the slide. */
function ask([x, y]) {
  const far = (tile) => (tile < 0 ? Infinity : Math.hypot(coords[2 * tile] + tileSize / 2 - x, coords[2 * tile + 1] + tileSize / 2 - y));
  query = queries.reduce((best, tile, index) => (far(tile) < far(queries[best]) ? index : best), query);
  choose();
}

let grabbed = null; // where the pointer went down, and how far it has moved since

canvas.addEventListener("pointerdown", (event) => {
  grabbed = { from: at(event), moved: 0 };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (grabbed) {
    const now = at(event), [dx, dy] = [now[0] - grabbed.from[0], now[1] - grabbed.from[1]];
    grabbed = { from: now, moved: grabbed.moved + Math.hypot(dx, dy) };
    view = { ...view, left: view.left - dx / view.scale, top: view.top - dy / view.scale };
    draw();
  }
  point(event);
});
canvas.addEventListener("pointerup", (event) => {
  if (grabbed && grabbed.moved < 4) ask(onSlide(at(event)));
  grabbed = null;
});
canvas.addEventListener("pointerleave", () => { hover.hidden = true; });
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const [x, y] = at(event), [fixedX, fixedY] = onSlide([x, y]);
  const scale = view.scale * Math.exp(-event.deltaY / 400);
  view = { scale, left: fixedX - x / scale, top: fixedY - y / scale };
  draw();
}, { passive: false });
elements.layer.addEventListener("input", choose);
elements.head.addEventListener("input", choose);
elements.opacity?.addEventListener("input", draw);
elements.cls.addEventListener("click", () => { query = Math.max(0, queries.indexOf(-1)); choose(); });
elements.whole.addEventListener("click", () => { whole(); draw(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
new ResizeObserver(() => {
  [canvas.width, canvas.height] = [canvas.clientWidth * devicePixelRatio, canvas.clientHeight * devicePixelRatio];
  whole();
  choose();
}).observe(canvas);
