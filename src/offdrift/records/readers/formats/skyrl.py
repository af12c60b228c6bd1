"""SkyRL's dumped training input (`trainer.dump_data_batch = true`).

One pickle per step: response tensors `[sequences, response]`, right-aligned under `response_mask`;
`sequences` holds prompt and response, right-aligned too. Rewards were removed before the dump, and the
prompts' ids with them; the last `pad_size` rows are copies that fill up the batch.
Source: SkyRL a956457, skyrl/backends/skyrl_train/training_batch.py and skyrl/train/trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from offdrift.errors import RecordError
from offdrift.records.readers.columns import Row
from offdrift.records.readers.files import Bytes
from offdrift.records.readers.formats.base import Source
from offdrift.records.readers.formats.prime_rl import prompt_id
from offdrift.records.readers.pickles import TensorBatch, load_pickle, tensor_of
from offdrift.records.readers.types import LIMIT

COLUMNS = {
    "logp_rollout": "rollout_logprobs",
    "logp_old": "action_log_probs",
    "logp_ref": "base_action_log_probs",
    "advantages": "advantages",
    "mask": "loss_mask",
}


def load(file: Bytes, limit: int = LIMIT) -> tuple[Source, Iterator[Row]]:
    """That a dump is SkyRL's, and its sequences.

    Raises: `RecordError` if the pickle is none of SkyRL's, or asks for anything but data.
    """
    batch = load_pickle(file, limit)
    state = getattr(batch, "state", None)
    if not isinstance(batch, TensorBatch) or not isinstance(state, Mapping):
        raise RecordError("the pickle holds no training batch of SkyRL")
    wanted = {*COLUMNS.values(), "response_mask", "sequences", "attention_mask", "rewards"}
    held = {
        name: tensor_of(x, limit)
        for name, x in state["batch_dict"].items()
        if name in wanted and x is not None and x.get("format") != "tensor_list"
    }
    padding = (state.get("metadata") or {}).get("pad_size") or 0
    real = (held["response_mask"] if "response_mask" in held else held["loss_mask"]).bool()
    return SKYRL, (_row(held, real[i], i) for i in range(len(real) - padding))


def _row(held: Mapping[str, Tensor], real: Tensor, i: int) -> Row:
    row: dict[str, Any] = {name: held[column][i][real] for name, column in COLUMNS.items() if column in held}
    if "rewards" in held:
        row["reward"] = float(held["rewards"][i].sum())
    if "sequences" in held:
        sequence = held["sequences"][i]
        row["tokens"] = sequence[-len(real) :][real]
        there = held["attention_mask"][i].bool() if "attention_mask" in held else None
        whole = sequence if there is None else sequence[there]
        row["group_id"] = prompt_id(whole[: len(whole) - int(real.sum())])
    return row


SKYRL = Source(
    "skyrl",
    "skyrl",
    "SkyRL's dumped training batches",
    "the class in the pickles",
    columns=COLUMNS,
    step_in_name=r"global_step_(\d+)_",
)
