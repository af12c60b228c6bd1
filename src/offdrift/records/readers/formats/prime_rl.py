"""prime-rl's token exports (`trainer.enable_token_export = true`) and episodes (always written).

Token exports: one line per sequence, prompt and response together; `trainer_logprobs[i]` and `inference_logprobs[i]`
are both the log-prob of token i. Non-finite numbers were written as null.

Episodes (`rollouts/step_N/train/effective/traces.jsonl`): one line per episode, one trace per agent. A trace is a tree
of messages, each with the tokens that it adds. Every path from the root to a leaf is one training sample, in which a
message that an earlier path has trained on is context. Log-probs and advantages cover the sampled tokens of a message.
Episodes hold the engine's side alone: the trainer's log-probs are in the token exports.

Source: prime-rl 559b447, src/prime_rl/trainer/rl/token_export.py, src/prime_rl/monitors/file.py and
src/prime_rl/orchestrator/trajectories.py; verifiers a60a606, verifiers/v1/episode.py, trace.py and graph.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.readers.formats import first_trained, prompt_id, response_of
from offdrift.records.readers.formats.table import PRIME_RL, PRIME_RL_TRACES

CUT_SHORT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""Reasons to stop that are limits."""

MOST = 1 << 26
"""Tokens that the samples of one line may have together: paths share their beginning."""

PER_SAMPLED = {name: c for name, c in PRIME_RL_TRACES.columns.items() if name not in ("tokens", "mask")}
"""Lists of a message that cover its sampled tokens."""


def adapt(row: Mapping[str, Any]) -> Row:
    """The response of a token export: everything from the first token that trains on."""
    return response_of(row, PRIME_RL.columns)


def adapt_traces(record: Mapping[str, Any]) -> list[Row]:
    """A row for each training sample of an episode."""
    about: dict[str, Any] = {}
    policy = ((record.get("run") or {}).get("work") or {}).get("policy")
    if policy and policy["start"] == policy["end"]:  # one version of the weights drew all of it
        about["rollout_version"] = policy["start"]
    group = (record.get("group") or {}).get("id")
    rows: list[Row] = []
    left = MOST
    for trace in record["traces"]:
        if not trace["agent"].get("trainable", True):
            continue
        rewards = [r for r in (trace.get("rewards") or {}).values() if r is not None]
        about["reward"] = sum(r["score"] * r.get("weight", 1.0) for r in rewards) if rewards else None
        calls = [c for c in trace.get("calls") or () if c.get("error") is None]
        at_limit = bool(calls) and calls[-1].get("finish_reason") == "length"
        about["truncated"] = int(at_limit or trace.get("stop_condition") in CUT_SHORT)
        for row in _samples(trace["nodes"]):
            left -= len(row["tokens"])
            if left < 0:
                raise ValueError(f"the paths of its traces hold more than {MOST} tokens")
            rows.append({**row, **about, "group_id": group or row["group_id"]})
    return rows


def _samples(nodes: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The training samples of a trace: its paths, each from the first token that trains."""
    parents = [node.get("parent") for node in nodes]
    if any(p is not None and not 0 <= p < i for i, p in enumerate(parents)):
        raise ValueError("a message comes before the one that it answers")
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path, at = [leaf], parents[leaf]
        while at is not None:
            path.append(at)
            at = parents[at]
        values: dict[str, list[Any]] = {"tokens": [], "mask": [], **{name: [] for name in PER_SAMPLED}}
        for i in reversed(path):
            mask = [bool(m) for m in nodes[i]["mask"]]
            values["tokens"] += nodes[i]["token_ids"]
            values["mask"] += [0] * len(mask) if i in trained else [int(m) for m in mask]
            for name, key in PER_SAMPLED.items():
                sampled = iter(nodes[i].get(key) or ())
                values[name] += [next(sampled, None) if m else None for m in mask]
        trained.update(i for i in path if nodes[i].get("sampled"))
        begin = first_trained(values["mask"])
        if begin < len(values["mask"]):
            row: dict[str, Any] = {name: x[begin:] for name, x in values.items()}
            row |= {n: None for n in PER_SAMPLED if all(x is None for x in row[n])}
            yield {**row, "group_id": prompt_id(values["tokens"][:begin])}
