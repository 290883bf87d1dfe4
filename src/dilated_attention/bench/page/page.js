// The plot at work. What it shows is in the address after the #, so that a link keeps it; here is no other state.

const byId = (id) => document.getElementById(id);
const { specification, points, first, figures, directions } = JSON.parse(byId("data").textContent);
const controls = byId("controls");
const WIDE = matchMedia("(min-width: 700px)"); // room for names at the ends of lines; elsewhere numbers stand there

/** An element with text in it: names may hold any markup, and stay text. */
function element(tag, attributes, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children);
  return made;
}

function swatch(colour) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  made.setAttribute("viewBox", "0 0 10 10");
  const dot = made.appendChild(document.createElementNS(made.namespaceURI, "circle"));
  for (const [name, value] of Object.entries({ cx: 5, cy: 5, r: 5, fill: colour })) dot.setAttribute(name, value);
  return made;
}

// --- what is asked for ----------------------------------------------------------------------------------------------

/** The choice in the address. What is not known there is replaced by what is shown first. */
function choice() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const options = (name) => controls.querySelectorAll(`input[name=${name}], [name=${name}] option`);
  const known = (name) => [...options(name)].map((one) => one.value);
  const one = (name) => (known(name).includes(asked.get(name)) ? asked.get(name) : known(name)[0]);
  const found = { figure: one("figure"), direction: one("direction"), setting: one("setting") };
  const here = points.filter((point) => point.setting === found.setting && point.direction === found.direction);
  const colours = new Map(here.map((point) => [point.series, point.colour]));
  const wanted = asked.has("line") ? asked.getAll("line") : (first[found.setting] ?? []);
  const lines = wanted.filter((name) => colours.has(name));
  return { ...found, here, colours, wanted, lines, asked: asked.getAll("line") };
}

/** Asks for these lines; with none of them named, for those that are shown first. */
function go({ figure, direction, setting }, lines) {
  location.hash = new URLSearchParams([
    ...Object.entries({ figure, direction, setting }),
    ...lines.map((name) => ["line", name]),
  ]);
}

// --- what is shown --------------------------------------------------------------------------------------------------

const number = (lines, name) => (WIDE.matches || !lines.includes(name) ? "" : `${lines.indexOf(name) + 1}`);
const drawn = ({ here, lines }) =>
  here.flatMap((point) =>
    lines.includes(point.series) ? [{ ...point, name: number(lines, point.series) || point.series }] : [],
  );

function draw(view) {
  const now = choice();
  for (const name of ["figure", "direction", "setting"]) controls.elements[name].value = now[name];
  byId("nothing").hidden = drawn(now).length > 0;
  byId("heading").textContent = `${figures[now.figure]}, ${directions[now.direction]}`;
  byId("question").textContent = controls.elements.setting.selectedOptions[0]?.parentElement.label ?? "";
  const longest = Math.max(0, ...now.lines.map((name) => name.length));
  const padding = { left: 62, top: 10, bottom: 46, right: WIDE.matches ? Math.min(320, 20 + 6.8 * longest) : 24 };
  view.padding(padding).width(Math.max(80, byId("plot").clientWidth - padding.left - padding.right));
  view.signal("figure", now.figure).signal("lengths", [...new Set(drawn(now).map((point) => point.tokens))]);
  view.data("points", drawn(now)).runAsync();
  crosshair();
  const more = [...now.colours.keys()].filter((name) => !now.lines.includes(name));
  byId("shown").replaceChildren(...now.lines.map((name) => button(now, name)));
  byId("more").replaceChildren(...more.map((name) => button(now, name)));
  byId("others").hidden = !more.length;
  byId("others").firstElementChild.textContent = `More lines to show: ${more.length}`;
}

function button(now, name) {
  const isShown = now.lines.includes(name);
  const label = `${number(now.lines, name)} ${name}`.trim();
  const made = element("button", { type: "button", ariaPressed: isShown }, swatch(now.colours.get(name)), label);
  const others = now.wanted.filter((one) => one !== name && one);
  const lines = isShown ? others : [...others, name];
  made.addEventListener("click", () => go(now, lines.length ? lines : [""])); // an empty name: no line at all
  return made;
}

/** All lines at one length, in the order in which they lie. */
function crosshair(tokens) {
  const now = choice();
  const value = (point) => (now.figure === "memory" ? point.peak : point.ms) ?? Infinity;
  const at = drawn(now).filter((point) => point.tokens === tokens).sort((one, other) => value(other) - value(one));
  const least = Math.min(...at.map(value));
  const said = {
    time: (point) => [point.time, point.spread],
    memory: (point) => [point.memory || "not measured", ""],
    relative: (point) => [point.ms ? `${(point.ms / least).toPrecision(3)} ×` : "", point.time],
  };
  const rows = at.map((point) => {
    const cells = said[now.figure](point).map((text) => element("td", {}, text));
    return element("tr", {}, element("td", {}, swatch(point.colour), point.series), ...cells);
  });
  const lengths = drawn(now).map((point) => Math.log(point.tokens));
  const middle = (Math.min(...lengths) + Math.max(...lengths)) / 2;
  byId("crosshair").hidden = !rows.length;
  byId("crosshair").classList.toggle("right", Math.log(tokens) < middle); // out of the way of the pointer
  byId("crosshair").replaceChildren(
    element("b", {}, `${tokens?.toLocaleString("en")} tokens`),
    element("table", {}, ...rows),
  );
}

// --- the start ------------------------------------------------------------------------------------------------------

const settings = {
  mode: "vega-lite",
  renderer: "svg",
  ast: true, // expressions are interpreted: the page's policy lets no text become code
  actions: false,
  tooltip: false,
  defaultStyle: false,
  logLevel: 1,
};
window.embed("#plot", specification, settings).then(({ view }) => {
  view.addSignalListener("near", (_, { tokens }) => crosshair(tokens?.[0]));
  addEventListener("hashchange", () => draw(view));
  addEventListener("resize", () => draw(view));
  controls.addEventListener("change", ({ target }) => {
    const asked = Object.fromEntries(new FormData(controls));
    go(asked, target.name === "setting" ? [] : choice().asked);
  });
  draw(view);
  document.documentElement.classList.add("drawn");
});

byId("words").addEventListener("input", ({ target }) => {
  const words = target.value.toLowerCase().split(/\s+/);
  for (const row of document.querySelectorAll("#tables tbody tr"))
    row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
});
