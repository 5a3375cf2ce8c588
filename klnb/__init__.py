"""Which divergence does a KL term really minimise? Estimators, losses, an exact oracle and an audit.

Signs and words, everywhere: π (`policy`, `logp`) is trained; π_ref (`ref`, `ref_logp`) is frozen (if it moves or is
trained too, none of the identities hold); μ (`behavior`, `behavior_logp`) sampled the data, on-policy means μ = π.
ℓ_t = log π − log π_ref of token t (`log_ratio`); G_t = Σ_{s≥t} ℓ_s its reward-to-go; w_t = π/μ of token t and w_{1:t}
the product over the prefix. `mask` is 1 up to and including the first EOS.

    R_seq = ∇KL(π‖π_ref) over sequences = E_π Σ_t ∇log π_t G_t       the target
    F_seq = ∇KL(π_ref‖π) over sequences                              the swapped divergence
    R_tok, F_tok  the same per token with prefixes from π held fixed: partial gradients
    R_tok_mu, F_tok_mu  the same with prefixes from μ

Everything public is imported on first use, so `import klnb` is instant and a module costs only what it needs.
"""

from importlib import import_module

_EXPORTS = {
    "ESTIMATORS": "losses",
    "AuditError": "auditing",
    "AuditReport": "auditing",
    "audit": "auditing",
    "audit_reward": "auditing",
    "compare": "comparing",
    "completion_mask": "losses",
    "k1": "estimators",
    "k2": "estimators",
    "k3": "estimators",
    "kl_loss": "losses",
    "token_logprobs": "losses",
    "token_logprobs_from_hidden": "losses",
}
_MODULES = ("exact", "policies")
__all__ = [*_EXPORTS, *_MODULES]
__version__ = "0.1.0"


def __getattr__(name):
    if name in _EXPORTS:
        return getattr(import_module(f"klnb.{_EXPORTS[name]}"), name)
    if name in _MODULES:
        return import_module(f"klnb.{name}")
    raise AttributeError(f"module 'klnb' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__():
    return sorted(__all__)
