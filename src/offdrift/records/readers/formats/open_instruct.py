"""open-instruct's rollout traces (`--save_traces --rollouts_save_path DIR`).

One line per response, tokens and log-probs of the response alone. Tokens that a tool answered are between the model's
with a log-prob of exactly 0. Their mask is not logged; whether a tool was called at all is. Source: open-instruct
e6c3044, open_instruct/rl_utils.py and open_instruct/vllm_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.records.readers.columns import Row


def without_tools(row: Mapping[str, Any], translated: Row) -> Row:
    """With a mask that leaves out the exact zeros of a response in which a tool was called.

    A sampled token that is certain is left out with them; a response without a tool keeps its zeros.
    """
    info, logp = row.get("request_info"), translated.get("logp_rollout")
    called = isinstance(info, Mapping) and info.get("tool_calleds")
    if not called or not isinstance(logp, list) or translated.get("mask") is not None:
        return translated
    return {**translated, "mask": [int(x != 0) for x in logp]}
