"""Twenty-six faults of a rollout stack, by somebody who had not read the check.

    python benchmarks/planted_outside.py [--engine transformers|vllm] [--pretrained] [--only NAME ...] [--json PATH]

The author knew vLLM, SGLang, transformers and how post-training stacks break, and had read the request for such
a list (which names some kinds), but neither `offdrift.check`, its page, nor the faults of `planted.py` when this
list was written and committed. Faults and sizes are as they were then. The measure of "named" was changed before the
first run, from words of the answer to the stricter one of `planted.py`, the module.

Each fault is a function of a directory that holds a copy of the trainer's checkpoint. It spoils the copy that the
rollout engine will read, and returns what has to be given to the engine besides (empty for most). The trainer keeps
the clean checkpoint: SmolLM2-135M with --pretrained (4 responses), else its 30 layers half as wide with random
weights (16), or the tiny mixture of experts of `planted.py`; responses of 16 tokens in float32.
What only a server reads (tokenizer, template, `generation_config.json`, its own options) is planted into vLLM's server
with --engine vllm --pretrained; for transformers, prompts are rendered by the faulty tokenizer, and what it does not
read is left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import planted
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.check import BUNDLED, check, encoded
from offdrift.models import load_model
from offdrift.records.provenance import Sampling

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outside:
    """A fault: the model it lives in, what it breaks, what happened, and parts of the module's name or of the rule of
    which one has to be named."""

    name: str
    model: str
    kind: str
    story: str
    at: tuple[str, ...]
    plant: Callable[[Path], Mapping[str, object]]


FAULTS: dict[str, Outside] = {}
"""Every fault, by its name."""


def _fault(model: str, kind: str, story: str, *at: str):
    def keep(plant: Callable[[Path], Mapping[str, object] | None]):
        name = plant.__name__
        FAULTS[name] = Outside(name, model, kind, story, at, lambda folder: plant(folder) or {})
        return plant

    return keep


# --------------------------------------------------------------------------------------------- the tools


def _weights(folder: Path, edit: Callable[[State], None]) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        state = load_file(file)
        edit(state)
        file.unlink()  # it may be a link to the right weights
        save_file({name: value.contiguous() for name, value in state.items()}, file, metadata={"format": "pt"})


def _json(folder: Path, file: str, **changes: object) -> None:
    path = folder / file
    content = json.loads(path.read_text()) if path.exists() else {}
    content.update(changes)
    path.write_text(json.dumps(content, indent=1))


def _older(name: str, value: torch.Tensor, share: float) -> torch.Tensor:
    """The tensor some steps ago: moved by `share` of its root mean square, the same way on every call."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    noise = torch.randn(value.shape, generator=generator)
    return (value.float() + share * value.float().square().mean().sqrt() * noise).to(value.dtype)


def _layer(name: str) -> int:
    return int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else -1


def _update(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
    def edit(state: State) -> None:
        for name in list(state):
            changed = change(name, state[name])
            if changed is not None:
                state[name] = changed

    _weights(folder, edit)


# --------------------------------------------------------------------------------------------- weights


@_fault("smollm2", "weights", "a bucket of the weight transfer never arrived: layers 20 to 24 are older", "layers.20")
def bucket_lost(folder: Path):
    _update(folder, lambda name, value: _older(name, value, 0.01) if 20 <= _layer(name) <= 24 else None)


@_fault("smollm2", "weights", "the whole policy is some steps old, 1 % of the root mean square", "embed")
def policy_behind(folder: Path):
    _update(folder, lambda name, value: _older(name, value, 0.01))


@_fault("smollm2", "weights", "q and k kept in the interleaved order of rotary pairs", "layers.0.self_attn")
def rope_layout(folder: Path):
    size = json.loads((folder / "config.json").read_text())["hidden_size"] // 9

    def change(name: str, value: torch.Tensor):
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return None
        heads = value.view(-1, 2, size // 2, value.shape[1])
        return heads.transpose(1, 2).reshape(value.shape)

    _update(folder, change)


@_fault("smollm2", "weights", "heads of keys and values gathered from ranks in a rotated order", "layers.0.self_attn")
def kv_heads_rotated(folder: Path):
    def change(name: str, value: torch.Tensor):
        if not name.endswith(("k_proj.weight", "v_proj.weight")):
            return None
        return value.view(3, -1, value.shape[1]).roll(1, 0).reshape(value.shape)

    _update(folder, change)


@_fault(
    "smollm2", "weights", "half the columns of one down projection are zero: one rank's shard lost", "layers.17.mlp"
)
def shard_zero(folder: Path):
    def change(name: str, value: torch.Tensor):
        if _layer(name) != 17 or not name.endswith("down_proj.weight"):
            return None
        value = value.clone()
        value[:, value.shape[1] // 2 :] = 0
        return value

    _update(folder, change)


@_fault("smollm2", "weights", "the square output projection of one layer is transposed", "layers.12.self_attn")
def square_transposed(folder: Path):
    _update(
        folder,
        lambda name, value: value.T.clone() if _layer(name) == 12 and name.endswith("o_proj.weight") else None,
    )


@_fault("smollm2", "weights", "every matrix went through float8 e4m3, one scale for each", "layers.0.self_attn")
def float8_transfer(folder: Path):
    def change(name: str, value: torch.Tensor):
        if not name.endswith("proj.weight"):
            return None
        scale = value.abs().max() / 448
        return ((value / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).to(value.dtype)

    _update(folder, change)


@_fault("smollm2", "weights", "an adapter's half for the MLP was not merged (rank 8, 3 %)", "layers.0.mlp")
def adapter_half_merged(folder: Path):
    def change(name: str, value: torch.Tensor):
        if not name.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight")):
            return None
        generator = torch.Generator().manual_seed(sum(name.encode()))
        left = torch.randn(value.shape[0], 8, generator=generator)
        right = torch.randn(8, value.shape[1], generator=generator)
        delta = left @ right
        delta *= 0.03 * value.float().square().mean().sqrt() / delta.square().mean().sqrt()
        return (value.float() - delta).to(value.dtype)

    _update(folder, change)


@_fault(
    "smollm2",
    "weights",
    "one norm is back at its initial value of 1: its group was not sent",
    "layers.3.post_attention",
)
def norm_reset(folder: Path):
    _update(
        folder,
        lambda name, value: (
            torch.ones_like(value) if _layer(name) == 3 and "post_attention_layernorm" in name else None
        ),
    )


@_fault("smollm2", "weights", "two neighbouring layers exchanged at a border of pipeline stages", "layers.14")
def layers_exchanged(folder: Path):
    def edit(state: State) -> None:
        for name in [name for name in state if _layer(name) == 14]:
            other = name.replace(".layers.14.", ".layers.15.")
            state[name], state[other] = state[other], state[name]

    _weights(folder, edit)


@_fault("smollm2", "weights", "rows of special tokens made anew by a resize of the embedding", "embed")
def special_rows_new(folder: Path):
    def change(name: str, value: torch.Tensor):
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return None
        value = value.clone()
        value[:17] = value.float().mean(0).to(value.dtype)
        return value

    _update(folder, change)


@_fault("smollm2", "weights", "the head was stored beside the embedding, 2 % older, and is read", "lm_head")
def head_untied(folder: Path):
    def edit(state: State) -> None:
        embedding = state["model.embed_tokens.weight"]
        state["lm_head.weight"] = _older("lm_head.weight", embedding, 0.02)

    _weights(folder, edit)
    _json(folder, "config.json", tie_word_embeddings=False)


# --------------------------------------------------------------------------------------------- config


def _rope(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    rope = dict(config.get("rope_parameters") or {"rope_type": "default"}) | changes
    config.pop("rope_scaling", None)
    config["rope_parameters"] = rope
    if "rope_theta" in changes:
        config["rope_theta"] = changes["rope_theta"]
    (folder / "config.json").write_text(json.dumps(config, indent=1))


@_fault("smollm2", "config", "a recipe for long context left YaRN with factor 4 on", "rotary", "layers.0.self_attn")
def yarn_left_on(folder: Path):
    _rope(folder, rope_type="yarn", factor=4.0, original_max_position_embeddings=2048)


@_fault(
    "smollm2",
    "config",
    "the rotary base was lost in a conversion: the default of 10000",
    "rotary",
    "layers.0.self_attn",
)
def rope_field_lost(folder: Path):
    _rope(folder, rope_theta=10000.0)


@_fault("smollm2", "config", "served as Mistral with a sliding window of 32", "layers.0.self_attn")
def window_on(folder: Path):
    _json(
        folder,
        "config.json",
        model_type="mistral",
        architectures=["MistralForCausalLM"],
        sliding_window=32,
    )


@_fault("smollm2", "config", "the activation is GELU where the trainer has SiLU", "layers.0.mlp")
def activation_other(folder: Path):
    _json(folder, "config.json", hidden_act="gelu")


# --------------------------------------------------------------------------------------------- mixture of experts


@_fault("moe", "config", "the weights of the chosen experts are not made to sum to 1", "layers.0.mlp")
def topk_not_normed(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    _json(folder, "config.json", norm_topk_prob=not config.get("norm_topk_prob", False))


@_fault("moe", "config", "half the experts for each token, to be faster", "layers.0.mlp")
def fewer_experts(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    _json(folder, "config.json", num_experts_per_tok=max(1, config["num_experts_per_tok"] // 2))


@_fault("moe", "weights", "experts of one layer stand one place on: ranks numbered otherwise", "layers.1.mlp")
def experts_rotated(folder: Path):
    def edit(state: State) -> None:
        found = {name: value for name, value in state.items() if _layer(name) == 1 and ".experts." in name}
        numbers = sorted({int(name.split(".experts.")[1].split(".")[0]) for name in found})
        for name, value in found.items():
            number = int(name.split(".experts.")[1].split(".")[0])
            following = numbers[(numbers.index(number) + 1) % len(numbers)]
            state[name.replace(f".experts.{number}.", f".experts.{following}.")] = value

    _weights(folder, edit)


@_fault("moe", "weights", "routers are frozen in the engine, 5 % older than the trainer's", "layers.0.mlp")
def routers_stale(folder: Path):
    _update(folder, lambda name, value: _older(name, value, 0.05) if name.endswith("mlp.gate.weight") else None)


# --------------------------------------------------------------------------------------------- tokenizer and template


@_fault("smollm2 chat", "tokenizer", "the tokenizer puts a space before every text", "elsewhere", "server_prompt")
def prefix_space(folder: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    text = json.dumps(tokenizer).replace('"add_prefix_space": false', '"add_prefix_space": true')
    (folder / "tokenizer.json").write_text(text)
    _json(folder, "tokenizer_config.json", add_prefix_space=True)


@_fault("smollm2 chat", "tokenizer", "a chat template without the default system prompt", "elsewhere", "server_prompt")
def template_bare(folder: Path):
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
        "+ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    _json(folder, "tokenizer_config.json", chat_template=template)


# --------------------------------------------------------------------------------------------- sampling


@_fault(
    "smollm2", "sampling", "generation_config.json holds a repetition penalty of 1.1", "elsewhere", "generation_config"
)
def repetition_penalty(folder: Path):
    _json(folder, "generation_config.json", repetition_penalty=1.1, do_sample=True)


@_fault("smollm2 chat", "sampling", "a line break counts as the end of a text", "generation_config", "ends_differ")
def newline_ends(folder: Path):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    newline = tokenizer["model"]["vocab"]["\u010a"]
    _json(folder, "generation_config.json", eos_token_id=[2, newline])


# --------------------------------------------------------------------------------------------- options of the engine


@_fault("smollm2", "launch", "quantisation is still on from another run", "layers.0.self_attn", "quanti")
def quantisation_on(folder: Path):
    return {"quantization": "fp8_per_channel"}


@_fault(
    "smollm2", "launch", "log-probs are asked in the mode that gives logits", "broken_record", "misaligned", "logits"
)
def logits_reported(folder: Path):
    return {"logprobs_mode": "raw_logits"}


# --------------------------------------------------------------------------------------------- the run

SERVER = (
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16", "--max-logprobs", "20",
    "--kv-cache-memory-bytes", str(128 * 2**20), "--logits-processors", "offdrift.engines.vllm.forced:Forced",
)  # fmt: skip
"""Options of vLLM's server. `--generation-config` is left at its default: the checkpoint's file counts."""
FEW = 4
"""Responses that the pretrained model draws."""
ONLY_SERVED = ("tokenizer", "sampling")
"""Kinds of faults that tokens and sampling given by a caller go around: vLLM's server is asked about them."""
SLOW = ("quantisation_on",)
"""Faults that vLLM is not asked about: a CPU multiplies float8 by hand, and takes over 9 CPU minutes."""
SERVER_OPTIONS = {"logits_reported": ("--logprobs-mode", "raw_logits")}


@cache
def subject(name: str) -> planted.Subject:
    """A right model by its name: "smollm2" behind bare texts, "smollm2 chat" in its template, "narrow", or "moe"."""
    if name == "moe":
        return planted.Subject(planted.models()["moe"], planted.tiny_tokenizer(), planted.prompts())
    if name == "narrow":
        ids = [[4 + (7 * i + 3 * j) % 60 for j in range(20 + i)] for i in range(planted.COUNT)]
        return planted.Subject(narrow(), planted.tiny_tokenizer(), ids)
    model, tokenizer = smollm2()
    ids = encoded(BUNDLED[:FEW], tokenizer, vocab_size=model.config.vocab_size, chat=name.endswith("chat"))
    return planted.Subject(model, tokenizer, ids, context=256)


@cache
def smollm2() -> tuple[Any, Any]:
    """The pretrained model and its tokenizer, loaded once."""
    return load_model("smollm2-135m", seed=0)


def narrow() -> LlamaForCausalLM:
    """SmolLM2's 30 layers, 9 and 3 heads, half as wide, over 64 tokens, with random weights.

    Half, not less: where a processor has AMX, vLLM's attention takes heads of 32 numbers and more.
    """
    sizes = planted.SIZES | {"hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 30, "head_dim": 32}
    sizes |= {"initializer_range": 0.06}  # thirty layers of the tiny models' 0.2 amplify rounding
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192}
    rope = {"rope_type": "default", "rope_theta": 100000.0}
    config = LlamaConfig(**sizes, rope_parameters=rope, rms_norm_eps=1e-5, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for name, weight in model.named_parameters():
            if "norm" in name:  # as after training
                weight.data += 0.3 * torch.randn(weight.shape)
    return model.eval()


def rendered(folder: list[str]) -> Callable[..., Any]:
    """A server that renders the prompts with the tokenizer of its own folder."""

    def serves(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(folder[0])
        ids = encoded(BUNDLED[: len(prompts)], tokenizer, vocab_size=engine.vocab_size)
        return engine.generate(ids, sampling, **options)

    return serves


def newline_stops(engine: Any, prompts: list[list[int]], sampling: Sampling, options: dict[str, Any]) -> Any:
    """Responses end at a line break."""
    return engine.generate(prompts, replace(sampling, stop_token_ids=(198,)), **options)


def as_fault(outside: Outside, llama: str) -> planted.Fault:
    """The fault as the harness takes it, for an engine in this process; `llama` is the model for SmolLM2's."""
    serves, where = None, [""]
    if outside.kind == "tokenizer":
        serves = rendered(where)
    if outside.name == "newline_ends":
        serves = newline_stops

    def plant(folder: Path) -> Mapping[str, Any]:
        where[0] = str(folder)
        return outside.plant(folder)

    family = {"smollm2": llama}.get(outside.model, outside.model)
    # vLLM multiplies weights in float8 with activations in half precision alone.
    dtype = "bfloat16" if outside.name == "quantisation_on" else "float32"
    return planted.Fault(outside.name, family, plant=plant, serves=serves, at=outside.at, dtype=dtype)


def at_server(outside: Outside | None) -> dict[str, Any]:
    """One row: what the check of a real vLLM server on the faulty folder says; None: nothing is planted."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests.engines.serving import serving

    name = "none (server)" if outside is None else outside.name
    fault = planted.Fault(name, "smollm2 chat", at=() if outside is None else outside.at)
    started, right = time.process_time(), subject("smollm2 chat")
    with tempfile.TemporaryDirectory(prefix="planted-") as made:
        folder = Path(made) / "checkpoint"
        planted.planted(fault, right, folder)
        if outside is not None:
            outside.plant(folder)
        flags = (*SERVER, *SERVER_OPTIONS.get(name, ()))
        with serving(str(folder), Path(made), *flags) as url:

            def measured() -> dict[str, Any]:
                model, asked = copy.deepcopy(right.model), Sampling(planted.LENGTH, stop_token_ids=(2,))
                with Bench(model, right.tokenizer, right.prompts, sampling=asked, name="smollm2") as bench:
                    spec = EngineSpec.parse(f"vllm-server:{url},dtype=float32")
                    return check(bench, spec, EngineSpec("transformers", "float32"), noise=False)

            row = planted.attempted(fault, measured)
    return (
        {"fault": name, "family": "smollm2 chat", "engine": "vllm"} | row | {"seconds": time.process_time() - started}
    )


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Plant every fault, and print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of faults' names")
    parser.add_argument("--pretrained", action="store_true", help="SmolLM2-135M itself, and what its server reads")
    parser.add_argument("--json", type=Path, help="rows of this commit that are stored there are not run again")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    disable_progress_bar()
    order = planned(options.engine, options.pretrained)
    command = f"python benchmarks/planted_outside.py --engine {options.engine}"
    command += " --pretrained" if options.pretrained else ""
    rows, held = [], planted.measured_now(options.json)
    for name in order:
        if name in held or not any(part in name for part in options.only):
            continue
        rows.append(measured_row(name, options.engine, options.pretrained))
        planted.show(rows[-1])
        if options.json:  # an interrupted run keeps what it measured
            planted.stored(list(rows), options.engine, order, options.json, command=command)
    return planted.stored(rows, options.engine, order, options.json, command=command)


def planned(engine: str, pretrained: bool) -> list[str]:
    """Names of the rows of a run: right models first.

    With `pretrained`, faults of SmolLM2 and of its server; else of its narrow copy and the mixture of experts, and in
    transformers those of a server that it can play.
    """
    if pretrained:
        server = ["none (server)"] if engine == "vllm" else []
        names = [name for name, fault in FAULTS.items() if fault.model != "moe" and (server or not at_servers(fault))]
        return ["none (smollm2)", *server, *_quick(names, engine)]
    names = [name for name, fault in FAULTS.items() if not (at_servers(fault) if engine == "vllm" else unread(fault))]
    names = _quick(names, engine)
    return ["none (narrow)", "none (moe)", *names]


def _quick(names: list[str], engine: str) -> list[str]:
    """The names without those that take vLLM too long."""
    return [name for name in names if engine != "vllm" or name not in SLOW]


def at_servers(outside: Outside) -> bool:
    """Whether only vLLM's server reads what the fault is in."""
    return outside.kind in ONLY_SERVED or outside.name in SERVER_OPTIONS


def unread(outside: Outside) -> bool:
    """Whether the engine of transformers does not read what the fault is in."""
    return outside.name == "repetition_penalty" or outside.name in SERVER_OPTIONS


def measured_row(name: str, engine: str, pretrained: bool) -> dict[str, Any]:
    """One row of the table, by its name."""
    if name not in FAULTS:
        family = name.partition("(")[2].rstrip(")")
        return (
            at_server(None)
            if family == "server"
            else planted.caught(planted.Fault(name, family), subject(family), engine)
        )
    outside = FAULTS[name]
    if engine == "vllm" and at_servers(outside):
        row = at_server(outside)
    else:
        fault = as_fault(outside, "smollm2" if pretrained else "narrow")
        row = planted.caught(fault, subject(fault.family), engine)
    return row | {"story": outside.story}


if __name__ == "__main__":
    main()
