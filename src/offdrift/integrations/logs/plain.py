"""The plain schema, and logs that are plain rows under other names: verl, TRL, open-instruct, AReaL."""

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

TRL = Source(
    "trl",
    "trl",
    "TRL's completions",
    "the columns step, prompt, completion and advantage",
    columns={"advantages": "advantage"},
    step_in_name=r"completions_(\d+)\.parquet",
    note="it holds texts, rewards and advantages; log-probs only where log_extra added them",
)

OPEN_INSTRUCT = Source(
    "open-instruct",
    "open-instruct",
    "open-instruct's rollout traces",
    "the keys prompt_tokens, response_tokens and finish_reason",
    columns={
        "logp_rollout": "logprobs",
        "tokens": "response_tokens",
        "advantages": "advantage",
        "group_id": "prompt_idx",
        "truncated": "finish_reason",
    },
    note="it holds the engine's log-probs, none of the trainer's",
)

AREAL = Source(
    "areal",
    "areal",
    "AReaL's trajectory dump",
    "the keys task_id, head_version and tail_version",
    columns={"step": "tail_version", "group_id": "task_id"},
    note="it holds texts, rewards and weight versions, no log-probs",
)
