"""Tabular policies over short sequences: small enough to enumerate, rich enough to be wrong on."""

from functools import lru_cache
from itertools import product

import torch
from jaxtyping import Float, Int
from torch import Tensor

TABLES = ("full", "bigram", "free")


def table_rows(vocab: int, horizon: int, table: str) -> int:
    """How many rows of logits a table has: full, one per prefix; bigram, start and each last token; free, positions."""
    if table not in TABLES:
        raise ValueError(f"table: expected one of {', '.join(TABLES)}, got {table!r}")
    return {"full": sum(vocab**t for t in range(horizon)), "bigram": 1 + vocab, "free": horizon}[table]


@lru_cache
def sequences(vocab: int, horizon: int, eos: int | None = None) -> tuple[Tensor, Tensor]:
    """All sequences, in lexicographic order: tokens [N, T] (int64) and mask [N, T] (float64).

    With `eos`, a sequence ends with its first EOS (mask 1) and is filled with EOS (mask 0) up to the horizon; one that
    never draws EOS is cut at the horizon. The tensors are shared between callers: do not write into them.
    """
    tokens = torch.tensor(list(product(range(vocab), repeat=horizon)))
    if eos is None:
        return tokens, torch.ones(tokens.shape, dtype=torch.float64)
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    mask[:, 1:] = (tokens[:, :-1] == eos).cumsum(1) == 0
    once = (mask | (tokens == eos)).all(1)  # of all fillings after the first EOS, the one with EOS
    return tokens[once], mask[once].double()


class Tabular:
    """A policy over sequences of at most `horizon` tokens whose logits are the rows of one table.

    Args:
        logits: float64 [rows, V] on the CPU, kept as it is (so `requires_grad` is honoured). −inf bars a token.
        table: "full", one row per prefix (by length, then lexicographic; prefixes that contain EOS have rows too, which
            nothing reads but padding); "bigram", the start and then each last token; "free", one row per position.
        horizon: T, the largest number of tokens.
        eos: the token that ends a sequence, or None for sequences of exactly T tokens.

    Raises: ValueError for a table of the wrong shape, an unknown `table`, a horizon below 1 or an eos outside the
    vocabulary; TypeError for logits that are not float64.
    """

    def __init__(self, logits: Tensor, table: str = "full", *, horizon: int, eos: int | None = None):
        if not isinstance(logits, Tensor) or logits.dtype != torch.float64:
            raise TypeError(f"logits: expected a float64 tensor, got {getattr(logits, 'dtype', type(logits).__name__)}")
        if logits.ndim != 2 or logits.shape[1] < 2:
            raise ValueError(f"logits: expected shape [rows, V] with V >= 2, got {list(logits.shape)}")
        if horizon < 1:
            raise ValueError(f"horizon: expected at least 1, got {horizon}")
        vocab = logits.shape[1]
        if logits.shape[0] != table_rows(vocab, horizon, table):
            raise ValueError(
                f"logits: a {table} table with V={vocab}, T={horizon} has {table_rows(vocab, horizon, table)} rows, "
                f"got {logits.shape[0]}"
            )
        if eos is not None and not 0 <= eos < vocab:
            raise ValueError(f"eos: expected a token below {vocab} or None, got {eos}")
        self.logits, self.table, self.horizon, self.eos, self.vocab = logits, table, horizon, eos, vocab

    def __repr__(self):
        return f"Tabular({self.table}, V={self.vocab}, T={self.horizon}, eos={self.eos})"

    def at(self, logits: Tensor) -> "Tabular":
        """The same kind of policy with other logits."""
        return Tabular(logits, self.table, horizon=self.horizon, eos=self.eos)

    def rows(self, tokens: Int[Tensor, "N T"]) -> Int[Tensor, "N T"]:
        """The row of the table from which each token is drawn, given the tokens before it."""
        if self.table == "free":
            return torch.arange(tokens.shape[1]).expand_as(tokens)
        rows, of_parent = torch.zeros_like(tokens), self.vocab if self.table == "full" else 0
        for t in range(1, tokens.shape[1]):  # full: a V-ary heap, in which row r has the children V r + 1 .. V r + V
            rows[:, t] = of_parent * rows[:, t - 1] + 1 + tokens[:, t - 1]
        return rows

    def log_probs(self, tokens: Int[Tensor, "N T"]) -> Float[Tensor, "N T V"]:
        """log π(· | y_<t) at every position of every row, over the whole vocabulary."""
        return self.logits.log_softmax(1)[self.rows(tokens)]

    def token_logprobs(self, tokens: Int[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """log π(y_t | y_<t) of the given tokens; padding positions hold what the policy would give them."""
        return self.log_probs(tokens).gather(2, tokens.unsqueeze(2)).squeeze(2)

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator) -> tuple[Int[Tensor, "N T"], Float[Tensor, "N T"]]:
        """n sequences from this policy: tokens [n, T], filled with EOS after the first one, and mask [n, T]."""
        probs = self.logits.softmax(1)
        tokens = torch.zeros(n, self.horizon, dtype=torch.int64)
        mask = torch.ones(n, self.horizon, dtype=torch.float64)
        for t in range(self.horizon):
            row = self.rows(tokens[:, : t + 1])[:, t]
            tokens[:, t] = torch.multinomial(probs[row], 1, generator=generator).squeeze(1)
            if self.eos is not None and t > 0:
                mask[:, t] = mask[:, t - 1] * (tokens[:, t - 1] != self.eos)
                tokens[mask[:, t] == 0, t] = self.eos
        return tokens, mask


def random(
    vocab: int,
    horizon: int,
    table: str = "full",
    eos: int | None = None,
    scale: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tabular:
    """A policy with independent N(0, scale²) logits, drawn from `generator` (required: no global random state)."""
    if generator is None:
        raise ValueError("generator: expected a torch.Generator, so that the policy can be drawn again")
    logits = torch.randn(table_rows(vocab, horizon, table), vocab, dtype=torch.float64, generator=generator)
    return Tabular(scale * logits, table, horizon=horizon, eos=eos)
