/* The playground's page: tokens to drag, sliders, and live pictures of what core.js measures. Plain JavaScript, no request. */
(function () {
  "use strict";
  const core = window.HowSmoothCore;
  const MOST = 64; // tokens in all, copies counted
  const LONGEST = 4096; // of the growth curve without a mask; with one every copy is a token of its own

  const identity = [1, 0, 0, 1], opposite = [-1, 0, 0, -1];
  const PRESETS = {
    random: {
      label: "Eight tokens", radius: 2, A: [1, 0.4, -0.4, 0.6], V: identity, causal: false,
      points: [[1.2, 0.9], [-0.9, 1.2], [-1.5, -0.4], [0.2, -1.6], [1.6, -0.5], [0.3, 0.5], [-0.5, -1.1], [0.6, 1.7]],
      say: "Drag a token. The orange arrows are the small change that this layer stretches most.",
    },
    flat: {
      label: "Flat attention", radius: 1, A: [0.1, 0, 0, 0.1], V: identity, causal: false,
      points: [[0.5, 0.6], [-0.6, 0.4], [-0.4, -0.7], [0.7, -0.3]],
      say: "Small logits: every token looks at all tokens alike, the output is their mean, and L is about 1. Nothing to fear.",
    },
    dirac: {
      label: "One against many", radius: 1.5, A: opposite, V: identity, causal: false, selected: 0,
      points: [[1.5, 0], [-1.5, 0]], counts: [31, 1],
      say: "31 copies all look at the one token on the other side. Move that one, and 31 outputs follow: L grows like √n.",
    },
    tie: {
      label: "A tie", radius: 2, A: opposite, V: identity, causal: false, selected: 2,
      points: [[-0.2, 1.98], [-0.2, -1.98], [2, 0]], counts: [1, 1, 30],
      say: "30 copies cannot decide between two tokens. A small push decides for all of them at once: worse than one against many.",
    },
    split: {
      label: "Worth splitting", radius: 4, A: opposite, V: [1, 0, 0, 0], causal: false, selected: 0,
      points: [[0, 0], [4, 0]], counts: [15, 1],
      say: "To move the heavy place as a whole does little. To cut it in two and pull the halves apart does 3.6 times more.",
    },
    causal: {
      label: "Causal", radius: 1.5, A: [0, 0, 0, 0], V: identity, causal: true, selected: 3,
      points: [[0, 1.5], [1.1, 0.5], [0.7, -0.9], [-0.9, -0.4]], counts: [1, 1, 1, 29],
      say: "Under a causal mask a token looks back only. The first token is in every mean, so it counts most.",
    },
  };

  function make(tag, attributes, parent, text) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  }

  /** Three digits or so, with a real minus sign. */
  function show(value) {
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "–";
    const size = Math.abs(value);
    const text = size >= 1e5 ? value.toExponential(1).replace("e+", "e") : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
    return text.replace("-", "−");
  }

  function sheet(canvas, height) {
    const width = canvas.clientWidth, tall = height || width, sharp = Math.min(window.devicePixelRatio || 1, 2);
    if (canvas.width !== Math.round(width * sharp) || canvas.height !== Math.round(tall * sharp)) {
      canvas.width = Math.round(width * sharp);
      canvas.height = Math.round(tall * sharp);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(sharp, 0, 0, sharp, 0, 0);
    pen.clearRect(0, 0, width, tall);
    pen.lineCap = pen.lineJoin = "round";
    return { pen, width, height: tall };
  }

  function arrow(pen, x, y, dx, dy, color, heavy) {
    const length = Math.hypot(dx, dy);
    if (length < 1.5) return;
    const head = Math.min(8, 0.45 * length), ux = dx / length, uy = dy / length;
    pen.strokeStyle = pen.fillStyle = color;
    pen.lineWidth = heavy ? 2.5 : 1.8;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x + dx - ux * head * 0.7, y + dy - uy * head * 0.7);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x + dx, y + dy);
    pen.lineTo(x + dx - head * (ux + 0.55 * uy), y + dy - head * (uy - 0.55 * ux));
    pen.lineTo(x + dx - head * (ux - 0.55 * uy), y + dy - head * (uy + 0.55 * ux));
    pen.fill();
  }

  class Playground {
    constructor(host) {
      this.host = host;
      this.frames = 0;
      this.spent = 0;
      this.before = null;
      this.build();
      this.preset(host.dataset.preset || "random");
      new ResizeObserver(() => this.draw()).observe(host);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
      new MutationObserver(() => this.draw()).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
    }

    /* What is on the page. */

    build() {
      const host = this.host;
      host.classList.add("hs-play");
      this.chips = make("div", { class: "hs-chips", role: "group", "aria-label": "examples" }, host);
      for (const [name, { label }] of Object.entries(PRESETS)) {
        const chip = make("button", { type: "button", "data-name": name }, this.chips, label);
        chip.addEventListener("click", () => this.preset(name));
      }
      this.said = make("p", { class: "hs-said" }, host);
      const planes = make("div", { class: "hs-planes" }, host);
      const tokens = make("figure", {}, planes);
      this.tokens = make("canvas", { class: "hs-tokens", tabindex: 0, role: "img", "aria-label": "tokens in the plane; arrow keys move the chosen one, N chooses the next" }, tokens);
      make("figcaption", {}, tokens, "Tokens. Drag them; double-click adds one.");
      const outputs = make("figure", {}, planes);
      this.outputs = make("canvas", { role: "img", "aria-label": "outputs in the plane" }, outputs);
      make("figcaption", {}, outputs, "What comes out, and where the change goes.");
      const read = make("div", { class: "hs-read" }, planes);
      make("div", { class: "hs-small" }, read, "how smooth? L =");
      this.value = make("div", { class: "hs-value", "aria-live": "polite" }, read);
      this.meaning = make("p", {}, read);
      this.gain = make("p", {}, read);
      this.count = make("p", { class: "hs-small" }, read);
      const scale = make("figure", { class: "hs-wide" }, host);
      this.scale = make("canvas", { role: "img", "aria-label": "L beside what theory allows" }, scale);
      make("figcaption", {}, scale, "L (dot) beside theory: at these tokens, and for any n tokens in the disc of radius R.");
      const more = make("div", { class: "hs-more" }, host);
      this.controls(make("div", { class: "hs-controls" }, more));
      const heat = make("figure", {}, more);
      this.heat = make("canvas", { role: "img", "aria-label": "attention weights" }, heat);
      make("figcaption", {}, heat, "Attention weights: a row for each token, who looks at whom.");
      const curve = make("figure", {}, more);
      this.curve = make("canvas", { role: "img", "aria-label": "L against the number of tokens" }, curve);
      make("figcaption", {}, curve, "L against n as the ringed token is copied; above it the best bound, dashed √n.");
      this.listen();
    }

    controls(box) {
      this.sliders = {};
      const slider = (name, label, min, max, step, change) => {
        const row = make("label", { class: "hs-slider" }, box);
        make("span", {}, row, label);
        const input = make("input", { type: "range", min, max, step, "aria-label": label }, row);
        const out = make("output", {}, row);
        input.addEventListener("input", () => {
          change(Number(input.value));
          this.update();
        });
        this.sliders[name] = { input, out };
      };
      slider("radius", "radius R", 0.2, 4, 0.05, (value) => {
        const ratio = value / this.setting.radius;
        this.setting.points.forEach((p) => ((p[0] *= ratio), (p[1] *= ratio)));
        this.setting.radius = value;
      });
      slider("copies", "copies (ringed)", 1, MOST, 1, (value) => (this.setting.counts[this.selected] = value));
      slider("places", "places", 1, MOST, 1, (value) => this.resize(value));
      const row = make("label", { class: "hs-check" }, box);
      this.mask = make("input", { type: "checkbox" }, row);
      make("span", {}, row, "causal: look back only");
      this.mask.addEventListener("change", () => {
        this.setting.causal = this.mask.checked;
        this.update();
      });
      this.cells = {};
      const pair = make("div", { class: "hs-matrices" }, box);
      for (const [name, meaning] of [["A", "who looks at whom"], ["V", "what is passed on"]]) {
        const group = make("fieldset", {}, pair);
        const legend = make("legend", {}, group);
        make("b", {}, legend, name);
        legend.append(" " + meaning);
        this.cells[name] = [0, 1, 2, 3].map((k) => {
          const cell = make("label", {}, group);
          const input = make("input", { type: "range", min: -3, max: 3, step: 0.05, "aria-label": `${name}, row ${1 + (k >> 1)}, column ${1 + (k & 1)}` }, cell);
          const out = make("output", {}, cell);
          input.addEventListener("input", () => {
            this.setting[name][k] = Number(input.value);
            this.update();
          });
          return { input, out };
        });
      }
    }

    /* What the reader does. */

    preset(name) {
      const chosen = PRESETS[name];
      this.named = name;
      this.said.textContent = chosen.say;
      for (const chip of this.chips.children) chip.setAttribute("aria-pressed", chip.dataset.name === name);
      this.selected = chosen.selected || 0;
      this.set({
        points: chosen.points.map((p) => [...p]), counts: chosen.counts ? [...chosen.counts] : chosen.points.map(() => 1),
        A: [...chosen.A], V: [...chosen.V], causal: chosen.causal, radius: chosen.radius,
      });
    }

    set(setting) {
      this.setting = { ...this.setting, ...setting };
      this.selected = Math.min(this.selected, this.setting.points.length - 1);
      this.before = null;
      this.update();
    }

    resize(places) {
      const { points, counts, radius } = this.setting;
      while (points.length > places) [points.pop(), counts.pop()];
      let room = MOST - counts.reduce((a, b) => a + b, 0);
      for (; points.length < places && room > 0; room--) {
        const turn = 2.399963 * (points.length + 1), far = radius * Math.sqrt((((points.length + 1) * 0.618034) % 1) * 0.9 + 0.05);
        points.push([far * Math.cos(turn), far * Math.sin(turn)]);
        counts.push(1);
      }
      this.selected = Math.min(this.selected, points.length - 1);
      this.before = null;
    }

    listen() {
      const canvas = this.tokens;
      const at = (event) => {
        const box = canvas.getBoundingClientRect(), unit = this.unit(canvas);
        return [(event.clientX - box.left - box.width / 2) / unit, -(event.clientY - box.top - box.width / 2) / unit];
      };
      const nearest = (event) => {
        const [x, y] = at(event), reach = 22 / this.unit(canvas);
        let best = -1, least = reach;
        this.setting.points.forEach((p, i) => {
          const far = Math.hypot(p[0] - x, p[1] - y);
          if (far < least) [best, least] = [i, far];
        });
        return best;
      };
      const move = (place, x, y) => {
        const far = Math.hypot(x, y), within = far > this.setting.radius ? this.setting.radius / far : 1;
        this.setting.points[place] = [x * within, y * within];
        this.update();
      };
      let held = -1;
      canvas.addEventListener("pointerdown", (event) => {
        held = nearest(event);
        if (held < 0) return;
        this.selected = held;
        canvas.setPointerCapture(event.pointerId);
        this.update();
      });
      canvas.addEventListener("pointermove", (event) => {
        if (held >= 0) move(held, ...at(event));
        else canvas.style.cursor = nearest(event) >= 0 ? "grab" : "default";
      });
      for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (held = -1));
      canvas.addEventListener("touchstart", (event) => held >= 0 && event.preventDefault(), { passive: false });
      canvas.addEventListener("touchmove", (event) => held >= 0 && event.preventDefault(), { passive: false });
      canvas.addEventListener("dblclick", (event) => {
        if (nearest(event) >= 0) return;
        this.resize(this.setting.points.length + 1);
        this.selected = this.setting.points.length - 1;
        move(this.selected, ...at(event));
      });
      canvas.addEventListener("keydown", (event) => {
        const step = this.setting.radius / 40, ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
        const [x, y] = this.setting.points[this.selected], count = this.setting.points.length;
        if (ways[event.key]) move(this.selected, x + step * ways[event.key][0], y + step * ways[event.key][1]);
        else if (event.key === "n" || event.key === "N") this.selected = (this.selected + 1) % count;
        else if ((event.key === "Delete" || event.key === "Backspace") && count > 1) {
          this.setting.points.splice(this.selected, 1);
          this.setting.counts.splice(this.selected, 1);
          this.set({});
        } else return;
        event.preventDefault();
        this.update();
      });
    }

    /* What is computed and drawn, once a frame. */

    update() {
      if (this.asked) return;
      this.asked = requestAnimationFrame(() => {
        this.asked = 0;
        this.frame();
      });
    }

    frame() {
      const began = performance.now();
      this.result = core.measure(this.setting);
      let along = 0;
      const { direction, image } = this.result;
      if (this.before && this.before.length === direction.length) direction.forEach((d, i) => (along += d * this.before[i]));
      else direction.forEach((d) => (along += d));
      if (along < 0) for (const side of [direction, image]) side.forEach((d, i) => (side[i] = -d)); // a direction has no sign: keep the last one
      this.before = direction;
      clearTimeout(this.later);
      if (this.setting.points.length <= 6 && !this.setting.causal) this.grow();
      else this.later = setTimeout(() => (this.grow(), this.drawCurve()), 150);
      this.write();
      this.draw();
      this.frames += 1;
      this.spent = performance.now() - began;
    }

    grow() {
      const { causal, points } = this.setting;
      this.growth = core.growth(this.setting, this.selected, causal || points.length > 16 ? MOST : LONGEST);
    }

    write() {
      const { L, n, splitting } = this.result, { counts, causal } = this.setting;
      this.value.textContent = show(L);
      this.meaning.textContent = `A small change of the tokens can come out ${show(L)} times as large.`;
      const pays = splitting.gain > 1 + 1e-9;
      this.gain.classList.toggle("hs-pays", pays);
      this.gain.textContent = pays
        ? `Splitting pays: cut ${causal ? `token ${splitting.token + 1}` : `place ${splitting.token + 1}`} in two and pull the halves apart, and the output moves ${show(splitting.gain)} times more than by moving ${causal ? "tokens" : "places"} whole.`
        : `Splitting a token does not pay here (${show(splitting.gain)} of moving).`;
      this.count.textContent = `n = ${n} tokens at ${counts.length} ${counts.length === 1 ? "place" : "places"}`;
      const { sliders, setting } = this, others = n - counts[this.selected];
      sliders.copies.input.max = MOST - others;
      const values = { radius: setting.radius, copies: counts[this.selected], places: counts.length };
      for (const [name, value] of Object.entries(values)) {
        sliders[name].input.value = value;
        sliders[name].out.textContent = name === "radius" ? show(value) : value;
      }
      this.mask.checked = causal;
      for (const name of ["A", "V"]) {
        this.cells[name].forEach(({ input, out }, k) => {
          input.value = setting[name][k];
          out.textContent = show(setting[name][k]);
        });
      }
    }

    colors() {
      const style = getComputedStyle(this.host);
      return (name) => style.getPropertyValue(`--hs-${name}`).trim();
    }

    unit(canvas) {
      return canvas.clientWidth / 2 / (1.32 * this.setting.radius * (canvas === this.outputs ? Math.max(1, core.norm2(this.setting.V)) : 1));
    }

    draw() {
      if (!this.result || !this.host.clientWidth) return;
      this.color = this.colors();
      this.drawTokens();
      this.drawOutputs();
      this.drawScale();
      this.drawHeat();
      this.drawCurve();
    }

    disc(canvas) {
      const { pen, width } = sheet(canvas), unit = this.unit(canvas), middle = width / 2;
      const place = ([x, y]) => [middle + unit * x, middle - unit * y];
      pen.strokeStyle = this.color("line");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(0, middle);
      pen.lineTo(width, middle);
      pen.moveTo(middle, 0);
      pen.lineTo(middle, width);
      pen.stroke();
      pen.beginPath();
      pen.arc(middle, middle, unit * this.setting.radius, 0, 2 * Math.PI);
      pen.strokeStyle = this.color("edge");
      pen.stroke();
      pen.fillStyle = this.color("faint");
      pen.font = `11px ${this.color("font") || "sans-serif"}`;
      pen.fillText("R", middle + unit * this.setting.radius * 0.7071 + 5, middle - unit * this.setting.radius * 0.7071 - 3);
      return { pen, place };
    }

    arrows(pen, place, canvas, starts, vector, color) {
      const { places } = this.result, largest = Math.max(...starts.map((_, i) => Math.hypot(vector[2 * i], vector[2 * i + 1])));
      const factor = (0.42 * this.setting.radius * this.unit(canvas) * (canvas === this.outputs ? Math.max(1, core.norm2(this.setting.V)) : 1)) / (largest || 1);
      let last = -1, lastX = NaN, lastY = NaN;
      starts.forEach((start, i) => {
        const [dx, dy] = [factor * vector[2 * i], -factor * vector[2 * i + 1]];
        if (places[i] === last && Math.abs(dx - lastX) + Math.abs(dy - lastY) < 0.01 && canvas === this.tokens) return;
        [last, lastX, lastY] = [places[i], dx, dy];
        arrow(pen, ...place(start), dx, dy, color, starts.length < 24);
      });
    }

    drawTokens() {
      const { pen, place } = this.disc(this.tokens), { points, counts } = this.setting, { P, places, n, tokens } = this.result;
      const from = places.lastIndexOf(this.selected), shares = points.map(() => 0);
      for (let j = 0; j < n; j++) shares[places[j]] += P[from * n + j];
      const [x, y] = place(points[this.selected]);
      points.forEach((point, j) => {
        if (j === this.selected || shares[j] < 0.004) return;
        pen.strokeStyle = this.color("look");
        pen.globalAlpha = 0.15 + 0.6 * shares[j];
        pen.lineWidth = 1 + 7 * shares[j];
        pen.beginPath();
        pen.moveTo(x, y);
        pen.lineTo(...place(point));
        pen.stroke();
        pen.globalAlpha = 1;
      });
      this.arrows(pen, place, this.tokens, tokens, this.result.direction, this.color("worst"));
      points.forEach((point, i) => {
        const [px, py] = place(point), size = points.length > 24 ? 4 : 6 + Math.min(6, 1.2 * Math.log2(counts[i]));
        pen.fillStyle = this.color("token");
        pen.beginPath();
        pen.arc(px, py, size, 0, 2 * Math.PI);
        pen.fill();
        if (i === this.selected) {
          pen.strokeStyle = this.color("token");
          pen.lineWidth = 1.5;
          pen.beginPath();
          pen.arc(px, py, size + 4, 0, 2 * Math.PI);
          pen.stroke();
        }
        if (counts[i] > 1) {
          pen.fillStyle = this.color("ink");
          pen.font = `600 12px ${this.color("font") || "sans-serif"}`;
          const label = `×${counts[i]}`, edge = this.tokens.clientWidth - pen.measureText(label).width - 2;
          pen.fillText(label, Math.min(px + size + 6, edge), py - size - (px + size + 6 > edge ? 8 : 2));
        }
      });
    }

    drawOutputs() {
      const { pen, place } = this.disc(this.outputs), { outputs, image } = this.result;
      this.arrows(pen, place, this.outputs, outputs, image, this.color("image"));
      pen.strokeStyle = this.color("token");
      pen.fillStyle = this.color("paper");
      pen.lineWidth = 1.6;
      for (const output of outputs) {
        pen.beginPath();
        pen.arc(...place(output), outputs.length > 24 ? 3 : 4.5, 0, 2 * Math.PI);
        pen.fill();
        pen.stroke();
      }
    }

    drawScale() {
      const { pen, width } = sheet(this.scale, this.scale.clientWidth < 440 ? 124 : 98), { L, bounds } = this.result;
      const marks = bounds.filter((b) => b.value > 0 && Number.isFinite(b.value)), values = [L, ...marks.map((b) => b.value)].filter((v) => v > 1e-6);
      const low = Math.log(Math.min(...values)) - 0.35, high = Math.log(Math.max(...values)) + 0.35;
      const x = (value) => 14 + ((width - 28) * (Math.log(Math.max(value, 1e-6)) - low)) / (high - low), line = 34;
      pen.strokeStyle = this.color("edge");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.moveTo(8, line);
      pen.lineTo(width - 8, line);
      pen.stroke();
      const least = Math.min(...marks.filter((b) => b.side === "upper").map((b) => b.value));
      pen.strokeStyle = this.color("worst");
      pen.lineWidth = 4;
      pen.globalAlpha = 0.25;
      pen.beginPath();
      pen.moveTo(x(L), line);
      pen.lineTo(x(least), line);
      pen.stroke();
      pen.globalAlpha = 1;
      const font = this.color("font") || "sans-serif", ends = [-Infinity, -Infinity, -Infinity, -Infinity];
      pen.font = `12px ${font}`;
      const words = { B1: "published bound", B7: "any mask", B9: "causal", B12: "best in the disc", B2: "reached in the disc", D5: "at these tokens" };
      const joined = []; // bounds of one value share a mark
      for (const mark of marks.sort((a, b) => a.value - b.value)) {
        const last = joined[joined.length - 1];
        if (last && mark.side === last.side && Math.abs(mark.value - last.value) < 1e-9 * mark.value) last.text = `${last.text}, ${words[mark.id]}`;
        else joined.push({ ...mark, text: words[mark.id] });
      }
      for (const mark of joined) {
        const at = x(mark.value), text = `${mark.side === "lower" ? "≥ " : "≤ "}${show(mark.value)} ${mark.text}`, wide = pen.measureText(text).width;
        const start = Math.min(Math.max(at - wide / 2, 2), width - wide - 2);
        let row = ends.findIndex((end) => start > end + 10);
        if (row < 0) row = 3;
        ends[row] = start + wide;
        const below = line + 22 + 18 * row;
        pen.strokeStyle = this.color("edge");
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(at, line + 8);
        pen.lineTo(at, below - 11);
        pen.stroke();
        pen.strokeStyle = this.color(mark.side === "lower" ? "look" : "ink");
        pen.lineWidth = 2;
        pen.beginPath();
        pen.moveTo(at, line - 8);
        pen.lineTo(at, line + 8);
        pen.stroke();
        pen.fillStyle = this.color("soft");
        pen.fillText(text, start, below);
      }
      pen.fillStyle = this.color("worst");
      pen.beginPath();
      pen.arc(x(L), line, 7, 0, 2 * Math.PI);
      pen.fill();
      pen.font = `600 13px ${font}`;
      const label = `L = ${show(L)}`, wide = pen.measureText(label).width;
      pen.fillText(label, Math.min(Math.max(x(L) - wide / 2, 2), width - wide - 2), line - 15);
    }

    drawHeat() {
      const { pen, width } = sheet(this.heat), { n, P } = this.result, cell = width / n, gap = n > 24 ? 0 : Math.min(2, cell / 10);
      pen.fillStyle = this.color("line");
      pen.fillRect(0, 0, width, width);
      pen.fillStyle = this.color("paper");
      pen.fillRect(1, 1, width - 2, width - 2);
      pen.fillStyle = this.color("look");
      for (let i = 0; i < n; i++) {
        for (let j = 0; j < n; j++) {
          const p = P[i * n + j];
          if (p < 0.002) continue;
          pen.globalAlpha = Math.min(1, 0.08 + 0.92 * Math.sqrt(p));
          pen.fillRect(j * cell + gap / 2, i * cell + gap / 2, cell - gap + (gap ? 0 : 0.4), cell - gap + (gap ? 0 : 0.4));
        }
      }
      pen.globalAlpha = 1;
    }

    drawCurve() {
      const { pen, width, height } = sheet(this.curve, Math.round(this.curve.clientWidth * 0.92)), curve = (this.growth || []).filter((p) => p.L > 0);
      if (curve.length < 2) return;
      const left = 40, bottom = height - 26, top = 10, right = width - 12, font = this.color("font") || "sans-serif";
      const first = curve[0], last = curve[curve.length - 1], guide = first.L * Math.sqrt(last.n / first.n);
      const values = curve.flatMap((p) => [p.L, p.bound]).concat(guide), low = Math.log(Math.min(...values)), high = Math.log(Math.max(...values));
      const x = (n) => left + ((right - left) * Math.log(n / first.n)) / Math.log(last.n / first.n);
      const y = (v) => bottom - ((bottom - top) * (Math.log(v) - low)) / (high - low || 1);
      pen.font = `11px ${font}`;
      pen.lineWidth = 1;
      for (let power = Math.ceil(low / Math.LN10); power <= high / Math.LN10; power++) {
        pen.strokeStyle = this.color("line");
        pen.beginPath();
        pen.moveTo(left, y(10 ** power));
        pen.lineTo(right, y(10 ** power));
        pen.stroke();
        pen.fillStyle = this.color("soft");
        pen.textAlign = "right";
        pen.fillText(10 ** power, left - 6, y(10 ** power) + 4);
      }
      pen.textAlign = "center";
      pen.fillStyle = this.color("soft");
      for (const p of [first, curve[curve.length >> 1], last]) pen.fillText(p.n, Math.min(x(p.n), right - 8), bottom + 17);
      pen.textAlign = "left";
      const path = (pick, color, heavy, dash) => {
        pen.strokeStyle = color;
        pen.lineWidth = heavy;
        pen.setLineDash(dash || []);
        pen.beginPath();
        curve.forEach((p, i) => (i ? pen.lineTo : pen.moveTo).call(pen, x(p.n), y(pick(p))));
        pen.stroke();
        pen.setLineDash([]);
      };
      path((p) => p.bound, this.color("ink"), 1.4);
      path((p) => first.L * Math.sqrt(p.n / first.n), this.color("faint"), 1.2, [4, 4]);
      path((p) => p.L, this.color("worst"), 2.6);
      const { n, L } = this.result;
      if (n <= last.n) {
        pen.fillStyle = this.color("worst");
        pen.beginPath();
        pen.arc(x(n), y(L), 5, 0, 2 * Math.PI);
        pen.fill();
      }
    }
  }

  function start() {
    window.HowSmoothPlayground = [...document.querySelectorAll("[data-playground]")].map((host) => new Playground(host));
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
