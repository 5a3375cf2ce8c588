"""A second, naive way to the expected numbers: plain Python floats, recursion and the textbook formulas.

It shares no code with `klnb.exact` and never calls autograd: a policy is a function from a prefix (a tuple of tokens)
to a list of probabilities, sequences are found by recursion, and every gradient field is its definition written as
loops over ∂log π(y|prefix)/∂logits[row, v] = 1[v = y] − π(v|prefix).
"""

import math

import torch


def row_of(prefix, vocab, table):
    """The row of the table that a prefix reads, counted out by listing the prefixes."""
    if table == "free":
        return len(prefix)
    if table == "bigram":
        return 0 if not prefix else 1 + prefix[-1]
    shorter = sum(vocab**n for n in range(len(prefix)))
    return shorter + sum(token * vocab ** (len(prefix) - 1 - i) for i, token in enumerate(prefix))


class Policy:
    """What a `klnb.policies.Tabular` says, read from its logits with `math.exp`."""

    def __init__(self, tabular):
        self.table, self.vocab, self.horizon, self.eos = tabular.table, tabular.vocab, tabular.horizon, tabular.eos
        self.rows = [[math.exp(x) for x in row] for row in tabular.logits.detach().tolist()]
        self.rows = [[x / sum(row) for x in row] for row in self.rows]

    def row(self, prefix):
        return row_of(prefix, self.vocab, self.table)

    def probs(self, prefix):
        return self.rows[self.row(prefix)]

    def sequences(self, prefix=()):
        """Every finished sequence, once."""
        if len(prefix) == self.horizon or (prefix and prefix[-1] == self.eos):
            return [prefix]
        return [y for token in range(self.vocab) for y in self.sequences((*prefix, token))]

    def prob(self, y):
        return math.prod(self.probs(y[:t])[y[t]] for t in range(len(y)))

    def prefixes(self):
        """Every prefix from which a token is drawn, with the probability of getting there."""
        out, todo = [], [()]
        while todo:
            prefix = todo.pop()
            out.append((prefix, self.prob(prefix)))
            if len(prefix) + 1 < self.horizon:
                todo += [(*prefix, token) for token in range(self.vocab) if token != self.eos]
        return out

    def zeros(self):
        return [[0.0] * self.vocab for _ in self.rows]

    def add_score(self, grad, prefix, token, weight):
        """grad += weight · ∇log π(token | prefix)."""
        for v, p in enumerate(self.probs(prefix)):
            grad[self.row(prefix)][v] += weight * ((v == token) - p)


def kl(p, q):
    return sum(p.prob(y) * math.log(p.prob(y) / q.prob(y)) for y in p.sequences())


def field(p, q, name, mu=None):
    """The gradient field `name` at p, as a float64 tensor [rows, V]."""
    grad = p.zeros()
    if name in ("R_seq", "F_seq"):
        for y in p.sequences():
            weight = p.prob(y) * math.log(p.prob(y) / q.prob(y)) if name == "R_seq" else -q.prob(y)
            for t in range(len(y)):
                p.add_score(grad, y[:t], y[t], weight)
    else:
        for prefix, reach in (mu if name.endswith("_mu") else p).prefixes():
            for v, (pv, qv) in enumerate(zip(p.probs(prefix), q.probs(prefix), strict=True)):
                weight = pv * math.log(pv / qv) if name[0] == "R" else -qv
                p.add_score(grad, prefix, v, reach * weight)
    return torch.tensor(grad, dtype=torch.float64)


def expected(p, sample_gradient, mu=None):
    """E_{y~mu} of a gradient that is given per sequence as [(t, weight of ∇log π_t)]."""
    grad = p.zeros()
    for y in p.sequences():
        for t, weight in sample_gradient(y):
            p.add_score(grad, y[:t], y[t], (mu or p).prob(y) * weight)
    return torch.tensor(grad, dtype=torch.float64)
