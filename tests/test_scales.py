"""Scales that are run on purpose: the plan, a short scale in a given time, publishing, and what is published."""
import json
import re
import subprocess
import sys

import pytest

from klnb import paths, runs, tasks, training
from klnb.stats import generator

sys.path.insert(0, str(paths.ROOT / "tools"))
import scales  # noqa: E402

SMALL = {"prompts": 4, "group": 2, "steps": 4, "eval_every": 4, "eval_prompts": 2, "problems": 20, "max_new_tokens": 5,
         "temperature": 2.0, "chunks": 2}  # fmt: skip


@pytest.fixture(scope="module")
def section(tmp_path_factory):
    """Of two models that have learnt nothing."""
    home, tokenizer = tmp_path_factory.mktemp("models"), tasks.arithmetic_tokenizer()
    for role, width in (("policy", 8), ("ref", 16)):
        model = training.new_model(tokenizer, generator(0, role), width=width, layers=1, heads=2)
        model.save_pretrained(home / role), tokenizer.save_pretrained(home / role)
    train = SMALL | {role: str(home / role) for role in ("policy", "ref")}
    return {"names": ["k2", "k3"], "seeds": [0, 1], "seeds_of": {"k3": [1]}, "train": train}


@pytest.fixture
def params(section, tmp_path, monkeypatch):
    """A params file with the section as gpu_short, and folders of its own."""
    for name in ("BUILD", "PUBLISHED"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    file = tmp_path / "params.yaml"
    file.write_text(json.dumps({"gpu_short": section}))
    return file


def test_runs_go_seed_by_seed_so_that_a_part_of_them_is_paired(section):
    runs = scales.runs_of(section, {"lr": 0.5})
    assert list(runs) == ["k2/beta1-seed0.json", "k2/beta1-seed1.json", "k3/beta1-seed1.json"]
    assert runs["k3/beta1-seed1.json"] == section["train"] | {"lr": 0.5, "name": "k3", "beta": 1.0, "seed": 1}


def test_estimates_are_for_the_costliest_run(section):
    """The one that needs the logits of the whole vocabulary, else the first; with its defaults."""
    runs = scales.runs_of(section | {"names": ["k2", "rao-blackwell", "k3"]}, {})
    assert scales.costliest(runs) == training.DEFAULTS | runs["rao-blackwell/beta1-seed0.json"]
    assert scales.costliest(scales.runs_of(section, {}))["name"] == "k2"


def test_plan_says_runs_tokens_memory_and_time(params, section, tmp_path, capsys):
    finished = tmp_path / "published/gpu_short/k2/beta1-seed0.json"
    finished.parent.mkdir(parents=True)
    finished.write_text(json.dumps({"settings": scales.runs_of(section, {})["k2/beta1-seed0.json"]}))
    scales.main(["plan", "--section", "gpu_short", "--params", str(params)])
    out = capsys.readouterr().out
    assert "3 runs (k2, k3; seeds [0, 1]), 2 to do" in out
    assert "4 steps of 4 prompts x 2 completions, at most 5 tokens each: 160 tokens; 320 in all" in out  # 4·4·2·5
    timing = re.search(r"two timed steps of k2: ([\d.]+) s each, an evaluation ([\d.]+) s, peak ([\d.]+) GiB", out)
    assert timing and float(timing[3]) > 0.05 and "hours, one run at a time" in out


def test_memory_counts_what_the_models_have(section):
    """Against transformers' own count of the models with weights, and by hand."""
    s = training.DEFAULTS | next(iter(scales.runs_of(section, {}).values()))
    policy, ref, _ = training.models(s)
    parts = scales.memory(s)
    assert parts["policy: weights, gradients twice, AdamW"] == 20 * policy.num_parameters()
    assert parts["reference"] == 4 * ref.num_parameters()
    assert scales.memory(s | {"ref_dtype": "bfloat16"})["reference"] == 2 * ref.num_parameters()
    assert parts["logits of a part, seven times"] == 7 * 4 * 4 * 5 * 27  # 4 rows of 5 tokens of 27 kinds
    # keys and values: 8 rows of 5 + 640 tokens, one block of 8 numbers each; in bfloat16 the values are half as large
    assert parts["cache of the rollouts"] == 2 * 4 * 8 * 645 * 8
    assert scales.memory(s | {"dtype": "bfloat16"})["cache of the rollouts"] == (4 + 2) * 8 * 645 * 8
    width = policy.config.intermediate_size
    assert parts["prompts of the rollouts, in one block"] == 3 * 4 * 8 * 640 * width


def test_short_fits_its_time_and_publishes(params, tmp_path, monkeypatch, capsys):
    """Three runs of as many steps as fit by a stopped clock, to which the timed run took no time at all, a step 1 s and
    the rest of a run 2 s, one evaluation less than a run's three: 33 s are 3 · (8 + 2 + 1)."""
    monkeypatch.setattr(scales, "timed", lambda s: {"step": 1.0, "evaluation": 1.0, "rest": 2.0, "memory": 0})
    monkeypatch.setattr(scales.time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(scales, "commit_of", lambda code, root: "c" * 40)
    monkeypatch.setattr(scales.publish, "__defaults__", (tmp_path,))
    monkeypatch.setattr(paths, "BUILD", tmp_path / "build")
    scales.main(["short", "--section", "gpu_short", "--params", str(params), "--minutes", "0.55"])
    assert "gpu_short: 3 runs of 8 steps" in capsys.readouterr().out
    published = sorted(tmp_path.glob("published/gpu_short/*/*.json"))
    runs = ["k2/beta1-seed0.json", "k2/beta1-seed1.json", "k3/beta1-seed1.json"]
    assert [f"{f.parent.name}/{f.name}" for f in published] == runs
    for file in published:
        check(json.loads(file.read_text()))
        assert [e["step"] for e in json.loads(file.read_text())["evals"]] == [0, 4, 8]
    with pytest.raises(SystemExit, match="0.01 minutes are too few: 3 runs of at least 4 steps.*give more MINUTES"):
        scales.main(["short", "--section", "gpu_short", "--params", str(params), "--minutes", "0.01"])


def test_what_is_missing_is_one_clear_line(params, section, tmp_path, capsys):
    for changes, message in (
        ({"device": "cuda"}, "no CUDA GPU here .*run it on a machine that has one.*make smollm2"),
        ({"task": "math", "data_dir": str(tmp_path / "none")}, "no file .*train.jsonl: the data folder must hold"),
        ({"policy": "none/such"}, "no such folder, and a hub id needs revision"),
    ):
        changed = section | {"train": section["train"] | changes}
        params.write_text(json.dumps({"gpu_short": changed}))
        for what in ("plan", "short"):
            if what == "plan" and "device" in changes:  # says what it can without one
                scales.main([what, "--section", "gpu_short", "--params", str(params)])
                assert "GiB  in all, estimated\nno CUDA GPU here, so no timed steps" in capsys.readouterr().out
                continue
            with pytest.raises(SystemExit, match=f"^gpu_short: .*{message}") as error:
                scales.main([what, "--section", "gpu_short", "--params", str(params)])
            assert "\n" not in str(error.value)
        with pytest.raises(SystemExit, match=message):
            runs.main(["k2", "--params", str(params), "--section", "gpu_short", "-o", str(tmp_path / "out"),
                           "--processes", "1"])  # fmt: skip


def test_publish_keeps_runs_with_their_commit_and_only_once(section, tmp_path, capsys):
    """In a repository whose second commit has this code, and whose third changes it."""
    run = "smollm2/k2/beta1-seed0.json"
    source, target = tmp_path / "build/runs" / run, tmp_path / "published" / run
    source.parent.mkdir(parents=True)
    (tmp_path / "params.yaml").write_text(json.dumps({"smollm2": section}))
    runs.make(scales.runs_of(section, {})["k2/beta1-seed0.json"], source)
    git = ["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "klnb").mkdir()
    commits = []
    for extra in ("# older\n", "", "# newer\n"):
        for m in runs.CODE:
            text = (paths.ROOT / f"klnb/{m}.py").read_text()
            (tmp_path / f"klnb/{m}.py").write_text(text + extra)
        subprocess.run([*git, "add", "klnb"], check=True)
        subprocess.run([*git, "commit", "-qm", "code"], check=True)
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        commits.append(head.stdout.strip())
    scales.publish(tmp_path)
    record, made = (json.loads(f.read_text()) for f in (target, source))
    assert record["commit"] == commits[1] and capsys.readouterr().out == f"published published/{run}\n"
    check(record)
    norms = (r["steps"]["gradient_norm"] for r in (record, made))
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in zip(*norms))
    assert scales.done("k2/beta1-seed0.json", made["settings"], tmp_path / "published/smollm2")
    scales.publish(tmp_path)
    source.write_text(target.read_text())  # as a clone that took it from there
    scales.publish(tmp_path)
    assert capsys.readouterr().out == ""
    for bad, message in (
        (made | {"made": made["made"] | {"code": "unknown"}}, "no commit has the code that made this run .* commit it"),
        (made | {"evals": [{"step": 4, "kl": [float("nan"), 0.0]}]}, "not JSON compliant"),
    ):
        source.write_text(json.dumps(bad))
        target.unlink(missing_ok=True)
        with pytest.raises(ValueError, match=f"^{run}: .*{message}"):
            scales.publish(tmp_path)
        assert not target.exists()
    source.write_text(json.dumps(made | {"settings": made["settings"] | {"lr": 1.0}}))
    scales.publish(tmp_path)
    assert capsys.readouterr().out == f"{run}: other settings than in params.yaml, left out\n"


def check(record):
    """What a published run must say of itself."""
    assert re.fullmatch("[0-9a-f]{40}", record["commit"])
    assert {"code", "parameters", "torch", "transformers"} <= record["made"].keys()
    assert record["made"]["parameters"] == runs.digest(record["settings"])
    s = training.DEFAULTS | record["settings"]
    assert s["device"] and s["dtype"] and "data_dir" not in record["settings"]
    for model in record["used"]["models"].values():
        assert model["source"] and (s["task"] != "math" or "sha256" in model or "revision" in model)
    assert re.fullmatch("[0-9a-f]{64}", record["used"]["problems"])
    assert [e["step"] for e in record["evals"]][-1] == s["steps"] == len(record["steps"]["gradient_norm"])


PUBLISHED = sorted(f for scale in scales.SCALES for f in (paths.PUBLISHED / scale).glob("*/*.json"))


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda f: str(f.relative_to(paths.PUBLISHED)))
def test_published_runs_say_what_they_were_made_with(file):
    record = json.loads(file.read_text())
    check(record)
    assert file.parent.name == record["settings"]["name"]
    assert file.name == f"beta{record['settings']['beta']:g}-seed{record['settings']['seed']}.json"
    log = subprocess.run(["git", "cat-file", "-t", record["commit"]], cwd=paths.ROOT, capture_output=True, text=True)
    assert log.stdout == "commit\n" or not (paths.ROOT / ".git").exists()


def test_no_stage_of_the_pipeline_needs_a_scale():
    text = (paths.ROOT / "dvc.yaml").read_text()
    assert not re.search(r"(results|build/runs)/(smollm2|gpu)", text)
