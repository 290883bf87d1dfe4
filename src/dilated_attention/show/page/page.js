const { specification, captions, cells } = JSON.parse(document.getElementById("data").textContent);
const box = document.getElementById("chart"), caption = document.getElementById("caption");
const dark = matchMedia("(prefers-color-scheme: dark)");
const say = (name, colour) => { caption.textContent = captions[colour]; };
async function draw() {
  const room = Math.min(560, box.clientWidth - 90);
  const side = cells > room ? room : cells * Math.floor(room / cells);  // whole pixels per cell
  const view = { fill: dark.matches ? "#161b22" : "#f5f6f8", stroke: null };
  const legend = { layout: { bottom: { direction: "vertical", anchor: "start" } } };
  const config = { background: "transparent", view, legend };
  const style = { ast: true, actions: false, defaultStyle: false, tooltip: { disableDefaultStyle: true } };  // no eval
  const options = { ...style, renderer: "canvas", theme: dark.matches ? "dark" : undefined, config };
  const result = await window.embed(box, { ...specification, width: side, height: side }, options);
  result.view.addSignalListener("colour", say);
  window.shown = result.view;
}
say("colour", specification.params.find((one) => one.name === "colour").value);
dark.addEventListener("change", draw);
draw();
