"""Every kind of log that is known, and which one a file is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from offdrift.records.readers.formats.base import Source
from offdrift.records.readers.formats.nemo_rl import NEMO_RL
from offdrift.records.readers.formats.open_instruct import OPEN_INSTRUCT
from offdrift.records.readers.formats.plain import (
    AREAL,
    OWN,
    OWN_ROLLOUTS,
    PLAIN,
    TRL,
    VERL,
    VERL_VALIDATION,
)
from offdrift.records.readers.formats.prime_rl import PRIME_RL, PRIME_RL_TRACES
from offdrift.records.readers.formats.skyrl import SKYRL
from offdrift.records.readers.formats.slime import (
    MILES_COLUMNS,
    MILES_ROLLOUT,
    MILES_TRAIN,
    SLIME_ROLLOUT,
    SLIME_TRAIN,
)
from offdrift.records.schema import DIVERGENCES, LOGPS

SOURCES = (
    PRIME_RL, NEMO_RL, SLIME_TRAIN, MILES_TRAIN, SKYRL, OWN, OWN_ROLLOUTS, PLAIN, SLIME_ROLLOUT, MILES_ROLLOUT,
    MILES_COLUMNS, PRIME_RL_TRACES, OPEN_INSTRUCT, TRL, AREAL, VERL, VERL_VALIDATION,
)  # fmt: skip
"""In this order: where a folder holds several that say the same, the first is read."""

KEYS: Mapping[str, frozenset[str]] = {
    "prime-rl": frozenset({"inference_logprobs", "trainer_logprobs", "loss_mask"}),
    "nemo-rl": frozenset({"generation_logprobs", "prev_logprobs", "input_lengths"}),
    "open-instruct": frozenset({"prompt_tokens", "response_tokens", "finish_reason"}),
    "miles-columns": frozenset({"sample_index", "total_length", "tokens", "rollout_log_probs"}),
    "trl": frozenset({"step", "prompt", "completion", "advantage"}),
    "areal": frozenset({"task_id", "head_version", "tail_version"}),
    "prime-rl-traces": frozenset({"env", "task", "ok", "traces"}),
    "verl": frozenset({"input", "output", "score", "step"}),
    "verl-validation": frozenset({"input", "output", "score", "step", "reward"}),
}
"""Names that give a log of rows away."""

WITHOUT: Mapping[str, frozenset[str]] = {"verl-validation": frozenset({"request_id"})}
"""Names that it does not have."""

SAYING = {*LOGPS, *(f.column for f in DIVERGENCES), "completion"}
"""Of the plain schema, a log of sequences has one of these; rewards alone are a table of metrics."""


def rank(source: Source, columns: Collection[str]) -> tuple[int, int]:
    """Which log to read where there are several: the smallest, the one that says most.

    Args:
        source: what kind of log it is.
        columns: fields that it has.
    """
    both = "logp_rollout" in columns and ("logp" in columns or "logp_old" in columns)
    return -(both + ("logp_rollout" in columns)), SOURCES.index(source)


def source(format: str) -> Source:
    """The kind of log with this format."""
    return next(s for s in SOURCES if s.format == format)


def source_of(names: Collection[str]) -> Source | None:
    """The kind of log whose rows have these names; None if it is not known."""
    there = set(names)
    fit = [
        s
        for s in SOURCES
        if there >= KEYS.get(s.format, {""}) and not there & WITHOUT.get(s.format, frozenset())
    ]
    if fit:
        return max(fit, key=lambda s: len(KEYS[s.format]))
    return PLAIN if SAYING & set(PLAIN.resolve(there, {})) else None
