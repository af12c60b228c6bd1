"""The plain schema, and logs that are plain rows under other names: verl, TRL, AReaL."""

from __future__ import annotations

from offdrift.integrations.logs.source import Source

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
