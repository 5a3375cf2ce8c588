"""The small teacher and student that notebooks 07 and 08 start from, trained on worked sums and differences.

python tools/lm_models.py --params params.yaml --section lm_models -o build/lm

Both are trained at once, in one thread each. What they reach on held-out problems is printed and kept in models.json.
"""
import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from ruamel.yaml import YAML

from klnb import tasks
from klnb.losses import token_logprobs
from klnb.models import completion_logits, encode, load
from klnb.paths import write
from klnb.processes import end_with_parent, in_processes
from klnb.stats import generator
from klnb.training import DEFAULTS, new_model, problems, rewards, sample


def fit(s: dict, folder: Path, bar=iter) -> dict:
    """Train a small model on worked solutions and save it with its tokenizer: {parameters, steps, accuracy, greedy}.

    It stops when its chance to write a held-out solution out without an error, at temperature 1, reaches `goal`, after
    `cooldown` more steps in which the learning rate falls to 0: so it comes out alike on machines that round
    differently. RuntimeError if `max_steps` are not enough.
    """
    tokenizer = tasks.arithmetic_tokenizer()
    model = new_model(tokenizer, generator(s["seed"], f"{folder.name}/weights"), **s["model"])
    data, held = (_solutions(tokenizer, problems(n, split=split))
                  for n, split in ((s["problems"], "train"), (s["held"], "test")))  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=s["lr"], betas=(0.9, 0.98), weight_decay=0.01)
    source, end = generator(s["seed"], f"{folder.name}/batches"), None
    for i in bar(range(s["max_steps"])):
        if i % s["check_every"] == 0 and end is None:
            with torch.no_grad():
                if _score(model, *held).sum(1).exp().mean() >= s["goal"]:
                    end = i + s["cooldown"]
        if i == end:
            break
        falling = 1.0 if end is None else (end - i) / s["cooldown"]
        optimizer.param_groups[0]["lr"] = s["lr"] * min(1.0, (i + 1) / 50) * falling
        rows = torch.randint(len(data[0]), (s["batch"],), generator=source)
        optimizer.zero_grad()
        (-_score(model, *(x[rows] for x in data)).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise RuntimeError(f"{folder.name}: not at {s['goal']} after {s['max_steps']} steps; raise max_steps")
    _save(model.eval(), tokenizer, folder)
    return {"parameters": sum(p.numel() for p in model.parameters()), "steps": i, **accuracy(folder, s)}


def accuracy(folder, s) -> dict:
    """Of a small model, on held-out problems that did not stop its training: the share of right answers, sampled at
    temperature 1, and of solutions that it writes out without an error when it takes the likeliest token each time."""
    model, tokenizer = load(folder)
    records = problems(2 * s["held"], split="test")[s["held"] :]
    settings = DEFAULTS | {"group": 1}
    batch = sample(model, tokenizer, records, settings, generator(s["seed"], "accuracy"), [])
    tokens, mask, solutions = _solutions(tokenizer, records)
    with torch.no_grad():
        greedy = (completion_logits(model, tokens, mask, solutions).argmax(-1) == solutions).all(1).float()
    return {"accuracy": rewards(batch, tokenizer, records, settings)[0].mean().item(), "greedy": greedy.mean().item()}


def _solutions(tokenizer, records):
    """(prompts [N, P], their mask, solutions [N, T] with EOS)."""
    tokens, mask = encode(tokenizer, [tasks.prompt(r, tokenizer) for r in records])
    rows = tokenizer([r["solution"] + tokenizer.eos_token for r in records], add_special_tokens=False)["input_ids"]
    return tokens, mask, torch.tensor(rows)


def _score(model, tokens, mask, solution):
    return token_logprobs(completion_logits(model, tokens, mask, solution), solution)


def _save(model, tokenizer, folder):
    with tempfile.TemporaryDirectory(dir=folder.parent) as tmp:
        for part in (model, tokenizer):
            part.save_pretrained(Path(tmp) / "new")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(Path(tmp) / "new", folder)


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("-o", "--output", required=True, type=Path, help="the folder to write")
    ap.add_argument("--params", required=True, type=Path, help="a YAML file of sections")
    ap.add_argument("--section", required=True, help="a section of it, with common, teacher, student")
    ap.add_argument("--processes", type=int, default=2)
    args = ap.parse_args(argv)
    if "DVC_STAGE" in os.environ:
        end_with_parent()
    section = YAML(typ="safe", pure=True).load(args.params.read_text())[args.section]
    args.output.mkdir(parents=True, exist_ok=True)
    models = {role: (section["common"] | section[role], args.output / role) for role in ("teacher", "student")}
    reached = in_processes(fit, models, args.processes, "models")
    write(args.output / "models.json", lambda tmp: tmp.write_text(json.dumps(reached, indent=1) + "\n"))
    for role, row in reached.items():
        print(role, ", ".join(f"{k} {v:.4g}" for k, v in row.items()))


if __name__ == "__main__":
    main()
