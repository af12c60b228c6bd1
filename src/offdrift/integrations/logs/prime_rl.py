"""prime-rl's token exports (`trainer.enable_token_export = true`).

One line per sequence, prompt and response together; `trainer_logprobs[i]` and `inference_logprobs[i]`
are both the log-prob of token i. Non-finite numbers were written as null.
Source: prime-rl 559b447, src/prime_rl/trainer/rl/token_export.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.integrations.logs.rows import Row
from offdrift.integrations.logs.source import Source

COLUMNS = {
    "logp_rollout": "inference_logprobs",
    "logp": "trainer_logprobs",
    "tokens": "token_ids",
    "mask": "loss_mask",
    "advantages": "advantages",
    "entropy": "entropy",
    "step": "step",
}


def adapt(row: Mapping[str, Any]) -> Row:
    """From the first token that trains on, everything is the response."""
    begin = first_trained(row["loss_mask"])
    found = {
        name: cut(row.get(column), begin, None)
        for name, column in COLUMNS.items()
        if name != "step"
    }
    tokens = row.get("token_ids")
    group = None if tokens is None else prompt_id(tokens[:begin])
    return {**found, "step": row.get("step"), "group_id": group}


def first_trained(mask: list[Any]) -> int:
    """Index of the first token that trains; the token at 0 has no context, so it is none."""
    try:
        return mask.index(1, 1)
    except ValueError:
        return len(mask)


def cut(values: Any, begin: int, end: int | None) -> Any:
    """Part of a list; None stays None."""
    return None if values is None else values[begin:end]


def prompt_id(tokens: Any) -> str:
    """What equal prompts share."""
    return str(tokens.tolist() if hasattr(tokens, "tolist") else tokens)


PRIME_RL = Source(
    "prime-rl",
    "prime-rl",
    "prime-rl's token exports",
    "the keys inference_logprobs and trainer_logprobs",
    columns=COLUMNS,
    adapt=adapt,
    step_in_name=r"(?:^|/)step_(\d+)/",
)
