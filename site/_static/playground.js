// The interactive page: sliders in, a simplex and a table out. All numbers come from klnb.js.
(function () {
  "use strict";
  const root = document.getElementById("klnb-playground");
  if (!root) return;
  const ACTIONS = ["A", "B", "C"];
  const FIELDS = [
    { field: "zero", color: "k1", names: "k1", short: "k1" },
    { field: "target", color: "k2", names: "k2, score, sequence, reward-to-go, reward-to-go-k3, rao-blackwell", short: "k2 and the unbiased ones" },
    { field: "swapped", color: "k3", names: "k3", short: "k3" },
  ];
  const PRESETS = {
    "a rare action pays": { policy: [1.6, 1.2, -2.5], ref: [0.6, -2.4, 2], reward: [0, 1, 0], beta: 0.25 },
    "no reward": { policy: [1.6, 1.2, -2.5], ref: [0.6, -2.4, 2], reward: [0, 0, 0], beta: 1 },
    "near the reference": { policy: [0.5, -2.3, 2.2], ref: [0.6, -2.4, 2], reward: [0, 0, 0], beta: 1 },
    "a weak penalty": { policy: [1.6, 1.2, -2.5], ref: [0.6, -2.4, 2], reward: [0, 1, 0], beta: 0.1 },
    "a strong penalty": { policy: [1.6, 1.2, -2.5], ref: [0.6, -2.4, 2], reward: [0, 1, 0], beta: 4 },
  };
  const SVG = "http://www.w3.org/2000/svg";
  const W = 520, H = 470, CORNERS = [[260, 34], [36, 424], [484, 424]];
  const at = (p) => [0, 1].map((k) => p[0] * CORNERS[0][k] + p[1] * CORNERS[1][k] + p[2] * CORNERS[2][k]);
  const xy = (p) => at(p).map((v) => v.toFixed(2)).join(",");

  // π_ref with a real subscript; only for the constant texts of this file
  function typeset(text) {
    const span = document.createElement("span");
    span.innerHTML = text.replaceAll("π_ref", "π<sub>ref</sub>");
    return text.includes("π_ref") ? span : text;
  }

  function el(tag, attrs = {}, ...children) {
    const svg = ["svg", "g", "path", "circle", "line", "text", "polygon", "defs", "marker", "rect", "title"].includes(tag);
    const node = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
    for (const [k, v] of Object.entries(attrs)) node.setAttribute(k, v);
    node.append(...children.map((c) => (typeof c === "string" && !svg ? typeset(c) : c)));
    return node;
  }

  // ---- controls
  const inputs = {};
  function slider(key, label, min, max, step, title) {
    const input = el("input", { type: "range", id: "s-" + key, min, max, step, "aria-label": title });
    const output = el("output", { for: "s-" + key });
    inputs[key] = { input, output };
    return el("label", { class: "pg-slider", for: "s-" + key }, el("span", {}, label), input, output);
  }
  const group = (title, note, ...rows) => el("fieldset", {}, el("legend", {}, title), el("p", {}, note), ...rows);
  const triple = (key, min, max, title) => ACTIONS.map((a, i) => slider(`${key}-${i}`, a, min, max, 0.1, `${title} ${a}`));
  const controls = el("div", { class: "pg-controls" },
    group("Policy π", "logits, and what they make of each action", ...triple("policy", -4, 4, "logit of π for action")),
    group("Reference π_ref", "logits, frozen", ...triple("ref", -4, 4, "logit of the reference for action")),
    group("Reward R", "per action; all 0 leaves the KL term alone", ...triple("reward", 0, 1, "reward of action")),
    group("Coefficient β", "of the KL term", slider("beta", "β", -2, 1, 0.05, "logarithm of beta")));
  controls.querySelector("legend").classList.add("pg-first");
  const presets = el("div", { class: "pg-presets", role: "group", "aria-label": "Examples" }, el("span", {}, "Examples:"));
  for (const name of Object.keys(PRESETS)) {
    const button = el("button", { type: "button" }, name);
    button.addEventListener("click", () => { set(PRESETS[name]); draw(); });
    presets.append(button);
  }

  // ---- picture
  const marker = (f) => el("marker", { id: "pg-head-" + f.field, viewBox: "0 0 10 10", refX: 7, refY: 5, markerWidth: 5.5, markerHeight: 5.5, orient: "auto" },
    el("path", { d: "M0,0 L10,5 L0,10 z", class: "pg-fill-" + f.color }));
  const layer = {};
  const svg = el("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "The simplex of three actions with policy, reference, expected gradients and end points; the table below has the numbers" },
    el("defs", {}, ...FIELDS.map(marker)),
    el("polygon", { points: CORNERS.map((c) => c.join(",")).join(" "), class: "pg-simplex" }));
  for (const name of ["levels", "paths", "ends", "arrows", "points"]) svg.append((layer[name] = el("g")));
  [[0, -14, "middle"], [-10, 24, "middle"], [10, 24, "middle"]].forEach(([dx, dy, anchor], i) =>
    svg.append(el("text", { x: CORNERS[i][0] + dx, y: CORNERS[i][1] + dy, "text-anchor": anchor, class: "pg-corner" }, ACTIONS[i])));
  const legend = el("ul", { class: "pg-legend" },
    el("li", {}, el("i", { class: "pg-dot" }), "π, now (drag it)"),
    el("li", {}, el("i", { class: "pg-ring" }), "π_ref (drag it)"),
    ...FIELDS.map((f) => el("li", {}, el("i", { class: "pg-swatch pg-back-" + f.color }), f.short)),
    el("li", {}, "→ which way is down the KL term alone"), el("li", {}, "··· the way with the reward, to ◆ where it ends"),
    el("li", {}, "thin lines: equal E[R] − β KL(π‖π_ref)"));

  // ---- numbers
  const body = el("tbody");
  const table = el("table", { class: "pg-table" },
    el("thead", {}, el("tr", {}, ...["estimator as a loss", "expected gradient in the logits (A, B, C)", "ends at (A, B, C), with", "KL(π‖π_ref)", "E[R]"].map((t) => el("th", { scope: "col" }, t)))), body);
  const rows = {};
  for (const f of FIELDS) {
    const cells = ["gradient", "end", "kl", "reward"].map((c) => el("td", { class: "pg-num", "data-cell": c }));
    rows[f.field] = el("tr", { "data-field": f.field, "data-names": f.names },
      el("th", { scope: "row" }, el("i", { class: "pg-swatch pg-back-" + f.color }), ...f.names.split(", ").flatMap((n, i) => (i ? [", ", el("code", {}, n)] : [el("code", {}, n)]))), ...cells);
    body.append(rows[f.field]);
  }
  const now = el("p", { class: "pg-now", "aria-live": "polite" });
  root.append(presets, el("div", { class: "pg-main" }, el("div", { class: "pg-picture" }, svg, legend), controls), now, el("div", { class: "pg-scroll", tabindex: 0, role: "region", "aria-label": "Numbers" }, table));

  const minus = (s) => s.replace("-", "−");
  const short = (x) => minus((Math.abs(x) < 5e-5 ? 0 : x).toFixed(3));
  const list = (x) => "(" + x.map(short).join(", ") + ")";

  function get() {
    const read = (k) => ACTIONS.map((_, i) => Number(inputs[`${k}-${i}`].input.value));
    return { policy: read("policy"), ref: read("ref"), reward: read("reward"), beta: 10 ** Number(inputs.beta.input.value) };
  }

  function set(state) {
    for (const k of ["policy", "ref", "reward"]) state[k].forEach((v, i) => { inputs[`${k}-${i}`].input.value = v; });
    inputs.beta.input.value = Math.log10(state.beta);
  }

  // Level lines of E[R] − β KL(π‖π_ref) over the simplex, by triangles.
  function levels(state, ref) {
    const N = 44, value = [], log = ref.map(Math.log);
    const f = (p) => p.reduce((s, v, i) => s + v * state.reward[i] - (v > 0 ? state.beta * v * (Math.log(v) - log[i]) : 0), 0);
    for (let i = 0; i <= N; i++) { value.push([]); for (let j = 0; j <= N - i; j++) value[i].push(f([i / N, j / N, (N - i - j) / N])); }
    const all = value.flat(), top = Math.max(...all), span = top - Math.min(...all);
    if (!(span > 1e-9)) return "";
    const cuts = [0.01, 0.04, 0.1, 0.18, 0.29, 0.42, 0.57, 0.74].map((c) => top - c * span);
    let d = "";
    const edge = (a, b, c) => { const t = (c - a.v) / (b.v - a.v); return [0, 1].map((k) => a.at[k] + t * (b.at[k] - a.at[k])); };
    const corner = (i, j) => ({ v: value[i][j], at: at([i / N, j / N, (N - i - j) / N]) });
    const cell = (a, b, c) => {
      for (const cut of cuts) {
        const cross = [[a, b], [b, c], [c, a]].filter(([x, y]) => (x.v < cut) !== (y.v < cut)).map(([x, y]) => edge(x, y, cut));
        if (cross.length === 2) d += `M${cross[0].map((v) => v.toFixed(1))}L${cross[1].map((v) => v.toFixed(1))}`;
      }
    };
    for (let i = 0; i < N; i++) for (let j = 0; j < N - i; j++) {
      cell(corner(i, j), corner(i + 1, j), corner(i, j + 1));
      if (j < N - i - 1) cell(corner(i + 1, j), corner(i + 1, j + 1), corner(i, j + 1));
    }
    return d;
  }

  function draw() {
    const state = get(), r = window.klnb.compute(state);
    for (const k of ["policy", "ref"]) ACTIONS.forEach((_, i) => { inputs[`${k}-${i}`].output.textContent = `${minus(state[k][i].toFixed(1))} → ${r[k][i].toFixed(3)}`; });
    ACTIONS.forEach((_, i) => { inputs[`reward-${i}`].output.textContent = state.reward[i].toFixed(1); });
    inputs.beta.output.textContent = state.beta.toPrecision(2);
    now.replaceChildren(typeset(`Now KL(π‖π_ref) = ${short(r.kl)}, KL(π_ref‖π) = ${short(r.klSwapped)}, E[R] = ${short(r.reward)}.`));
    now.dataset.values = JSON.stringify({ state, kl: r.kl, klSwapped: r.klSwapped, reward: r.reward, policy: r.policy, ref: r.ref });
    for (const f of FIELDS) {
      const row = rows[f.field], g = r.gradient[f.field], end = r.end[f.field];
      const kl = end.reduce((s, v, i) => s + (v > 0 ? v * Math.log(v / r.ref[i]) : 0), 0), reward = end.reduce((s, v, i) => s + v * state.reward[i], 0);
      row.dataset.gradient = JSON.stringify(g);
      row.dataset.end = JSON.stringify(end);
      row.dataset.kl = kl;
      row.dataset.reward = reward;
      [list(g), list(end), short(kl), short(reward)].forEach((t, i) => { row.children[i + 1].textContent = t; });
    }
    layer.levels.replaceChildren(el("path", { d: levels(state, r.ref), class: "pg-level" }));
    layer.paths.replaceChildren(...FIELDS.map((f) => el("path", { d: "M" + window.klnb.flow(state, f.field, r.end[f.field]).map(xy).join("L"), class: "pg-path pg-line-" + f.color })));
    layer.ends.replaceChildren(...FIELDS.map((f) => {
      const [x, y] = at(r.end[f.field]);
      return el("path", { d: `M${x},${y - 9}L${x + 9},${y}L${x},${y + 9}L${x - 9},${y}z`, class: "pg-end pg-fill-" + f.color });
    }));
    // the direction of a small step of gradient descent, seen on the simplex; none where the expected gradient is 0
    const [px, py] = at(r.policy);
    layer.arrows.replaceChildren(...FIELDS.flatMap((f) => {
      const g = r.gradient[f.field], mean = g.reduce((s, v, i) => s + v * r.policy[i], 0);
      const to = at(r.policy.map((v, i) => v - v * (g[i] - mean))), d = [to[0] - px, to[1] - py], size = Math.hypot(...d);
      if (!(size > 1e-9)) return [];
      return [el("line", { x1: px, y1: py, x2: px + (64 * d[0]) / size, y2: py + (64 * d[1]) / size, class: "pg-arrow pg-line-" + f.color, "marker-end": `url(#pg-head-${f.field})` })];
    }));
    const [qx, qy] = at(r.ref);
    layer.points.replaceChildren(
      el("circle", { cx: qx, cy: qy, r: 8, class: "pg-ref", "data-drag": "ref" }, el("title", {}, "π_ref")),
      el("circle", { cx: px, cy: py, r: 7, class: "pg-policy", "data-drag": "policy" }, el("title", {}, "π")));
  }

  // ---- dragging π or π_ref: the logits that give the point, rounded to the sliders' steps
  let dragging = null;
  const place = (event) => {
    const box = svg.getBoundingClientRect(), x = ((event.clientX - box.left) / box.width) * W, y = ((event.clientY - box.top) / box.height) * H;
    const [[ax, ay], [bx, by], [cx, cy]] = CORNERS, det = (by - cy) * (ax - cx) + (cx - bx) * (ay - cy);
    const a = ((by - cy) * (x - cx) + (cx - bx) * (y - cy)) / det, b = ((cy - ay) * (x - cx) + (ax - cx) * (y - cy)) / det;
    const p = [a, b, 1 - a - b].map((v) => Math.max(v, 4e-4)), logs = p.map(Math.log), middle = (Math.max(...logs) + Math.min(...logs)) / 2;
    logs.forEach((v, i) => { inputs[`${dragging}-${i}`].input.value = (v - middle).toFixed(1); });
    draw();
  };
  svg.addEventListener("pointerdown", (event) => {
    dragging = event.target.dataset.drag || null;
    if (dragging) { svg.setPointerCapture(event.pointerId); event.preventDefault(); }
  });
  svg.addEventListener("pointermove", (event) => { if (dragging) place(event); });
  for (const type of ["pointerup", "pointercancel"]) svg.addEventListener(type, () => { dragging = null; });
  controls.addEventListener("input", draw);
  set(PRESETS["a rare action pays"]);
  draw();
})();
