"""What the KL terms of libraries follow, with the pinned libraries installed: `make test-audit`, failing without."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import sys
import warnings

import pytest
import torch

from klnb import AuditError, audit, paths

sys.path.insert(0, str(paths.ROOT / "examples"))
with warnings.catch_warnings():  # theirs, when they are imported
    warnings.simplefilter("ignore")
    import audit_libraries as libraries
    import liger_kernel.chunked_loss  # noqa: F401
    import torchrl.objectives.llm  # noqa: F401
    import trl
    import trl.trainer.distillation_trainer
    from trl_kl import KLTrainer

PUBLISHED = json.loads((paths.PUBLISHED / "audit.json").read_text())


def names(term):
    return f"{term.library}: {term.option}"


def test_the_pinned_versions_are_the_installed_and_the_published_ones():
    assert {n: importlib.metadata.version(n) for n in libraries.PINS} == libraries.PINS
    assert PUBLISHED["provenance"]["versions"] | libraries.PINS == PUBLISHED["provenance"]["versions"]


@pytest.mark.parametrize("term", [t for t in libraries.TERMS if t.source == "package"], ids=names)
def test_package(term):
    report = libraries.run(term)
    assert (libraries.label(report, "on-policy"), libraries.label(report, "off-policy")) == (term.on, term.off)
    (published,) = [r for r in PUBLISHED["rows"] if names(libraries.SimpleNamespace(**r)) == names(term)]
    assert published == libraries.row(term, report)  # digit by digit


def test_the_defaults_that_the_page_states():
    default = {f.name: f.default for f in dataclasses.fields(trl.GRPOConfig)}
    assert default["beta"] == 0.0 and default["use_bias_correction_kl"] is True and default["loss_type"] == "dapo"
    assert default["importance_sampling_level"] == "token"
    assert {f.name: f.default for f in dataclasses.fields(trl.RLOOConfig)}["beta"] == 0.05
    assert {f.name: f.default for f in dataclasses.fields(trl.DistillationConfig)}["beta"] == 1.0


# ---- the recipe
def recipe(trainer=lambda: KLTrainer, **attributes):
    return libraries.trl_grpo(True, trainer, **attributes)()


def test_recipe_follows_the_kl_of_sequences_on_and_off_policy():
    report = audit(recipe(), expect="R_seq", off_policy=True)
    assert all(r["coefficients"] == {"R_seq": 1} for r in report.rows)


def test_recipe_scales_with_beta_and_accumulation():
    report = audit(recipe(beta=0.3, current_gradient_accumulation_steps=2), expect="R_seq")
    assert all(r["coefficient"] == pytest.approx(0.15) for r in report.rows)


def test_the_trainer_it_replaces_does_not_follow_it():
    with pytest.raises(AuditError):
        audit(recipe(lambda: trl.GRPOTrainer), expect="R_seq")


def test_recipe_keeps_the_policy_loss_and_skips_rows_that_are_masked_out():
    """With beta 0 the loss is GRPOTrainer's; a row without tokens neither breaks the loss nor counts."""
    generator = torch.Generator().manual_seed(0)
    logp, ref, old = (-torch.rand(4, 5, dtype=torch.float64, generator=generator) - 0.1 for _ in range(3))
    mask = torch.ones(4, 5, dtype=torch.float64)
    inputs = libraries._inputs(logp, ref, mask, old) | {"advantages": torch.tensor([1.0, -1.0, 0.5, 2.0]).double()}

    def loss(trainer, beta, inputs, rows=slice(None)):
        stub = libraries._stub(trainer, trl.GRPOTrainer, trl.GRPOConfig, logp[rows].clone().requires_grad_(), beta=beta)
        return stub._compute_loss(stub.model, {k: v[rows] if v.ndim else v for k, v in inputs.items()})

    assert torch.equal(loss(KLTrainer, 0.0, inputs), loss(trl.GRPOTrainer, 0.0, inputs))
    inputs["completion_mask"] = mask * torch.tensor([1.0, 1.0, 1.0, 0.0]).double()[:, None]
    kl = loss(KLTrainer, 1.0, inputs) - loss(KLTrainer, 0.0, inputs)
    three = loss(KLTrainer, 1.0, inputs, slice(3)) - loss(KLTrainer, 0.0, inputs, slice(3))
    torch.testing.assert_close(kl * 4, three * 3)  # the mean over 4 rows of a sum over 3


def test_recipe_is_short():
    lines = (paths.ROOT / "examples/trl_kl.py").read_text().split("\nclass ")[1].split("\n")
    assert len([line for line in lines if line.strip()]) <= 25


def test_recipe_trains(tmp_path):
    """Two rollouts of a tiny model, each used for two updates: finite, moved, old log-probs with reused rollouts."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    torch.manual_seed(0)  # the trainer is somebody else's: it uses the global generator
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    for part in (model, tokenizer):  # the trainer loads the reference from where the policy came from
        part.save_pretrained(tmp_path / "model")
    seen = []

    class Watched(KLTrainer):
        def _compute_loss(self, model, inputs):
            seen.append(inputs.get("old_per_token_logps") is not None)
            return super()._compute_loss(model, inputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = trl.GRPOConfig(
            output_dir=str(tmp_path), beta=0.1, num_iterations=2, max_steps=4, per_device_train_batch_size=4,
            num_generations=4, max_completion_length=6, learning_rate=1e-2, use_cpu=True, bf16=False, report_to=[],
            save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        )  # fmt: skip
        trainer = Watched(
            model=str(tmp_path / "model"), args=args, processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [float(c.count("a")) for c in completions],
            train_dataset=Dataset.from_list([{"prompt": "a b c"}, {"prompt": "d e f"}] * 4),
        )  # fmt: skip
        result = trainer.train()
    trained = dict(trainer.model.named_parameters())
    assert all(torch.isfinite(p).all() for p in trained.values()) and result.global_step == 4
    assert any(not torch.equal(p, start[n]) for n, p in trained.items())
    assert seen == [True] * 4
