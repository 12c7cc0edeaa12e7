"use strict";
// The page of certified radii: one chart, one table.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function start() {
  if (data.rows.length) {
    radiiByLayer($("radii-chart"), $("radii-controls"), { layers: data.layers, rows: data.rows, unit: "log scale; shaded: range over inputs" });
    const whole = new Set(["layer", "sample", "label"]);
    const columns = data.columns.map((name) => ({ title: name === "sample" ? "input" : name.replace("_", " "), name, value: (r) => (name === "sample" ? r.sample + 1 : r[name]), ...(whole.has(name) ? { show: String } : {}) }));
    table($("numbers-table"), { name: "radii", columns, rows: data.rows });
  } else $("radii").remove();
  ready($("theme"));
}

start();
