"use strict";
// Small charts in SVG: drawn at the width they have, redrawn when it changes. Text enters through textContent only.

const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null));
  return node;
}

function draw(parent, tag, attributes = {}, text = null) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// ---- numbers and colours

const raised = (whole) => [...String(whole)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("");
const signed = (text) => text.replace("-", "−");

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5 || size < 1e-3) {
    const [digits, power] = value.toExponential(1).split("e");
    return signed(`${digits === "1.0" ? "" : Number(digits) + "·"}10${raised(Number(power))}`);
  }
  if (size >= 1e4) return signed(value.toFixed(0)).replace(/(?=\d{3}$)/, "\u202f");
  return signed(size >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
}

// exp(log), as a power of ten where it is very large
function formatLog(log) {
  return Math.abs(log) < 50 ? format(Math.exp(log)) : "10" + raised(Math.round(log / Math.LN10));
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// Heat goes from the paper's own tone to the strongest one, in either theme.
const HEAT = {
  light: ["#fbf4e9", "#f9d9a8", "#f2a65e", "#d95f30", "#8c1c33"],
  dark: ["#20242f", "#4b2748", "#96374c", "#e0703c", "#ffd591"],
};
// Okabe and Ito's hues, told apart by colour-blind readers, darkened or lightened for contrast with the paper.
const LINES = {
  light: ["#0072b2", "#d55e00", "#00855f", "#b5528b", "#946400", "#6a51a3", "#2a93cc", "#4a4f5a"],
  dark: ["#56b4e9", "#ff8f50", "#2ccb9b", "#e79ac4", "#f0c04a", "#b9a6f2", "#9ad8ff", "#d5d9e2"],
};
const DEPTH = { light: ["#3b0f70", "#2c728e", "#1f9e89", "#8aa800"], dark: ["#b9a6f2", "#5aa9e6", "#2ccb9b", "#f0e442"] };

const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function ramp(stops, t) {
  const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  const [a, b] = [channels(stops[i]), channels(stops[i + 1])];
  return a.map((v, k) => Math.round(v + (b[k] - v) * (at - i)));
}

const theme = () => (isDark() ? "dark" : "light");
const heatColour = (t) => ramp(HEAT[theme()], t);
const rgb = (c) => `rgb(${c.join(" ")})`;
// Black or white, whichever has the larger contrast with a colour: 4.5 at least.
const inkOn = (colour) => {
  const [r, g, b] = colour.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
};

function seriesColour(index, count) {
  return count <= 8 ? LINES[theme()][index] : rgb(ramp(DEPTH[theme()], index / (count - 1)));
}

// ---- scales

function logScale([low, high], [from, to]) {
  const span = Math.log(high / low) || 1;
  return (value) => from + ((to - from) * Math.log(value / low)) / span;
}

function linearScale([low, high], [from, to]) {
  return (value) => from + ((to - from) * (value - low)) / (high - low || 1);
}

function logTicks(low, high, most = 9) {
  const ticks = [];
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high)), decades = last - first;
  const steps = decades > most ? [1] : Math.log10(high / low) > 2.2 ? [1] : [1, 2, 5];
  const stride = Math.max(1, Math.ceil(decades / most));
  for (let e = first; e <= last; e += stride) for (const m of steps) ticks.push(m * 10 ** e);
  const inside = ticks.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  return inside.length < 3 && high / low > 1.02 ? evenTicks(low, high) : inside;
}

function evenTicks(low, high) {
  const step = 10 ** Math.floor(Math.log10((high - low) / 3)), nice = [1, 2, 5, 10].find((k) => (high - low) / (k * step) <= 5) * step, ticks = [];
  for (let t = Math.ceil(low / nice) * nice; t <= high; t += nice) ticks.push(Number(t.toPrecision(6)));
  return ticks;
}

// Labels of the lengths that fit beside each other; powers of two come first, those in `keep` before all.
function pickLabels(values, place, room, keep = []) {
  const even = values.length > 2 && values.every((v, i) => v === values[0] + i);
  if (even && !keep.length) {
    const stride = Math.ceil(room / Math.abs(place(values[1]) - place(values[0])));
    return values.filter((_, i) => i % stride === 0);
  }
  const rank = (v) => (keep.includes(v) ? 0 : Number.isInteger(Math.log2(v)) ? 1 : 2);
  const chosen = [];
  for (const v of [...values].sort((a, b) => rank(a) - rank(b) || a - b)) {
    if (chosen.every((c) => Math.abs(place(c) - place(v)) >= room)) chosen.push(v);
  }
  return chosen;
}

// ---- the tip, one for the page: values under the pointer, a finger, or the arrow keys

const tip = {
  node: null,
  owner: null,
  follow: null, // shows it again where its value went, behind a finger or the keys
  show(owner, { clientX, clientY }, lines) {
    this.owner = owner;
    this.node ??= document.body.appendChild(el("div", { class: "tip", role: "status" }));
    this.node.replaceChildren(...lines.map((line, i) => el(i ? "div" : "b", {}, line)));
    this.node.style.display = "block";
    const box = this.node.getBoundingClientRect(), x = Math.min(clientX + 14, innerWidth - box.width - 6);
    const y = clientY + 18 + box.height > innerHeight ? clientY - box.height - 12 : clientY + 18;
    this.node.style.transform = `translate(${Math.max(6, x)}px, ${Math.max(6, y)}px)`;
  },
  hide() {
    this.owner?.dispatchEvent(new Event("tipgone"));
    this.owner = this.follow = null;
    if (this.node) this.node.style.display = "none";
  },
};

// Shows `lines(event)` under the pointer; what a finger has touched stays until it touches something else.
function touched(node, lines) {
  const over = (event) => {
    const said = lines(event);
    said ? tip.show(node, event, said) : tip.hide();
  };
  node.addEventListener("pointermove", over);
  node.addEventListener("pointerdown", over);
  node.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && tip.hide());
}

const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// Makes a drawing's values readable. find: the stop `{x, y, lines}` at a place; step: the next one in a direction, from nothing the first.
function readable(sheet, { find, step }, mark = () => {}) {
  let at = null;
  const put = (stop) => mark((at = stop)), here = () => {
    const box = sheet.getBoundingClientRect();
    tip.show(sheet, { clientX: box.left + at.x, clientY: box.top + at.y }, at.lines());
  };
  touched(sheet, (event) => {
    const box = sheet.getBoundingClientRect(), stop = find(event.clientX - box.left, event.clientY - box.top);
    put(stop);
    tip.follow = event.pointerType === "touch" && stop ? here : null;
    return stop && stop.lines();
  });
  sheet.setAttribute("tabindex", 0);
  sheet.addEventListener("tipgone", () => put(null));
  sheet.addEventListener("blur", () => tip.hide());
  sheet.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hide();
    if (!WAYS[event.key]) return;
    event.preventDefault();
    const stop = step(at, ...WAYS[event.key]);
    if (!stop) return;
    put(stop);
    here();
    tip.follow = here;
  });
}

// Stops that are a list: the nearest to a place, and the nearest in a direction.
function among(stops) {
  const nearest = (some, cost) => some.reduce((a, b) => (a !== null && cost(a) <= cost(b) ? a : b), null);
  return {
    find: (x, y) => nearest(stops, (s) => (s.x - x) ** 2 + (s.y - y) ** 2),
    step: (at, dx, dy) => {
      if (!at) return stops[0];
      const ahead = (s) => (s.x - at.x) * dx + (s.y - at.y) * dy, off = (s) => Math.abs((s.x - at.x) * dy) + Math.abs((s.y - at.y) * dx);
      return nearest(stops.filter((s) => ahead(s) > 0.5), (s) => ahead(s) + 3 * off(s)) ?? at;
    },
  };
}

// ---- downloads

function save(name, blob) {
  const url = URL.createObjectURL(blob);
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function csv(rows) {
  if (!rows.length) return "";
  const names = Object.keys(rows[0]);
  const cell = (v) => (v === null || v === undefined ? "" : /[",\n\r]/.test(v) ? `"${String(v).replaceAll('"', '""')}"` : String(v));
  return [names.join(","), ...rows.map((r) => names.map((k) => cell(r[k])).join(","))].join("\r\n") + "\r\n";
}

const saveCsv = (name, rows) => save(name + ".csv", new Blob([csv(rows)], { type: "text/csv;charset=utf-8" }));

// ---- a chart's frame: title, downloads, drawing, legend

const frames = [];

function frame(host, { name, title, unit, render, rows, below = null }) {
  const canvas = el("div", { class: "canvas" });
  const titleText = () => (typeof title === "function" ? title() : title);
  const label = el("span", { class: "chart-title" }, titleText());
  const csvButton = el("button", { type: "button", class: "tool", title: "Download its numbers", "aria-label": `CSV of ${name}`, onclick: () => saveCsv(name, rows()) }, "CSV");
  const tools = el("span", { class: "tools" }, csvButton);
  const caption = el("figcaption", {}, el("span", {}, label, el("span", { class: "unit" }, unit ?? "")), tools);
  host.append(el("figure", { class: "chart", "data-chart": name }, caption, canvas, below));
  let drawn = 0;
  const self = {
    redraw() {
      const folded = canvas.closest("details:not([open])");
      if (folded) return folded.addEventListener("toggle", self.redraw, { once: true });
      drawn = Math.floor(canvas.clientWidth);
      label.textContent = titleText();
      const drawing = render(Math.max(drawn, 240));
      (drawing.querySelector("svg") ?? drawing).setAttribute("aria-label", `${titleText()}. Arrow keys read its values.`);
      canvas.replaceChildren(drawing);
    },
  };
  frames.push(self);
  new ResizeObserver(() => drawn && Math.floor(canvas.clientWidth) !== drawn && self.redraw()).observe(canvas);
  self.redraw();
  return self;
}

const redrawAll = () => frames.forEach((f) => f.redraw());

function sheetOf(width, height) {
  return draw(null, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
}

// Colours span a factor of four at least, so that what is alike looks alike.
const spanned = ([low, high]) => [low, Math.max(high, 4 * low)];

// ---- heat map: rows × columns of numbers on one logarithmic colour scale

function heatMap({ width, rows, columns, value, range, rowLabel, columnLabel, axis, lines, mark = () => false }) {
  const longest = rows.reduce((most, r) => Math.max(most, rowLabel(r).length), 0);
  const narrow = width < 520, left = narrow ? 10 + 6.5 * longest : 74, top = 26, bottom = 46;
  const cell = (width - left - 2) / columns.length, tall = Math.max(17, Math.min(narrow ? 30 : 34, 420 / rows.length));
  const height = top + tall * rows.length + bottom;
  const sheet = sheetOf(width, height), [low, high] = spanned(range), span = Math.log(high / low);
  const across = (c) => left + cell * (columns.indexOf(c) + 0.5), stops = [];
  draw(sheet, "text", { x: left - 8, y: 16, class: "axis", "text-anchor": "end" }, axis);
  for (const c of pickLabels(columns, across, narrow ? 26 : 30)) {
    draw(sheet, "text", { x: across(c), y: 16, class: "tick", "text-anchor": "middle" }, columnLabel(c));
  }
  rows.forEach((r, i) => {
    const y = top + tall * i;
    draw(sheet, "text", { x: left - 8, y: y + tall / 2 + 4, class: "tick", "text-anchor": "end" }, rowLabel(r));
    for (const c of columns) {
      const v = value(r, c), x = left + cell * columns.indexOf(c);
      if (v === null) continue;
      const colour = heatColour(v > 0 ? Math.log(v / low) / span : 0);
      const box = draw(sheet, "rect", { x: x + 0.5, y: y + 0.5, width: Math.max(cell - 1, 1), height: tall - 1, rx: 2.5, class: "cell" });
      box.style.fill = rgb(colour);
      if (mark(r, c)) box.classList.add("marked");
      stops.push({ x: x + cell / 2, y: y + tall / 2, box, lines: () => lines(r, c) });
      if (cell >= 33) {
        const text = draw(sheet, "text", { x: x + cell / 2, y: y + tall / 2 + 4, class: "inside", "text-anchor": "middle" }, format(v));
        text.style.fill = inkOn(colour);
      }
    }
  });
  colourBar(sheet, left, height, Math.min(220, width - left - 60), low, high);
  readable(sheet, among(stops), (stop) => stops.forEach((s) => s.box.classList.toggle("on", s === stop)));
  return sheet;
}

function colourBar(sheet, left, height, width, low, high) {
  for (let i = 0; i < 44; i++) {
    const part = draw(sheet, "rect", { x: left + (width * i) / 44, y: height - 26, width: width / 44 + 0.6, height: 8 });
    part.style.fill = rgb(heatColour(i / 43));
  }
  draw(sheet, "text", { x: left, y: height - 4, class: "tick" }, format(low));
  draw(sheet, "text", { x: left + width, y: height - 4, class: "tick", "text-anchor": "end" }, format(high));
  draw(sheet, "text", { x: left + width / 2, y: height - 4, class: "tick", "text-anchor": "middle" }, "log scale");
}

let clips = 0;

// ---- lines on logarithmic axes; `over` draws what goes on top, given the scales

function lineChart({ width, height, xs, xLabel, yLabel, range, series, keep = [], under = null, over = null, scale = logScale, linear = false }) {
  const longest = series.reduce((most, s) => Math.max(most, s.name.length), 0);
  const ticks = linear ? evenTicks(...range) : logTicks(...range), digits = ticks.reduce((most, t) => Math.max(most, format(t).length), 0);
  const wide = width >= 560, left = Math.max(52, 24 + 7 * digits), right = wide ? 14 + 7 * longest : 12, top = 14, bottom = 42;
  const sheet = sheetOf(width, height);
  const px = scale([xs[0], xs[xs.length - 1]], [left + 8, width - right - 6]);
  const py = (linear ? linearScale : logScale)(range, [height - bottom, top]);
  for (const t of ticks) {
    draw(sheet, "line", { x1: left, x2: width - right, y1: py(t), y2: py(t), class: "grid" });
    draw(sheet, "text", { x: left - 7, y: py(t) + 4, class: "tick", "text-anchor": "end" }, format(t));
  }
  for (const x of pickLabels(xs, px, 30, keep)) {
    draw(sheet, "line", { x1: px(x), x2: px(x), y1: top, y2: height - bottom, class: "grid" });
    draw(sheet, "text", { x: px(x), y: height - bottom + 17, class: "tick", "text-anchor": "middle" }, String(x));
  }
  draw(sheet, "text", { x: (left + width - right) / 2, y: height - 6, class: "axis", "text-anchor": "middle" }, xLabel);
  draw(sheet, "text", { transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)`, class: "axis", "text-anchor": "middle" }, yLabel);
  const scales = { sheet, px, py, range, left, right: width - right, top, bottom: height - bottom };
  if (under) under(scales);
  const points = [], labels = [], id = `clip-${(clips += 1)}`;
  const clip = draw(draw(sheet, "defs"), "clipPath", { id });
  draw(clip, "rect", { x: left - 4, y: top - 4, width: Math.max(width - left - right + 8, 1), height: height - top - bottom + 8 });
  scales.clip = `url(#${id})`;
  for (const s of [...series].sort((a, b) => Number(b.faded) - Number(a.faded))) {
    const group = draw(sheet, "g", { class: s.faded ? "series faded" : "series", "data-series": s.name });
    group.style.setProperty("--series", s.colour);
    if (!s.faded && s.points.some((p) => p.low < p.high)) {
      const edge = [...s.points.map((p) => [p.x, p.high]), ...[...s.points].reverse().map((p) => [p.x, p.low])];
      draw(group, "polygon", { class: "spread", points: edge.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ") });
    }
    draw(group, "polyline", { class: "curve", points: s.points.map((p) => `${px(p.x).toFixed(1)},${py(p.y).toFixed(1)}`).join(" ") });
    for (const p of s.points) {
      draw(group, "circle", { class: "dot", cx: px(p.x), cy: py(p.y), r: s.faded ? 2.2 : 3.2 });
      points.push({ x: px(p.x), y: py(p.y), lines: () => p.lines });
    }
    const last = s.points[s.points.length - 1];
    if (last) labels.push({ text: s.name, y: py(last.y), colour: s.colour, faded: s.faded });
  }
  if (over) over(scales);
  if (wide && labels.length <= 14) {
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((l, i) => i && (l.y = Math.max(l.y, labels[i - 1].y + 14)));
    const spill = Math.max(0, (labels.at(-1)?.y ?? 0) - (height - bottom));
    for (const l of labels) {
      const text = draw(sheet, "text", { x: width - right + 6, y: l.y - spill + 4, class: l.faded ? "end faded" : "end" }, l.text);
      text.style.fill = l.colour;
    }
  }
  const ring = draw(sheet, "circle", { class: "ring", r: 7, visibility: "hidden" });
  readable(sheet, among(points), (stop) => {
    for (const [name, value] of [["cx", stop?.x ?? 0], ["cy", stop?.y ?? 0], ["visibility", stop ? "visible" : "hidden"]]) ring.setAttribute(name, value);
  });
  return sheet;
}

// ---- a ladder: one row per thing, marks along a logarithmic axis; what lies beyond the axis is an arrow at its edge

function ladder({ width, rows, unit, base = null, baseLabel = "", room = 1e7 }) {
  const longest = rows.reduce((most, r) => Math.max(most, r.label.length), 0);
  const narrow = width < 560, left = narrow ? 8 : Math.min(20 + 6.6 * longest, width * 0.4), right = narrow ? 70 : 96, top = 30;
  const tall = narrow ? (rows.length > 16 ? 36 : 42) : rows.length > 16 ? 21 : 28;
  const logs = rows.flatMap((r) => r.marks.map((m) => m.log)).concat(base ? [Math.log(base)] : []);
  const least = Math.min(...logs), most = Math.min(Math.max(...logs), least + Math.log(room));
  const pad = Math.max((most - least) * 0.04, 0.05), low = Math.max(least - pad, -600), high = Math.max(most + pad, low + 0.1);
  const height = top + tall * rows.length + 44, sheet = sheetOf(width, height);
  const place = (log) => left + ((width - right - left) * (Math.min(log, high) - low)) / (high - low);
  const ticks = logTicks(Math.exp(low), Math.exp(high), narrow ? 5 : 8);
  for (const t of pickLabels(ticks, (v) => place(Math.log(v)), 44)) {
    const x = place(Math.log(t));
    draw(sheet, "line", { x1: x, x2: x, y1: top - 4, y2: height - 40, class: "grid" });
    draw(sheet, "text", { x, y: height - 24, class: "tick", "text-anchor": "middle" }, format(t));
  }
  draw(sheet, "text", { x: (left + width - right) / 2, y: height - 5, class: "axis", "text-anchor": "middle" }, unit);
  if (base) {
    const x = place(Math.log(base));
    draw(sheet, "line", { x1: x, x2: x, y1: top - 8, y2: height - 40, class: "base" });
    draw(sheet, "text", { x: x + 5, y: top - 14, class: "base-label" }, baseLabel);
  }
  const stops = [];
  rows.forEach((row, i) => {
    const y = top + tall * (i + 0.5) + (narrow ? 8 : 0);
    const band = draw(sheet, "rect", { x: 0, y: top + tall * i, width, height: tall, class: "row" });
    draw(sheet, "text", narrow ? { x: left, y: y - 12, class: "row-label" } : { x: left - 12, y: y + 4, class: "row-label", "text-anchor": "end" }, row.label);
    const places = row.marks.map((m) => place(m.log)).concat(base ? [place(Math.log(base))] : []);
    draw(sheet, "line", { x1: Math.min(...places), x2: Math.max(...places), y1: y, y2: y, class: "bar " + row.kind });
    for (const m of row.marks) {
      const x = place(m.log);
      if (m.log > high) draw(sheet, "path", { d: `M${x - 5} ${y - 6}l9 6l-9 6z`, class: "mark " + m.kind });
      else if (m.hollow) draw(sheet, "circle", { cx: x, cy: y, r: 5, class: "mark hollow " + m.kind });
      else draw(sheet, "circle", { cx: x, cy: y, r: 5, class: "mark " + m.kind });
    }
    draw(sheet, "text", { x: width - right + 12, y: y + 4, class: "value" }, row.value);
    stops.push({ x: (left + width - right) / 2, y: top + tall * (i + 0.5), band, lines: () => row.lines });
  });
  const { step } = among(stops), find = (_, y) => stops[Math.floor((y - top) / tall)] ?? null;
  readable(sheet, { find, step }, (stop) => stops.forEach((s) => s.band.classList.toggle("on", s === stop)));
  return sheet;
}

// ---- a strip of bars, one per position

function strip({ width, values, colour, lines, label, most = 0, name = String }) {
  const height = 84, left = 8, bottom = 20, sheet = sheetOf(width, height), top = most || values.reduce((a, b) => Math.max(a, b), 0) || 1;
  const step = (width - 2 * left) / values.length;
  draw(sheet, "line", { x1: left, x2: width - left, y1: height - bottom, y2: height - bottom, class: "grid" });
  values.forEach((v, i) => {
    const tall = ((height - bottom - 6) * v) / top;
    if (tall < 0.2) return;
    const bar = draw(sheet, "rect", { x: left + step * i, y: height - bottom - tall, width: Math.max(step - (step > 3 ? 0.8 : 0), 0.6), height: tall, class: "share" });
    bar.style.fill = colour;
  });
  const stop = (i) => (i >= 0 && i < values.length ? { i, x: left + step * (i + 0.5), y: height / 2, lines: () => lines(i) } : null);
  readable(sheet, { find: (x) => stop(Math.floor((x - left) / step)), step: (at, dx, dy) => (at ? (stop(at.i + dx + dy) ?? at) : stop(0)) });
  for (const i of values.length > 1 ? [0, values.length - 1] : [0]) {
    draw(sheet, "text", { x: left + step * (i + 0.5), y: height - 5, class: "tick", "text-anchor": i ? "end" : "start" }, name(i));
  }
  draw(sheet, "text", { x: width / 2, y: height - 5, class: "tick", "text-anchor": "middle" }, label);
  return sheet;
}

// ---- a picture: n × n numbers from 0 (zero), 1 (low) to 127 (high) on a logarithmic scale, a pixel each

function picture({ width, n, codes, low, high, across, down, lines }) {
  const left = 34, top = 26, bottom = 40, side = Math.max(Math.min(width - left - 2, 620), 120), height = top + side + bottom;
  const sheet = sheetOf(width, height), host = el("div", { class: "picture" });
  const canvas = el("canvas", { width: n, height: n });
  Object.assign(canvas.style, { left: `${left}px`, top: `${top}px`, width: `${side}px`, height: `${side}px` });
  const shades = Array.from({ length: 127 }, (_, i) => heatColour(i / 126)), brush = canvas.getContext("2d"), image = brush.createImageData(n, n);
  codes.forEach((code, k) => image.data.set(code ? [...shades[code - 1], 255] : [0, 0, 0, 0], 4 * k));
  brush.putImageData(image, 0, 0);
  draw(sheet, "rect", { x: left - 0.5, y: top - 0.5, width: side + 1, height: side + 1, class: "frame" });
  draw(sheet, "text", { x: left + side / 2, y: 16, class: "axis", "text-anchor": "middle" }, across);
  draw(sheet, "text", { transform: `translate(12 ${top + side / 2}) rotate(-90)`, class: "axis", "text-anchor": "middle" }, down);
  for (const i of n > 1 ? [0, n - 1] : [0]) {
    const at = (side * (i + 0.5)) / n;
    draw(sheet, "text", { x: left + (i ? side : 0), y: 16, class: "tick", "text-anchor": i ? "end" : "start" }, String(i));
    draw(sheet, "text", { x: left - 5, y: top + Math.min(Math.max(at + 4, 10), side), class: "tick", "text-anchor": "end" }, String(i));
  }
  colourBar(sheet, left, height, Math.min(220, side), low, high);
  const ring = draw(sheet, "rect", { class: "ring", visibility: "hidden" });
  const cell = Math.max(side / n, 5), at = (i, j) => (Math.min(i, j) < 0 || Math.max(i, j) >= n ? null : { i, j, x: left + (side * (j + 0.5)) / n, y: top + (side * (i + 0.5)) / n, lines: () => lines(i, j) });
  const find = (x, y) => at(Math.floor((n * (y - top)) / side), Math.floor((n * (x - left)) / side));
  readable(sheet, { find, step: (from, dx, dy) => (from ? (at(from.i + dy, from.j + dx) ?? from) : at(0, 0)) }, (stop) => {
    const box = stop ? { x: stop.x - cell / 2, y: stop.y - cell / 2, width: cell, height: cell, visibility: "visible" } : { visibility: "hidden" };
    for (const [name, value] of Object.entries(box)) ring.setAttribute(name, value);
  });
  host.append(canvas, sheet);
  return host;
}

// ---- a choice beside a chart

function choose(host, label, options, name, chosen, change) {
  const select = el("select", { "data-pick": name, onchange: () => change(select.value) });
  for (const [value, text] of options) select.append(el("option", { value, selected: String(value) === String(chosen) }, text));
  host.append(el("label", { class: "pick" }, label + " ", select));
  return select;
}

// ---- a table that sorts by the column clicked

function table(host, { name, columns, rows, most = 25, mark = "" }) {
  let order = null, rising = true, open = rows.length <= most;
  const body = el("tbody"), more = el("button", { type: "button", class: "more", onclick: () => ((open = true), fill()) });
  const heads = columns.map((c, i) => {
    const button = el("button", { type: "button", title: c.help ?? null, onclick: () => sort(i) }, c.title);
    return el("th", { scope: "col", "aria-sort": "none", class: c.text ? "text" : null }, button);
  });
  const compare = (a, b) => {
    if (a === null || b === null) return (a === null) - (b === null);
    const way = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return rising ? way : -way;
  };
  function sort(i) {
    rising = order === i ? !rising : true;
    order = i;
    heads.forEach((h, k) => h.setAttribute("aria-sort", k === i ? (rising ? "ascending" : "descending") : "none"));
    fill();
  }
  const some = (c) => rows.map((r) => c.value(r)).filter((v) => v > 0);
  function cell(c, r) {
    const v = c.value(r), said = v === null ? "–" : (c.show ?? ((x) => (typeof x === "number" ? format(x) : x)))(v, r);
    const node = el("td", { class: c.text ? "text" : null }, c.link && r[c.link] ? el("a", { href: r[c.link] }, said) : said);
    if (c.heat && v > 0) {
      const [low, high] = spanned([Math.min(...some(c)), Math.max(...some(c))]), colour = heatColour(Math.log(v / low) / Math.log(high / low));
      Object.assign(node.style, { background: rgb(colour), color: inkOn(colour) });
    }
    return node;
  }
  function fill() {
    const key = (r) => columns[order].value(r);
    const shown = order === null ? rows : [...rows].sort((a, b) => compare(key(a), key(b)));
    body.replaceChildren(...(open ? shown : shown.slice(0, most)).map((r) => el("tr", { class: r[mark] ? "marked" : null }, ...columns.map((c) => cell(c, r)))));
    more.hidden = open;
    more.textContent = `Show all ${rows.length} rows`;
  }
  const record = (r) => Object.fromEntries(columns.map((c) => [c.name ?? c.title, c.value(r)]));
  const save = el("button", { type: "button", class: "tool", "aria-label": `CSV of ${name}`, onclick: () => saveCsv(name, rows.map(record)) }, "CSV");
  const whole = el("table", { "data-table": name }, el("thead", {}, el("tr", {}, ...heads)), body);
  host.append(el("div", { class: "table-tools" }, save), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `table of ${name}` }, whole), more);
  fill();
  if (columns.some((c) => c.heat)) frames.push({ redraw: fill });
}

// What a page does once it is drawn: the button that turns light to dark, and a word to whoever waits for it.
function ready(theme) {
  theme.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    redrawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  addEventListener("scroll", () => (tip.follow ? tip.follow() : tip.hide()), { passive: true });
  addEventListener("pointerdown", (event) => tip.owner && !tip.owner.contains(event.target) && tip.hide());
  document.documentElement.dataset.ready = "yes";
}
