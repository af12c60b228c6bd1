"""Tokens that end a response: the trainer's, and whether an engine ends there, only there, or elsewhere.

Log-probs do not show where a response ends. A record does: a response that is shorter than asked for stopped at its
last token, and one that goes on behind an end did not stop there. A server can also be asked: it draws from a single
allowed token, and either stops or goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offdrift.check.finding import act_finding
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.judge import Evidence, Finding
from offdrift.records.rollouts import Rollouts

CANDIDATES = 48
"""Tokens that a server is asked about, at most."""
BREAKS = ("\n", "\n\n", "\r\n", " ")
"""Texts that a stop string or a wrong id makes an end of."""


def ends_of(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's, and those of the checkpoint's generation_config.json.

    Example:
        >>> from types import SimpleNamespace as N
        >>> ends_of(N(generation_config=N(eos_token_id=[7, 2])), N(eos_token_id=2))
        (2, 7)
    """
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [named] if isinstance(named, int) else [*(named or ())]
    return tuple(sorted({i for i in (*ids, getattr(tokenizer, "eos_token_id", None)) if isinstance(i, int)}))


def recorded_ends(rollouts: Rollouts) -> dict[str, Any]:
    """Ends of a record's responses, against the stop tokens that were asked for.

    Returns: `early`: responses that are shorter than asked for and end with no stop token; `beyond`: those that go on
        behind one; and of the first such response its number `sequence`, the `place` and the `token` there.
    """
    asked, limit = rollouts.provenance.sampling.stop_token_ids, rollouts.provenance.sampling.max_tokens
    counts: dict[str, Any] = {"early": 0, "beyond": 0}
    for number, part in enumerate(rollouts.tokens.split(rollouts.lengths.tolist())):
        tokens = part.tolist()
        inside = next((i for i, token in enumerate(tokens[:-1]) if token in asked), None)
        early = 0 < len(tokens) < limit and tokens[-1] not in asked
        counts["early"] += early
        counts["beyond"] += inside is not None
        if (early or inside is not None) and "sequence" not in counts:
            place = len(tokens) - 1 if inside is None else inside
            counts |= {"sequence": number, "place": place, "token": tokens[place]}
    return counts


def candidates_of(tokenizer: Any, ends: Sequence[int]) -> list[int]:
    """Tokens that a server may take for an end: the trainer's, the special ones, and breaks of lines."""
    special = [i for i in getattr(tokenizer, "all_special_ids", ()) if isinstance(i, int)]
    added = sorted(getattr(tokenizer, "added_tokens_decoder", {}))
    encoded = (tokenizer.encode(text, add_special_tokens=False) for text in BREAKS)
    single = [ids[0] for ids in encoded if len(ids) == 1]
    return list(dict.fromkeys([*ends, *single, *special, *added]))[:CANDIDATES]


def served_ends(engine: OpenAIEngine, prompt: Sequence[int], model: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Compare the tokens at which a server ends a response that leaves its settings open with the trainer's.

    A token of the trainer's generation_config.json at which the server goes on is no difference: it ignores that file
    where it was told to, and the tokenizer's own end is left.

    Returns: `asked`, how many tokens it was asked about; `extra`, ends of the server alone; `missing`, the tokenizer's
        end where the server goes on; None if the server cannot be asked.
    """
    ends = ends_of(model, tokenizer)
    last = getattr(tokenizer, "eos_token_id", None)
    tried = [i for i in candidates_of(tokenizer, ends) if 0 <= i < engine.vocab_size]
    ended = engine.ends(prompt, tried)
    if ended is None:
        return None
    return {
        "asked": len(tried),
        "extra": [i for i, end in zip(tried, ended, strict=True) if end and i not in ends],
        "missing": [i for i, end in zip(tried, ended, strict=True) if not end and i == last],
    }


def end_findings(recorded: Mapping[str, Any], served: Mapping[str, Any] | None, tokenizer: Any) -> list[Finding]:
    """Findings that an engine ends responses elsewhere than the trainer, by its record or by its answers."""
    places = {
        "ends a response at": (recorded.get("early"), recorded.get("token"), "responses that end there"),
        "goes on behind": (recorded.get("beyond"), recorded.get("token"), "responses that go on"),
    }
    if recorded.get("early") and recorded.get("beyond"):  # one token was noted, of the first of both
        places.pop("goes on behind")
    extra, missing = ((served or {}).get(name) or () for name in ("extra", "missing"))
    if extra:
        places["ends a response at"] = (len(extra), extra[0], "tokens at which it ends")
    if missing:
        places["goes on behind"] = (len(missing), missing[0], "ends at which it goes on")
    return [
        act_finding(
            "ends_differ",
            "open_settings",
            f"The rollout engine {does} token {token} ({tokenizer.decode([token])!r}), the trainer does not.",
            Evidence(metric, float(count), ">", 0.0, source="the record, or one token allowed"),
            explanation="A stop token, a stop string or the checkpoint's generation_config.json ends texts on one side "
            "alone. Log-probs agree all the same; lengths, rewards and the tokens that are trained on do not.",
            fix="Give the engine the trainer's ends: its stop_token_ids, or one generation_config.json for both.",
            refuted_by="The same prompt ends at the same token on both sides.",
        )
        for does, (count, token, metric) in places.items()
        if count and token is not None
    ]
