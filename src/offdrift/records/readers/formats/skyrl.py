"""SkyRL's dumped training input (`trainer.dump_data_batch = true`).

One pickle per step: response tensors `[sequences, response]`, right-aligned under `response_mask`; `sequences` holds
prompt and response, right-aligned too. Rewards were removed before the dump, and the prompts' ids with them; the
last `pad_size` rows are copies that fill up the batch.
Source: SkyRL a956457, skyrl/backends/skyrl_train/training_batch.py and skyrl/train/trainer.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offdrift.errors import RecordError
from offdrift.records.readers.columns import Row
from offdrift.records.readers.files import LIMIT, Bytes
from offdrift.records.readers.formats import prompt_id
from offdrift.records.readers.formats.table import SKYRL, Source
from offdrift.records.readers.pickles import TensorBatch, load_pickle, tensor_of


def load(file: Bytes, limit: int = LIMIT) -> tuple[Source, Iterator[Row]]:
    """That a dump is SkyRL's, and its sequences.

    Raises: `RecordError` if the pickle is none of SkyRL's, or asks for anything but data.
    """
    batch = load_pickle(file, limit)
    state = getattr(batch, "state", None)
    if not isinstance(batch, TensorBatch) or not isinstance(state, Mapping):
        raise RecordError("the pickle holds no training batch of SkyRL")
    wanted = {*SKYRL.columns.values(), "response_mask", "sequences", "attention_mask", "rewards"}
    tensors = {
        name: tensor_of(x, limit)
        for name, x in state["batch_dict"].items()
        if name in wanted and x is not None and x.get("format") != "tensor_list"
    }
    padding = (state.get("metadata") or {}).get("pad_size") or 0
    response = (tensors["response_mask"] if "response_mask" in tensors else tensors["loss_mask"]).bool()

    def rows() -> Iterator[Row]:
        for i in range(len(response) - padding):
            row: dict[str, Any] = {n: tensors[c][i][response[i]] for n, c in SKYRL.columns.items() if c in tensors}
            if "rewards" in tensors:
                row["reward"] = float(tensors["rewards"][i].sum())
            if "sequences" in tensors:
                sequence = tensors["sequences"][i]
                row["tokens"] = sequence[-len(response[i]) :][response[i]]
                if "attention_mask" in tensors:
                    sequence = sequence[tensors["attention_mask"][i].bool()]
                row["group_id"] = prompt_id(sequence[: len(sequence) - int(response[i].sum())])
            yield row

    return SKYRL, rows()
