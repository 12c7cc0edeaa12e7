"use strict";
// The sections of a page, each drawn from the charts that the data block describes.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const many = data.layers.length;
const colourOf = (layer) => seriesColour(data.layers.indexOf(layer), many);
const layerName = (layer) => `layer ${layer}`;
const percent = (v) => (100 * v).toFixed(v < 0.1 ? 2 : 1) + " %";
const between = (i) => (i.low === null ? "" : signed(`${i.low.toFixed(2)} to `) + signed(i.high.toFixed(2)));
const ln = (v) => Math.log(Math.max(v, 1e-12)); // a constant of zero has to stand somewhere
const distinct = (values) => [...new Set(values)];
const ordered = (values) => distinct(values).sort((a, b) => a - b);
const mean = (values) => (values.length > 1 ? Math.exp(values.reduce((s, v) => s + Math.log(v), 0) / values.length) : values[0] ?? null);
const padded = (values) => {
  const some = values.filter((v) => v > 0), low = Math.min(...some), high = Math.max(...some), pad = Math.max((high / low) ** 0.05, 1.03);
  return some.length ? [low / pad, high * pad] : [1, 2];
};

// ---- templates

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
  said(record) {
    return { ...record, ...Object.fromEntries(this.picks.map((p) => [p.column, p.options.find((o) => o.value === this.values[p.column]).said || this.values[p.column]])) };
  }
  shown(chart, rows = data[chart.source]) {
    const wanted = Object.entries({ ...this.values, ...chart.where });
    return rows.filter((r) => wanted.every(([c, v]) => v === ALL || r[c] === undefined || r[c] === v || r[c] === ANY));
  }
  isMean(chart) {
    return Object.entries(this.values).some(([c, v]) => v === ALL && data[chart.source].some((r) => r[c] !== undefined));
  }
}

// ---- how each kind of chart is drawn; `about` is its name, title and records

const INKS = { point: "var(--point)", ball: "var(--ball)", hot: "rgb(var(--hot))", ink: "var(--ink)" };

// Curves of a chart: name, colour, and points, each the mean of the records at one place.
function curves(chart, choice) {
  const y = choice.values.y ?? chart.y, rows = choice.shown(chart), all = choice.isMean(chart), names = chart.series && distinct(data[chart.source].map((r) => r[chart.series]));
  const wanted = chart.series ? names.map((name, i) => [name, seriesColour(i, names.length), y, rows.filter((r) => r[chart.series] === name)]) : chart.curves.map(([name, column, colour]) => [name, INKS[colour], column, rows]);
  return wanted.map(([name, colour, column, own]) => {
    const places = new Map(), worth = (r) => (chart.over && r[column] !== null ? r[column] / r[chart.over] : r[column]);
    for (const r of own) if (worth(r) > 0 && r[chart.x] > 0 - (chart.x === "layer")) places.set(chart.points ? 0 : r[chart.x], [...(places.get(chart.points ? 0 : r[chart.x]) ?? []), r]);
    const points = [...places.values()].map((some) => {
      const values = some.map(worth), value = mean(values), r = some[0], range = values.length === 1 && chart.low && column === (chart.series ? chart.y : column) && r[chart.low] > 0;
      const [low, high] = range ? [r[chart.low], r[chart.high]] : chart.over ? [Math.min(...values), Math.max(...values)] : [value, value];
      const about = all ? { ...choice.said(r), count: values.length, low, high, [chart.x]: r[chart.x] } : { ...choice.said(r), ...r };
      return { x: chart.points ? Number(mean(some.map((s) => s[chart.x])).toPrecision(2)) : r[chart.x], y: value, low, high, lines: lines(all ? chart.tip_all : chart.tip, { ...about, series: name, shown: value }) };
    });
    return { name, colour, faded: false, points: points.sort((a, b) => a.x - b.x) };
  }).filter((s) => s.points.length);
}

const draws = {
  lines: (chart, choice) => (width) => {
    const series = curves(chart, choice), layers = chart.x === "layer";
    let xs = layers ? data.layers : ordered(choice.shown({ ...chart, source: chart.source }, data[chart.source]).map((r) => r[chart.x]).filter((v) => v > 0));
    if (chart.points) {
      const places = series.flatMap((s) => s.points.map((p) => p.x)).concat([1]).sort((a, b) => a - b);
      xs = distinct([places[0] === places.at(-1) ? places[0] / 2 : places[0], ...places]);
    }
    return lineChart({
      width, height: width < 560 ? 270 : 320, xs, xLabel: chart.x_label, yLabel: fill(chart.y_label, choice.said({})), series,
      range: padded(series.flatMap((s) => s.points.flatMap((p) => [p.low, p.high]))), scale: layers ? linearScale : logScale,
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

  picture: (chart) => {
    const p = pictureOf(chart), named = (i) => `token ${i}` + (p.tokens ? ` “${p.tokens[i][1].slice(0, 24)}”` : "");
    return (width) => picture({
      width, n: p.n, codes: p.codes, low: p.low, high: p.high, across: chart.across, down: chart.down,
      lines: (i, j) => [`${named(j)} → ${named(i)}`, p.codes[i * p.n + j] === 0 ? "no influence" : `${p.faint && p.codes[i * p.n + j] === 1 ? "at most" : "‖J‖ ="} ${format(p.norm(i, j))}`],
    });
  },
};

function pictureOf(chart) {
  const [p] = data[chart.source], bytes = Uint8Array.from(atob(p.codes), (c) => c.charCodeAt(0)), view = new DataView(bytes.buffer);
  const codes = Array.from({ length: p.n * p.n }, (_, k) => view.getUint16(2 * k, true));
  const norm = (i, j) => { const c = codes[i * p.n + j]; return c ? p.low * (p.high / p.low) ** ((c - 1) / 65534) : 0; };
  return { ...p, codes, norm, tokens: p.text === null ? null : data.texts[p.text].tokens };
}

// What the CSV of a chart holds: its records, of a picture its numbers.
function recordsOf(chart) {
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

// The names and colours of a chart that has a curve for each value of a column.
function swatches(host, section, chart) {
  const names = distinct(data[chart.source].map((r) => r[chart.series])), list = el("ul", { class: "swatches", id: `${section.id}-names` });
  host.append(list);
  return () => list.replaceChildren(...names.map((name, k) => {
    const i = el("i");
    i.style.background = i.style.borderColor = seriesColour(k, names.length);
    return el("li", {}, i, name);
  }));
}

function build(section) {
  const host = $(`${section.id}-charts`), choice = new Choice(section.picks), updates = [];
  const titled = (chart) => () => fill(chart.title, { ...choice.shown(chart)[0], ...choice.said({}) });
  const named = section.charts.find((chart) => chart.series);
  if (named) updates.push(swatches(host, section, named));
  for (const chart of section.charts) {
    if (chart.draw === "own") own[chart.name]?.();
    else if (chart.draw === "table") {
      const place = host.appendChild(el("div")), columns = chart.columns.map((c) => ({ title: c.title, name: c.key, help: c.help || null, text: c.text, link: c.link, heat: c.heat, value: (r) => r[c.key], ...(c.key === "layer" ? { show: String } : {}) }));
      const exact = () => data[chart.source].filter((r) => section.picks.every((p) => r[p.column] === undefined || r[p.column] === choice.values[p.column]));
      updates.push(() => (place.replaceChildren(), table(place, { name: chart.name, columns, rows: exact(), most: chart.most, mark: chart.mark })));
    } else {
      const drawn = frame(host, { name: chart.name, title: titled(chart), unit: chart.unit, render: draws[chart.draw](chart, choice), rows: () => recordsOf(chart) });
      updates.push(drawn.redraw);
      if (chart.missing && data[chart.source].some((r) => r[chart.marks[0][0]] === null)) updates.push(missing(host, chart, choice));
    }
  }
  const update = () => updates.forEach((redraw) => redraw());
  for (const p of section.picks) {
    if (p.options.length < 2 && p.column !== "layer") continue;
    choose($(`${section.id}-controls`), p.label, p.options.map((o) => [o.value, o.text]), p.name, p.first, (v) => ((choice.values[p.column] = p.options.find((o) => String(o.value) === v).value), update()));
  }
  update();
  if (named) frames.push({ redraw: updates[0] });
}

// ---- charts with a drawing of their own

const own = {
  growth() {
    let focus = data.focus, quantity = "L";
    const controls = $("growth-controls"), legend = el("div", { class: "legend", role: "group", "aria-label": "layer in focus" });
    choose(controls, "Show", [["L", "L, the constant"], ["R", "R, the size of the tokens"]], "quantity", "L", (v) => ((quantity = v), update()));
    const buttons = new Map();
    for (const layer of [null, ...data.layers]) {
      const swatch = layer === null ? null : el("i");
      const button = el("button", { type: "button", class: "key", onclick: () => ((focus = layer), update()) }, ...(swatch ? [swatch] : []), layer === null ? "all" : layerName(layer));
      buttons.set(layer, [button, swatch]);
      legend.append(button);
    }
    const of = (layer) => data.summary.filter((c) => c.layer === layer && (quantity === "R" ? c.radius : c.low) > 0);
    const series = () => data.layers.map((layer) => ({
      name: layerName(layer), colour: colourOf(layer), faded: focus !== null && layer !== focus,
      points: of(layer).map((c) => quantity === "R"
        ? { x: c.n, y: c.radius, low: c.radius, high: c.radius, lines: [`layer ${layer}, n = ${c.n}`, `R = ${format(c.radius)}`] }
        : { x: c.n, y: c.mean, low: c.low, high: c.high,
            lines: [`layer ${layer}, n = ${c.n}`, `L = ${format(c.mean)}`, `${format(c.low)} to ${format(c.high)} over ${c.samples}`] }),
    })).filter((s) => s.points.length);
    const shownBreaks = () => (quantity === "L" ? data.layers.filter((l) => focus === null || l === focus).flatMap((l) =>
      (data.fits[l]?.breaks ?? []).filter((b) => focus !== null || b.kind === "jump").map((b) => ({ ...b, layer: l }))) : []);
    const keep = () => [...new Set(shownBreaks().filter((b) => b.kind === "jump").flatMap((b) => [b.after]))];

    function breaksUnder({ sheet, px, top, bottom, left, right }, high = false) {
      for (const b of shownBreaks()) {
        const [from, to] = [px(b.before), px(b.after)], jump = b.kind === "jump";
        const band = draw(sheet, "rect", { x: jump ? from : from - 0.75, y: top, width: Math.max(to - from, 1.5), height: bottom - top, class: "break " + b.kind });
        band.style.setProperty("--series", colourOf(b.layer));
        const text = jump ? `×${format(b.change.value)} from ${b.before} to ${b.after}` : `exponent ${signed(b.change.value.toFixed(2))} at ${b.before}`;
        const late = (from + to) / 2 > (left + right) / 2;
        const label = draw(sheet, "text", { x: late ? from - 5 : to + 5, y: high ? top + (jump ? 14 : 28) : bottom - (jump ? 8 : 22), class: "break-label", "text-anchor": late ? "end" : "start" }, text);
        label.style.fill = colourOf(b.layer);
      }
    }

    function guides({ sheet, px, py, range }) {
      if (quantity !== "L") return;
      const [first, last] = [data.lengths[0], data.lengths.at(-1)], start = Math.min(...data.summary.filter((c) => c.low > 0).map((c) => c.mean));
      for (const [power, text] of [[0.25, "¼"], [0.5, "½"]]) {
        const end = Math.min(last, first * (range[1] / start) ** (1 / power)), height = py(start * (end / first) ** power);
        draw(sheet, "line", { x1: px(first), y1: py(start), x2: px(end), y2: height, class: "guide" });
        const label = draw(sheet, "text", { x: px(end) - 6, y: height + 15, class: "guide-label", "text-anchor": "end" }, "n");
        draw(label, "tspan", { dy: -4, "font-size": 10 }, text);
      }
    }

    function fitOver({ sheet, px, py, clip }) {
      const f = focus === null ? null : data.fits[focus];
      if (!f || quantity !== "L") return;
      const path = (ys) => f.lengths.map((n, i) => `${px(n).toFixed(1)},${py(ys[i]).toFixed(1)}`).join(" ");
      const group = draw(sheet, "g", { class: "fit", "clip-path": clip });
      group.style.setProperty("--series", colourOf(focus));
      if (f.exponent.low !== null) {
        const mid = f.lengths.reduce((s, n) => s + Math.log(n), 0) / f.lengths.length;
        const line = (a) => f.lengths.map((n, i) => f.fitted[i] * Math.exp((a - f.exponent.value) * (Math.log(n) - mid)));
        const low = line(f.exponent.low), high = line(f.exponent.high);
        draw(group, "polygon", { class: "interval", points: path(high) + " " + path(low).split(" ").reverse().join(" ") });
      }
      draw(group, "polyline", { class: "plain", points: path(f.fitted) });
      if (f.breaks.length) draw(group, "polyline", { class: "apart", points: path(f.fitted_apart) });
    }

    const spread = () => {
      const cells = quantity === "R" ? data.summary.filter((c) => c.radius > 0).map((c) => [c.radius, c.radius]) : data.summary.filter((c) => c.low > 0).map((c) => [c.low, c.high]);
      const low = Math.min(...cells.map((c) => c[0])), high = Math.max(...cells.map((c) => c[1])), pad = Math.max((high / low) ** 0.05, 1.03);
      return [low / pad, high * pad];
    };
    const main = frame($("growth-chart"), {
      name: "growth", title: () => (quantity === "L" ? "L against n" : "R against n"), unit: "log–log; shaded: range over samples", below: legend,
      rows: () => data.summary,
      render: (width) => lineChart({
        width, height: width < 560 ? 300 : 400, xs: data.lengths, xLabel: "n, tokens", yLabel: quantity === "L" ? "L, times" : "R, root mean square norm",
        range: spread(), series: series(), keep: keep(), under: (s) => (guides(s), breaksUnder(s)), over: fitOver,
      }),
    });
    const left = Object.values(data.fits).flatMap((f) => f.residuals), off = Math.max(1.1, ...left, ...left.map((r) => 1 / r)) ** 1.1;
    const rest = frame($("residual-chart"), {
      name: "residuals", title: "What one power law leaves over", unit: "L divided by its fit; 1 is on the line",
      rows: () => Object.entries(data.fits).flatMap(([layer, f]) => f.lengths.map((n, i) => ({ layer, n, mean: f.means[i], fitted: f.fitted[i], residual: f.residuals[i], residual_with_breaks: f.residuals_apart[i] }))),
      render: (width) => lineChart({
        width, height: width < 560 ? 200 : 230, xs: data.lengths, xLabel: "n, tokens", yLabel: "L / fit", range: [1 / off, off], unity: 1, keep: keep(), under: (s) => breaksUnder(s, true),
        series: data.layers.filter((l) => data.fits[l]).map((layer) => ({
          name: layerName(layer), colour: colourOf(layer), faded: focus !== null && layer !== focus,
          points: data.fits[layer].lengths.map((n, i) => {
            const r = data.fits[layer].residuals[i];
            return { x: n, y: r, low: r, high: r, lines: [`layer ${layer}, n = ${n}`, `${format(r)} × the fitted power law`] };
          }),
        })),
      }),
    });
    function update() {
      for (const [layer, [button, swatch]] of buttons) {
        button.setAttribute("aria-pressed", String(layer === focus));
        if (swatch) swatch.style.background = colourOf(layer);
      }
      main.redraw();
      rest.redraw();
    }
    update();
    frames.push({ redraw: update });
    const apart = (f) => (f.breaks.length ? f.exponent_apart.value : null);
    table($("fit-table"), {
      name: "fits",
      columns: [
        { title: "layer", value: (r) => r.layer },
        { title: "exponent a", name: "exponent", help: "L ≈ c·n^a, least squares on logarithms", value: (r) => r.fit.exponent.value, show: (v) => v.toFixed(2) },
        { title: "95 % interval", name: "low", value: (r) => r.fit.exponent.low, show: (v, r) => between(r.fit.exponent) },
        { title: "scatter", help: "typical distance from the line", value: (r) => r.fit.scatter, show: (v) => "± " + (100 * Math.expm1(v)).toFixed(0) + " %" },
        { title: "breaks", text: true, value: (r) => r.fit.breaks.map((b) => (b.kind === "jump" ? `jump ×${format(b.change.value)} from ${b.before} to ${b.after}` : `bend by ${signed(b.change.value.toFixed(2))} at ${b.before}`)).join("; ") || null },
        { title: "a with breaks apart", name: "exponent_with_breaks", value: (r) => apart(r.fit), show: (v) => v.toFixed(2) },
        { title: "steepest step", name: "steepest_ratio", value: (r) => r.fit.steepest.ratio, show: (v, r) => `×${v.toFixed(2)} from ${r.fit.steepest.before} to ${r.fit.steepest.after}` },
      ],
      rows: data.layers.filter((l) => data.fits[l]).map((layer) => ({ layer, fit: data.fits[layer] })),
      most: 16,
    });
  },

  text() {
    let passage = data.texts[data.text], layer = null;
    const layers = () => Object.keys(passage.shares).map(Number).sort((a, b) => a - b);
    layer = layers().includes(data.focus) ? data.focus : layers()[0];
    const body = $("text-body"), note = $("text-note"), controls = $("text-controls");
    let spans = [];
    function fill() {
      spans = [];
      const pieces = [];
      passage.tokens.forEach(([gap, text, special], i) => {
        if (gap) pieces.push(/\n\s*\n/.test(gap) ? "\n" : gap.trim() ? gap : " ");
        const span = el("span", { class: special ? "token special" : "token", "data-token": i }, text);
        spans.push(span);
        pieces.push(span);
      });
      body.replaceChildren(...pieces);
    }
    function shade() {
      const shares = passage.shares[layer], top = shares.reduce((a, b) => Math.max(a, b), 0) || 1;
      spans.forEach((span, i) => span.style.setProperty("--share", (0.85 * Math.sqrt(shares[i] / top)).toFixed(3)));
      const order = shares.map((_, i) => i).sort((a, b) => shares[b] - shares[a]).slice(0, 5);
      const short = (t) => (t.length > 24 ? t.slice(0, 23) + "…" : t);
      note.replaceChildren("Largest shares: ", ...order.flatMap((i, k) => [k ? ", " : "", el("bdi", {}, `“${short(passage.tokens[i][1])}”`), ` (token ${i}) ${percent(shares[i])}`]), ".");
    }
    const over = (event) => {
      const i = event.target.dataset.token;
      if (i === undefined) return tip.hide();
      tip.show(event, [`token ${i} of ${passage.tokens.length}`, `${percent(passage.shares[layer][i])} of the worst direction`]);
    };
    body.addEventListener("pointermove", over);
    body.addEventListener("pointerdown", over);
    body.addEventListener("pointerleave", () => tip.hide());
    fill();
    shade();
    const chart = frame($("text-chart"), {
      name: "token-shares", title: () => `Share of each token, layer ${layer}, n = ${passage.tokens.length}`, unit: "by position",
      rows: () => passage.tokens.map(([, text], i) => ({ position: i, token: text, ...Object.fromEntries(layers().map((l) => [`layer_${l}`, passage.shares[l][i]])) })),
      render: (width) => strip({
        width, values: passage.shares[layer], colour: "rgb(var(--hot))", label: "position",
        lines: (i) => [`token ${i}: ${passage.tokens[i][1].slice(0, 40)}`, percent(passage.shares[layer][i])],
      }),
    });
    const pick = choose(controls, "Layer", layers().map((l) => [l, layerName(l)]), "text-layer", layer, (v) => ((layer = Number(v)), shade(), chart.redraw()));
    if (data.texts.length > 1) {
      choose(controls, "Length", data.texts.map((p, i) => [i, `n = ${p.tokens.length}`]), "text-length", data.text, (v) => {
        passage = data.texts[Number(v)];
        if (!layers().includes(layer)) layer = layers()[0];
        pick.replaceChildren(...layers().map((l) => el("option", { value: l, selected: l === layer }, layerName(l))));
        fill();
        shade();
        chart.redraw();
      });
    }
  },
};

function numbers({ names, rows }) {
  const columns = names.map((name, i) => ({ title: name, value: (r) => r[i], text: name === "status" }));
  const shown = { confidence: (v) => (v === 1 ? "1" : String(v)), seconds: (v) => v.toFixed(2), layer: String, n: String, sample: String, seed: String };
  for (const c of columns) if (shown[c.title]) c.show = shown[c.title];
  table($("numbers-table"), { name: "measurements", columns, rows });
}

// Opens the part that the address names.
function unfold() {
  const part = location.hash && $(decodeURIComponent(location.hash.slice(1)));
  if (part && part.tagName === "DETAILS") part.open = true;
}

function start() {
  data.sections.forEach(build);
  if (data.rows) numbers(data.rows);
  for (const part of $("contents") ? document.querySelectorAll("main section") : []) $("contents").append(el("a", { href: "#" + part.id }, part.dataset.name));
  addEventListener("hashchange", unfold);
  unfold();
  ready($("theme"));
}

start();
