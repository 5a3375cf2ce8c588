"""One training loop, for distillation and for reward maximisation.

The loss is β·kl_loss(name, …) − E[reward], on-policy: every step samples completions afresh. Sums over tokens and means
over sequences throughout, no dropout, logits divided by the temperature on both sides, gradients clipped by their norm.
"""

import gc
import hashlib
import re
from functools import cache, partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from klnb import tasks
from klnb.estimators import k1, k2, k3
from klnb.losses import ESTIMATORS, kl_loss, token_logprobs, token_logprobs_from_hidden
from klnb.models import completion_hidden, completion_logits, encode, eos_ids, load, rollout
from klnb.paths import ROOT, write
from klnb.stats import generator
from klnb.team import mine, over_team, team

import transformers  # isort: skip  # after klnb.models, which keeps it from warning in every kernel

transformers.utils.logging.disable_progress_bar()  # of loading weights: each run does it twice
SHOWN = 8  # sampled answers that a run's record keeps
GIVEN = ("policy", "ref", "name", "seed", "steps")  # settings of a run that have no default
DEFAULTS = {
    "task": "arithmetic",  # or "math": MATH's records, from data_dir or the hub
    "data_dir": None,
    "levels": None,  # of MATH's problems
    "longest": 10_000,  # characters that a MATH problem may have
    "answers": ".*",  # regular expression of the MATH answers to keep
    "examples": 0,  # MATH: training problems with their answers that go before each problem
    "record": False,  # keep every sample that a step trains on
    "problems": 2000,  # for training, and as many for evaluation: by split, never the same
    "policy_layers": None,  # keep the first so many blocks
    "ref_layers": None,
    "reward": False,  # maximise the reward, with the KL term as regulariser; else the KL term is all
    "beta": 1.0,  # weight of the KL term
    "eos": True,  # may a completion end? False: EOS is barred in both models, all have max_new_tokens
    "max_new_tokens": 25,
    "temperature": 1.0,
    "prompts": 16,  # a step
    "group": 4,  # completions of each prompt
    "chunks": 2,  # a step's rows go through the model in so many parts; from 2 on, they tell the gradient's variance
    "lr": 1e-3,  # AdamW's (no weight decay), falling linearly to 0
    "clip": 1.0,  # the norm that a gradient is cut to
    "eval_every": 25,
    "eval_prompts": 64,
    "save_every": 100,  # steps between checkpoints of a run under way
    "device": "cpu",
    "dtype": "float32",  # "bfloat16": autocast, with losses and optimiser in float32
    "ref_dtype": "float32",  # of the reference's weights
    "generation": "loop",  # a cache of transformers' `generate`, as "static": compiled on CUDA
    "chunked": False,  # log-probs without [B, T, V] logits in memory, where the estimator needs none
    "checkpointing": False,  # of the policy's activations
}


# One step -------------------------------------------------------------------------------------------------------------


def log_probs(model, batch, with_logits=True, *, chunked=False, group=1, **sampler):
    """(log-probs [B, T] of a batch's completions, and the logits [B, T, V] that they are from, or None)."""
    if chunked and not with_logits:
        temperature = sampler.pop("temperature", 1.0)
        hidden, weight, bias = completion_hidden(model, *_where(batch), **sampler)
        return token_logprobs_from_hidden(hidden, weight, batch["completion"], temperature, bias), None
    logits = completion_logits(model, *_where(batch), group=group, **sampler)
    return token_logprobs(logits, batch["completion"]), logits


def objective(policy, ref, batch, name, beta, *, group, **sampler) -> Float[Tensor, ""]:
    """The loss to minimise on rows sampled from the policy: β times the KL term, minus the reward if the batch has one.

    batch: tokens, prompt_mask [B, P], completion, mask [B, T], `group` adjacent rows per prompt, and reward [B] or
    none. The expectation of its gradient is β·(the field that `name` follows) − ∇E[reward]; the reward's part is the
    score function with the mean of the group's other rows as baseline. beta = 0 leaves the KL term out. sampler: the
    temperature and barred ids of the rollouts, and `chunked` for `log_probs`.
    """
    needs_logits = ESTIMATORS[name].needs_logits if beta else False
    logp, logits = log_probs(policy, batch, needs_logits, group=group, **sampler)
    loss = 0.0 * logp.sum()
    if beta:
        with torch.no_grad():
            ref_logp, ref_logits = log_probs(ref, batch, needs_logits, group=group, **sampler)
        extra = {"group_size": group} if ESTIMATORS[name].baseline else {}
        extra |= {"logits": logits, "ref_logits": ref_logits} if needs_logits else {}
        loss = beta * kl_loss(name, logp, ref_logp, batch["mask"], **extra)
    if "reward" in batch:
        reward = batch["reward"].unflatten(0, (-1, group))
        advantage = (reward - reward.mean(1, keepdim=True)) * group / (group - 1)  # minus the mean of the others
        loss = loss - (advantage.flatten() * (logp * batch["mask"]).sum(1)).mean()
    return loss


def step(policy, optimizer, batch, loss_of, *, chunks, clip) -> dict:
    """One optimiser step on a batch, in `chunks` equal parts: the gradient's norm before clipping, and its variance.

    Parts hold whole groups, so their losses' mean is the batch's loss. variance is the trace of the covariance of the
    step's gradient, unbiased from the spread of its parts; NaN with one part. Several processes share a batch: each has
    its own rows, and the gradient is the mean. ValueError, before any weight changes, if the gradient is not finite.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer.zero_grad()  # the last step's gradients: their memory is needed
    total, squares = [torch.zeros_like(p) for p in parameters], 0.0
    for part in zip(*(x.chunk(chunks) for x in batch.values())):
        gradients = torch.autograd.grad(loss_of(dict(zip(batch, part))), parameters)
        squares += _square(gradients) / chunks
        torch._foreach_add_(total, gradients, alpha=1 / chunks)
        del gradients
    total, squares, chunks = over_team(total), over_team([squares])[0], chunks * team()[1]
    norm = _square(total).sqrt()
    if not norm.isfinite():  # a step with it would leave no weight finite
        raise ValueError(f"the gradient's norm is {norm.item()}: too high a learning rate, or a kernel that overflows")
    torch._foreach_mul_(total, (clip / norm).clamp(max=1).item())
    for parameter, gradient in zip(parameters, total):
        parameter.grad = gradient
    optimizer.step()
    variance = (squares - norm**2) / (chunks - 1) if chunks > 1 else float("nan") * norm
    return {"gradient_norm": norm.item(), "gradient_variance": float(variance)}


def _square(gradients):
    return sum(torch.linalg.vector_norm(g, dtype=torch.float64) ** 2 for g in gradients)


def sample(model, tokenizer, records, s, source, barred) -> dict:
    """A batch for `objective`: s["group"] completions of each record's prompt, adjacent; of this process's records."""
    tokens, prompt_mask = encode(tokenizer, [tasks.prompt(r, tokenizer) for r in records], s["device"])
    tokens, prompt_mask = (x.repeat_interleave(s["group"], 0) for x in (tokens, prompt_mask))
    completion, mask, _ = rollout(
        model, tokens, prompt_mask, s["max_new_tokens"], temperature=s["temperature"],
        eos=[] if barred else eos_ids(model, tokenizer), barred=barred, group=s["group"], share=team(),
        cache=s["generation"], generator=source,
    )  # fmt: skip
    return {"tokens": tokens, "prompt_mask": prompt_mask, "completion": completion, "mask": mask.float()}


def rewards(batch, tokenizer, records, s) -> tuple[Float[Tensor, " B"], list[str]]:
    """1 for a right answer, else 0, and the texts. Arithmetic: the box holds the answer's very digits; MATH: as
    math-verify says."""
    rows = [row[:n] for row, n in zip(batch["completion"].tolist(), batch["mask"].sum(1).int().tolist())]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    of_rows = [r for r in records for _ in range(s["group"])]
    if s["task"] == "math":
        return tasks.rewards(texts, of_rows).to(s["device"]), texts
    right = [tasks.last_boxed(text) == tasks.answer(r) for text, r in zip(texts, of_rows)]
    return torch.tensor(right, dtype=torch.float32, device=s["device"]), texts


# One run --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(policy, ref, tokenizer, records, swapped_batch, s, source, barred) -> tuple[dict, list]:
    """Metrics {name: [mean, standard error]} over prompts, on fresh samples of the policy, and the first of these rows.

    kl, swapped: KL(π‖π_ref) and, on the reference's samples `swapped_batch`, KL(π_ref‖π): nats a sequence, from sums
    over the whole vocabulary at every position. length: tokens. entropy: nats a token. distinct: the share of a
    prompt's samples that differ. accuracy: mean reward. k1, k2, k3: the estimates of KL(π‖π_ref) from the samples.
    """
    batch = sample(policy, tokenizer, records, s, source, barred)
    batch["reward"], texts = rewards(batch, tokenizer, records, s)
    rows = measure(policy, ref, batch, s, barred)
    rows["swapped"] = measure(ref, policy, swapped_batch, s, barred)["kl"]
    shown = _listed(texts[:SHOWN], {k: x for k, x in rows.items() if k != "swapped"})
    prompts = {k: rows[k].unflatten(0, (-1, s["group"])).mean(1) for k in rows if "logp" not in k}
    groups = (batch["completion"] * batch["mask"].long()).unflatten(0, (-1, s["group"])).tolist()
    prompts["distinct"] = torch.tensor([len(set(map(tuple, g))) / len(g) for g in groups], dtype=torch.float64)
    prompts = dict(zip(prompts, over_team([x.to(s["device"]) for x in prompts.values()], "gather")))
    return {k: [v.mean().item(), (v.std() / len(v) ** 0.5).item()] for k, v in prompts.items()}, shown


@torch.no_grad()
def measure(policy, ref, batch, s, barred) -> dict:
    """Of each row of a batch, float64 [B]: kl, KL(π‖π_ref) in nats as `evaluate` has it, for rows sampled from the
    policy; k1, k2, k3, its estimates from the row's tokens alone, summed; log-probs; length, entropy and reward."""
    found, rows = [], s["prompts"] * s["group"] // s["chunks"]  # as many as a training step has in a part
    sampler = {"temperature": s["temperature"], "barred": barred, "group": s["group"]}
    for part in zip(*(x.split(rows) for x in batch.values())):
        part = dict(zip(batch, part))
        logp, ref_logp = (
            completion_logits(model, *_where(part), **sampler).log_softmax(-1) for model in (policy, ref)
        )
        mask, chosen = part["mask"], part["completion"].unsqueeze(-1)
        own, other = (x.gather(-1, chosen).squeeze(-1) for x in (logp, ref_logp))
        ratio = own - other
        of_tokens = {"logp": own, "ref_logp": other, "k1": k1(ratio), "k2": k2(ratio), "k3": k3(ratio)}
        row = {name: (x * mask).sum(1) for name, x in of_tokens.items()} | {"length": mask.sum(1)}
        row |= {"kl": _full_kl(logp, ref_logp, mask), "entropy": -_full_kl(logp, torch.zeros_like(logp), mask)}
        row["entropy"] = row["entropy"] / row["length"]
        found.append(row | ({"accuracy": part["reward"]} if "reward" in part else {}))
    return {k: torch.cat([row[k] for row in found]).double().cpu() for k in found[0]}


def _listed(texts, rows):
    return [{"text": text} | {k: x[i].item() for k, x in rows.items()} for i, text in enumerate(texts)]


def _where(batch):
    return batch["tokens"], batch["prompt_mask"], batch["completion"]


def _full_kl(logp, other, mask):
    """Σ_t Σ_v p (log p − log q) [B], with 0 log 0 = 0."""
    return (torch.where(logp > -torch.inf, logp.exp() * (logp - other), 0.0).sum(-1) * mask).sum(1)


def train(s: dict, checkpoint: Path | None = None, bar=iter, key: str = "") -> dict:
    """One run with the settings s over DEFAULTS: {"steps": {quantity: [one per step]}, "evals": [...], "samples": ...,
    "rows": what `measure` says of every sample trained on, if s["record"] and s["reward"], "used": what the models say
    where they are from, a sha256 of the problems, the device}.

    Its randomness is a function of the seed, the purpose and the step, the same for all estimators: runs with the same
    seed start from the same policy and see the same prompts. With `checkpoint`, a run that was cut goes on from there,
    if the file has the same `key`. `rows` are those of the first process where several share the run.
    ValueError for a setting that is unknown or missing, or a name that is neither an estimator's nor "none".
    """
    if (s.keys() - DEFAULTS.keys()) != set(GIVEN) or s["name"] not in (*ESTIMATORS, "none"):
        raise ValueError(f"settings: expected {', '.join(GIVEN)} with a name of {', '.join(ESTIMATORS)} or none, "
                         f"and only those in klnb.training.DEFAULTS; got {s}")  # fmt: skip
    s = DEFAULTS | s
    policy, ref, tokenizer = models(s)
    barred = [] if s["eos"] else sorted({*eos_ids(ref, tokenizer), tokenizer.pad_token_id} - {None})
    records, held = (_records(s, split, s[n]) for split, n in (("train", "problems"), ("test", "eval_prompts")))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=s["lr"], weight_decay=0.0)
    loss_of = partial(objective, policy, ref, name=s["name"], beta=s["beta"], group=s["group"],
                      temperature=s["temperature"], barred=barred, chunked=s["chunked"])  # fmt: skip
    cast = partial(torch.autocast, torch.device(s["device"]).type, torch.bfloat16, enabled=s["dtype"] == "bfloat16")
    problems_used = hashlib.sha256("\0".join(r["problem"] for r in records + held).encode()).hexdigest()
    held, run = mine(held), {"done": 0, "steps": {}, "evals": [], "samples": {}, "rows": []}
    if checkpoint and checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        if state["key"] == key:
            policy.load_state_dict(state["policy"])
            optimizer.load_state_dict(state["optimizer"])
            run = state["run"]
        del state  # as large as the models
    with cast():
        swapped_batch = sample(ref, tokenizer, held, s, generator(s["seed"], "reference"), barred)
    for i in bar(range(run["done"], s["steps"] + 1)):
        if i % s["eval_every"] == 0 or i == s["steps"]:
            with cast():
                source = generator(s["seed"], f"evaluate/{i}")
                metrics, shown = evaluate(policy, ref, tokenizer, held, swapped_batch, s, source, barred)
            run["evals"].append({"step": i, **metrics})
            run["samples"][str(i)] = shown
        if i == s["steps"]:
            break
        chosen = torch.randperm(len(records), generator=generator(s["seed"], f"prompts/{i}"))[: s["prompts"]]
        chosen = mine([records[j] for j in chosen])
        with cast():
            batch = sample(policy, tokenizer, chosen, s, generator(s["seed"], f"rollout/{i}"), barred)
            row = {"length": over_team([batch["mask"].sum(1).mean()])[0].item()}
            if s["reward"]:
                batch["reward"], texts = rewards(batch, tokenizer, chosen, s)
                row["reward"] = over_team([batch["reward"].mean()])[0].item()
            if s["reward"] and s["record"]:
                kept = _listed(texts, measure(policy, ref, batch, s, barred))
                asked = [{"step": i, "prompt": tasks.prompt(r, tokenizer), "answer": tasks.answer(r)} for r in chosen]
                run["rows"] += [asked[j // s["group"]] | row for j, row in enumerate(kept)]
            optimizer.param_groups[0]["lr"] = s["lr"] * (1 - i / s["steps"])
            chunks = max(1, s["chunks"] // team()[1])
            row |= step(policy, optimizer, batch, loss_of, chunks=chunks, clip=s["clip"])
        for quantity, value in row.items():
            run["steps"].setdefault(quantity, []).append(value)
        if checkpoint and (i + 1) % s["save_every"] == 0 and team()[0] == 0:
            state = {"key": key, "policy": policy.state_dict(), "optimizer": optimizer.state_dict()}
            write(checkpoint, partial(torch.save, state | {"run": run | {"done": i + 1}}))
    of_rows = [{"problem": r["problem"], "answer": tasks.answer(r)} for r in held for _ in range(s["group"])]
    ends = [run["samples"][str(run["evals"][at]["step"])] for at in (0, -1)]
    samples = [row | {"before": first, "after": last} for row, first, last in zip(of_rows, *ends)]
    used = {"models": {"policy": policy.provenance, "ref": ref.provenance}, "problems": problems_used}
    used["device"] = torch.cuda.get_device_name() if s["device"].startswith("cuda") else "CPU"
    return {"used": used, "steps": run["steps"], "evals": run["evals"], "samples": samples, "rows": run["rows"]}


def models(s):
    """(policy, reference, tokenizer), with one vocabulary: some families pad theirs to a size that differs by model."""
    if s["device"].startswith("cuda"):
        if not torch.cuda.is_available():
            raise OSError("no CUDA GPU here (torch.cuda.is_available() is False): run it on a machine that has one and "
                          "a CUDA build of torch, or take `make smollm2`, which needs none")  # fmt: skip
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN under a mask: pytorch's issue 196678
        gc.collect()  # an earlier run's models: compiled generation makes them refer to themselves
        torch.cuda.empty_cache()
    policy, tokenizer = load(_place(s["policy"]), layers=s["policy_layers"], device=s["device"])
    dtype = getattr(torch, s["ref_dtype"])
    ref, other = load(_place(s["ref"]), layers=s["ref_layers"], device=s["device"], dtype=dtype)
    if tokenizer.get_vocab() != other.get_vocab():
        raise ValueError(f"{s['policy']} and {s['ref']} have different tokenizers: a KL needs the same tokens in both")
    size = min(m.get_output_embeddings().weight.shape[0] for m in (policy, ref))
    for model in (policy, ref):
        if model.get_output_embeddings().weight.shape[0] > size:
            model.resize_token_embeddings(size)
        for part in model.modules():  # no dropout
            if isinstance(getattr(part, "attention_dropout", None), float):
                part.attention_dropout = 0.0
    if s["checkpointing"]:
        policy.activation_checkpointing_enable({"use_reentrant": False})
        policy.train()
    return policy, ref.requires_grad_(False), tokenizer


problems = cache(tasks.arithmetic)  # made once in each process


def _place(name):
    """Local folders are given from the top of the repository, whatever the working folder."""
    return ROOT / name if (ROOT / name).is_dir() else name


def _records(s, split, count):
    """A fixed random choice of problems, the same for all seeds."""
    if s["task"] == "arithmetic":
        return problems(count, split=split)
    records = tasks.math_records(split, data_dir=s["data_dir"], levels=s["levels"])
    kind = re.compile(s["answers"], re.DOTALL)  # some answers have several lines
    records = [r for r in records if len(r["problem"]) <= s["longest"] and kind.fullmatch(tasks.answer(r))]
    records = [records[i] for i in torch.randperm(len(records), generator=generator(0, f"records/{split}"))[:count]]
    if s["examples"]:
        shown = _records(s | {"examples": 0}, "train", s["examples"])  # the first; they are not trained on
        records = [r | {"examples": shown} for r in records if r not in shown]
    return records


# A model to start from ------------------------------------------------------------------------------------------------


def new_model(tokenizer, source, *, width: int, layers: int, heads: int = 4):
    """A Llama with weights drawn from `source`, N(0, 0.08²): wider than usual, with which small models learn sooner."""
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=8 * width // 3, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # the weights that the constructor draws are replaced
        model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim == 2:
                weights.normal_(0.0, 0.08, generator=source)
    return model
