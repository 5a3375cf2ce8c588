"""benchmarks/trl_step.py on a tiny model: it runs, and counts the work of both sides as its docstring says."""

import json
import sys

import torch

from klnb import paths

sys.path.insert(0, str(paths.ROOT / "benchmarks"))
import trl_step


def test_the_work_of_both_sides(tmp_path, capsys):
    """2 prompts of 3 tokens x 4 completions of 4, so 8 rows; the last token of a row never needs a pass.

    Blocks: ours 2·3 + 8·(4 − 1) = 30 in all three; TRL's rollout 8·(3 + 4 − 1) = 48, its passes over whole rows
    8·(3 + 4) = 56. Vocabulary: ours one position a prompt and one for each later token, 2 + 8·3 = 26; TRL's rollout
    one for each token, 8·4 = 32, its passes all positions but the last, 8·(3 + 4 − 1) = 48. Ours with prompts that are
    not shared: 8·(3 + 4 − 1) = 48 tokens and 8·4 = 32 positions.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                pad_token_id=0, eos_token_id=1, bos_token_id=None,
            )
        )  # fmt: skip
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / "model")
        problem = {"level": "Level 1", "type": "Algebra", "solution": "\\boxed{1}"}
        lines = [json.dumps(problem | {"id": str(i), "problem": f"a b {w}"}) for i, w in enumerate("cdefgh")]
        (tmp_path / "train.jsonl").write_text("\n".join(lines) + "\n")
        trl_step.main(["--data-dir", str(tmp_path), "--model", str(tmp_path / "model"), "--layers", "1", "--steps", "1",
                       "--prompts", "2", "--tokens", "4", "--threads", str(torch.get_num_threads())])  # fmt: skip
    out = capsys.readouterr().out
    counts = [line.split()[-4:] for line in out.splitlines() if line.split()[-5:-4] in (["tokens"], ["positions"])]
    expected = [[48, 30, 30, 48], [56, 30, 30, 48], [56, 30, 30, 48]]  # blocks: rollout, reference, policy
    expected += [[32, 26, 26, 32], [48, 26, 26, 32], [48, 26, 26, 32]]
    assert [[int(n) for n in row] for row in counts] == expected, out
