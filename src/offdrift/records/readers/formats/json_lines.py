"""Rows of JSON lines that are translated: of NeMo-RL, open-instruct, and prime-rl's token exports and episodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.readers.formats import prompt_id
from offdrift.records.readers.formats.table import NEMO_RL, PRIME_RL, PRIME_RL_TRACES

CUT_SHORT = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "context_length")
"""Reasons to stop that are limits."""

MOST = 1 << 26
"""Tokens that the samples of one line may have together: paths share their beginning."""

PER_SAMPLED = {name: c for name, c in PRIME_RL_TRACES.columns.items() if name not in ("tokens", "mask")}
"""Lists of a message that cover its sampled tokens."""


def first_trained(mask: list[Any]) -> int:
    """Index of the first token that trains. The token at 0 has no context, so it never counts."""
    try:
        return mask.index(1, 1)
    except ValueError:
        return len(mask)


def response_of(row: Mapping[str, Any], columns: Mapping[str, str], end: int | None = None) -> dict[str, Any]:
    """Fields of the response, of a row whose lists cover the prompt as well.

    The response begins with the first token that trains, and ends before `end`. Its group is its prompt.
    """
    begin = first_trained(row[columns["mask"]][:end])
    values = {name: row.get(column) for name, column in columns.items()}
    response = {name: x[begin:end] if isinstance(x, list) else x for name, x in values.items()}
    if values["tokens"] is not None:
        response["group_id"] = prompt_id(values["tokens"][:begin])
    return response


def nemo_rl(row: Mapping[str, Any]) -> Row:
    """A row of NeMo-RL's training data, `train_data_step{N}.jsonl`, from the first token that trains on.

    Every value is wrapped in a list of one; token lists cover prompt, response and padding up to `input_lengths`; index
    0 of the log-probs belongs to no token. With dynamic sampling, `filtered_rewards` are those of the rows; `rewards`
    are those of every sequence that was drawn.

    Source: NeMo-RL 7ea279a, nemo_rl/algorithms/grpo.py and nemo_rl/utils/logger.py.
    """
    value: dict[str, Any] = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in row.items()}
    # Some algorithms log one advantage per sequence.
    response = response_of(value, NEMO_RL.columns, int(value["input_lengths"]))
    if value.get("sample_loss_mask") == 0:
        response["mask"] = [0] * len(response["mask"])
    response["reward"] = value.get("filtered_rewards", value.get("rewards"))
    response["completion"] = content = value.get("content")
    if isinstance(content, list) and content:
        # The last message is the response.
        response["prompt"], response["completion"] = "\n".join(map(str, content[:-1])), content[-1]
    return response


def open_instruct(row: Mapping[str, Any], translated: Row) -> Row:
    """A row of open-instruct's rollout traces, masked where a tool was called: its tokens have log-probs of exactly 0.

    Their mask is not logged. A sampled token that is certain is left out with them; a response without a tool keeps
    its zeros.

    Source: open-instruct e6c3044, open_instruct/rl_utils.py and open_instruct/vllm_utils.py.
    """
    info, logp = row.get("request_info"), translated.get("logp_rollout")
    called = isinstance(info, Mapping) and info.get("tool_calleds")
    if not called or not isinstance(logp, list) or translated.get("mask") is not None:
        return translated
    return {**translated, "mask": [int(x != 0) for x in logp]}


def prime_rl(row: Mapping[str, Any]) -> Row:
    """The response of one of prime-rl's token exports (`trainer.enable_token_export = true`).

    Prompt and response together; `trainer_logprobs[i]` and `inference_logprobs[i]` are both the log-prob of token i.
    Non-finite numbers were written as null.

    Source: prime-rl 559b447, src/prime_rl/trainer/rl/token_export.py.
    """
    return response_of(row, PRIME_RL.columns)


def prime_rl_episode(record: Mapping[str, Any]) -> list[Row]:
    """A row for each training sample of one of prime-rl's episodes (`rollouts/step_N/train/effective/traces.jsonl`).

    A trace, one per agent, is a tree of messages, each with the tokens that it adds. Every path from the root to a leaf
    is one training sample, in which a message that an earlier path has trained on is context. Log-probs (the engine's
    alone) and advantages cover the sampled tokens of a message.

    Source: prime-rl 559b447, src/prime_rl/monitors/file.py and src/prime_rl/orchestrator/trajectories.py; verifiers
    a60a606, verifiers/v1/episode.py, trace.py and graph.py.
    """
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
