"use strict";
// The sections of a page, each drawn from the charts that the data block describes.

const data = JSON.parse(document.getElementById("data").textContent);
for (const [name, some] of Object.entries(data)) if (some.columns) data[name] = records(some);
const $ = (id) => document.getElementById(id);
const layerName = (layer) => `layer ${layer}`;
const percent = (v) => (100 * v).toFixed(v < 0.1 ? 2 : 1) + " %";
const ln = (v) => Math.log(Math.max(v, 1e-12)); // a constant of zero has to stand somewhere
const distinct = (values) => [...new Set(values)];
const ordered = (values) => distinct(values).sort((a, b) => a - b);
const mean = (values) => (values.length > 1 ? Math.exp(values.reduce((s, v) => s + Math.log(v), 0) / values.length) : values[0] ?? null);
const padded = (values) => {
  const some = values.filter((v) => v > 0), low = Math.min(...some), high = Math.max(...some), pad = Math.max((high / low) ** 0.05, 1.03);
  return some.length ? [low / pad, high * pad] : [1, 2];
};

// Records that came by column, words as numbers of a list.
function records({ names, columns }) {
  const lists = columns.map((c) => (c.words ? c.at.map((k) => c.words[k]) : c));
  return lists[0].map((_, i) => Object.fromEntries(names.map((name, k) => [name, lists[k][i]])));
}

// ---- templates

const PLAIN = ["layer", "n", "sample", "seed", "confidence", "steps"]; // columns of whole numbers and names
const WORDS = { "%": percent, log: formatLog, short: (v) => String(v).slice(0, 24) };

// A template with what stands in a record's columns; empty where one of them is.
function fill(template, record) {
  let whole = true;
  const text = template.replace(/\{(\w+)(?::([^}]+))?\}/g, (_, name, how) => {
    const v = record[name];
    if (v === null || v === undefined) whole = false;
    return how ? WORDS[how](v) : typeof v !== "number" || Number.isInteger(v) ? v : format(v);
  });
  return whole ? text : "";
}

const lines = (templates, record) => templates.map((t) => fill(t, record)).filter((line) => line);

// ---- what is picked above the charts of a section

const ALL = "all", ANY = "both"; // every record, in means; a record that every option shows

class Choice {
  constructor(picks) {
    this.picks = picks;
    this.values = Object.fromEntries(picks.map((p) => [p.column, p.first]));
  }
  // What is picked of a chart; all its curves are there, whichever is in front.
  of(chart) {
    return Object.entries(this.values).filter(([c]) => chart.picked.includes(c) && c !== chart.series);
  }
  said(record) {
    return { ...record, ...Object.fromEntries(this.picks.map((p) => [p.column, p.options.find((o) => o.value === this.values[p.column]).said || this.values[p.column]])) };
  }
  shown(chart, rows = data[chart.source]) {
    const wanted = Object.entries({ ...Object.fromEntries(this.of(chart)), ...chart.where });
    return rows.filter((r) => wanted.every(([c, v]) => v === ALL || r[c] === undefined || r[c] === v || r[c] === ANY));
  }
  isMean(chart) {
    return this.of(chart).some(([c, v]) => v === ALL && data[chart.source].some((r) => r[c] !== undefined));
  }
  // The curve in front, or nothing where none is.
  front(chart) {
    const value = chart.picked.includes(chart.series) ? this.values[chart.series] : ALL;
    return value === ALL ? null : value;
  }
}

// ---- how each kind of chart is drawn; `about` is its name, title and records

const INKS = { point: "var(--point)", ball: "var(--ball)", hot: "rgb(var(--hot))", ink: "var(--ink)" };

const called = (chart, value) => (chart.series === "layer" ? layerName(value) : value);

// Curves of a chart: name, colour, and points, each the mean of the records at one place.
function curves(chart, choice) {
  const y = choice.values.y ?? chart.y, rows = choice.shown(chart), all = choice.isMean(chart), front = choice.front(chart);
  const values = chart.series && distinct(data[chart.source].map((r) => r[chart.series])), whole = (v) => v !== null && v !== undefined && (chart.linear || v > 0);
  const wanted = chart.series ? values.map((v, i) => [called(chart, v), seriesColour(i, values.length), y, rows.filter((r) => r[chart.series] === v), v])
    : chart.curves.map(([name, column, colour]) => [name, INKS[colour], column, rows, null]);
  return wanted.map(([name, colour, column, own, value]) => {
    const places = new Map(), worth = (r) => (chart.over && r[column] !== null ? r[column] / r[chart.over] : r[column]);
    for (const r of own) if (whole(worth(r)) && r[chart.x] > 0 - (chart.x === "layer")) places.set(chart.points ? 0 : r[chart.x], [...(places.get(chart.points ? 0 : r[chart.x]) ?? []), r]);
    const points = [...places.values()].map((some) => {
      const values = some.map(worth), value = values.length > 1 ? mean(values) : values[0], r = some[0], range = values.length === 1 && chart.low && column === (chart.series ? chart.y : column) && whole(r[chart.low]);
      const [low, high] = range ? [r[chart.low], r[chart.high]] : chart.over ? [Math.min(...values), Math.max(...values)] : [value, value];
      const about = all ? { ...choice.said(r), count: values.length, low, high, [chart.x]: r[chart.x] } : { ...choice.said(r), ...r };
      return { x: chart.points ? Number(mean(some.map((s) => s[chart.x])).toPrecision(2)) : r[chart.x], y: value, low, high, record: r, lines: lines(all ? chart.tip_all : chart.tip, { ...about, series: name, shown: value }) };
    });
    return { name, colour, value, faded: front !== null && value !== front, points: points.sort((a, b) => a.x - b.x) };
  }).filter((s) => s.points.length);
}

// Dotted powers from the lowest point on, breaks as bands of their curve's colour, and fits over the curve in front.
function beside(chart, choice, series, xs) {
  const y = choice.values.y ?? chart.y, front = choice.front(chart), found = series.find((s) => s.value === front), fitted = y === chart.y;
  const breaks = chart.broken.includes(y) ? chart.breaks.filter((b) => (front === null ? b.jump : b.curve === front)) : [];
  function under({ sheet, px, py, range, top, bottom, left, right }) {
    const first = xs[0], start = Math.min(...series.flatMap((s) => s.points.map((p) => p.y)));
    for (const power of fitted ? chart.guides : []) {
      const end = Math.min(xs.at(-1), first * (range[1] / start) ** (1 / power)), height = py(start * (end / first) ** power);
      draw(sheet, "line", { x1: px(first), y1: py(start), x2: px(end), y2: height, class: "guide" });
      const label = draw(sheet, "text", { x: px(end) - 6, y: height + 15, class: "guide-label", "text-anchor": "end" }, "n");
      draw(label, "tspan", { dy: -4, "font-size": 10 }, { 0.25: "¼", 0.5: "½" }[power] ?? power);
    }
    for (const b of breaks) {
      const [from, to] = [px(b.before), px(b.after)], late = (from + to) / 2 > (left + right) / 2, colour = series.find((s) => s.value === b.curve)?.colour;
      const band = draw(sheet, "rect", { x: b.jump ? from : from - 0.75, y: top, width: Math.max(to - from, 1.5), height: bottom - top, class: b.jump ? "break" : "break bend" });
      band.style.setProperty("--series", colour);
      draw(sheet, "text", { x: late ? from - 5 : to + 5, y: bottom - (b.jump ? 8 : 22), class: "break-label", "text-anchor": late ? "end" : "start" }, signed(b.text)).style.fill = colour;
    }
  }
  function over({ sheet, px, py, clip }) {
    if (!found || !fitted) return;
    const group = draw(sheet, "g", { class: "fit", "clip-path": clip });
    const path = (column) => found.points.filter((p) => p.record[column] > 0).map((p) => `${px(p.x).toFixed(1)},${py(p.record[column]).toFixed(1)}`);
    if (chart.band) draw(group, "polygon", { class: "interval", points: [...path(chart.band[0]), ...path(chart.band[1]).reverse()].join(" ") });
    for (const [column, look] of chart.fits) draw(group, "polyline", { class: look, points: path(column).join(" ") });
  }
  return { under, over, keep: breaks.filter((b) => b.jump).map((b) => b.after) };
}

const draws = {
  lines: (chart, choice) => (width) => {
    const series = curves(chart, choice), layers = chart.x === "layer";
    let xs = layers ? data.layers : ordered(choice.shown(chart).map((r) => r[chart.x]).filter((v) => v > 0));
    if (chart.points) {
      const places = series.flatMap((s) => s.points.map((p) => p.x)).concat([1]).sort((a, b) => a - b);
      xs = distinct([places[0] === places.at(-1) ? places[0] / 2 : places[0], ...places]);
    }
    const ends = series.flatMap((s) => s.points.flatMap((p) => [p.low, p.high]));
    return lineChart({
      width, height: width < 560 ? 270 : 340, xs, xLabel: chart.x_label, yLabel: fill(chart.y_label, choice.said({})), series, linear: chart.linear,
      range: chart.linear ? [Math.min(...ends) - 0.05, Math.max(...ends) + 0.05] : padded(ends), scale: layers ? linearScale : logScale, ...beside(chart, choice, series, xs),
    });
  },

  heat: (chart, choice) => {
    const all = data[chart.source], range = all.map((r) => r[chart.y]).filter((v) => v > 0), key = (r) => `${r.layer} ${r[chart.x]}`;
    return (width) => {
      const at = new Map(choice.shown(chart).map((r) => [key(r), r])), cell = (layer, x) => at.get(`${layer} ${x}`);
      return heatMap({
        width, rows: ordered(all.map((r) => r.layer)), columns: ordered(all.map((r) => r[chart.x])), range: range.length ? [Math.min(...range), Math.max(...range)] : [1, 2],
        axis: chart.x === "n" ? "n =" : chart.x_label, rowLabel: layerName, columnLabel: String,
        value: (layer, x) => cell(layer, x)?.[chart.y] ?? null, mark: (layer, x) => chart.mark !== null && cell(layer, x)[chart.mark],
        lines: (layer, x) => [...lines(chart.tip, cell(layer, x)), ...(chart.each ? all.filter((r) => key(r) === `${layer} ${x}`).map((r) => fill(chart.each, r)) : [])],
      });
    };
  },

  ladder: (chart, choice) => (width) => {
    const rows = choice.shown(chart).filter((r) => r[chart.marks[0][0]] !== null), base = chart.base && choice.shown(chart)[0]?.[chart.base];
    return ladder({
      width, unit: chart.x_label, base: base > 0 ? base : null, baseLabel: `measured ${format(base)}`,
      rows: rows.map((r) => {
        const marks = chart.marks.filter(([c]) => r[c] !== null).map(([c, look]) => {
          const [kind, hollow] = (r[look] ?? look).split(" ");
          return { log: chart.logs.includes(c) ? r[c] : ln(r[c]), kind, hollow: Boolean(hollow) };
        });
        return { label: fill(chart.label, r), kind: marks[0].kind, marks, value: fill(chart.right[0], r) || chart.right[1], lines: lines(chart.tip, r) };
      }),
    });
  },

  bars: (chart, choice) => (width) => {
    const rows = choice.shown(chart);
    return strip({ width, values: rows.map((r) => r[chart.y]), colour: INKS.hot, label: chart.x, most: 1, name: (i) => String(rows[i][chart.x]), lines: (i) => lines(chart.tip, rows[i]) });
  },

  passage: (chart, choice) => (width) => {
    const [record] = choice.shown(chart), shares = record[chart.y], tokens = data.texts[record.n], top = shares.reduce((a, b) => Math.max(a, b), 0) || 1;
    const said = (i) => [`token ${i}: ${tokens[i][1].slice(0, 40)}`, `${percent(shares[i])} of the worst direction`];
    const sheet = strip({ width, values: shares, colour: INKS.hot, label: "position", lines: said });
    const body = el("p", { class: "passage", dir: "auto", tabindex: 0, "aria-label": "the text" }), note = el("p", { class: "note" }, "Largest shares: ");
    tokens.forEach(([gap, text, special], i) => {
      if (gap) body.append(/\n\s*\n/.test(gap) ? "\n" : gap.trim() ? gap : " ");
      const span = el("span", { class: special ? "token special" : "token", "data-token": i }, text);
      span.style.setProperty("--share", (0.85 * Math.sqrt(shares[i] / top)).toFixed(3));
      body.append(span);
    });
    const order = shares.map((_, i) => i).sort((a, b) => shares[b] - shares[a]).slice(0, 5), short = (t) => (t.length > 24 ? t.slice(0, 23) + "…" : t);
    note.append(...order.flatMap((i, k) => [k ? ", " : "", el("bdi", {}, `“${short(tokens[i][1])}”`), ` (token ${i}) ${percent(shares[i])}`]), ".");
    touched(body, (event) => (event.target.dataset.token === undefined ? null : said(event.target.dataset.token)));
    return el("div", {}, sheet, note, body);
  },

  picture: (chart) => {
    const p = pictureOf(chart), named = (i) => `token ${i}` + (p.tokens ? ` “${p.tokens[i][1].slice(0, 24)}”` : "");
    return (width) => picture({
      width, n: p.n, codes: p.codes, low: p.low, high: p.high, across: chart.across, down: chart.down,
      lines: (i, j) => [`${named(j)} → ${named(i)}`, p.codes[i * p.n + j] === 0 ? "no influence" : `${p.faint && p.codes[i * p.n + j] === 1 ? "at most" : "‖J‖ ="} ${format(p.norm(i, j))}`],
    });
  },
};

function pictureOf(chart) {
  const [p] = data[chart.source], codes = p.unpacked;
  const norm = (i, j) => { const c = codes[i * p.n + j]; return c ? p.low * (p.high / p.low) ** ((c - 1) / 126) : 0; };
  return { ...p, codes, norm, tokens: data.texts[p.n] ?? null };
}

// Codes of a picture are deflated; each is less the one above it.
async function unpack(p) {
  const bytes = Uint8Array.from(atob(p.codes), (c) => c.charCodeAt(0)), stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  p.unpacked = new Uint8Array(await new Response(stream).arrayBuffer());
  for (let k = p.n; k < p.unpacked.length; k++) p.unpacked[k] += p.unpacked[k - p.n];
}

// What the CSV of a chart holds: its records, of a picture its numbers, of a passage the shares of its tokens.
function recordsOf(chart, choice) {
  if (chart.draw === "passage") {
    const { n } = choice.shown(chart)[0], some = data[chart.source].filter((r) => r.n === n);
    return data.texts[n].map(([, text], i) => ({ position: i, token: text, ...Object.fromEntries(some.map((r) => [`layer_${r.layer}`, r[chart.y][i]])) }));
  }
  if (chart.draw !== "picture") return data[chart.source];
  const p = pictureOf(chart), all = Array.from({ length: p.n }, (_, i) => i);
  return all.map((i) => Object.fromEntries([["to", i], ...all.map((j) => [`from_${j}`, Number(p.norm(i, j).toPrecision(4))])]));
}

// Bounds and the like that have no mark, in a list below.
function missing(host, chart, choice) {
  const list = el("ul", { id: `${host.id.replace("-charts", "")}-missing` }), whole = el("details", {}, el("summary", {}, chart.missing[0]), list);
  host.append(whole);
  return () => {
    const none = choice.shown(chart).filter((r) => r[chart.marks[0][0]] === null);
    list.replaceChildren(...none.map((r) => el("li", {}, el("b", {}, fill(chart.missing[1], r)), fill(chart.missing[2], r) || "does not apply")));
    whole.hidden = !none.length;
  };
}

// The names and colours of the curves of a chart; where one can stand in front, as buttons that put it there.
function key(host, section, chart, choice, update) {
  const values = distinct(data[chart.source].map((r) => r[chart.series])), picked = chart.picked.includes(chart.series);
  const list = el("div", picked ? { class: "legend", id: `${section.id}-names`, role: "group", "aria-label": "in front" } : { class: "legend", id: `${section.id}-names` });
  host.append(list);
  return () => list.replaceChildren(...(picked ? [ALL] : []).concat(values).map((value) => {
    const swatch = value === ALL ? null : el("i"), name = value === ALL ? "all" : called(chart, value);
    if (swatch) swatch.style.background = seriesColour(values.indexOf(value), values.length);
    if (!picked) return el("span", { class: "key" }, swatch, name);
    return el("button", { type: "button", class: "key", "aria-pressed": String(choice.values[chart.series] === value), onclick: () => ((choice.values[chart.series] = value), update(), list.querySelector("[aria-pressed=true]").focus()) }, swatch, name);
  }));
}

function build(section) {
  const host = $(`${section.id}-charts`), choice = new Choice(section.picks), updates = [], update = () => updates.forEach((redraw) => redraw());
  const titled = (chart) => () => fill(chart.title, { ...choice.shown(chart)[0], ...choice.said({}) });
  const named = section.charts.find((chart) => chart.series);
  if (named) updates.push(key(host, section, named, choice, update));
  for (const chart of section.charts) {
    if (chart.draw === "table") {
      const place = host.appendChild(el("div"));
      const columns = chart.columns.map((c) => ({ title: c.title, name: c.key, help: c.help || null, text: c.text, link: c.link, heat: c.heat, value: (r) => r[c.key], ...(PLAIN.includes(c.key) ? { show: String } : {}) }));
      const exact = () => data[chart.source].filter((r) => choice.of(chart).every(([c, v]) => r[c] === undefined || r[c] === v));
      updates.push(() => (place.replaceChildren(), table(place, { name: chart.name, columns, rows: exact(), most: chart.most, mark: chart.mark })));
    } else {
      updates.push(frame(host, { name: chart.name, title: titled(chart), unit: chart.unit, render: draws[chart.draw](chart, choice), rows: () => recordsOf(chart, choice) }).redraw);
      if (chart.missing && data[chart.source].some((r) => r[chart.marks[0][0]] === null)) updates.push(missing(host, chart, choice));
    }
  }
  for (const p of section.picks) {
    if ((p.options.length < 2 && p.column !== "layer") || p.column === named?.series) continue;
    choose($(`${section.id}-controls`), p.label, p.options.map((o) => [o.value, o.text]), p.name, p.first, (v) => ((choice.values[p.column] = p.options.find((o) => String(o.value) === v).value), update()));
  }
  update();
  if (named) frames.push({ redraw: updates[0] });
}

// Opens the part that the address names.
function unfold() {
  const part = location.hash && $(decodeURIComponent(location.hash.slice(1)));
  if (part && part.tagName === "DETAILS") part.open = true;
}

async function start() {
  for (const p of data.influence ?? []) await unpack(p);
  data.sections.forEach(build);
  for (const part of $("contents") ? document.querySelectorAll("main section") : []) $("contents").append(el("a", { href: "#" + part.id }, part.dataset.name));
  addEventListener("hashchange", unfold);
  unfold();
  ready($("theme"));
}

start();
