"""NeMo-RL's training data (`train_data_step{N}.jsonl` in its log folder, written unless NeMo-Gym logs).

Every value is wrapped in a list of one; token lists cover prompt, response and padding up to `input_lengths`; index 0
of the log-probs belongs to no token. NaN is written bare. With dynamic sampling, `filtered_rewards` are those of the
rows; `rewards` are those of every sequence that was drawn. Source: NeMo-RL 7ea279a, nemo_rl/algorithms/grpo.py and
nemo_rl/utils/logger.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.readers.formats import response_of
from offdrift.records.readers.formats.table import NEMO_RL


def adapt(row: Mapping[str, Any]) -> Row:
    """Unwrapped, cut at the true length, from the first token that trains on."""
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
