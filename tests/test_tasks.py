r"""Problems, answers, prompts and rewards. The verifier is tested with what hangs or kills it."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256

import pytest
import torch

from klnb import tasks, verifier
from klnb.paths import ROOT


@pytest.mark.parametrize(
    "text, want",
    [
        (r"so \boxed{5}.", "5"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}} done", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x > 0\right.}", r"\left\{x \mid x > 0\right."),  # an escaped brace with no partner
        (r"\boxed{a\\{b}}", r"a\\{b}"),  # an escaped backslash does not escape the brace after it
        (r"$\boxed 5$.", "5"),
        (r"$\boxed 12 = x$", "12"),
        (r"\boxed {7}", "7"),
        (r"\fbox{8}", "8"),
        (r"\fbox{8} \boxed{9}", "9"),
        (r"\boxed{9} \fbox{8}", "8"),
        ("\\boxed{ 3\n}", "3"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed{}", ""),
        (r"\boxedsomething{5}", None),
        ("no answer", None),
        ("", None),
        (r"\boxed{1} and \boxed{2", None),  # cut in the last box: no answer, and not the one before
        (r"\boxed{1} and \boxed", None),
    ],
)
def test_last_boxed(text, want):
    assert tasks.last_boxed(text) == want


RECORDS = [
    {"id": "algebra/1", "problem": r"Find $x$. Write \boxed{9}.", "level": "Level 1", "type": "Algebra",
     "solution": r"So \boxed{\frac{1}{2}}"},
    {"id": "geometry/7", "problem": "Area?", "level": "Level 5", "type": "Geometry", "solution": r"\boxed 2$"},
    {"id": "algebra/3", "problem": "Sum?", "level": "Level ?", "type": "Algebra", "solution": r"\boxed{8+4i}"},
]  # fmt: skip


@pytest.fixture
def data_dir(tmp_path):
    for split, records in (("train", RECORDS), ("test", RECORDS[:1])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps({**r, "extra": 1}) + "\n" for r in records))
    return tmp_path


def test_math_records_of_a_folder(data_dir):
    assert tasks.math_records("train", data_dir=data_dir) == RECORDS
    assert tasks.math_records("test", data_dir=str(data_dir)) == RECORDS[:1]
    assert tasks.math_records("train", data_dir=data_dir, levels=[5, 1]) == RECORDS[:2]
    assert [tasks.answer(r) for r in RECORDS] == [r"\frac{1}{2}", "2", "8+4i"]
    with pytest.raises(ValueError, match="no MATH problem"):
        tasks.math_records("train", data_dir=data_dir, levels=[3])
    with pytest.raises(ValueError, match="split: expected"):
        tasks.math_records("validation", data_dir=data_dir)


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"id": "a/1"', "train.jsonl, line 2"),
        (json.dumps({k: v for k, v in RECORDS[0].items() if k != "level"}), "line 2: .*level is missing"),
        (json.dumps({**RECORDS[0], "solution": 5}), "line 2: .*solution is missing or no text"),
        (
            json.dumps({**RECORDS[0], "solution": r"\boxed{5"}),
            r"line 2: problem algebra/1: its solution has no \\boxed",
        ),
        ("[1]", "line 2: a record needs"),
    ],
)
def test_a_bad_record_is_named(data_dir, line, message):
    (data_dir / "train.jsonl").write_text(json.dumps(RECORDS[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        tasks.math_records("train", data_dir=data_dir)
    assert "\n" not in str(error.value)


def test_missing_data_is_one_line_with_the_ways_out(tmp_path, monkeypatch):
    with pytest.raises(OSError, match="train.jsonl and test.jsonl"):
        tasks.math_records("train", data_dir=tmp_path)

    def offline(*_, revision, **__):
        assert re.fullmatch("[0-9a-f]{40}", revision)
        raise ConnectionError("many\nlines")

    import datasets

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(OSError) as error:
        tasks.math_records("train")
    text = str(error.value)
    assert "\n" not in text and "ConnectionError" in text and "DATA_DIR=path/to/math" in text and "arithmetic" in text


def test_math_records_of_the_hub_are_read_by_subject(monkeypatch):
    rows = [{"problem": "p", "level": "Level 2", "type": "T", "solution": r"\boxed{1}"}] * 2
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", lambda name, subject, split, revision: rows)
    records = tasks.math_records("test")
    assert len(records) == 14 and records[3] == {"id": "counting_and_probability/1", **rows[0]}


def test_arithmetic_is_right_step_by_step():
    r"""Problem "Compute $347+ 58-126$.": the rows 743, +850, =504, -621, =972 read from the units on, then the box."""
    records = tasks.arithmetic(300)
    for record in records:
        expression = re.fullmatch(r"Compute \$(\d{3}|( \d\d))([+-](\d{3}| \d\d)){2}\$\.", record["problem"])
        terms = [int(t.replace(" ", "")) for t in re.findall(r"[+-]? *\d+", expression.group()[9:])]
        a, b, c, d, e, last = record["solution"].split("\n")
        assert [int(x[::-1]) for x in (a, b[1:], c[1:], d[1:], e[1:])] == [
            terms[0], abs(terms[1]), sum(terms[:2]), abs(terms[2]), sum(terms),
        ]  # fmt: skip
        assert b[0] == "+-"[terms[1] < 0] and d[0] == "+-"[terms[2] < 0] and c[0] == e[0] == "="
        assert last == rf"\boxed{{{sum(terms)}}}" and 100 <= sum(terms[:2]) < 1000 and 100 <= sum(terms) < 1000
        assert record["level"] == "Level 1" and record.keys() == set(tasks.FIELDS)
        assert tasks.answer(record) == str(sum(terms))
    tokenizer = tasks.arithmetic_tokenizer()
    assert {len(tokenizer(tasks.prompt(r, tokenizer))["input_ids"]) for r in records} == {15}
    assert {len(tokenizer(r["solution"], add_special_tokens=False)["input_ids"]) for r in records} == {24}
    assert any(" " in r["problem"][9:] for r in records)
    assert len({r["problem"] for r in records}) == len({r["id"] for r in records}) == 300
    first = [int(re.search(r"\d+", r["problem"]).group()) for r in records]
    assert min(first) < 20 and max(first) > 900  # both lengths, over their range
    assert any("-" in r["problem"] for r in records) and any("+" in r["problem"] for r in records)


def test_arithmetic_is_a_function_of_its_arguments():
    before = torch.get_rng_state()
    problems = {
        key: [r["problem"] for r in tasks.arithmetic(200, split=key[0], seed=key[1])]
        for key in (("train", 0), ("train", 1), ("test", 0))
    }
    assert torch.equal(before, torch.get_rng_state())
    assert problems["train", 0] == [r["problem"] for r in tasks.arithmetic(200)]
    assert problems["train", 0][:50] == [r["problem"] for r in tasks.arithmetic(50)]
    assert problems["train", 0] != problems["train", 1]


def test_arithmetic_splits_are_disjoint():
    """By the rule: a problem is for testing where the first byte of its sha256 divides by 10, one in ten or so."""
    seen = {key: {r["problem"] for r in tasks.arithmetic(300, split=key[0], seed=key[1])}
            for key in itertools.product(("train", "test"), (0, 1))}  # fmt: skip
    for (split, _), problems in seen.items():
        assert all((sha256(p.encode()).digest()[0] % 10 == 0) == (split == "test") for p in problems)
    assert not (seen["train", 0] | seen["train", 1]) & (seen["test", 0] | seen["test", 1])


def test_tokenizer_of_arithmetic(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = tasks.arithmetic_tokenizer()
    record = tasks.arithmetic(1)[0]
    text = tasks.prompt(record, tokenizer) + record["solution"]
    assert text.startswith(record["problem"] + "\n")
    ids = tokenizer(text + tokenizer.eos_token)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.unk_token_id not in ids and tokenizer.unk_token_id in tokenizer("x")["input_ids"]
    specials = {tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}
    assert len(specials) == 4 and len(tokenizer) == 27
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text)["input_ids"] == ids[:-1] and again.decode(ids) == tokenizer.decode(ids)
    assert (again.pad_token_id, again.bos_token_id, again.eos_token_id) == (0, 1, 2) and again.chat_template is None


def test_prompt_with_a_chat_template_asks_for_the_box():
    tokenizer = tasks.arithmetic_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    text = tasks.prompt(RECORDS[1], tokenizer)
    assert text.startswith("<user>Area?") and r"\boxed{}" in text and text.endswith("<assistant>")


# --- rewards


@pytest.fixture(scope="module", autouse=True)
def no_worker_outlives_the_tests():
    yield
    tasks.verifier().close()
    tasks.verifier(2.0, 2).close()


def test_rewards_of_completions():
    half, two, i = RECORDS
    cases = [
        (r"Clearly \boxed{0.5}", half, 1),
        (r"\boxed{\dfrac{2}{4}}", half, 1),
        (r"\boxed{0.5} no, \boxed{9}", half, 0),  # the last one counts; 9 is what the prompt's box holds
        ("0.5", half, 0),
        ("", half, 0),
        (r"\boxed{}", half, 0),
        (r"\boxed{0.5", half, 0),
        (r"\boxed{2}", two, 1),
        (r"\boxed{-2}", two, 0),
        (r"\boxed{4i+8}", i, 1),
        (r"\boxed{8-4i}", i, 0),
        ("\\boxed{}} \u2603 \\boxed{{\\", i, 0),
    ]
    got = tasks.rewards([text for text, _, _ in cases], [record for _, record, _ in cases])
    assert got.dtype == torch.float32 and got.tolist() == [float(want) for _, _, want in cases]
    with pytest.raises(ValueError, match="1 completions for 2 records"):
        tasks.rewards(["x"], RECORDS[:2])


def test_arithmetic_is_rewarded_exactly():
    """Each answer against its own and 17 shifted problems: right where, and only where, the integers are equal."""
    records = tasks.arithmetic(60)
    for shift in (0, *range(1, 18)):
        texts = [records[(i + shift) % 60]["solution"] for i in range(60)]
        want = [float(int(tasks.last_boxed(t)) == int(tasks.answer(r))) for t, r in zip(texts, records)]
        assert tasks.rewards(texts, records).tolist() == want
    assert want.count(0.0) > 40


HANGS = "9^{9^{9^{9}}}"


def test_a_hang_costs_its_own_reward_only():
    before = dict(tasks.verifier(2.0, 2).counts)
    texts = [r"\boxed{0.5}", rf"\boxed{{{HANGS}}}", r"\boxed{1/2}", rf"\boxed{{{HANGS}}}", r"\boxed{0.5}"]
    got = tasks.rewards(texts, [RECORDS[0]] * 5, timeout=2.0)
    assert got.tolist() == [1, 0, 1, 0, 1]
    counts = tasks.verifier(2.0, 2).counts
    assert counts["timeout"] - before["timeout"] == 2 and counts["asked"] - before["asked"] == 5
    assert tasks.rewards(texts[:1], RECORDS[:1], timeout=2.0).tolist() == [1]  # the new workers answer


def processes(check):
    """The workers at rest (each is taken from the queue and put back)."""
    found = [check.idle.get() for _ in range(check.size)]
    for worker in found:
        check.idle.put(worker)
    return found


@pytest.fixture
def check():
    made = verifier.Verifier(timeout=3.0, workers=1)
    yield made
    made.close()
    assert processes(made) == [None]


def test_workers_that_die_are_replaced(check):
    assert check(["1", "2"], ["1", "3"]) == [True, False]
    (worker,) = processes(check)
    worker.kill()
    worker.wait()
    assert check(["4"], ["4"]) == [True]  # died while idle: nothing is lost
    threading.Timer(0.5, processes(check)[0].kill).start()
    assert check(["1", "5"], [HANGS, "5"]) == [False, True]  # killed at work, as for lack of memory
    assert check.counts == {"asked": 5, "timeout": 0, "error": 1}


def test_after_an_interrupt_the_next_answers_are_right(check):
    assert check(["1"], ["1"]) == [True]
    (worker,) = processes(check)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # what ctrl-C does to this process
    try:
        with pytest.raises(KeyboardInterrupt):
            check(["7"] * 2, [HANGS] * 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert check(["1", "2"], ["2", "2"]) == [False, True]
    assert worker.returncode is not None  # ended and waited for: no zombie


def test_workers_end_with_a_parent_that_is_killed():
    """The parent is killed while one worker waits and one hangs; both are gone within the time limit and a margin."""
    script = (
        "from klnb.verifier import Verifier\n"
        "v = Verifier(timeout=3, workers=2)\n"
        "v(['1', '2'], ['1', '2'])\n"
        "workers = [v.idle.get() for _ in '12']\n"
        "[v.idle.put(w) for w in workers]\n"
        "print(*[w.pid for w in workers], flush=True)\n"
        f"v(['1'], ['{HANGS}'])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        time.sleep(0.5)
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"  # one that init has not yet collected has ended
    except FileNotFoundError:
        return False


def test_rewards_work_from_a_thread_and_workers_import_no_torch():
    got = []
    thread = threading.Thread(target=lambda: got.append(tasks.rewards([r"\boxed{0.5}"], RECORDS[:1]).item()))
    thread.start()
    thread.join()
    assert got == [1.0]
    for worker in processes(tasks.verifier()):
        if worker is not None and sys.platform == "linux":
            with open(f"/proc/{worker.pid}/maps") as maps:
                assert "libtorch" not in maps.read()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_rewards_work_in_a_forked_process():
    assert tasks.rewards([r"\boxed{0.5}"], RECORDS[:1]).tolist() == [1.0]  # the parent has workers and threads
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(tasks.rewards, ([r"\boxed{0.5}"], RECORDS[:1])).tolist() == [1.0]
