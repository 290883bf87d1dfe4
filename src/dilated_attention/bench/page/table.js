// The table of all measurements: sorted by any column, filtered by words and by status.

const number = (of, say) => ({ of, say: (m) => (of(m) === null ? "" : say(of(m))), kind: "number" });
const words = (of) => ({ of, say: of, kind: "" });

/** Title → the value to sort by, the text to show, and the class of the cell. */
const COLUMNS = {
  implementation: words((m) => m.implementation),
  tokens: number((m) => m.tokens, count),
  direction: words((m) => word("direction", m.direction)),
  causal: words((m) => word("causal", m.causal)),
  dtype: words((m) => m.dtype),
  status: { of: (m) => m.status, say: (m) => m.status, kind: "status" },
  time: number((m) => m.ms?.median ?? null, duration),
  "quartiles, or why none": {
    of: (m) => (m.ms ? m.ms.upper / m.ms.lower : null),
    say: (m) => (m.ms ? spread(m.ms) : m.why),
    kind: "why",
  },
  memory: number((m) => m.peak_bytes, size),
  "tokens/s": number((m) => m.tokens_per_s, (x) => count(Math.round(x))),
  "FLOP/s": number((m) => m.tflops, rate),
  "of matmul": number((m) => m.of_matmul, percent),
  "GB/s": number((m) => m.gb_per_s, plain),
  "of copy": number((m) => m.of_copy, percent),
  ranks: number((m) => m.ranks, count),
  rule: words((m) => m.rule),
  segments: words((m) => m.lengths.map((length, i) => `${length}/${m.rates[i]}`).join(" ")),
  shape: words((m) => m.shape),
  suite: words((m) => m.suite),
};

function table() {
  const rows = measurements.map((m) => {
    const cells = Object.values(COLUMNS).map(({ say, kind }) => html("td", kind ? { class: kind } : {}, say(m)));
    const node = html("tr", { class: m.status.replaceAll(" ", "-") }, ...cells);
    return { m, node, text: [...cells.map((cell) => cell.textContent), m.tokens].join(" ").toLowerCase() };
  });
  const body = html("tbody");
  let column = null;
  let down = false;
  const update = () => {
    const asked = byId("words").value.toLowerCase().split(/\s+/);
    const status = byId("status").value;
    const kept = rows.filter(({ m, text }) => (!status || m.status === status) && asked.every((one) => text.includes(one)));
    if (column) kept.sort(order(COLUMNS[column].of, down));
    body.replaceChildren(...kept.map(({ node }) => node));
    byId("count").value = rows.length ? `${count(kept.length)} of ${count(rows.length)}` : "Nothing was measured.";
  };
  const heads = Object.entries(COLUMNS).map(([title, { kind }]) => {
    const button = html("button", { type: "button" }, title);
    const head = html("th", { scope: "col", class: kind }, button);
    button.addEventListener("click", () => {
      [down, column] = [column === title && !down, title];
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      update();
    });
    return head;
  });
  byId("all").append(html("thead", {}, html("tr", {}, ...heads)), body);
  byId("status").append(...[...new Set(measurements.map((m) => m.status))].map((one) => html("option", {}, one)));
  byId("words").addEventListener("input", update);
  byId("status").addEventListener("change", update);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  update();
}

/** By a column's value; what has none is last either way. */
function order(of, down) {
  return ({ m: a }, { m: b }) => {
    const [left, right] = [of(a), of(b)];
    if (left === null || right === null) return (left === null) - (right === null);
    const sign = typeof left === "number" ? left - right : left.localeCompare(right, "en", { numeric: true });
    return down ? -sign : sign;
  };
}
