"""NeMo-RL's training data (`train_data_step{N}.jsonl` in its log folder, written unless NeMo-Gym logs).

Every value is wrapped in a list of one; token lists cover prompt, response and padding up to
`input_lengths`; index 0 of the log-probs belongs to no token. NaN is written bare. With dynamic
sampling, `filtered_rewards` are those of the rows; `rewards` are those of every sequence that was drawn.
Source: NeMo-RL 7ea279a, nemo_rl/algorithms/grpo.py and nemo_rl/utils/logger.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.readers.formats.base import Source
from offdrift.records.readers.formats.prime_rl import cut, first_trained, prompt_id

COLUMNS = {
    "logp_rollout": "generation_logprobs",
    "logp_old": "prev_logprobs",
    "tokens": "token_ids",
    "mask": "token_loss_mask",
    "advantages": "advantages",
}


def adapt(row: Mapping[str, Any]) -> Row:
    """Unwrapped, cut at the true length, from the first token that trains on."""
    value = {name: _unwrapped(x) for name, x in row.items()}
    length = int(value["input_lengths"])
    mask = value["token_loss_mask"][:length]
    begin = first_trained(mask)
    found: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        x = value.get(column)
        # Some algorithms log one advantage per sequence.
        found[name] = cut(x, begin, length) if isinstance(x, list) else x
    if value.get("sample_loss_mask") == 0:
        found["mask"] = [0] * len(found["mask"])
    tokens = value.get("token_ids")
    if tokens is not None:
        found["group_id"] = prompt_id(tokens[:begin])
    return {**found, "reward": value.get("filtered_rewards", value.get("rewards")), **_texts(value.get("content"))}


def _texts(content: Any) -> Row:
    """The last message is the response, unless there is but one text."""
    if not isinstance(content, list) or not content:
        return {"completion": content}
    return {"prompt": "\n".join(map(str, content[:-1])), "completion": content[-1]}


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


NEMO_RL = Source(
    "nemo-rl",
    "nemo-rl",
    "NeMo-RL's training data",
    "the keys generation_logprobs and prev_logprobs",
    columns={**COLUMNS, "reward": "rewards", "completion": "content"},
    adapt=adapt,
    step_in_name=r"train_data_step(\d+)\.jsonl",
)
