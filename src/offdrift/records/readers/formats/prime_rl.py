"""prime-rl's token exports (`trainer.enable_token_export = true`).

One line per sequence, prompt and response together; `trainer_logprobs[i]` and `inference_logprobs[i]`
are both the log-prob of token i. Non-finite numbers were written as null.
Source: prime-rl 559b447, src/prime_rl/trainer/rl/token_export.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.readers.formats.base import Source

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
    found = {name: cut(row.get(column), begin, None) for name, column in COLUMNS.items() if name != "step"}
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


# prime-rl's episodes (`rollouts/step_N/train/effective/traces.jsonl`, always written).
#
# One line per episode, one trace per agent. A trace is a tree of messages, each with the tokens that it
# adds; every path from the root to a leaf is one training sample, in which a message that an earlier path
# has trained on is context. Log-probs and advantages cover the sampled tokens of a message. The engine's
# side alone: the trainer's log-probs are in the token exports.
# Source: prime-rl 559b447, src/prime_rl/monitors/file.py and src/prime_rl/orchestrator/trajectories.py;
# verifiers a60a606, verifiers/v1/episode.py, trace.py and graph.py.


CUT_SHORT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""Reasons to stop that are limits."""

MOST = 1 << 26
"""Tokens that the samples of one line may have together: paths share their beginning."""

PER_SAMPLED = {"logp_rollout": "logprobs", "advantages": "advantages", "logp_ref": "reference_logprobs"}
"""Lists of a message that cover its sampled tokens."""


def adapt_traces(record: Mapping[str, Any]) -> list[Row]:
    """A row for each training sample of an episode."""
    about = {"group_id": (record.get("group") or {}).get("id"), **_version(record)}
    rows: list[Row] = []
    left = MOST
    for trace in record["traces"]:
        if not trace["agent"].get("trainable", True):
            continue
        of_trace = {**about, "reward": _reward(trace), "truncated": _truncated(trace)}
        for row in _samples(trace["nodes"]):
            left -= len(row["tokens"])
            if left < 0:
                raise ValueError(f"the paths of its traces hold more than {MOST} tokens")
            group = of_trace["group_id"] or row["group_id"]
            rows.append({**row, **of_trace, "group_id": group})
    return rows


def _samples(nodes: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    parents = [node.get("parent") for node in nodes]
    if any(p is not None and not 0 <= p < i for i, p in enumerate(parents)):
        raise ValueError("a message comes before the one that it answers")
    trained: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path, at = [leaf], parents[leaf]
        while at is not None:
            path.append(at)
            at = parents[at]
        path.reverse()
        sample = _sample([nodes[i] for i in path], [i in trained for i in path])
        trained.update(i for i in path if nodes[i].get("sampled"))
        if sample is not None:
            yield sample


def _sample(path: list[Mapping[str, Any]], trained: list[bool]) -> dict[str, Any] | None:
    """One path as a row, from the first token that trains; None if none does."""
    found: dict[str, list[Any]] = {"tokens": [], "mask": [], **{name: [] for name in PER_SAMPLED}}
    for node, done in zip(path, trained, strict=True):
        mask = [bool(m) for m in node["mask"]]
        found["tokens"] += node["token_ids"]
        found["mask"] += [0] * len(mask) if done else [int(m) for m in mask]
        for name, key in PER_SAMPLED.items():
            values = iter(node.get(key) or ())
            found[name] += [next(values, None) if m else None for m in mask]
    begin = first_trained(found["mask"])
    if begin >= len(found["mask"]):
        return None
    row: dict[str, Any] = {name: values[begin:] for name, values in found.items()}
    row |= {n: None for n in PER_SAMPLED if all(x is None for x in row[n])}
    return {**row, "group_id": prompt_id(found["tokens"][:begin])}


def _version(record: Mapping[str, Any]) -> Row:
    """The weights that drew the episode, if one version drew it all."""
    policy = ((record.get("run") or {}).get("work") or {}).get("policy")
    if not policy or policy["start"] != policy["end"]:
        return {}
    return {"rollout_version": policy["start"]}


def _reward(trace: Mapping[str, Any]) -> float | None:
    rewards = [r for r in (trace.get("rewards") or {}).values() if r is not None]
    return sum(r["score"] * r.get("weight", 1.0) for r in rewards) if rewards else None


def _truncated(trace: Mapping[str, Any]) -> int:
    calls = [c for c in trace.get("calls") or () if c.get("error") is None]
    cut = bool(calls) and calls[-1].get("finish_reason") == "length"
    return int(cut or trace.get("stop_condition") in CUT_SHORT)


PRIME_RL_TRACES = Source(
    "prime-rl-traces",
    "prime-rl",
    "prime-rl's episodes",
    "the keys env, task and traces",
    columns={**PER_SAMPLED, "tokens": "token_ids", "mask": "mask"},
    adapt=adapt_traces,
    step_in_name=r"(?:^|/)step_(\d+)/",
    note="it holds the engine's log-probs, none of the trainer's; trainer.enable_token_export writes both",
)
