"""Questions to a server that tokens and settings given by a check go around: prompts, defaults, ends, and its folder.

A check sends token ids and every sampling setting, so a chat template, a tokenizer or a `generation_config.json` that
is not the trainer's leaves no trace in what it draws. The requests of a framework that sends texts, or leaves settings
open, are drawn with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.declared import compare_folder, folder_findings, folder_of
from offdrift.check.ends import ends_of, served_ends
from offdrift.check.equality import attempted
from offdrift.check.finding import act_finding
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.errors import NotOfferedError
from offdrift.judge import Evidence, Finding

TEXTS = 4
"""Texts that the server renders, and prompts of the check that it answers with its defaults."""
TOKENS = 32
"""Longest of those answers."""
MARGIN = 6
"""Tokens shown from the first that differs on."""
REFUTED = "The framework sends token ids and every sampling setting."


def server_side(
    bench: Bench, rollout: EngineSpec, texts: Sequence[str], ours: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Prompts that the server renders, responses to requests that leave settings open, ends, and the folder it opened.

    Args:
        texts, ours: prompts, and what the trainer's tokenizer makes of each, in its chat template where it has one.

    Returns: `prompts`: None if the server does not render, or `same`, and the first text with both renderings;
        `defaults`: `repeats` (the same request gave the same tokens), `neutral`, and the first token that differs;
        `ends`: see `served_ends`; `folder`: see `compare_folder`, None if it is not on this machine.

    Raises: `NotOfferedError` for an engine that is not a server; `EngineError` if it cannot be asked.
    """
    engine = bench.engine(rollout)
    if not isinstance(engine, OpenAIEngine):
        raise NotOfferedError("only a server renders prompts and has defaults")
    folder = folder_of(engine)
    return {
        "prompts": compare_prompts(bench, engine, texts, ours),
        "defaults": compare_defaults(bench, engine),
        "ends": served_ends(engine, bench.prompts[0], bench.model, bench.tokenizer),
        "folder": None if folder is None else attempted(compare_folder, bench, folder),
    }


def compare_prompts(
    bench: Bench, engine: OpenAIEngine, texts: Sequence[str], ours: Sequence[Sequence[int]]
) -> dict[str, Any] | None:
    """Compare the server's renderings of texts with those of the trainer's tokenizer."""
    chat = bool(getattr(bench.tokenizer, "chat_template", None))
    for text, here in zip(texts, ours, strict=True):
        there = engine.rendered(text, chat=chat)
        if there is None:
            return None
        if there != here:
            at = _first(here, there)
            parts = {"trainer": here[at : at + MARGIN], "server": there[at : at + MARGIN]}
            words = {side: bench.tokenizer.decode(ids) for side, ids in parts.items()}
            return {"same": False, "chat": chat, "text": text, "at": at, **words}
    return {"same": True, "chat": chat}


def compare_defaults(bench: Bench, engine: OpenAIEngine) -> dict[str, Any]:
    """Compare responses with every setting given, twice, and with all of them left open."""
    ends = {*bench.sampling.stop_token_ids, *ends_of(bench.model, bench.tokenizer)}
    repeats = True
    for index, prompt in enumerate(bench.prompts[:TEXTS]):
        length = min(TOKENS, bench.sampling.max_tokens)
        stated, again, left_open = (
            engine.answered(prompt, tokens=length, seed=bench.seed + index, settings=settings)
            for settings in (True, True, False)
        )
        repeats &= stated == again
        at = _first(stated, left_open)
        early = at == len(left_open) < len(stated)
        if repeats and (at < len(left_open) or (early and left_open[-1] not in ends)):
            return {"repeats": True, "neutral": False, "prompt": index, "at": at, "early": early}
    return {"repeats": repeats, "neutral": repeats or None}


def _first(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place at which two sequences differ, or the length of the shorter."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))


def server_findings(found: Mapping[str, Any]) -> list[Finding]:
    """Findings about a folder that is not the trainer's, prompts that the server renders otherwise, and defaults that
    change what is drawn."""
    findings = folder_findings(found.get("folder") or {})
    prompts, defaults = found.get("prompts") or {}, found.get("defaults") or {}
    if prompts.get("same") is False:
        what = "chat template or tokenizer" if prompts["chat"] else "tokenizer"
        findings.append(
            act_finding(
                "server_prompt",
                "inputs_differ",
                f"The server renders prompts otherwise than the trainer's tokenizer, from token {prompts['at']} on: "
                f"{prompts['server']!r} where the trainer has {prompts['trainer']!r}.",
                Evidence("first prompt token that differs", float(prompts["at"]), ">=", 0.0, source="/tokenize"),
                explanation=f"Its {what} is another. The tokens of this check were sent as ids, a framework that sends "
                "texts draws behind other prompts than it trains on.",
                fix=f"Serve the trainer's {what}, or send token ids.",
                refuted_by=REFUTED,
            )
        )
    if defaults.get("neutral") is False:
        how = "ends early" if defaults["early"] else "has other tokens"
        findings.append(
            act_finding(
                "server_defaults",
                "open_settings",
                f"A request that leaves sampling settings open {how} from token {defaults['at']} on, at the same seed.",
                Evidence(
                    "first token that differs", float(defaults["at"]), ">=", 0.0, source="two requests of one seed"
                ),
                explanation="The server fills what is left open from the checkpoint's generation_config.json "
                "(temperature, top-k, top-p, repetition penalty, ends) or from its own options, and log-probs do not "
                "show it.",
                fix="Start vLLM with --generation-config vllm (SGLang: --sampling-defaults openai), or send every "
                "setting.",
                refuted_by=REFUTED,
            )
        )
    return findings
