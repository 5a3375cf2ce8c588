// One position, a few actions: what klnb.exact computes, in plain JavaScript. Pure functions, nothing drawn here.
// tests_site/test_pages.py compares every number with klnb.exact. Logits in, natural logarithms, gradients in the logits.
(function () {
  "use strict";
  const sum = (x) => x.reduce((a, b) => a + b, 0);
  const dot = (x, y) => sum(x.map((v, i) => v * y[i]));

  function logSoftmax(logits) {
    const top = Math.max(...logits);
    const norm = top + Math.log(sum(logits.map((z) => Math.exp(z - top))));
    return logits.map((z) => z - norm);
  }

  const softmax = (logits) => logSoftmax(logits).map(Math.exp);

  // KL(p‖q) = Σ p (log p − log q)
  const kl = (logp, logq) => sum(logp.map((l, i) => (Math.exp(l) === 0 ? 0 : Math.exp(l) * (l - logq[i]))));

  // The expected gradients, y ~ π, in the logits of π, of what an estimator returns as a loss:
  //   zero: 0;   target: ∇KL(π‖π_ref), π (ℓ − KL);   swapped: ∇KL(π_ref‖π), π − π_ref
  function fields(logits, refLogits) {
    const logp = logSoftmax(logits), logq = logSoftmax(refLogits), p = logp.map(Math.exp), q = logq.map(Math.exp);
    const divergence = kl(logp, logq);
    return {
      zero: p.map(() => 0),
      target: p.map((v, i) => v * (logp[i] - logq[i] - divergence)),
      swapped: p.map((v, i) => v - q[i]),
    };
  }

  // ∇E[R] = π (R − E[R])
  function rewardGradient(logits, reward) {
    const p = softmax(logits), mean = dot(p, reward);
    return p.map((v, i) => v * (reward[i] - mean));
  }

  // argmax E[R] − β KL(π‖π_ref) = π_ref e^{R/β} / Z
  const targetOptimum = (logq, reward, beta) => softmax(logq.map((l, i) => l + reward[i] / beta));

  // argmax E[R] − β KL(π_ref‖π) = β π_ref / (λ − R), with u = λ − max R > 0 found by bisection
  function swappedOptimum(logq, reward, beta) {
    const q = logq.map(Math.exp), top = Math.max(...reward), gap = reward.map((r) => top - r);
    let low = beta * Math.max(...q.map((v, i) => (gap[i] === 0 ? v : 0))), high = beta;
    for (let mid = (low + high) / 2; mid > low && mid < high; mid = (low + high) / 2) {
      if (sum(q.map((v, i) => (beta * v) / (gap[i] + mid))) > 1) low = mid;
      else high = mid;
    }
    const p = q.map((v, i) => (beta * v) / (gap[i] + high)), total = sum(p);
    return p.map((v) => v / total);
  }

  // Where gradient ascent of E[R] alone ends: on the best action. The start decides between equal rewards, as the
  // flow keeps e^{−z_i} − e^{−z_j} of two such actions; when all are equal, nothing moves.
  function rewardOnly(logits, reward) {
    const top = Math.max(...reward), p = softmax(logits);
    if (reward.every((r) => r === top)) return p;
    const best = Math.max(...p.filter((_, i) => reward[i] === top));
    const winner = p.map((v, i) => (reward[i] === top && v === best ? 1 : 0)), n = sum(winner);
    return winner.map((v) => v / n);
  }

  // state: {policy, ref: logits; reward; beta > 0}
  function compute(state) {
    const logp = logSoftmax(state.policy), logq = logSoftmax(state.ref);
    const gradient = fields(state.policy, state.ref);
    return {
      policy: logp.map(Math.exp),
      ref: logq.map(Math.exp),
      kl: kl(logp, logq),
      klSwapped: kl(logq, logp),
      reward: dot(logp.map(Math.exp), state.reward),
      rewardGradient: rewardGradient(state.policy, state.reward),
      gradient,
      end: {
        zero: rewardOnly(state.policy, state.reward),
        target: targetOptimum(logq, state.reward, state.beta),
        swapped: swappedOptimum(logq, state.reward, state.beta),
      },
    };
  }

  // The probabilities along gradient ascent of E[R] − β·(what the estimator follows): midpoint steps of equal length on
  // the simplex, shorter where a step would change a logit by more than a quarter (near the corners).
  function flow(state, field, end, step = 0.006, limit = 2000) {
    const path = [softmax(state.policy)];
    let z = state.policy.slice();
    const direction = (z) => {
      const g = fields(z, state.ref)[field], r = rewardGradient(z, state.reward), p = softmax(z);
      const u = r.map((v, i) => v - state.beta * g[i]), mean = dot(p, u);
      const speed = Math.hypot(...p.map((v, i) => v * (u[i] - mean))), most = Math.max(...u.map(Math.abs));
      return speed > 1e-12 ? u.map((v) => v * Math.min(step / speed, 0.25 / most)) : null;
    };
    for (let n = 0; n < limit; n++) {
      const p = path[path.length - 1];
      if (Math.max(...p.map((v, i) => Math.abs(v - end[i]))) < 2 * step) break;
      const first = direction(z), second = first && direction(z.map((v, i) => v + first[i] / 2));
      if (!second) break;
      z = z.map((v, i) => v + second[i]);
      path.push(softmax(z));
    }
    return path;
  }

  window.klnb = { compute, flow, softmax };
})();
