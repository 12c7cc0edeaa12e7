/* The mathematics of the playground: one head of attention on tokens in the plane.
 *
 * Logits are <A x_i, x_j>, outputs f(X)_i = sum_j P_ij V x_j, and L is the largest singular value of the derivative of f.
 * A setting is { points: [[x, y], ...], counts: [1, ...], A: [a, b, c, d], V: [a, b, c, d], causal, radius }: matrices row by
 * row, and counts[i] copies of points[i], one after the other. Everything is in double precision.
 */
(function (root) {
  "use strict";

  /* Two by two matrices are arrays [a, b, c, d]. */
  const apply = (m, x) => [m[0] * x[0] + m[1] * x[1], m[2] * x[0] + m[3] * x[1]];
  const times = (m, k) => [
    m[0] * k[0] + m[1] * k[2], m[0] * k[1] + m[1] * k[3],
    m[2] * k[0] + m[3] * k[2], m[2] * k[1] + m[3] * k[3],
  ];

  /** The larger singular value of a 2 x 2 matrix. */
  function norm2(m) {
    const s = Math.hypot(m[0] + m[3], m[1] - m[2]), t = Math.hypot(m[0] - m[3], m[1] + m[2]);
    return (s + t) / 2;
  }

  /** The eigenvalues of a symmetric 2 x 2 matrix [a, b, b, d], the larger one. */
  const top2 = (a, b, d) => (a + d) / 2 + Math.hypot((a - d) / 2, b);

  /** The real eigenvalues of a 2 x 2 matrix; none where they are a complex pair. */
  function realEigenvalues(m) {
    const mean = (m[0] + m[3]) / 2, square = ((m[0] - m[3]) / 2) ** 2 + m[1] * m[2];
    return square < 0 ? [] : [mean - Math.sqrt(square), mean + Math.sqrt(square)];
  }

  /** The tokens one by one: copies written out, each with the number of its place. */
  function written(setting) {
    const tokens = [], places = [];
    setting.points.forEach((point, i) => {
      for (let copy = 0; copy < (setting.counts ? setting.counts[i] : 1); copy++) {
        tokens.push(point);
        places.push(i);
      }
    });
    return { tokens, places };
  }

  /** Attention weights, n x n row by row. Masses multiply the weights of a key; under a mask a query sees what is before it. */
  function weights(tokens, A, causal, masses) {
    const n = tokens.length, P = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      const g = apply(A, tokens[i]), seen = causal ? i + 1 : n;
      let largest = -Infinity, sum = 0;
      for (let j = 0; j < seen; j++) {
        const logit = g[0] * tokens[j][0] + g[1] * tokens[j][1];
        P[i * n + j] = logit;
        if (logit > largest) largest = logit;
      }
      for (let j = 0; j < seen; j++) sum += P[i * n + j] = (masses ? masses[j] : 1) * Math.exp(P[i * n + j] - largest);
      for (let j = 0; j < seen; j++) P[i * n + j] /= sum;
    }
    return P;
  }

  /** Per row of P: the mean of the tokens and their covariance [xx, xy, yx, yy]. */
  function moments(tokens, P) {
    const n = tokens.length, means = [], covariances = [];
    for (let i = 0; i < n; i++) {
      let x = 0, y = 0, xx = 0, xy = 0, yy = 0;
      for (let j = 0; j < n; j++) {
        x += P[i * n + j] * tokens[j][0];
        y += P[i * n + j] * tokens[j][1];
      }
      for (let j = 0; j < n; j++) {
        const p = P[i * n + j], dx = tokens[j][0] - x, dy = tokens[j][1] - y;
        xx += p * dx * dx;
        xy += p * dx * dy;
        yy += p * dy * dy;
      }
      means.push([x, y]);
      covariances.push([xx, xy, xy, yy]);
    }
    return { means, covariances };
  }

  /** The derivative, 2n x 2n row by row: blocks P_ij (V + V (x_j - m_i) (A x_i)^T), and V C_i A on the diagonal. */
  function derivative(tokens, A, V, P, { means, covariances }, masses) {
    const n = tokens.length, size = 2 * n, J = new Float64Array(size * size);
    for (let i = 0; i < n; i++) {
      const g = apply(A, tokens[i]);
      for (let j = 0; j < n; j++) {
        const p = P[i * n + j] * (masses ? Math.sqrt(masses[i] / masses[j]) : 1);
        const u = apply(V, [tokens[j][0] - means[i][0], tokens[j][1] - means[i][1]]);
        const at = 2 * i * size + 2 * j;
        J[at] = p * (V[0] + u[0] * g[0]);
        J[at + 1] = p * (V[1] + u[0] * g[1]);
        J[at + size] = p * (V[2] + u[1] * g[0]);
        J[at + size + 1] = p * (V[3] + u[1] * g[1]);
      }
      const own = times(V, times(covariances[i], A)), at = 2 * i * size + 2 * i;
      J[at] += own[0];
      J[at + 1] += own[1];
      J[at + size] += own[2];
      J[at + size + 1] += own[3];
    }
    return J;
  }

  /** The largest singular value of an n x n matrix, and its unit vectors: sigma u = M v. */
  function topSingular(M, n) {
    const G = new Float64Array(n * n);
    for (let r = 0; r < n; r++) {
      const from = r * n;
      for (let i = 0; i < n; i++) {
        const m = M[from + i], to = i * n;
        if (m === 0) continue;
        for (let j = 0; j <= i; j++) G[to + j] += m * M[from + j];
      }
    }
    for (let i = 0; i < n; i++) for (let j = 0; j < i; j++) G[j * n + i] = G[i * n + j];
    const v = topEigenvector(G, n), u = new Float64Array(n);
    let sigma = 0;
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) u[i] += M[i * n + j] * v[j];
      sigma += u[i] * u[i];
    }
    sigma = Math.sqrt(sigma);
    if (sigma > 0) for (let i = 0; i < n; i++) u[i] /= sigma;
    return { sigma, v, u };
  }

  /** A unit eigenvector of the largest eigenvalue of a symmetric positive matrix, which is overwritten.
   *
   * Householder's reflections make it tridiagonal, bisection by Sturm's count finds the eigenvalue, inverse iteration the vector.
   */
  function topEigenvector(G, n) {
    const diagonal = new Float64Array(n), off = new Float64Array(n), scales = new Float64Array(n);
    const h = new Float64Array(n), w = new Float64Array(n); // a reflection's vector stays in the column that it clears
    for (let k = 0; k < n - 2; k++) {
      let length = 0;
      for (let i = k + 1; i < n; i++) length += G[i * n + k] ** 2;
      length = Math.sqrt(length);
      diagonal[k] = G[k * n + k];
      if (length === 0) continue;
      const head = G[(k + 1) * n + k];
      off[k] = head > 0 ? -length : length;
      for (let i = k + 1; i < n; i++) h[i] = G[i * n + k];
      h[k + 1] -= off[k];
      const scale = (scales[k] = 1 / (length * (length + Math.abs(head))));
      let inner = 0;
      for (let i = k + 1; i < n; i++) {
        const from = i * n;
        let sum = 0;
        for (let j = k + 1; j < n; j++) sum += G[from + j] * h[j];
        w[i] = scale * sum;
        inner += w[i] * h[i];
      }
      for (let i = k + 1; i < n; i++) w[i] -= (scale / 2) * inner * h[i];
      for (let i = k + 1; i < n; i++) {
        const to = i * n, hi = h[i], wi = w[i];
        for (let j = k + 1; j < n; j++) G[to + j] -= hi * w[j] + wi * h[j];
      }
      for (let i = k + 1; i < n; i++) G[i * n + k] = h[i];
    }
    if (n > 1) {
      diagonal[n - 2] = G[(n - 2) * n + n - 2];
      off[n - 2] = G[(n - 1) * n + n - 2];
    }
    diagonal[n - 1] = G[n * n - 1];

    let high = 0;
    for (let i = 0; i < n; i++) high = Math.max(high, diagonal[i] + Math.abs(off[i]) + (i ? Math.abs(off[i - 1]) : 0));
    const v = new Float64Array(n);
    if (!(high > 0)) {
      v[0] = 1;
      return v;
    }
    let low = 0;
    for (let step = 0; step < 80 && high - low > 4e-16 * high; step++) {
      const middle = (low + high) / 2;
      let below = true, pivot = 1; // below: no eigenvalue is above the middle
      for (let i = 0; i < n && below; i++) {
        pivot = middle - diagonal[i] - (i ? (off[i - 1] * off[i - 1]) / pivot : 0);
        below = pivot > 0;
      }
      if (below) high = middle;
      else low = middle;
    }
    const shift = high * (1 + 2e-15), pivots = new Float64Array(n);
    for (let i = 0; i < n; i++) v[i] = 1 + ((i * 7919) % 101) / 101; // any start that no symmetry of the tokens knows
    for (let round = 0; round < 4; round++) {
      for (let i = 0; i < n; i++) {
        const before = i ? off[i - 1] / pivots[i - 1] : 0;
        pivots[i] = Math.max(shift - diagonal[i] - (i ? before * off[i - 1] : 0), 1e-300);
        if (i) v[i] += before * v[i - 1];
      }
      let length = 0;
      for (let i = n - 1; i >= 0; i--) {
        v[i] = (v[i] + (i < n - 1 ? off[i] * v[i + 1] : 0)) / pivots[i];
        length = Math.max(length, Math.abs(v[i]));
      }
      let sum = 0;
      for (let i = 0; i < n; i++) sum += (v[i] /= length) ** 2;
      for (let i = 0; i < n; i++) v[i] /= Math.sqrt(sum);
    }
    for (let k = n - 3; k >= 0; k--) {
      let inner = 0;
      for (let i = k + 1; i < n; i++) inner += G[i * n + k] * v[i];
      for (let i = k + 1; i < n; i++) v[i] -= scales[k] * inner * G[i * n + k];
    }
    return v;
  }

  /** The largest <A x, y - x> over the unit disc: the exponent of the largest column sum (Theorem 3.9). */
  function columnExponent(A) {
    const a = norm2(A);
    if (a === 0) return 0;
    const square = [A[0] * A[0] + A[2] * A[2], A[0] * A[1] + A[2] * A[3], A[1] * A[1] + A[3] * A[3]];
    const at = (t) => {
      const mu = Math.exp(t);
      const value = top2(square[0] / (4 * mu) - A[0], square[1] / (4 * mu) - (A[1] + A[2]) / 2, square[2] / (4 * mu) - A[3]);
      return mu + Math.max(value, 0);
    };
    let low = Math.log(a) - 12, high = Math.log(a) + 4;
    const golden = (Math.sqrt(5) - 1) / 2;
    for (let step = 0; step < 90; step++) {
      const left = high - golden * (high - low), right = low + golden * (high - low);
      if (at(left) < at(right)) high = right;
      else low = left;
    }
    return at((low + high) / 2);
  }

  /** What theory allows for n tokens in the disc: rows { id, name, side, value }, those that apply. */
  function ballBounds(A, V, causal, n, radius) {
    const a = norm2(A), v = norm2(V), reach = a * radius * radius, root = Math.sqrt(1 + reach * reach);
    const byColumns = (log) => v * (Math.exp(log / 2) * root + reach);
    const rows = [
      { id: "B1", name: "published", side: "upper", value: v * Math.sqrt(3 * (reach * reach * (4 * n + 1) + n)) },
      { id: "B7", name: "any mask", side: "upper", value: byColumns(Math.log(n)) },
    ];
    if (causal) {
      const spread = 2 * reach, seen = Math.log(n);
      const log = spread >= seen ? seen : Math.min(seen, spread + Math.log1p(seen - spread));
      rows.push({ id: "B9", name: "causal", side: "upper", value: byColumns(log) });
    } else {
      const log = Math.min(Math.log(n), columnExponent(A) * radius * radius);
      rows.push({ id: "B12", name: "exact columns", side: "upper", value: byColumns(log) });
      const real = realEigenvalues(A);
      if (n > 1 && real.length && V[0] === 1 && V[1] === 0 && V[2] === 0 && V[3] === 1) {
        const gamma = Math.max(-real[0], real[1] / 8);
        if (gamma > 0) {
          const value = Math.sqrt(n - 1) / (1 + (n - 1) * Math.exp(-2 * gamma * radius * radius));
          rows.push({ id: "B2", name: "reached", side: "lower", value });
        }
      }
    }
    return rows;
  }

  /** The norm of the matrix of block norms (Theorem 4.4): an upper bound at these very tokens. */
  function pointBound(tokens, A, V, P, { means, covariances }) {
    const n = tokens.length, N = new Float64Array(n * n), v = norm2(V);
    for (let i = 0; i < n; i++) {
      const g = apply(A, tokens[i]), length = Math.hypot(g[0], g[1]);
      const along = length > 0 ? apply(V, [g[0] / length, g[1] / length]) : apply(V, [1, 0]);
      for (let j = 0; j < n; j++) {
        const p = P[i * n + j], u = apply(V, [tokens[j][0] - means[i][0], tokens[j][1] - means[i][1]]);
        const plain = v + Math.hypot(u[0], u[1]) * length;
        N[i * n + j] = p * Math.min(plain, Math.hypot(along[0] + length * u[0], along[1] + length * u[1], v));
      }
      N[i * n + i] += norm2(times(V, times(covariances[i], A)));
    }
    return topSingular(N, n).sigma;
  }

  /** Everything that is shown of a setting. */
  function measure(setting) {
    const { A, V, causal } = setting, { tokens, places } = written(setting), n = tokens.length;
    const P = weights(tokens, A, causal), rows = moments(tokens, P);
    const { sigma, v, u } = topSingular(derivative(tokens, A, V, P, rows), 2 * n);
    const outputs = rows.means.map((m) => apply(V, m));
    const bounds = ballBounds(A, V, causal, n, setting.radius);
    bounds.push({ id: "D5", name: "at these tokens", side: "upper", value: pointBound(tokens, A, V, P, rows) });
    return { n, tokens, places, P, outputs, L: sigma, direction: v, image: u, bounds, splitting: splitting(setting, sigma, rows) };
  }

  /** Does it pay to split a token? Without a mask copies are one place of larger mass; under one each token is by itself. */
  function splitting(setting, sigma, rows) {
    const { A, V, causal, points } = setting;
    let moved = sigma, covariances = rows.covariances;
    if (!causal && rows.means.length > points.length) ({ moved, covariances } = places(points, setting.counts, A, V));
    let split = 0, token = 0;
    covariances.forEach((C, i) => {
      const own = norm2(times(V, times(C, A)));
      if (own > split) [split, token] = [own, i];
    });
    return { moved, split, token, gain: moved > 0 ? split / moved : split > 0 ? Infinity : 0 };
  }

  /** Places with masses, no mask: the constant of moving them whole, and the covariance that each sees. */
  function places(points, counts, A, V) {
    const P = weights(points, A, false, counts), rows = moments(points, P);
    const moved = topSingular(derivative(points, A, V, P, rows, counts), 2 * points.length).sigma;
    return { moved, covariances: rows.covariances };
  }

  /** L against n, where one place gets 1, 2, 4, ... copies. Without a mask copies need no more work than one token. */
  function growth(setting, place, limit) {
    const counts = setting.counts ? [...setting.counts] : setting.points.map(() => 1), curve = [];
    const others = counts.reduce((sum, c, i) => sum + (i === place ? 0 : c), 0);
    for (let copies = 1; others + copies <= limit; copies *= 2) {
      counts[place] = copies;
      let L;
      if (setting.causal) {
        const { tokens } = written({ ...setting, counts }), P = weights(tokens, setting.A, true);
        L = topSingular(derivative(tokens, setting.A, setting.V, P, moments(tokens, P)), 2 * tokens.length).sigma;
      } else {
        const { moved, covariances } = places(setting.points, counts, setting.A, setting.V);
        L = covariances.reduce(
          (most, C, i) => (counts[i] > 1 ? Math.max(most, norm2(times(setting.V, times(C, setting.A)))) : most), moved);
      }
      const n = others + copies;
      const bound = Math.min(
        ...ballBounds(setting.A, setting.V, setting.causal, n, setting.radius).filter((b) => b.side === "upper").map((b) => b.value));
      curve.push({ n, L, bound });
    }
    return curve;
  }

  const api = { measure, growth, ballBounds, columnExponent, norm2 };
  if (typeof module !== "undefined" && module.exports) module.exports = api;
  root.HowSmoothCore = api;
})(typeof window === "undefined" ? globalThis : window);
