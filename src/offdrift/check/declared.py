"""Settings that a rollout engine declares and the trainer does not share: quantization, and the folder that it opened.

A quantized engine is another policy at equal weights, whatever the size of the difference. And a server names the
folder that it opened: where that can be read on this machine, its config.json and generation_config.json stand beside
the trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offdrift.check.bench import Bench
from offdrift.check.finding import act_finding
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.judge import Evidence, Finding
from offdrift.models import stored_configs

LARGEST = 2**20
"""Bytes of a config.json that is read."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "eos_token_id")
"""Entries of generation_config.json that a server applies to what a request leaves open."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), (None, 1, 1.0)),
    "top_k": (None, 0, -1),
    "min_p": (None, 0, 0.0),
    "max_new_tokens": (None,),
}
"""Values that change nothing."""
ASIDE = {
    *("_name_or_path", "name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "id2label", "label2id", "output_attentions", "return_dict"),
    *("output_hidden_states", "output_router_logits", "router_aux_loss_coef", "initializer_range", "problem_type"),
    *("chunk_size_feed_forward", "pretraining_tp", "is_encoder_decoder", "quantization_config", "attention_dropout"),
}
"""Entries of config.json that change no number of a forward pass, or are compared on their own."""
SHOWN = 4
"""Entries that a finding names."""


def quantization_of(model: Any) -> str | None:
    """The method by which a model's checkpoint is quantized, as its config.json names it."""
    return _method(getattr(getattr(model, "config", None), "quantization_config", None))


def folder_of(engine: Any) -> Path | None:
    """The folder that a server says it opened, if it lies on this machine and holds a config.json."""
    root = engine.served.root if isinstance(engine, OpenAIEngine) else ""
    folder = Path(root)
    if not (root and folder.is_absolute() and (folder / "config.json").is_file()):
        return None
    return folder if (folder / "config.json").stat().st_size <= LARGEST else None


def compare_folder(bench: Bench, folder: Path) -> dict[str, Any]:
    """Compare a served folder with the trainer's model.

    Both configurations are read by the same version of transformers, so that entries which it renames agree.

    Returns: `quantization`, the served folder's; `config` and `generation`, entries that differ, each with the values
        of `trainer` and `server`; `not_neutral`, entries of generation_config.json that change what is drawn.
    """
    theirs, served = stored_configs(folder)
    ours: Any = bench.model.config
    entries, stored = _flat(ours.to_dict()), _flat(theirs)
    config = {
        name: {"trainer": entries.get(name), "server": stored.get(name)}  # one that is absent on a side is its None
        for name in dict.fromkeys([*entries, *stored])
        if entries.get(name) != stored.get(name)
    }
    configured = getattr(bench.model, "generation_config", None)
    trainer = {} if configured is None else configured.to_dict()
    generation = {
        name: {"trainer": trainer.get(name), "server": served.get(name)}
        for name in SAMPLING
        if _meant(name, trainer.get(name), ours) != _meant(name, served.get(name), ours)
    }
    loud = {name: served[name] for name in SAMPLING if name in NEUTRAL and served.get(name) not in NEUTRAL[name]}
    return {
        "folder": str(folder),
        "quantization": _method(theirs.get("quantization_config")),
        "config": config,
        "generation": generation,
        "not_neutral": loud,
    }


def _method(stored: Any) -> str | None:
    """The method that a `quantization_config` names, a mapping or an object."""
    stored = stored if isinstance(stored, Mapping) or stored is None else vars(stored)
    return None if not stored else str(getattr(method := stored.get("quant_method"), "value", method))


def _meant(name: str, value: object, config: Any) -> object:
    """An entry by its effect: one of the values that change nothing is as good as none; ends are a set."""
    if name == "eos_token_id":
        value = getattr(config, "eos_token_id", None) if value is None else value
        return frozenset(value if isinstance(value, list | tuple) else [value]) - {None}
    return None if value in NEUTRAL[name] else value


def _flat(entries: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested entries by dotted names, without those that change no number."""
    flat: dict[str, Any] = {}
    for name, value in entries.items():
        if name in ASIDE or name.startswith("_"):
            continue
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat


def quantization_finding(declared: str | None, own: str | None) -> list[Finding]:
    """Finding that the rollout engine keeps numbers on a grid which the trainer does not have.

    Args:
        declared: the rollout engine's quantization of weights, or of its cache.
        own: that of the trainer's checkpoint.
    """
    if declared is None or (own is not None and "+" not in declared and declared.startswith(own)):
        return []  # vLLM calls gptq "gptq_marlin"
    return [
        act_finding(
            "quantization_differs",
            "quantized_rollouts",
            f"The rollout engine is quantized ({declared}), the trainer {'is not' if own is None else f'is {own}'}.",
            Evidence("quantized", 1.0, "=", 1.0, source="declared by the engine", scale="yes"),
            explanation="It is another policy at equal weights, not a noisy copy, and transformers has nothing that "
            "rounds alike, so that a fault of the weights could hide behind it.",
            fix="Start the engine without it; if it is meant, train with decoupled_token_is from the first step on, "
            "and check once without it.",
            refuted_by="Both sides declare the same grid.",
        )
    ]


def folder_findings(compared: Mapping[str, Any]) -> list[Finding]:
    """Findings about a served folder whose configuration or generation settings are not the trainer's."""
    findings = []
    for rule, entries, what, fix in (
        ("served_config", compared.get("config") or {}, "config.json", "Serve the trainer's config.json."),
        (
            "generation_config",
            compared.get("generation") or {},
            "generation_config.json",
            "Serve the trainer's generation_config.json, or send every setting with each request.",
        ),
    ):
        if entries:
            named = "; ".join(
                f"{name} {sides['server']} there, {sides['trainer']} in the trainer"
                for name, sides in list(entries.items())[:SHOWN]
            )
            more = f"; and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
            findings.append(
                act_finding(
                    rule,
                    "served_folder",
                    f"The server opened {compared['folder']}, whose {what} is another: {named[:400]}{more}.",
                    Evidence("entries that differ", float(len(entries)), ">", 0.0, source=what),
                    explanation="Its numbers, or what it draws where a request leaves settings open, follow that file.",
                    fix=fix,
                    refuted_by="The server ignores the file (vLLM: --generation-config vllm, --hf-overrides).",
                )
            )
    return findings
