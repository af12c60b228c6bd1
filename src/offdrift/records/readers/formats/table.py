"""Every kind of log that is known, and which one a file is."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from offdrift.records.readers.formats.base import Source
from offdrift.records.readers.formats.nemo_rl import NEMO_RL
from offdrift.records.readers.formats.open_instruct import OPEN_INSTRUCT
from offdrift.records.readers.formats.prime_rl import PRIME_RL, PRIME_RL_TRACES
from offdrift.records.readers.formats.skyrl import SKYRL
from offdrift.records.readers.formats.slime import MILES_COLUMNS, MILES_ROLLOUT, MILES_TRAIN, SLIME_ROLLOUT, SLIME_TRAIN
from offdrift.records.schema import DIVERGENCES, LOGPS

# The plain schema, and logs that are plain rows under other names: verl, TRL, AReaL.


PLAIN = Source("plain", "plain", "rows of the plain schema", "the names of the columns")

OWN = Source("plain", "offdrift", "this library's own log", "its header")

VERL = Source(
    "verl",
    "verl",
    "verl's rollout dump",
    "the keys input, output, score and step",
    columns={"prompt": "input", "completion": "output", "reward": "score"},
    step_in_name=r"(?:^|/)(\d+)\.jsonl",
    note="it holds texts and scores, no log-probs",
)

VERL_VALIDATION = Source(
    "verl-validation",
    "verl",
    "verl's validation dump",
    "the key reward, which its training dumps do not have",
    columns={"prompt": "input", "completion": "output", "reward": "score"},
    step_in_name=r"(?:^|/)(\d+)\.jsonl",
    note="it holds texts and scores of the validation, nothing that was trained on",
)

TRL = Source(
    "trl",
    "trl",
    "TRL's completions",
    "the columns step, prompt, completion and advantage",
    columns={"advantages": "advantage"},
    step_in_name=r"completions_(\d+)\.parquet",
    note="it holds texts, rewards and advantages; log-probs only where log_extra added them",
)

AREAL = Source(
    "areal",
    "areal",
    "AReaL's trajectory dump",
    "the keys task_id, head_version and tail_version",
    columns={"step": "tail_version", "group_id": "task_id"},
    note="it holds texts, rewards and weight versions, no log-probs",
)


# This library's own rollout records (`rollouts/*.parquet` of a run): the engine's side, complete.


STORED = b"offdrift"
"""Key of the header of rollout records."""
LOGGED = b"offdrift.log"
"""Key of the header of logs in the plain schema."""

OWN_ROLLOUTS = Source(
    "offdrift-rollouts",
    "offdrift",
    "this library's rollout records",
    "their header",
    columns={"truncated": "finish"},
    step_in_name=r"(?:^|[/_.-])(\d+)\.parquet",
    note="they hold the engine's side alone; the log beside them holds the trainer's",
)

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
    fit = [s for s in SOURCES if there >= KEYS.get(s.format, {""}) and not there & WITHOUT.get(s.format, frozenset())]
    if fit:
        return max(fit, key=lambda s: len(KEYS[s.format]))
    return PLAIN if SAYING & set(PLAIN.resolve(there, {})) else None


def header(metadata: dict[bytes, bytes] | None) -> dict[str, Any] | None:
    """The header of a log in the plain schema; None if the file has none."""
    if metadata is None or LOGGED not in metadata:
        return None
    try:
        stated = json.loads(metadata[LOGGED])
    except ValueError:
        return None
    return stated if isinstance(stated, dict) else None
