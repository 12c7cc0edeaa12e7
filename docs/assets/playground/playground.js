/* The playground's page: tokens to drag, sliders, and live pictures of what core.js measures. Plain JavaScript, no request. */
(function () {
  "use strict";
  const core = window.HowSmoothCore, { Pictures, show } = window.HowSmoothPictures;
  const MOST = 64; // tokens in all, copies counted
  const LONGEST = 4096; // of the growth curve without a mask; with one every copy is a token of its own

  const identity = [1, 0, 0, 1], opposite = [-1, 0, 0, -1];
  const PRESETS = {
    random: {
      label: "Eight tokens", radius: 2, A: [1, 0.4, -0.4, 0.6], V: identity, causal: false,
      points: [[1.2, 0.9], [-0.9, 1.2], [-1.5, -0.4], [0.2, -1.6], [1.6, -0.5], [0.3, 0.5], [-0.5, -1.1], [0.6, 1.7]],
      say: "Drag a token. The orange arrows are the small change that this layer amplifies most.",
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
      say: "30 copies cannot decide between two tokens. A small change decides for all of them at once: worse than one against many.",
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

  class Playground extends Pictures {
    constructor(host) {
      super();
      this.host = host;
      this.frames = 0;
      this.spent = 0;
      this.before = null;
      this.build();
      this.preset(host.dataset.preset || "random");
      this.restore();
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
      const again = make("div", { class: "hs-again" });
      make("button", { type: "button" }, again, "Reset").addEventListener("click", () => this.preset(this.named));
      this.link = make("a", { href: "#" }, again, "Link to this state");
      this.said = make("p", { class: "hs-said" }, host);
      this.again = again;
      const planes = make("div", { class: "hs-planes" }, host);
      const tokens = make("figure", {}, planes);
      this.tokens = make("canvas", { class: "hs-tokens", tabindex: 0, role: "img", "aria-label": "tokens in the plane; arrow keys move the chosen one, N chooses the next" }, tokens);
      make("figcaption", {}, tokens, "What goes in. Drag a token, or double-click to add one. Orange: the worst change. Blue lines: whom the ringed token looks at.");
      const outputs = make("figure", {}, planes);
      this.outputs = make("canvas", { role: "img", "aria-label": "outputs in the plane" }, outputs);
      make("figcaption", {}, outputs, "What comes out. Pink: what becomes of the worst change.");
      const read = make("div", { class: "hs-read" }, planes);
      make("div", { class: "hs-small" }, read, "how smooth? L =");
      this.value = make("div", { class: "hs-value", "aria-live": "polite" }, read);
      this.meaning = make("p", {}, read);
      this.gain = make("p", {}, read);
      this.count = make("p", { class: "hs-small" }, read);
      const more = make("details", { class: "hs-more" }, host);
      more.open = (host.dataset.preset || "random") !== "random";
      more.addEventListener("toggle", () => this.draw());
      make("summary", {}, more, "More: all controls, what theory allows, attention weights, longer inputs");
      const scale = make("figure", { class: "hs-wide" }, more);
      this.scale = make("canvas", { role: "img", "aria-label": "L beside what theory allows" }, scale);
      make("figcaption", {}, scale, "L (dot) beside what is proved: at these tokens, and for any n tokens in the disc of radius R.");
      const parts = make("div", { class: "hs-parts" }, more);
      this.controls(make("div", { class: "hs-controls" }, parts));
      const heat = make("figure", {}, parts);
      this.heat = make("canvas", { role: "img", "aria-label": "attention weights" }, heat);
      make("figcaption", {}, heat, "Attention weights. Row: the token that looks. Column: the token it looks at.");
      const curve = make("figure", {}, parts);
      this.curve = make("canvas", { role: "img", "aria-label": "L against the number of tokens" }, curve);
      make("figcaption", {}, curve, "L (upwards) against the number of tokens n, as the ringed token is copied. Black: the best bound. Dashed: √n.");
      host.append(this.again);
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
      slider("copies", "copies of the ringed token", 1, MOST, 1, (value) => (this.setting.counts[this.selected] = value));
      slider("places", "different tokens", 1, MOST, 1, (value) => this.resize(value));
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

    /* A state that an address carries behind `#play=`, for the first playground of a page. What is not one is left alone. */
    restore() {
      if (!location.hash.startsWith("#play=") || this.host !== document.querySelector("[data-playground]")) return;
      try {
        const { points, counts, A, V, causal, radius } = JSON.parse(decodeURIComponent(location.hash.slice(6)));
        const numbers = (list, size) => Array.isArray(list) && list.length === size && list.every(Number.isFinite);
        const whole = numbers(counts, points.length) && counts.every((c) => Number.isInteger(c) && c > 0);
        const some = points.length > 0 && points.every((p) => numbers(p, 2)) && whole && counts.reduce((a, b) => a + b, 0) <= MOST;
        if (some && numbers(A, 4) && numbers(V, 4) && radius > 0 && Number.isFinite(radius)) this.set({ points, counts, A, V, causal: causal === true, radius });
      } catch {
        return;
      }
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
        event.stopPropagation(); // the theme turns the page at n
        this.update();
      });
    }

    /* What is computed and written, once a frame. */

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
        : `Splitting this token would move the output ${show(splitting.gain)} times as far as moving it whole, so it does not pay.`;
      this.gain.hidden = !pays && this.named !== "split";
      const round = (key, value) => (typeof value === "number" ? Number(value.toFixed(3)) : value);
      this.link.href = `#play=${encodeURIComponent(JSON.stringify(this.setting, round))}`;
      this.count.textContent = `n = ${n} tokens, ${counts.length} of them different`;
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
  }

  function start() {
    window.HowSmoothPlayground = [...document.querySelectorAll("[data-playground]")].map((host) => new Playground(host));
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
