"""open-instruct's rollout traces (`--save_traces --rollouts_save_path DIR`).

One line per response, tokens and log-probs of the response alone. Tokens that a tool answered stand
between the model's with a log-prob of exactly 0, and their mask is not logged; whether a tool was called
at all is.
Source: open-instruct e6c3044, open_instruct/rl_utils.py and open_instruct/vllm_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offdrift.records.readers.columns import Row
from offdrift.records.readers.formats.base import Source


def without_tools(row: Mapping[str, Any], found: Row) -> Row:
    """With a mask that leaves out the exact zeros of a response in which a tool was called.

    A sampled token that is certain is left out with them; a response without a tool keeps its zeros.
    """
    info, logp = row.get("request_info"), found.get("logp_rollout")
    called = isinstance(info, Mapping) and info.get("tool_calleds")
    if not called or not isinstance(logp, list) or found.get("mask") is not None:
        return found
    return {**found, "mask": [int(x != 0) for x in logp]}


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
    amend=without_tools,
)
