r"""Problems, prompts and rewards. Every problem is a record in the format of MATH (Hendrycks et al., arXiv 2103.03874):
a dict of the strings id, problem, level ("Level 1" … "Level 5"), type, solution, the answer in the solution's last
\boxed{}. `arithmetic` makes such records where no data set can be had, with a tokenizer for small models.
"""

import atexit
import json
import os
import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from klnb.stats import generator
from klnb.verifier import Verifier

FIELDS = ("id", "problem", "level", "type", "solution")
HUB = ("EleutherAI/hendrycks_math", "21a5633873b6a120296cce3e2df9d5550074f4a3")
SUBJECTS = "algebra counting_and_probability geometry intermediate_algebra number_theory prealgebra precalculus".split()


def math_records(split: str, *, data_dir=None, levels: Sequence[int] | None = None) -> list:
    """MATH's records, 7,500 of split "train" or 5,000 of "test", in the order of their source.

    From data_dir/train.jsonl or test.jsonl (one JSON record a line), else the hub's copy at a pinned revision (there,
    id is subject/row number). The order is by subject: choose at random for a mixture. levels: keep these, 1 to 5.

    Raises: ValueError for an unknown split, for a record that lacks a field or whose solution has no box (naming file
    and line), and if no record is left; OSError, one line with the ways out, if the data cannot be reached.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
    records = _local(Path(data_dir).expanduser() / f"{split}.jsonl") if data_dir else _hub(split)
    if levels is not None:
        wanted = {f"Level {level}" for level in levels}
        records = [r for r in records if r["level"] in wanted]
    if not records:
        raise ValueError(f"no MATH problem of split {split!r} has a level among {levels}")
    return records


def _local(file):
    if not file.is_file():
        raise OSError(f"no file {file}: the data folder must hold train.jsonl and test.jsonl, one MATH record a line")
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            records.append(_checked(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{file.name}, line {number}: {error}") from None
    return records


def _hub(split):
    try:
        from datasets import load_dataset

        parts = [(s, load_dataset(HUB[0], s, split=split, revision=HUB[1])) for s in SUBJECTS]
    except Exception as error:
        raise OSError(
            f"cannot get MATH ({HUB[0]}) from the hub ({type(error).__name__}). Two ways out: DATA_DIR=path/to/math "
            "(data_dir=...), a folder with train.jsonl and test.jsonl, or the project's own problems, tasks.arithmetic"
        ) from None
    return [_checked({**row, "id": f"{subject}/{i}"}) for subject, rows in parts for i, row in enumerate(rows)]


def _checked(record):
    for field in FIELDS:
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise ValueError(f"a record needs the text fields {', '.join(FIELDS)}; {field} is missing or no text")
    answer(record)
    return {field: record[field] for field in FIELDS}


def arithmetic(n: int, *, split: str = "train", seed: int = 0) -> list:
    r"""n different sums of three numbers in MATH's format, worked in columns, the answer boxed.

    The sums stand one under the other, as small models learn them in minutes: problem "Compute $347+ 58-126$.",
    solution "743\n+850\n=504\n-621\n=972\n\boxed{279}", each row from its units digit on, filled up with zeros.
    Operands have two or three digits, sums three. Small digits are common, 10 times the square of a uniform number:
    with digits all alike, a sum's digit says nothing about one operand's, and small models are slow to find out where
    to look.

    The same arguments give the same records. A problem belongs to split "train" or "test" (one in ten) by a hash of its
    text, so that the two never share one, whatever the seeds.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
    source, found = generator(seed, f"arithmetic/{split}"), {}
    while len(found) < n:
        terms = [_term(*u) for u in torch.rand(3, 6, generator=source, dtype=torch.float64).tolist()]
        terms[0] = abs(terms[0])
        if not all(100 <= total < 1000 for total in (sum(terms[:2]), sum(terms))):
            continue
        problem = f"Compute ${terms[0]:3d}" + "".join(f"{'+-'[t < 0]}{abs(t):3d}" for t in terms[1:]) + "$."
        if (sha256(problem.encode()).digest()[0] % 10 == 0) == (split == "test"):
            found[problem] = terms
    records = []
    for i, (problem, terms) in enumerate(found.items()):
        rows = [_turned(terms[0])]
        for k in (1, 2):
            rows += ["+-"[terms[k] < 0] + _turned(terms[k]), "=" + _turned(sum(terms[: k + 1]))]
        solution = "\n".join([*rows, rf"\boxed{{{sum(terms)}}}"])
        records.append({"id": f"arithmetic/{split}/{seed}/{i}", "problem": problem, "level": "Level 1",
                        "type": "Arithmetic", "solution": solution})  # fmt: skip
    return records


def _term(sign, length, first, *rest):
    """Of shares of their ranges: the sign, two or three digits, the first digit, which is not 0, and the others."""
    digits = [int(1 + 9 * first**2), *(int(10 * x**2) for x in rest[: 1 + int(2 * length)])]
    return (1 if sign < 0.5 else -1) * int("".join(map(str, digits)))


def _turned(x):
    return str(abs(x))[::-1].ljust(3, "0")


def arithmetic_tokenizer():
    r"""A tokenizer for `arithmetic`: digits and signs one by one, "Compute $", "$." and a new line with what follows
    it, a sign or "\boxed{", whole; 27 tokens.

    bos (put before a prompt by `models.encode`), eos and pad are three different tokens; no chat template. Save it
    with the model: `save_pretrained(folder)` of both is what `models.load(folder)` reads.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words += ["\n\\boxed{", "\n+", "\n-", "\n=", "\n", "Compute $", "$.", "\\boxed{", "}"]  # longest first
    words += " +-=0123456789"
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    pattern = Regex("|".join(map(re.escape, words[4:])))
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def last_boxed(text: str) -> str | None:
    r"""The content of the last \boxed or \fbox of a text, or None: of a completion's text alone, never the prompt's.

    Braces may nest, and \{ and \} are no braces. "\boxed 5$" gives "5" (up to a space or $). None if the last box is
    not closed: a completion that is cut there gave no answer.
    """
    found = list(re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", text))
    if not found:
        return None
    start = found[-1].end()
    if text[start : start + 1] != "{":
        return re.match(r"[^\s$]*", text[start:]).group() or None
    depth = 0
    for token in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return text[start + 1 : start + token.start()].strip()
    return None


def answer(record: dict) -> str:
    """The record's gold answer, as LaTeX. ValueError if its solution has no closed box."""
    if (boxed := last_boxed(record["solution"])) is None:
        raise ValueError(rf"problem {record['id']}: its solution has no \boxed{{}}")
    return boxed


def prompt(record: dict, tokenizer) -> str:
    r"""The text that the model continues, for `models.encode`.

    With a chat template: one user message, the problem and the request to box the answer, and the assistant's turn
    opened. Without: the problem and a newline, as `arithmetic` solutions follow it in training. If the record has
    "examples" (other records): a plain text of them with their boxed answers, for models that follow no request.
    """
    if examples := record.get("examples"):
        shown = "".join(f"Problem: {r['problem']}\nAnswer: $\\boxed{{{answer(r)}}}$\n\n" for r in examples)
        return f"{shown}Problem: {record['problem']}\nAnswer:"
    if not tokenizer.chat_template:
        return record["problem"] + "\n"
    request = record["problem"] + "\n\n" + r"Reason step by step, and put your final answer within \boxed{}."
    message = [{"role": "user", "content": request}]
    return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)


def verifier(timeout: float | int = 5.0, workers: int = 2) -> Verifier:
    """The workers behind `rewards` with these settings; `.counts` says how many answers ran out of time or failed."""
    return _verifier(timeout, workers, os.getpid())


@cache
def _verifier(timeout, workers, process):  # a forked process has none of its parent's threads, and makes its own
    made = Verifier(timeout, workers)
    atexit.register(made.close)
    return made


def rewards(
    completions: Sequence[str], records: Sequence[dict], *, timeout: float | int = 5.0, workers: int = 2
) -> Float[Tensor, " B"]:
    """1 where a completion's last box equals its record's answer by math-verify, else 0; float32 [B], no gradient.

    completions: decoded texts without the prompt. An answer that math-verify cannot compare within `timeout` seconds
    gets 0 and is counted in `verifier(timeout, workers).counts`. Not evaluated in this process: see klnb/verifier.py.
    ValueError unless there is one record for each completion.
    """
    if len(completions) != len(records):
        raise ValueError(f"{len(completions)} completions for {len(records)} records: expected one record for each")
    boxed = [last_boxed(text) for text in completions]
    given = [i for i, text in enumerate(boxed) if text]
    scores = torch.zeros(len(boxed))
    if given:
        right = verifier(timeout, workers)([answer(records[i]) for i in given], [boxed[i] for i in given])
        scores[given] = torch.tensor(right, dtype=torch.float32)
    return scores
