"use strict";
// The page of a training run: one chart for each quantity, one above the other, on the same steps.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const colourOf = (layer) => (layer === undefined ? "currentColor" : seriesColour(data.layers.indexOf(layer), data.layers.length));
let focus = data.focus; // a layer, or all

// Round steps between the first and the last.
function stepTicks([first, last]) {
  const rough = (last - first) / 8, power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const stride = Math.max(1, [1, 2, 5, 10].find((k) => k * power >= rough) * power), ticks = [first];
  for (let t = (Math.floor(first / stride) + 1) * stride; t < last - stride / 3; t += stride) ticks.push(t);
  return [...ticks, last];
}

// Alarms of a quantity, as lines across its chart; those of all quantities across the loss.
function alarmsUnder(quantity, { sheet, px, top, bottom }) {
  const seen = new Set();
  for (const a of data.alarms) {
    if ((quantity !== "loss" && a.quantity !== quantity && a.quantity !== "finite") || seen.has(a.step)) continue;
    seen.add(a.step);
    const line = draw(sheet, "line", { x1: px(a.step), x2: px(a.step), y1: top, y2: bottom, class: "alarm", "stroke-dasharray": "3 3", stroke: "#d95f30", "stroke-width": 1.5 });
    draw(line, "title", {}, a.said);
  }
}

function chart(curve) {
  return frame($("charts"), {
    name: curve.name, title: curve.title, unit: "log scale",
    rows: () => curve.series.flatMap((s) => s.points.map(([step, value]) => ({ series: s.name, step, value }))),
    render: (width) => {
      const values = curve.series.flatMap((s) => s.points.map((p) => p[1])), low = Math.min(...values), high = Math.max(...values);
      const pad = Math.max((high / low) ** 0.05, 1.03);
      return lineChart({
        width, height: 240, xs: stepTicks(data.ends), xLabel: "step", yLabel: curve.title, range: [low / pad, high * pad], scale: linearScale,
        under: (scales) => alarmsUnder(curve.name, scales),
        series: curve.series.map((s) => ({
          name: s.name, colour: colourOf(s.layer), faded: focus !== null && s.layer !== undefined && s.layer !== focus,
          points: s.points.map(([x, y]) => ({ x, y, low: y, high: y, lines: [`${s.name}, step ${x}`, `${curve.title} = ${format(y)}`] })),
        })),
      });
    },
  });
}

function start() {
  const select = el("select", { "data-pick": "layer", onchange: () => ((focus = select.value === "" ? null : Number(select.value)), redrawAll()) });
  select.append(el("option", { value: "" }, "all"), ...data.layers.map((k) => el("option", { value: k, selected: k === focus }, `layer ${k}`)));
  $("controls").append(el("label", { class: "pick" }, "Layer ", select));
  data.curves.forEach(chart);
  const titles = { layer: "layer", first: "L at first", most: "L at most", last: "L at last", max_logit: "largest logit", min_entropy: "least entropy" };
  const columns = Object.entries(titles).map(([key, title]) => ({ title, value: (r) => r[key], ...(key === "layer" ? { show: String } : {}) }));
  table($("table"), { name: "layers", columns, rows: data.table });
  ready($("theme"));
}

start();
