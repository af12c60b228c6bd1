"""A small log of a run that went wrong, for a first audit: the engine never received an update and said that it did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from offdrift.records.atomic import write_atomically

VOCABULARY, CONTEXTS, TOKENS = 48, 64, 40
STEPS, SEQUENCES, GROUP = 16, 24, 4
UPDATE = 0.03
"""Change of the logits in one update, standard deviation."""
ROUNDING = 0.03
"""Difference of the engine's logits at equal weights, standard deviation: about 5e-4 nat per token, as of bfloat16."""


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def demo_rows(*, seed: int = 0, repaired: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the log, one a response.

    The policy is a table of next-token logits. Every response is drawn from the weights before the first update,
    while `rollout_version` says that each update had arrived; the trainer's log-probs are those of the updated weights.
    `repaired`, each update does arrive.

    Example:
        >>> rows = demo_rows()
        >>> len(rows), sorted(rows[-1])
        (384, ['group_id', 'logp_old', 'logp_rollout', 'reward', 'rollout_version', 'step', 'version'])
        >>> rows[-1]["version"] == rows[-1]["rollout_version"] == 15
        True
    """
    generator = np.random.default_rng(seed)
    start = 2.0 * generator.standard_normal((CONTEXTS, VOCABULARY))
    direction, rounding = generator.standard_normal((2, CONTEXTS, VOCABULARY))
    rows = []
    for step in range(STEPS):
        updated = start + step * UPDATE * direction
        trainer, engine = _log_softmax(updated), _log_softmax((updated if repaired else start) + ROUNDING * rounding)
        context = np.repeat(generator.integers(0, CONTEXTS, SEQUENCES // GROUP), GROUP)
        contexts, tokens = [], []
        for _ in range(TOKENS):
            below = np.exp(engine[context]).cumsum(-1) < generator.random((SEQUENCES, 1))
            token = np.minimum(below.sum(-1), VOCABULARY - 1)
            contexts.append(context)
            tokens.append(token)
            context = (7 * context + 13 * token + 1) % CONTEXTS
        at, drawn = np.stack(contexts, 1), np.stack(tokens, 1)
        rows += [
            {
                "step": step,
                "version": step,
                "rollout_version": step,
                "group_id": i // GROUP,
                "reward": float(drawn[i].mean() > VOCABULARY / 2),
                "logp_rollout": engine[at[i], drawn[i]].round(5).tolist(),
                "logp_old": trainer[at[i], drawn[i]].round(5).tolist(),
            }
            for i in range(SEQUENCES)
        ]
    return rows


def write_demo(folder: Path, *, repaired: bool = False) -> Path:
    """Write `log.jsonl` into a folder, which is made; return the file.

    Raises: `RecordError` if it cannot be written.
    """
    path = folder / "log.jsonl"
    text = "".join(f"{json.dumps(row)}\n" for row in demo_rows(repaired=repaired))
    write_atomically(path, lambda tmp: Path(tmp).write_text(text, encoding="utf-8"))
    return path
