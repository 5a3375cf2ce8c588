"""The loop on models of a few hundred weights: objective, step, evaluation, whole runs, cuts and sweeps."""
import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch

from klnb import paths, runs, tasks, team, training
from klnb.models import load
from klnb.stats import generator

sys.path.insert(0, str(paths.ROOT / "tools"))
import lm_models  # noqa: E402

FIT = {"seed": 0, "problems": 50, "held": 8, "batch": 4, "lr": 1e-3, "max_steps": 9, "check_every": 2, "goal": 0.0,
       "cooldown": 2}  # fmt: skip
SMALL = {"prompts": 4, "group": 2, "steps": 4, "eval_every": 2, "eval_prompts": 3, "problems": 20, "max_new_tokens": 5,
         "save_every": 2, "lr": 1e-2}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of a teacher and a student that have learnt nothing."""
    home = tmp_path_factory.mktemp("models")
    before = torch.get_rng_state()
    for role, width in (("teacher", 16), ("student", 8)):
        lm_models.fit(FIT | {"model": {"width": width, "layers": 1, "heads": 2}}, home / role)
    assert torch.equal(before, torch.get_rng_state())
    return home


@pytest.fixture
def s(models):
    return training.DEFAULTS | SMALL | {
        "policy": str(models / "student"), "ref": str(models / "teacher"), "name": "reward-to-go", "seed": 0,
    }  # fmt: skip


@pytest.fixture
def pair(s):
    """policy, ref, tokenizer, records"""
    (policy, tokenizer), (ref, _) = load(s["policy"]), load(s["ref"])
    return policy, ref, tokenizer, training._records(s, "train", 4)


def by_hand(model, batch, temperature=1.0):
    """log-probs [B, T] of the completions, one row and one token at a time, without padding or cache."""
    rows = []
    for tokens, prompt, completion in zip(batch["tokens"], batch["prompt_mask"], batch["completion"]):
        ids, row = tokens[prompt.bool()], []
        for token in completion:
            row.append((model(ids[None]).logits[0, -1].double() / temperature).log_softmax(-1)[token])
            ids = torch.cat([ids, token[None]])
        rows.append(torch.stack(row))
    return torch.stack(rows)


def gradients(loss, model):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


# One step ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_objective_is_kl_term_minus_reward_with_the_others_as_baseline(pair, s, temperature):
    """Two prompts × 2: β Σ_t (G_t − G'_t) log π_t − (r − r') Σ_t log π_t, with ' the group's other row, mean of 4."""
    policy, ref, tokenizer, records = pair
    s = s | {"temperature": temperature}
    batch = training.sample(policy, tokenizer, records[:2], s, generator(0, "x"), [])
    batch["reward"] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    logp, mask = by_hand(policy, batch, temperature), batch["mask"]
    with torch.no_grad():
        ratio = (logp - by_hand(ref, batch, temperature)) * mask
    want = 0.0
    for i in range(4):
        other = i ^ 1
        score = -(batch["reward"][i] - batch["reward"][other]) * (logp[i] * mask[i]).sum()
        for t in range(logp.shape[1]):
            score = score + 0.3 * (ratio[i, t:].sum() - ratio[other, t:].sum()) * logp[i, t] * mask[i, t]
        want = want + score / 4
    got = training.objective(policy, ref, batch, "reward-to-go", 0.3, group=2, temperature=temperature)
    want, got = gradients(want, policy), gradients(got, policy)
    assert want.norm() > 0.01
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_without_beta_the_reference_is_not_asked(pair, s):
    policy, _, tokenizer, records = pair
    batch = training.sample(policy, tokenizer, records, s, generator(0, "x"), [])
    batch["reward"] = torch.tensor([1.0, 0.0] * 4)
    loss = training.objective(policy, None, batch, "none", 0.0, group=2)
    want = (torch.tensor([-1.0, 1.0] * 4) * (by_hand(policy, batch) * batch["mask"]).sum(1)).mean()
    torch.testing.assert_close(gradients(loss, policy), gradients(want, policy), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", training.ESTIMATORS)
def test_every_name_trains(pair, s, name):
    policy, ref, tokenizer, records = pair
    batch = training.sample(policy, tokenizer, records, s, generator(0, "x"), [2, 0])
    loss = training.objective(policy, ref, batch, name, 1.0, group=2, barred=[2, 0])
    assert torch.isfinite(loss) and 0 < gradients(loss, policy).norm() < 1e3


def test_step_takes_the_mean_of_its_parts_clips_it_and_knows_its_variance(pair, s):
    policy, ref, tokenizer, records = pair
    batch = training.sample(policy, tokenizer, records, s, generator(0, "x"), [])
    loss_of = partial(training.objective, policy, ref, name="k2", beta=1.0, group=2)
    halves = [gradients(loss_of({k: v[i : i + 4] for k, v in batch.items()}), policy) for i in (0, 4)]
    whole = gradients(loss_of(batch), policy)
    torch.testing.assert_close(sum(halves) / 2, whole, rtol=1e-4, atol=1e-6)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    clip = whole.norm().item() / 3
    row = training.step(policy, optimizer, batch, loss_of, chunks=2, clip=clip)
    # of the mean of two independent gradients: |a − b|²/4
    assert row["gradient_variance"] == pytest.approx((halves[0] - halves[1]).square().sum().item() / 4, rel=1e-3)
    assert row["gradient_norm"] == pytest.approx(whole.norm().item(), rel=1e-4)
    clipped = torch.cat([p.grad.flatten() for p in policy.parameters()])
    torch.testing.assert_close(clipped, whole / 3, rtol=1e-4, atol=1e-6)
    training.step(policy, optimizer, batch, loss_of, chunks=1, clip=2 * clip * 3)
    torch.testing.assert_close(torch.cat([p.grad.flatten() for p in policy.parameters()]), whole)


def test_a_gradient_that_is_not_finite_changes_no_weight(pair, s):
    policy, _, tokenizer, records = pair
    batch = training.sample(policy, tokenizer, records, s, generator(0, "x"), [])
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    with pytest.raises(ValueError, match="norm is nan"):
        training.step(policy, optimizer, batch, lambda b: torch.nan * by_hand(policy, b).sum(), chunks=2, clip=1.0)
    assert all(torch.equal(p, was) for p, was in zip(policy.parameters(), before))


# Evaluation ----------------------------------------------------------------------------------------------------------


def test_barred_completions_have_full_length_and_no_end(pair, s):
    policy, ref, tokenizer, records = pair
    source = generator(0, "x")
    free = training.sample(policy, tokenizer, records * 8, s | {"max_new_tokens": 30}, source, [])
    assert (free["mask"] == 0).any() and (free["completion"] == tokenizer.eos_token_id).any()
    barred = training.sample(policy, tokenizer, records * 8, s | {"max_new_tokens": 30}, source, [0, 2])
    assert barred["mask"].all() and not torch.isin(barred["completion"], torch.tensor([0, 2])).any()


def test_evaluate_at_one_token_is_exact(pair, s):
    """With one token there is nothing to sample: KLs and entropy are sums over the vocabulary of the two prompts."""
    policy, ref, tokenizer, records = pair
    s = s | {"max_new_tokens": 1}
    other = training.sample(ref, tokenizer, records, s, generator(0, "ref"), [0, 2])
    got, shown = training.evaluate(policy, ref, tokenizer, records, other, s, generator(0, "x"), [0, 2])
    kls, swapped, entropies = [], [], []
    for record in records:
        ids = torch.tensor([tokenizer(tasks.prompt(record, tokenizer))["input_ids"]])
        p, q = (m(ids).logits[0, -1].double() for m in (policy, ref))
        keep = torch.tensor([v not in (0, 2) for v in range(len(p))])
        p, q = p[keep].softmax(0), q[keep].softmax(0)
        kls.append((p * (p / q).log()).sum())
        swapped.append((q * (q / p).log()).sum())
        entropies.append(-(p * p.log()).sum())
    for key, want in {"kl": kls, "swapped": swapped, "entropy": entropies}.items():
        want = torch.stack(want)
        assert got[key] == pytest.approx([want.mean().item(), want.std().item() / 2], rel=1e-3, abs=1e-6)
    assert abs(got["kl"][0] - got["swapped"][0]) > 1e-3 * got["kl"][0]  # the two can be told apart here
    assert got["length"] == [1, 0] and got["accuracy"] == [0, 0]
    assert len(shown) == 8 and shown[0]["logp"] < 0 and shown[0]["length"] == 1


def test_distinct_counts_samples_of_one_prompt(pair, s, monkeypatch):
    policy, ref, tokenizer, records = pair
    batch = training.sample(policy, tokenizer, records, s, generator(0, "x"), [])
    batch["completion"][1] = batch["completion"][0]
    batch["mask"][1] = batch["mask"][0]
    monkeypatch.setattr(training, "sample", lambda *args: dict(batch))
    got, _ = training.evaluate(policy, ref, tokenizer, records, batch, s, None, [])
    assert got["distinct"][0] == pytest.approx((0.5 + 1 + 1 + 1) / 4)


def test_rewards_look_at_the_last_box_up_to_the_end(s):
    tokenizer = tasks.arithmetic_tokenizer()
    record = tasks.arithmetic(1)[0]
    right, wrong = tasks.answer(record), "111"
    texts = [f"\n\\boxed{{{right}}}<eos>", f"\n\\boxed{{{right}}}1\n\\boxed{{{wrong}}}", "<eos>" + right, right]
    rows = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts]
    width = max(map(len, rows))
    completion = torch.tensor([row + [7] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1.0] * len(row) + [0.0] * (width - len(row)) for row in rows])
    mask[2, 1:] = 0
    got, shown = training.rewards({"completion": completion, "mask": mask}, tokenizer, [record] * 2, s)
    assert got.tolist() == [1, 0, 0, 0] and shown[0] == f"\n\\boxed{{{right}}}" and shown[2] == ""


# Runs ----------------------------------------------------------------------------------------------------------------


def test_distillation_lowers_the_target_kl(s):
    run = training.train(s | {"name": "rao-blackwell", "steps": 30, "eval_every": 30, "eval_prompts": 16, "eos": False})
    first, last = (e["kl"][0] for e in run["evals"])
    assert [e["step"] for e in run["evals"]] == [0, 30] and last < 0.9 * first
    assert len(run["steps"]["gradient_norm"]) == 30


def test_reward_maximisation_raises_the_reward(s, monkeypatch):
    """Reward 1 for ending at once: a policy that learns has shorter answers (chance 1/27 a token at the start)."""
    monkeypatch.setattr(training, "rewards", lambda b, *a: ((b["mask"].sum(1) == 1).float(), [""] * len(b["mask"])))
    s = s | {"name": "none", "beta": 0.0, "reward": True, "steps": 60, "eval_every": 60, "prompts": 8, "group": 4,
             "lr": 5e-2, "max_new_tokens": 3}  # fmt: skip
    run = training.train(s)
    first, last = (e["accuracy"][0] for e in run["evals"])
    assert first < 0.2 and last > 0.8 and run["evals"][-1]["length"][0] < 2
    assert sum(run["steps"]["reward"][-10:]) > sum(run["steps"]["reward"][:10])


def test_a_run_is_a_function_of_its_seed_alone(s):
    before = torch.get_rng_state()
    same, again, other = (training.train(s | {"seed": seed}) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert json.dumps(same) == json.dumps(again) != json.dumps(other)
    first = training.train(s | {"name": "k2"})  # paired: another estimator starts from the same samples
    assert first["evals"][0] == same["evals"][0] and first["evals"][-1] != same["evals"][-1]


class Cut(Exception):
    pass


def cut_at(step):
    def bar(steps):
        for i in steps:
            if i == step:
                raise Cut
            yield i

    return bar


def test_a_cut_run_goes_on_where_it_was(s, tmp_path):
    whole, cut = tmp_path / "beta1-seed0.json", tmp_path / "cut" / "beta1-seed0.json"
    cut.parent.mkdir()
    runs.make(s, whole)
    with pytest.raises(Cut):
        runs.make(s, cut, cut_at(3))
    assert [f.name for f in cut.parent.iterdir()] == ["beta1-seed0.json.checkpoint"]
    seen = []
    runs.make(s, cut, lambda steps: (seen.append(i) or i for i in steps))
    assert seen == [2, 3, 4] and cut.read_bytes() == whole.read_bytes()
    assert [f.name for f in cut.parent.iterdir()] == ["beta1-seed0.json"]


def test_a_checkpoint_of_other_settings_is_not_used(s, tmp_path):
    file = tmp_path / "beta1-seed0.json"
    with pytest.raises(Cut):
        runs.make(s, file, cut_at(3))
    seen = []
    runs.make(s | {"lr": 1e-3}, file, lambda steps: (seen.append(i) or i for i in steps))
    assert seen == [0, 1, 2, 3, 4]


# Sweeps --------------------------------------------------------------------------------------------------------------


def settings(s):
    return {k: v for k, v in s.items() if k not in ("name", "seed", "beta")}


def test_specs_are_the_grid_and_none_is_the_run_without_a_kl_term(s):
    grid = runs.specs(settings(s), [0, 1], "k2", [0, 0.01, 1])
    assert list(grid) == [f"beta{b}-seed{i}.json" for b in ("0.01", "1") for i in (0, 1)]
    assert grid["beta0.01-seed1.json"]["beta"] == 0.01 and grid["beta0.01-seed1.json"]["seed"] == 1
    assert list(runs.specs(settings(s), [3], "none", [0, 0.01])) == ["beta0-seed3.json"]
    assert list(runs.specs(settings(s), [3], "k1")) == ["beta1-seed3.json"]


def test_sweep_makes_what_is_missing_and_deletes_what_is_not_asked_for(s, tmp_path, monkeypatch):
    made, make = [], runs.make
    monkeypatch.setattr(runs, "make", lambda s, file, bar=iter: (made.append(file.name), make(s, file, iter)))
    s = settings(s)
    runs.sweep(runs.specs(s, [0, 1], "k2"), tmp_path)
    kept = (tmp_path / "beta1-seed0.json").stat()
    (tmp_path / "beta1-seed7.json.checkpoint").write_text("of a seed that is gone")
    (tmp_path / ".beta1-seed0.json.123").write_text("cut in the middle of a wri")
    (tmp_path / "notes.txt").write_text("not ours")
    records = runs.sweep(runs.specs(s, [0, 2], "k2"), tmp_path)
    assert made == ["beta1-seed0.json", "beta1-seed1.json", "beta1-seed2.json"]
    assert (tmp_path / "beta1-seed0.json").stat() == kept
    assert {f.name for f in tmp_path.iterdir()} == {"beta1-seed0.json", "beta1-seed2.json", "notes.txt"}
    assert [run["settings"]["seed"] for run in records] == [0, 2]
    runs.sweep(runs.specs(s | {"lr": 1e-3}, [0, 2], "k2"), tmp_path)
    assert made[3:] == ["beta1-seed0.json", "beta1-seed2.json"]


def test_key_follows_settings_code_and_weights(s, tmp_path, monkeypatch):
    first = runs.key(s)
    assert runs.key(dict(reversed(s.items()))) == first != runs.key(s | {"seed": 1})
    monkeypatch.setattr(runs, "CODE", runs.CODE[:-1])
    assert runs.key(s) != first
    monkeypatch.undo()
    policy, tokenizer = load(s["policy"])
    with torch.no_grad():
        next(policy.parameters()).add_(1)
    lm_models._save(policy, tokenizer, tmp_path / "other")
    assert runs.key(s | {"policy": str(tmp_path / "other")}) != runs.key(s | {"policy": s["policy"] + "/"})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="starting processes anew takes too long here")
def test_two_processes_write_the_same_bytes_as_one(s, tmp_path, capfd):
    wanted = runs.specs(settings(s), [0, 1, 2], "k3")
    for n in (1, 2):
        runs.sweep(wanted, tmp_path / str(n), processes=n)
    for file in wanted:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "2" / file).read_bytes()
    assert "3/3" in capfd.readouterr().err  # the bar
    with pytest.raises(ValueError, match="with a name of k1, k2"):
        runs.sweep(runs.specs(settings(s), [0, 1], "k4"), tmp_path / "3", processes=2)


def test_two_processes_that_share_a_run_do_what_one_does(s, tmp_path):
    """Two processes, each with half of the prompts and the gradients averaged, against one, to 1e-5."""
    s = s | {"reward": True, "name": "rao-blackwell", "eval_prompts": 4, "temperature": 1.5, "chunks": 4}
    s = {k: v for k, v in s.items() if training.DEFAULTS.get(k, "given") != v}
    params = {"runs": {"seeds": [0, 1], "train": {k: v for k, v in s.items() if k not in ("name", "seed", "beta")}}}
    (tmp_path / "params.yaml").write_text(json.dumps(params))
    alone = training.train(s)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "klnb.runs",
         s["name"], "--params", str(tmp_path / "params.yaml"), "--section", "runs", "-o", str(tmp_path / "two")],
        env=os.environ | {"PYTHONPATH": str(paths.ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(f.name for f in (tmp_path / "two").iterdir()) == ["beta1-seed0.json", "beta1-seed1.json"]
    shared = json.loads((tmp_path / "two/beta1-seed0.json").read_text())
    for quantity in ("length", "reward", "gradient_norm", "gradient_variance"):
        assert shared["steps"][quantity] == pytest.approx(alone["steps"][quantity], rel=1e-5), quantity
    for got, want in zip(shared["evals"], alone["evals"], strict=True):
        assert got.keys() == want.keys()
        for metric in got:
            assert got[metric] == pytest.approx(want[metric], rel=1e-5, abs=1e-5), metric
    assert shared["used"] == alone["used"] and shared["samples"] != []


def test_prompts_that_do_not_divide_among_processes_are_told(monkeypatch):
    monkeypatch.setattr(team, "team", lambda: (1, 2))
    assert training.mine([1, 2, 3, 4]) == [3, 4]
    with pytest.raises(ValueError, match="3 prompts do not divide among 2 processes"):
        training.mine([1, 2, 3])


@pytest.mark.parametrize("name", ["k3", "rao-blackwell"])
def test_what_saves_memory_or_time_changes_nothing(s, name):
    """Checkpointing, chunked log-probs and generation with a static cache: the same numbers as without, to 1e-3."""
    s = s | {"name": name, "temperature": 1.5, "steps": 3}
    plain = training.train(s)
    for way in ({"checkpointing": True}, {"chunked": True}, {"generation": "static"}):
        other = training.train(s | way)
        assert other["steps"]["gradient_norm"] == pytest.approx(plain["steps"]["gradient_norm"], rel=1e-3), way
        assert other["evals"][-1]["kl"] == pytest.approx(plain["evals"][-1]["kl"], rel=1e-3), way


def test_chunked_log_probs_hold_no_logits_and_checkpointing_recomputes(s, monkeypatch):
    """The memory-saving ways are really taken: no vocabulary-wide logits with a gradient; blocks run again."""
    policy, ref, tokenizer = training.models(s | {"checkpointing": True})
    batch = training.sample(policy, tokenizer, training._records(s, "train", 2), s, generator(0, "x"), [])
    count = []
    policy.base_model.layers[0].input_layernorm.register_forward_hook(lambda *_: count.append(1))
    monkeypatch.setattr(training, "completion_logits", None)  # the chunked way doesn't call it
    loss = training.objective(policy, ref, batch, "k2", 1.0, group=2, chunked=True)
    assert len(count) == 1
    gradients(loss, policy)
    assert len(count) == 2


def test_models_of_one_tokenizer_and_two_sizes_of_vocabulary_are_cut_to_the_smaller(s, models, tmp_path):
    ref, tokenizer = load(s["ref"])
    ref.resize_token_embeddings(len(tokenizer) + 5)
    lm_models._save(ref, tokenizer, tmp_path / "wide")
    policy, cut, _ = training.models(s | {"ref": str(tmp_path / "wide")})
    assert cut.get_output_embeddings().weight.shape[0] == policy.get_output_embeddings().weight.shape[0] == 27
    other = tasks.arithmetic_tokenizer()
    other.add_tokens(["more"])
    lm_models._save(ref, other, tmp_path / "other")
    with pytest.raises(ValueError, match="different tokenizers: a KL needs the same tokens in both"):
        training.models(s | {"ref": str(tmp_path / "other")})


def test_published_runs_count_if_their_settings_fit(s, tmp_path, monkeypatch):
    s = settings(s) | {"steps": 1, "eval_every": 1}
    there, here = tmp_path / "published", tmp_path / "results"
    runs.sweep(runs.specs(s, [0], "k2"), there)
    record = json.loads((there / "beta1-seed0.json").read_text())
    record |= {"key": "of older code", "commit": "abc"}
    (there / "beta1-seed0.json").write_text(json.dumps(record))
    made, make = [], runs.make
    monkeypatch.setattr(runs, "make", lambda s, file, bar=iter: (made.append(file.name), make(s, file, iter)))
    wanted = runs.specs(s, [0, 1], "k2")
    got = runs.sweep(wanted, here, published=there)
    assert made == ["beta1-seed1.json"] and got[0] == record
    runs.sweep(wanted, here, published=there)  # nor are they made again after a change of code
    monkeypatch.setattr(runs, "CODE", runs.CODE[:-1])
    elsewhere = runs.specs(s | {"data_dir": "elsewhere"}, [0, 1], "k2")
    assert runs.sweep(elsewhere, here, published=there) == got and made == ["beta1-seed1.json"]
    runs.sweep(runs.specs(s | {"lr": 1e-3}, [0], "k2"), here, published=there)
    assert made == ["beta1-seed1.json", "beta1-seed0.json"]
    assert "data_dir" not in got[1]["settings"] and got[1]["made"]["code"] != runs.code()


def test_settings_that_are_unknown_or_missing_are_told(s):
    for wrong in (s | {"learning_rate": 1}, {k: v for k, v in s.items() if k != "ref"}, s | {"name": "k4"}):
        with pytest.raises(ValueError, match="settings: expected policy, ref, name, seed, steps with a name of k1"):
            training.train(wrong)


# Small models --------------------------------------------------------------------------------------------------------


def test_fit_learns_and_stops_at_its_goal(tmp_path, monkeypatch):
    """The chance of a solution rises from about 27^−25; the goal is taken from a first, longer training."""
    chances = []
    score = lm_models._score

    def spy(model, *data):
        out = score(model, *data)
        if not torch.is_grad_enabled():
            chances.append(out.sum(1).exp().mean().item())
        return out

    monkeypatch.setattr(lm_models, "_score", spy)
    s = FIT | {"model": {"width": 16, "layers": 1, "heads": 2}, "max_steps": 40, "goal": 2.0, "lr": 1e-2}
    with pytest.raises(RuntimeError, match="not at 2.0 after 40 steps; raise max_steps"):
        lm_models.fit(s, tmp_path / "a")
    assert not (tmp_path / "a").exists() and chances[-1] > 1e6 * chances[0]
    reached = lm_models.fit(s | {"goal": chances[10]}, tmp_path / "a")
    assert reached["steps"] == 2 * 10 + s["cooldown"] and 0 <= reached["accuracy"] <= 1
    assert sorted(f.name for f in tmp_path.iterdir()) == ["a"]


def test_command_lines_make_models_and_runs(tmp_path, capsys):
    params = {
        "lm": {"common": FIT, "teacher": {"model": {"width": 16, "layers": 1, "heads": 2}},
               "student": {"model": {"width": 8, "layers": 1, "heads": 2}}},
        "runs": {"seeds": [0, 1], "train": SMALL | {"policy": str(tmp_path / "lm/student"),
                 "ref": str(tmp_path / "lm/teacher")}, "short": {"steps": 1}, "rates": {"k1": 0.25, "k2": 0.5}},
    }  # fmt: skip
    (tmp_path / "params.yaml").write_text(json.dumps(params))
    common = ["--params", str(tmp_path / "params.yaml"), "--processes", "1"]
    lm_models.main(["--section", "lm", "-o", str(tmp_path / "lm"), *common])
    out = capsys.readouterr().out
    assert "teacher" in out and "accuracy" in out
    assert json.loads((tmp_path / "lm/models.json").read_text())["student"]["parameters"] < 3000
    runs.main(["k1", "--section", "runs", "--settings", "train,short", "-o", str(tmp_path / "k1"), *common])
    assert sorted(f.name for f in (tmp_path / "k1").iterdir()) == ["beta1-seed0.json", "beta1-seed1.json"]
    done = json.loads((tmp_path / "k1/beta1-seed0.json").read_text())["settings"]
    assert done["steps"] == 1 and done["lr"] == 0.25 and done["prompts"] == SMALL["prompts"]


def test_runs_stay_in_a_work_folder_when_the_output_is_deleted(s, tmp_path, monkeypatch):
    """As DVC does before a stage runs: only a new seed's run is made, and a removed seed's is in neither folder."""
    made, make = [], runs.make
    monkeypatch.setattr(runs, "make", lambda s, file, bar=iter: (made.append(file.name), make(s, file, iter)))
    s = {k: v for k, v in settings(s).items() if training.DEFAULTS.get(k, "given") != v} | {"steps": 1, "eval_every": 1}
    (work, output), file = (tmp_path / "work", tmp_path / "out"), tmp_path / "params.yaml"
    common = ["k2", "--params", str(file), "--section", "runs", "--processes", "1", "--work", str(work)]
    for seeds, new in (([0, 1], [0, 1]), ([0, 2], [2])):
        file.write_text(json.dumps({"runs": {"seeds": seeds, "train": s}}))
        runs.main([*common, "-o", str(output)])
        assert made == [f"beta1-seed{i}.json" for i in new]
        for folder in (work, output):
            assert sorted(f.name for f in folder.iterdir()) == [f"beta1-seed{i}.json" for i in seeds]
        made.clear()
        shutil.rmtree(output)


def test_math_prompts_hold_examples_that_are_not_trained_on(tmp_path, s):
    texts = ["\n0\\\\\n0", *map(str, range(1, 12))]  # an answer may have several lines
    for split in ("train", "test"):
        lines = [{"id": f"{split}/{i}", "problem": f"{split} {i}?" + "!" * i, "level": f"Level {1 + i % 2}",
                  "type": "T", "solution": rf"\boxed{{{text}}}"} for i, text in enumerate(texts)]  # fmt: skip
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    s = s | {"task": "math", "data_dir": str(tmp_path), "levels": [1], "longest": 16, "answers": "(?!4).*"}
    s = s | {"examples": 1}
    records, held = (training._records(s, split, 9) for split in ("train", "test"))  # 0, 2, 6, 8; 10 is too long
    (shown,) = records[0]["examples"]
    assert {r["id"] for r in [*records, shown]} == {f"train/{i}" for i in (0, 2, 6, 8)} and len(records) == 3
    assert all(r["examples"] == [shown] for r in records + held) and {r["id"] for r in held} == {
        f"test/{i}" for i in (0, 2, 6, 8)
    }
    assert tasks.prompt(records[0], tasks.arithmetic_tokenizer()) == (
        f"Problem: {shown['problem']}\nAnswer: $\\boxed{{{tasks.answer(shown)}}}$\n\n"
        f"Problem: {records[0]['problem']}\nAnswer:"
    )


def test_record_keeps_what_a_step_trains_on(s):
    s = s | {"name": "k2", "reward": True, "record": True, "steps": 2}
    run = training.train(s)
    rows = run["rows"]
    assert len(rows) == 2 * s["prompts"] * s["group"] and {r["step"] for r in rows} == {0, 1}
    for i in (0, 1):
        of_step = [r for r in rows if r["step"] == i]
        for quantity, of_rows in (("reward", "accuracy"), ("length", "length")):
            assert sum(r[of_rows] for r in of_step) / len(of_step) == pytest.approx(run["steps"][quantity][i])
    for r in rows:
        assert r["k1"] == pytest.approx(r["logp"] - r["ref_logp"], abs=1e-4) and r["k2"] >= 0 and r["k3"] >= 0
        assert tasks.last_boxed(r["text"]) == r["answer"] or r["accuracy"] == 0
    assert training.train(s | {"record": False}) == run | {"rows": []}  # recording changes nothing
