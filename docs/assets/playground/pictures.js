/* The pictures of the playground: tokens, outputs, the scale of bounds, weights, and growth, drawn from `setting`, `result` and `growth`. */
(function () {
  "use strict";
  const core = window.HowSmoothCore;

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

  class Pictures {
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
      if (!this.scale.clientWidth) return; // folded
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
      const words = { B1: "published earlier", B7: "proved for any mask", B9: "proved for causal", B12: "proved in the disc", B2: "reached in the disc", D5: "proved at these tokens" };
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
      if (!this.heat.clientWidth) return;
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
      if (!this.curve.clientWidth) return;
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
      pen.fillText("L", 2, top + 8);
      pen.fillText("n", 2, bottom + 17);
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

  window.HowSmoothPictures = { Pictures, show };
})();
