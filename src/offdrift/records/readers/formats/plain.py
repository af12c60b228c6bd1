"""The plain schema, and logs that are plain rows under other names: verl, TRL, AReaL."""

from __future__ import annotations

import json
from typing import Any

from offdrift.records.readers.formats.base import Source

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


def header(metadata: dict[bytes, bytes] | None) -> dict[str, Any] | None:
    """The header of a log in the plain schema; None if the file has none."""
    if metadata is None or LOGGED not in metadata:
        return None
    try:
        stated = json.loads(metadata[LOGGED])
    except ValueError:
        return None
    return stated if isinstance(stated, dict) else None
