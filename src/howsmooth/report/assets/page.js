"use strict";
// The sections of the page, each from the data block; a section without data is taken out.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const many = data.layers.length;
const colourOf = (layer) => seriesColour(data.layers.indexOf(layer), many);
const layerName = (layer) => `layer ${layer}`;
const percent = (v) => (100 * v).toFixed(v < 0.1 ? 2 : 1) + " %";
const between = (i) => (i.low === null ? "" : signed(`${i.low.toFixed(2)} to `) + signed(i.high.toFixed(2)));
const ln = (v) => Math.log(Math.max(v, 1e-12)); // a constant of zero has to stand somewhere
const cellAt = new Map(data.summary.map((c) => [`${c.layer} ${c.n}`, c]));

const drop = (id) => $(id)?.remove();

const sections = {
  heat() {
    const values = data.summary.map((c) => c.mean).filter((v) => v > 0);
    const range = values.length ? [Math.min(...values), Math.max(...values)] : [1, 2];
    const jumped = new Set(Object.entries(data.fits).flatMap(([layer, f]) =>
      f.breaks.filter((b) => b.kind === "jump").map((b) => `${layer} ${b.after}`)));
    frame($("heat-chart"), {
      name: "layers-by-length", title: "L by layer and length", unit: "times, geometric mean over samples",
      rows: () => data.summary,
      render: (width) => heatMap({
        width, rows: data.layers, columns: data.lengths, range, axis: "n =",
        rowLabel: layerName, columnLabel: String,
        value: (l, n) => cellAt.get(`${l} ${n}`)?.mean ?? null,
        mark: (l, n) => jumped.has(`${l} ${n}`),
        lines: (l, n) => {
          const c = cellAt.get(`${l} ${n}`);
          return [`layer ${l}, n = ${n}`, `L = ${format(c.mean)} (${format(c.low)} to ${format(c.high)} over ${c.samples})`,
            `upper end at most ${format(c.upper)}`, `R = ${format(c.radius)}`];
        },
      }),
    });
  },

  growth() {
    if (!Object.keys(data.fits).length) return drop("growth");
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

  token() {
    const rows = data.held;
    if (!rows.length) return drop("token");
    const n = rows[0].n, table = () => rows.map((r) => ({ ...r, token: r.token + 1 })), name = (r) => `token ${r.token + 1} “${r.word.slice(0, 24)}”`;
    frame($("share-chart"), {
      name: "token-share", title: `Largest share of one token, n = ${n}`, unit: "of the worst direction; a full bar is 100 %", rows: table,
      render: (width) => strip({
        width, values: rows.map((r) => r.share), colour: "rgb(var(--hot))", label: "layer", most: 1, name: (i) => String(rows[i].layer),
        lines: (i) => [`layer ${rows[i].layer}`, `${name(rows[i])} carries ${percent(rows[i].share)}`],
      }),
    });
    byLayer($("held-chart"), {
      layers: data.layers,
      name: "held", title: `L with that token held fixed, n = ${n}`, unit: "log scale", yLabel: "L, times", rows: table,
      series: () => [["all move", "var(--point)", "whole"], ["one held", "rgb(var(--hot))", "value"]].map(([title, colour, key]) => ({
        name: title, colour,
        points: rows.map((r) => ({ layer: r.layer, value: r[key], lines: [`layer ${r.layer}`, `all tokens may move: L = ${format(r.whole)}`, `${name(r)} held fixed: ${format(r.value)}`] })),
      })),
    });
  },

  maps() {
    const rows = data.maps, names = [...new Set(rows.map((r) => r.map))];
    if (!rows.length) return drop("maps");
    const kinds = ["", "ball", "hot", "ink"], colours = ["var(--point)", "var(--ball)", "rgb(var(--hot))", "var(--ink)"];
    let key = "value";
    $("maps-names").append(...names.map((m, k) => el("li", {}, el("i", { class: kinds[k % 4] }), m)));
    const chart = byLayer($("maps-chart"), {
      layers: data.layers,
      name: "maps", title: () => (key === "value" ? `L of each map, n = ${rows[0].n}` : `Relative constant of each map, n = ${rows[0].n}`),
      unit: "first sample, log scale", yLabel: () => (key === "value" ? "L, times" : "L·|x| / |f(x)|"), rows: () => rows,
      series: () => names.map((m, k) => ({
        name: m, colour: colours[k % 4],
        points: rows.filter((r) => r.map === m).map((r) => ({ layer: r.layer, value: r[key], lines: [`layer ${r.layer}, ${m}`, `L = ${format(r.value)}`, `relative: ${format(r.relative)}`] })),
      })),
    });
    choose($("maps-controls"), "Show", [["value", "L, the constant"], ["relative", "L·|x| / |f(x)|, the relative constant"]], "maps-quantity", key, (v) => ((key = v), chart.redraw()));
  },

  heads() {
    if (!data.head.length) return drop("heads");
    const lengths = [...new Set(data.head.map((h) => h.n))].sort((a, b) => a - b);
    const values = data.head.map((h) => h.value).filter((v) => v > 0), range = [Math.min(...values), Math.max(...values)];
    const at = new Map(data.head.map((h) => [`${h.n} ${h.layer} ${h.head}`, h.value]));
    const layers = [...new Set(data.head.map((h) => h.layer))].sort((a, b) => a - b), heads = [...new Set(data.head.map((h) => h.head))].sort((a, b) => a - b);
    let n = lengths.includes(data.heads_at) ? data.heads_at : lengths[0];
    const chart = frame($("heads-chart"), {
      name: "layers-by-heads", title: () => `L of every head alone, n = ${n}`, unit: "times; one colour scale for all lengths", rows: () => data.head,
      render: (width) => heatMap({
        width, rows: layers, columns: heads, range, axis: "head", rowLabel: layerName, columnLabel: String,
        value: (l, h) => at.get(`${n} ${l} ${h}`) ?? null,
        lines: (l, h) => [`layer ${l}, head ${h}`, ...lengths.filter((k) => at.has(`${k} ${l} ${h}`)).map((k) => `n = ${k}: L = ${format(at.get(`${k} ${l} ${h}`))}`)],
      }),
    });
    if (lengths.length > 1) choose($("heads-controls"), "Length", lengths.map((k) => [k, `n = ${k}`]), "heads-length", n, (v) => ((n = Number(v)), chart.redraw()));
  },

  bounds() {
    const rows = data.bounds;
    if (!rows.length) return drop("bounds");
    const layers = [...new Set(rows.map((b) => b.layer))].sort((a, b) => a - b), lengths = [...new Set(rows.map((b) => b.n))].sort((a, b) => a - b);
    let layer = layers.includes(data.worst_layer) ? data.worst_layer : layers[0], n = lengths.at(-1);
    const chosen = () => rows.filter((b) => b.layer === layer && b.n === n);
    const ratio = (b) => (b.value > 0 ? b.log_value - Math.log(b.value) : null);
    const chart = frame($("bounds-chart"), {
      name: "bound-ladder", title: () => `Measured and bounds, layer ${layer}, n = ${n}`, unit: "times, log scale", rows: () => rows,
      render: (width) => {
        const known = chosen().filter((b) => b.log_value !== null).sort((a, b) => a.log_value - b.log_value), measured = chosen()[0]?.value ?? null;
        return ladder({
          width, unit: "L, times", base: measured > 0 ? measured : null, baseLabel: `measured ${format(measured)}`,
          rows: known.map((b) => ({
            label: `${b.id} · ${b.name}`, kind: b.where, value: formatLog(b.log_value),
            marks: [{ log: b.log_value, kind: b.where, hollow: b.side === "lower" }],
            lines: [`${b.id} · ${b.name}`, `${b.side} bound ${b.where === "point" ? "at this input" : "over the ball"}: ${formatLog(b.log_value)}`,
              ratio(b) === null ? "" : `${formatLog(ratio(b))} × measured`, b.statement, b.source],
          })),
        });
      },
    });
    const list = $("bounds-missing");
    const missing = () => {
      const none = chosen().filter((b) => b.log_value === null);
      list.replaceChildren(...none.map((b) => el("li", {}, el("b", {}, `${b.id} · ${b.name}: `), b.reason ?? "does not apply")));
      list.parentElement.hidden = !none.length;
    };
    const update = () => (chart.redraw(), missing());
    const controls = $("bounds-controls");
    choose(controls, "Layer", layers.map((l) => [l, layerName(l)]), "bounds-layer", layer, (v) => ((layer = Number(v)), update()));
    if (lengths.length > 1) choose(controls, "Length", lengths.map((k) => [k, `n = ${k}`]), "bounds-length", n, (v) => ((n = Number(v)), update()));
    missing();
  },

  near() {
    const rows = data.near, first = rows[0] ?? data.change[0];
    if (!first) return drop("near");
    if (rows.length) {
      const radii = rows[0].within;
      let k = Math.min(1, radii.length - 1);
      const flat = () => rows.flatMap((r) => r.within.map((share, i) => ({ layer: r.layer, n: r.n, r: share, at_text: r.value, attained: r.lower_ends[i], certified: r.upper_ends[i] })));
      const lines = (r) => [`layer ${r.layer}, r = ${format(r.within[k])} |x|`, `at the text: L = ${format(r.value)}`, `attained: ${format(r.lower_ends[k])}`,
        r.upper_ends[k] === null ? "nothing is certified" : `certified: at most ${format(r.upper_ends[k])}`];
      const chart = byLayer($("near-chart"), {
        layers: data.layers,
        name: "near", title: () => `L within ${format(radii[k])} of a token's length, n = ${first.n}`, unit: "first sample, log scale", yLabel: "L, times", rows: flat,
        series: () => [["at the text", "var(--ink)", (r) => r.value], ["attained", "var(--point)", (r) => r.lower_ends[k]], ["certified", "var(--ball)", (r) => r.upper_ends[k]]].map(([name, colour, of]) => ({
          name, colour, points: rows.map((r) => ({ layer: r.layer, value: of(r), lines: lines(r) })),
        })),
      });
      choose($("near-controls"), "Radius r", radii.map((share, i) => [i, `${format(share)} of a token's length`]), "near-radius", k, (v) => ((k = Number(v)), chart.redraw()));
    } else for (const id of ["near-chart", "near-controls"]) drop(id);
    const changes = data.change;
    if (!changes.length) return drop("radii");
    radiiByLayer($("radii-chart"), $("radii-controls"), { layers: data.layers, rows: changes, unit: `n = ${changes[0].n}, log scale; shaded: range over inputs` });
  },

  text() {
    if (!data.texts.length) return drop("text");
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
      note.replaceChildren("Largest shares: ", ...order.flatMap((i, k) => [k ? ", " : "", el("bdi", {}, `“${short(passage.tokens[i][1])}”`), ` (token ${i + 1}) ${percent(shares[i])}`]), ".");
    }
    const over = (event) => {
      const i = event.target.dataset.token;
      if (i === undefined) return tip.hide();
      tip.show(event, [`token ${Number(i) + 1} of ${passage.tokens.length}`, `${percent(passage.shares[layer][i])} of the worst direction`]);
    };
    body.addEventListener("pointermove", over);
    body.addEventListener("pointerdown", over);
    body.addEventListener("pointerleave", () => tip.hide());
    fill();
    shade();
    const chart = frame($("text-chart"), {
      name: "token-shares", title: () => `Share of each token, layer ${layer}, n = ${passage.tokens.length}`, unit: "by position",
      rows: () => passage.tokens.map(([, text], i) => ({ position: i + 1, token: text, ...Object.fromEntries(layers().map((l) => [`layer_${l}`, passage.shares[l][i]])) })),
      render: (width) => strip({
        width, values: passage.shares[layer], colour: "rgb(var(--hot))", label: "position",
        lines: (i) => [`token ${i + 1}: ${passage.tokens[i][1].slice(0, 40)}`, percent(passage.shares[layer][i])],
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

  influence() {
    const [p] = data.influence;
    if (!p) return drop("influence");
    const bytes = Uint8Array.from(atob(p.codes), (c) => c.charCodeAt(0)), view = new DataView(bytes.buffer);
    const codes = Array.from({ length: p.n * p.n }, (_, k) => view.getUint16(2 * k, true)), tokens = p.text === null ? null : data.texts[p.text].tokens;
    const norm = (i, j) => { const c = codes[i * p.n + j]; return c ? p.low * (p.high / p.low) ** ((c - 1) / 65534) : 0; };
    const named = (i) => `token ${i + 1}` + (tokens ? ` “${tokens[i][1].slice(0, 24)}”` : "");
    frame($("influence-chart"), {
      name: "influence", title: `From token to token, layer ${p.layer}, n = ${p.n}`, unit: "‖Jᵢⱼ‖, log scale",
      rows: () => Array.from({ length: p.n }, (_, i) => Object.fromEntries([["to", i + 1], ...Array.from({ length: p.n }, (_, j) => [`from_${j + 1}`, Number(norm(i, j).toPrecision(4))])])),
      render: (width) => picture({
        width, n: p.n, codes, low: p.low, high: p.high, across: "input token j", down: "output token i",
        lines: (i, j) => [`${named(j)} → ${named(i)}`, codes[i * p.n + j] === 0 ? "no influence" : `${p.faint && codes[i * p.n + j] === 1 ? "at most" : "‖J‖ ="} ${format(norm(i, j))}`],
      }),
    });
  },

  splitting() {
    const rows = data.splitting;
    if (!rows.length) return drop("splitting");
    frame($("splitting-chart"), {
      name: "splitting", title: "Moving tokens whole, or splitting one", unit: "times, log scale", rows: () => rows,
      render: (width) => ladder({
        width, unit: "local constant, times",
        rows: rows.map((r) => ({
          label: `layer ${r.layer}, n = ${r.n}`, kind: "point", value: r.value > r.moved && r.moved > 0 ? `×${format(r.value / r.moved)}` : "no gain",
          marks: [{ log: ln(r.moved), kind: "point" }, { log: ln(r.value), kind: "ball", hollow: true }],
          lines: [`layer ${r.layer}, n = ${r.n}`, `whole: ${format(r.moved)}`, `split: ${format(r.value)}`],
        })),
      }),
    });
  },

  worst() {
    const rows = data.worst;
    if (!rows.length) return drop("worst");
    frame($("worst-chart"), {
      name: "worst-inputs", title: "The text, the worst input found, the ceiling", unit: "times, log scale", rows: () => rows,
      render: (width) => ladder({
        width, unit: "L, times",
        rows: rows.map((r) => ({
          label: `layer ${r.layer}, n = ${r.n}`, kind: "point", value: r.text > 0 ? `×${format(r.value / r.text)}` : "",
          marks: [{ log: ln(r.text), kind: "point" }, { log: ln(r.value), kind: "hot" }, ...(r.log_ceiling === null ? [] : [{ log: r.log_ceiling, kind: "ball", hollow: true }])],
          lines: [`layer ${r.layer}, n = ${r.n}, R = ${format(r.radius_max)}`, `on the text: ${format(r.text)}`, `worst found: ${format(r.value)}`,
            r.log_ceiling === null ? "" : `ceiling: ${formatLog(r.log_ceiling)}`, r.how],
        })),
      }),
    });
  },

  variants() {
    const rows = data.variants;
    if (!rows.length) return drop("variants");
    const names = [...new Set(rows.map((r) => r.variant))], lengths = [...new Set(rows.map((r) => r.n))].sort((a, b) => a - b);
    const layers = [...new Set(rows.map((r) => r.layer))].sort((a, b) => a - b), sizes = [...new Set(rows.map((r) => r.factor))].sort((a, b) => a - b);
    const moved = rows.find((r) => r.factor !== 1)?.n ?? lengths.at(-1), colour = (name) => seriesColour(names.indexOf(name), names.length);
    let layer = "all", way = rows.some((r) => r.way === "matched") ? "matched" : "published", key = "mean";
    const quantity = () => (key === "mean" ? "L, times" : "L·|x| / |f(x)|"), where = () => (layer === "all" ? "mean of layers" : layerName(layer));
    const mean = (values) => (values.length ? Math.exp(values.reduce((s, v) => s + Math.log(v), 0) / values.length) : null);
    // one point of a kind: the geometric mean over the layers in focus, with the least and the greatest over all samples
    function point(name, ways, pick, x) {
      const own = rows.filter((r) => r.variant === name && ways.includes(r.way) && (layer === "all" || r.layer === layer) && pick(r) && r[key] > 0);
      if (!own.length) return null;
      const alone = key === "mean" && layer !== "all", y = mean(own.map((r) => r[key])), low = alone && own[0].low > 0 ? own[0].low : y;
      const lines = [`${name}, ${own[0].way === "both" ? "the layer's scale" : own[0].way}`, `L = ${format(mean(own.map((r) => r.mean)))}` + (alone ? `, upper end at most ${format(own[0].upper)}` : ` over ${own.length} layers`),
        `relative: ${format(mean(own.map((r) => r.relative).filter((v) => v > 0)))}`, `entropy ${format(own.reduce((s, r) => s + r.entropy, 0) / own.length)}`];
      return { x: x(own), y, low, high: alone ? own[0].high : y, lines, own };
    }
    const shown = (pick, xs) => names.map((name) => ({ name, colour: colour(name), faded: false, points: xs.map(([value, x]) => point(name, [way, "both"], (r) => pick(r, value), x)).filter((p) => p) })).filter((s) => s.points.length);
    const range = (series) => {
      const ends = series.flatMap((s) => s.points.flatMap((p) => [p.low, p.high])), low = Math.min(...ends), high = Math.max(...ends), pad = Math.max((high / low) ** 0.05, 1.03);
      return ends.length ? [low / pad, high * pad] : [1, 2];
    };
    const chart = (id, name, title, xs, xLabel, series) => frame($(id), {
      name, title: () => `${key === "mean" ? "L" : "Relative constant"} ${title}, ${where()}`, unit: "geometric means, log scales", rows: () => rows,
      render: (width) => {
        const lines = series();
        return lineChart({ width, height: width < 560 ? 280 : 340, xs: xs(lines), xLabel, yLabel: quantity(), range: range(lines), series: lines });
      },
    });
    const charts = [chart("variants-length", "variants-length", "against n", () => lengths, "n, tokens", () => shown((r, n) => r.n === n && r.factor === 1, lengths.map((n) => [n, () => n])))];
    if (sizes.length > 1) charts.push(chart("variants-radius", "variants-radius", `against the size of the tokens, n = ${moved}`, () => sizes, "tokens multiplied by", () => shown((r, f) => r.n === moved && r.factor === f, sizes.map((f) => [f, () => f]))));
    const price = (own) => Number(mean(own.map((r) => r.cost)).toPrecision(2));
    charts.push(chart("variants-cost", "variants-cost", `against cost, n = ${lengths.at(-1)}`, (series) => {
      const costs = series.flatMap((s) => s.points.map((p) => p.x)).concat([1]).sort((a, b) => a - b);
      return [...new Set([costs[0] === costs.at(-1) ? costs[0] / 2 : costs[0], ...costs])];
    }, "time of one pair of products, softmax = 1", () => shown((r, n) => r.n === n && r.factor === 1 && r.cost > 0, [[lengths.at(-1), price]])));
    const host = $("variants-table");
    function fill() {
      const lines = names.flatMap((name) => ["both", "published", "matched"].map((w) => {
        const p = point(name, [w], (r) => r.n === lengths.at(-1) && r.factor === 1, () => 0);
        return p && { name, way: w, own: p.own };
      })).filter((line) => line);
      const over = (k) => (line) => mean(line.own.map((r) => r[k]).filter((v) => v > 0));
      host.replaceChildren();
      table(host, {
        name: "variants", rows: lines, most: 40,
        columns: [
          { title: "kind", text: true, value: (l) => l.name },
          { title: "scale", text: true, help: "as published, or matched to softmax's entropy", value: (l) => (l.way === "both" ? "the layer's" : l.way) },
          { title: `L, n = ${lengths.at(-1)}`, name: "L", value: over("mean") },
          { title: "relative", help: "L·|x| / |f(x)|", value: over("relative") },
          { title: "entropy", help: "mean over heads and queries, in nats", value: (l) => l.own.reduce((s, r) => s + r.entropy, 0) / l.own.length },
          { title: "cost", help: "time of one pair of products, softmax = 1", value: over("cost") },
          { title: "steps", help: "of the solver", value: (l) => Math.round(l.own.reduce((s, r) => s + r.steps, 0) / l.own.length) },
          { title: "layers", value: (l) => l.own.length },
          { title: "entropy reached", name: "matched", text: true, value: (l) => (l.way === "published" ? null : `${l.own.filter((r) => r.matched).length} of ${l.own.length}`) },
        ],
      });
    }
    const swatches = () => $("variants-names").replaceChildren(...names.map((name) => {
      const i = el("i");
      i.style.background = i.style.borderColor = colour(name);
      return el("li", {}, i, name);
    }));
    const update = () => (charts.forEach((c) => c.redraw()), fill());
    const controls = $("variants-controls");
    choose(controls, "Layer", [["all", "all, geometric mean"], ...layers.map((l) => [l, layerName(l)])], "variants-layer", layer, (v) => ((layer = v === "all" ? v : Number(v)), update()));
    choose(controls, "Scale", [["matched", "matched to softmax's entropy"], ["published", "as published"]], "variants-way", way, (v) => ((way = v), update()));
    choose(controls, "Show", [["mean", "L, the constant"], ["relative", "L·|x| / |f(x)|, the relative constant"]], "variants-quantity", key, (v) => ((key = v), update()));
    swatches();
    fill();
    frames.push({ redraw: swatches });
  },

  numbers() {
    const { names, rows } = data.rows;
    const columns = names.map((name, i) => ({ title: name, value: (r) => r[i], text: name === "status" }));
    const shown = { confidence: (v) => (v === 1 ? "1" : String(v)), seconds: (v) => v.toFixed(2), layer: String, n: String, sample: String, seed: String };
    for (const c of columns) if (shown[c.title]) c.show = shown[c.title];
    table($("numbers-table"), { name: "measurements", columns, rows });
  },
};

function start() {
  for (const build of Object.values(sections)) build();
  for (const part of document.querySelectorAll("main section")) $("contents").append(el("a", { href: "#" + part.id }, part.dataset.name));
  ready($("theme"));
}

start();
