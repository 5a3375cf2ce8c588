"""The KL terms of RL libraries as losses that `klnb.audit` can call, and what each is expected to follow.

Two kinds. "package": the installed library's own function, called on small tensors (needs the `audit` extra:
requirements-audit.txt). "formula": ours, from the published description of a library that a CPU environment cannot
import; it is not the package's code. Every loss is summed over tokens and averaged over rows unless its option says so.

    python examples/audit_libraries.py            # all of them, to published/audit.json (make publish-audit)
"""

import dataclasses
import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace

import torch

from klnb import paths
from klnb.auditing import audit, audit_reward
from klnb.estimators import k1, k2, k3

PINS = {"trl": "1.16.0", "liger-kernel": "0.8.5", "torchrl": "0.14.1"}


@dataclasses.dataclass(frozen=True)
class Term:
    """One KL term: where it comes from, how to build its loss, and what it follows on- and off-policy (see `label`)."""

    library: str
    version: str
    option: str
    on: str
    off: str
    make: Callable  # () -> fn for audit, or for audit_reward if `reward` holds its options
    source: str = "formula"
    reward: dict | None = None
    batch_size: int = 1
    rtol: float = 1e-6


# ---- formulas: p = log π, q = log π_ref, b = log μ of the sampled tokens
def summed(term):
    """Sum over tokens, mean over rows, of term(p, q, b) per token."""
    return lambda: lambda p, q, mask, b: (term(p, q, b) * mask).sum(1).mean()


def averaged(term):
    """Mean over each row's own tokens, then over rows."""
    return lambda: lambda p, q, mask, b: ((term(p, q, b) * mask).sum(1) / mask.sum(1)).mean()


def per_token(term):
    """A penalty or advantage per token for audit_reward."""
    return lambda: lambda p, q, mask, b: term(p, q, b)


def sg(x):
    return x.detach()


def clamped_k3(p, q, b=None):
    return k3((p - q).clamp(-20, 20)).clamp(-10, 10)


def group_normalised():
    """A KL in the reward, frozen at rollout, divided by the group's standard deviation (the reward itself is 0)."""

    def fn(p, q, mask, b):
        score = -((b - q) * mask).sum(1)
        return ((score - score.mean()) / (score.std() + 1e-6))[:, None].expand_as(p)

    return fn


def batch_centred():
    """Advantages of a KL penalty, centred by its mean over the tokens of the batch."""
    return lambda p, q, mask, b: p - q - ((p - q) * mask).sum() / mask.sum()


# ---- the packages' own code
def _stub(trainer_class, base, config, logp, **attributes):
    """A trainer that was never set up: just what its loss reads. The forward pass of `base` returns `logp`."""

    class Accelerator:
        num_processes, sync_gradients = 1, True

        def gather(self, x):
            return x

        def gather_for_metrics(self, x):
            return x

        def reduce(self, x, reduction="sum"):
            return x

    class Forward(base):
        def __init__(self):  # no model, no data
            self.accelerator = Accelerator()

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return logp, torch.zeros_like(logp), None

    # a subclass of the trainer overrides the forward pass, so that its own super() calls reach it
    kind = type("Stub", (Forward,) if trainer_class is base else (trainer_class, Forward), {})
    stub = kind.__new__(kind)
    Forward.__init__(stub)
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    stub.args = SimpleNamespace(**defaults | {"steps_per_generation": 1})
    vars(stub).update(
        beta=1.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None, aux_loss_enabled=False, use_vllm=False,
        epsilon_low=0.2, epsilon_high=0.2, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
        vllm_importance_sampling_correction=False, model=torch.nn.Identity(), max_completion_length=1,
        importance_sampling_level="token", loss_type="dr_grpo",
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )  # fmt: skip
    vars(stub).update(attributes)
    return stub


def _inputs(logp, ref_logp, mask, behavior_logp):
    """A batch as TRL's trainers hand it to their loss. The advantages are 0: only the KL term is left."""
    ids = torch.zeros(mask.shape, dtype=torch.long)
    return {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids, "completion_mask": mask,
        "advantages": torch.zeros(len(mask), dtype=logp.dtype), "num_items_in_batch": mask.sum(),
        "old_per_token_logps": behavior_logp, "old_logps": (behavior_logp * mask).sum(1),
        "ref_per_token_logps": ref_logp,
    }  # fmt: skip


def trl_grpo(correction, trainer=lambda: importlib.import_module("trl").GRPOTrainer, **attributes):
    """GRPOTrainer._compute_loss with advantages 0 and beta 1; dr_grpo with a length of 1, which is our sum."""

    def make():
        import trl

        trainer_class = trainer()

        def fn(logp, ref_logp, mask, behavior_logp):
            stub = _stub(trainer_class, trl.GRPOTrainer, trl.GRPOConfig, logp, **attributes)
            stub.args.use_bias_correction_kl = correction
            return stub._compute_loss(stub.model, _inputs(logp, ref_logp, mask, behavior_logp))

        return fn

    return make


def trl_rloo(epsilon):
    """RLOOTrainer._compute_loss; its reward, −β times the whole sequence's k1 frozen at rollout, is set by us."""

    def make():
        from trl import RLOOConfig, RLOOTrainer

        def fn(logp, ref_logp, mask, behavior_logp):
            stub = _stub(RLOOTrainer, RLOOTrainer, RLOOConfig, logp, epsilon_low=epsilon, epsilon_high=epsilon)
            inputs = _inputs(logp, ref_logp, mask, behavior_logp)
            inputs["advantages"] = -((behavior_logp - ref_logp) * mask).sum(1)
            return stub._compute_loss(stub.model, inputs)

        return fn

    return make


def trl_distillation(beta):
    """The divergence of trl's distillation trainer, with the logits for hidden states and the identity for a head."""

    def make():
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        def fn(logp, ref_logp, mask, behavior_logp, logits, ref_logits):
            head = torch.eye(logits.shape[2], dtype=logits.dtype)
            return _chunked_divergence_loss(logits, ref_logits, head, head, mask, beta, len(mask))[0]

        return fn

    return make


def liger_grpo(correction):
    """Liger's fused GRPO loss (float32), with the logits for hidden states and the identity for a head."""

    def make():
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(
            beta=1.0, compiled=False, loss_type="dr_grpo", max_completion_length=1, use_bias_correction_kl=correction
        )

        def fn(logp, ref_logp, mask, behavior_logp, logits):
            # audit hands out no tokens, and the fused loss wants them: the token that has this log-prob
            tokens = (logits.detach().log_softmax(2) - logp.detach()[..., None]).abs().argmin(2)
            head, zero = torch.eye(logits.shape[2], dtype=logits.dtype), torch.zeros(len(mask), dtype=logits.dtype)
            old = {"ref_per_token_logps": ref_logp, "old_per_token_logps": behavior_logp}
            return loss(logits, head, tokens, mask, zero, **old)[0]

        return fn

    return make


def torchrl_grpo():
    """GRPOLoss._kl_to_ref with coefficient 1: a mean over all positions of the batch."""
    from tensordict import TensorDict
    from torchrl.objectives.llm import GRPOLoss

    def fn(logp, ref_logp, mask, behavior_logp):
        data = TensorDict({"_cur_log_prob": logp}, batch_size=[len(logp)])
        return GRPOLoss._kl_to_ref(SimpleNamespace(), data, ref_log_prob=ref_logp, coeff=1.0, mask=mask.bool())[0]

    return fn


REWARD = {"returns": "penalty"}
TOKEN = REWARD | {"ratio": "token"}
FIXED, ELSE = " at fixed length", " else"
TERMS = (
    Term("TRL", "1.16.0", "GRPO, use_bias_correction_kl=False", "F_tok", "none", trl_grpo(False), "package"),
    Term("TRL", "1.16.0", "GRPO, use_bias_correction_kl=True (default)", "R_tok", "R_tok_mu",
         trl_grpo(True), "package"),
    Term("TRL", "1.16.0", 'GRPO, default, importance_sampling_level="sequence"',
         "R_seq + F_tok" + FIXED + ", none" + ELSE, "none",
         trl_grpo(True, importance_sampling_level="sequence"), "package"),
    Term("TRL", "1.16.0", 'GRPO, default, loss_type="grpo" (mean over each sequence)',
         "R_tok" + FIXED + ", none" + ELSE, "R_tok_mu" + FIXED + ", none" + ELSE,
         trl_grpo(True, loss_type="grpo"), "package"),
    Term("TRL", "1.16.0", "RLOO, unclipped", "R_seq", "R_seq − ∇KL(π‖μ)", trl_rloo(1e30), "package"),
    Term("TRL", "1.16.0", "RLOO, epsilon=0.2 (default)", "R_seq", "none", trl_rloo(0.2), "package"),
    Term("TRL", "1.16.0", "distillation, beta=1 (default)", "R_tok", "R_tok_mu",
         trl_distillation(1.0), "package", rtol=1e-4),
    Term("TRL", "1.16.0", "distillation, beta=0", "F_tok", "F_tok_mu", trl_distillation(0.0), "package", rtol=1e-4),
    Term("liger-kernel", "0.8.5", "fused GRPO, use_bias_correction_kl=False (default)", "F_tok", "none",
         liger_grpo(False), "package", rtol=1e-4),
    Term("liger-kernel", "0.8.5", "fused GRPO, use_bias_correction_kl=True", "R_tok", "R_tok_mu",
         liger_grpo(True), "package", rtol=1e-4),
    Term("torchrl", "0.14.1", "GRPO, kl_to_ref_coeff (mean over all positions)", "F_tok, padding counted", "none",
         lambda: torchrl_grpo(), "package"),
    Term("verl", "0.9.1", "use_kl_loss, kl_loss_type=kl", "zero", "−∇KL(μ‖π)", summed(lambda p, q, b: k1(p - q))),
    Term("verl", "0.9.1", "use_kl_loss, kl_loss_type=abs", "none", "none", summed(lambda p, q, b: (p - q).abs())),
    Term("verl", "0.9.1", "use_kl_loss, kl_loss_type=mse", "R_tok", "none", summed(lambda p, q, b: k2(p - q))),
    Term("verl", "0.9.1", "use_kl_loss, kl_loss_type=low_var_kl (default)", "F_tok; far: none", "none",
         summed(clamped_k3)),
    Term("verl", "0.9.1", "use_kl_loss, kl_loss_type=low_var_kl+", "R_tok", "none",
         summed(lambda p, q, b: sg(clamped_k3(p, q) - k2(p - q)) + k2(p - q))),
    Term("verl", "0.9.1", "KL in the reward, reward-to-go advantages", "R_seq", "none",
         per_token(lambda p, q, b: b - q), reward=TOKEN),
    Term("verl", "0.9.1", "KL in the reward, GRPO advantages", "none", "none",
         group_normalised, reward=TOKEN | {"returns": "advantage"}, batch_size=2),
    Term("verl", "0.9.1", "on-policy distillation, k3 against the teacher", "F_tok", "none",
         summed(lambda p, q, b: k3(p - q))),
    Term("OpenRLHF", "0.11.2", "KL in the reward, k1 (default)", "R_seq; far: none", "none",
         per_token(lambda p, q, b: (b - q).clamp(-10, 10)), reward=TOKEN),
    Term("OpenRLHF", "0.11.2", "use_kl_loss, k1", "zero; far: none", "−∇KL(μ‖π); far: none",
         summed(lambda p, q, b: k1(p - q).clamp(-10, 10))),
    Term("OpenRLHF", "0.11.2", "use_kl_loss, k2", "R_tok; far: none", "none",
         summed(lambda p, q, b: k2(p - q).clamp(-10, 10))),
    Term("OpenRLHF", "0.11.2", "use_kl_loss, k3", "F_tok; far: none", "none",
         summed(lambda p, q, b: k3(p - q).clamp(-10, 10))),
    Term("OpenRLHF", "0.11.2", "unbiased_gradient, below its cap", "R_tok", "R_tok_mu",
         summed(lambda p, q, b: sg((p - b).exp()) * k2(p - q))),
    Term("NeMo-RL", "Aug 2026", "k3 × exp(x − x.detach())", "R_tok", "none",
         summed(lambda p, q, b: (p - sg(p)).exp() * k3(p - q))),
    Term("NeMo-RL", "Aug 2026", "k3, ratio to the sampler", "R_tok", "R_tok_mu",
         summed(lambda p, q, b: (p - b).exp() * k3(p - q))),
    Term("NeMo-RL", "Aug 2026", "k1 × exp(x − x.detach())", "R_tok", "none",
         summed(lambda p, q, b: (p - sg(p)).exp() * k1(p - q))),
    Term("NeMo-RL", "Aug 2026", "k2 × exp(x − x.detach())", "none", "none",
         summed(lambda p, q, b: (p - sg(p)).exp() * k2(p - q))),
    Term("slime", "Aug 2026", "k1 (default), mean over each sequence", "zero" + FIXED + ", ∇E[1/length]" + ELSE,
         "−∇KL(μ‖π)" + FIXED + ", none" + ELSE, averaged(lambda p, q, b: k1(p - q))),
    Term("slime", "Aug 2026", "ratio × k1, mean over each sequence", "R_tok" + FIXED + ", none" + ELSE,
         "R_tok_mu" + FIXED + ", none" + ELSE, averaged(lambda p, q, b: (p - b).exp() * k1(p - q))),
    Term("open-instruct", "Oct 2026", "kl_estimator=0 (k1)", "zero", "−∇KL(μ‖π)", summed(lambda p, q, b: k1(p - q))),
    Term("open-instruct", "Oct 2026", "kl_estimator=1 (k2)", "R_tok", "none", summed(lambda p, q, b: k2(p - q))),
    Term("open-instruct", "Oct 2026", "kl_estimator=2 (k3, default)", "F_tok", "none",
         summed(lambda p, q, b: k3(p - q))),
    Term("open-instruct", "Oct 2026", "kl_estimator=3 (live ratio × k1)", "R_tok", "R_tok_mu",
         summed(lambda p, q, b: (p - b).exp() * k1(p - q))),
    Term("tinker-cookbook", "Oct 2026", "KL in the advantage, discount 0 (default)", "R_tok", "none",
         per_token(lambda p, q, b: b - q), reward=TOKEN | {"discount": 0.0}),
    Term("tinker-cookbook", "Oct 2026", "distillation, discount 1", "R_seq", "none",
         per_token(lambda p, q, b: b - q), reward=TOKEN),
    Term("tinker-cookbook", "Oct 2026", "RL, discount 1, centred (large batches)",
         "R_seq" + FIXED + ", R_seq − ∇E[length]" + ELSE, "none", per_token(lambda p, q, b: b - q - 0.5), reward=TOKEN),
    Term("tinker-cookbook", "Oct 2026", "RL, discount 1, centred, 2 rows", "none", "none",
         batch_centred, reward=TOKEN, batch_size=2),
    Term("AReaL", "1.0.4", "joint RL and distillation", "zero", "−∇KL(μ‖π)", summed(lambda p, q, b: k1(p - q))),
)  # fmt: skip


def run(term):
    """The report of one term, on- and off-policy. ImportError where its package is not installed."""
    options = {"off_policy": True, "batch_size": term.batch_size, "rtol": term.rtol}
    return audit_reward(term.make(), **term.reward, **options) if term.reward else audit(term.make(), **options)


def label(report, policy):
    """What it follows in a few words: fields with their signs; what differs by length, padding or distance."""

    def name(row):
        if row["follows"] in ("zero", "none"):
            return row["follows"]
        text = " ".join(f"{'−' if c < 0 else '+'} {n}" for n, c in row["coefficients"].items())
        return "−" + text[2:] if text[0] == "−" else text[2:]

    def at(pairs):
        rows = [r for r in report.rows if r["policy"] == policy and r["pairs"] == pairs]
        fixed, own, full = (name(r) for r in rows)
        if fixed == own == full:
            return fixed
        return f"{fixed}, padding counted" if fixed == full else f"{fixed} at fixed length, {own} else"

    near, far = at("near"), at("far")
    return near if near == far else f"{near}; far: {far}"


def row(term, report):
    """What a table says of one term."""
    return {
        "library": term.library, "version": term.version, "option": term.option, "source": term.source,
        "on_policy": label(report, "on-policy"), "off_policy": label(report, "off-policy"),
        "verdict": report.verdict, "notes": list(report.notes),
        "coefficients": sorted({f"{r['policy']}, {r['pairs']}, {r['length']}: {r['text']}" for r in report.rows}),
    }  # fmt: skip


def _provenance():
    def hashed(*files):
        digest = hashlib.sha256()
        for file in files:
            digest.update((paths.ROOT / file).read_bytes())
        return digest.hexdigest()

    git = ["git", "-C", str(paths.ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    code = ["examples/audit_libraries.py", *(f"klnb/{m}.py" for m in ("auditing", "exact", "policies", "estimators"))]
    return {
        "made_by": "python examples/audit_libraries.py", "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": {n: importlib.metadata.version(n) for n in (*PINS, "torch")},
        "python": platform.python_version(),
        "device": "cpu", "dtype": "float64 (liger-kernel: float32)", "seed": 250609477,
        "code_sha256": hashed(*code), "code": code, "params_sha256": hashed("requirements-audit.txt"),
    }  # fmt: skip


def main(file=paths.PUBLISHED / "audit.json"):
    """Run every term and write the table with its provenance."""
    from tqdm import tqdm

    rows = [row(t, run(t)) for t in tqdm(TERMS)]
    for t, r in zip(TERMS, rows):
        if (r["on_policy"], r["off_policy"]) != (t.on, t.off):
            print(f"{t.library} {t.option}: expected {t.on} | {t.off}, found {r['on_policy']} | {r['off_policy']}")
    file.parent.mkdir(exist_ok=True)
    tmp = file.with_suffix(f".{os.getpid()}.tmp")
    tmp.write_text(json.dumps({"provenance": _provenance(), "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    os.replace(tmp, file)


if __name__ == "__main__":
    sys.exit(main())
