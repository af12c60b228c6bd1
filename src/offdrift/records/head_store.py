"""Output heads beside the batches that refer to them: one file per content, whoever wrote it.

A head is `vocab x hidden` numbers, far more than the states of a batch, and often the same for many
batches (drawn between two synchronizations, or with the head frozen). So a file is named by the
SHA-256 of its bytes: equal heads are one file, and a file that is not what its name says is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from offdrift.divergence.head import Head
from offdrift.errors import RecordError
from offdrift.records.atomic import write_atomically

FOLDER = "heads"
ROUNDING = {
    str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16)
}
"""Dtypes that an engine's logits may have, by name."""


def write_head(head: Head, folder: Path) -> str:
    """Write a head under `folder`, unless it is there already.

    Returns: its name, the SHA-256 of the file's bytes in hexadecimal.

    Raises: `RecordError` naming the file if the disk is full or the folder cannot be written.
    """
    tensors = {"weight": head.weight.contiguous()}
    if head.bias is not None:
        tensors["bias"] = head.bias.contiguous()
    rounding = next((name for name, dtype in ROUNDING.items() if dtype == head.round_to), None)
    rest = {"scale": head.scale, "soft_cap": head.soft_cap, "round_to": rounding}
    # One key: the library writes several in an order of its own, and the name is the bytes' hash.
    data = save(tensors, metadata={"head": json.dumps(rest, sort_keys=True)})
    name = hashlib.sha256(data).hexdigest()
    path = _path(folder, name)
    if not path.exists() or path.stat().st_size != len(data):
        write_atomically(path, lambda tmp: Path(tmp).write_bytes(data))
    return name


def read_head(folder: Path, name: str, *, wanted_by: Path) -> Head:
    """Read a head back, and check that it is the one that was written.

    Args:
        folder: of the batches.
        name: what `write_head` returned.
        wanted_by: the batch, for the message.

    Raises: `RecordError` naming both files if the head is missing or has other content.
    """
    if not re.fullmatch("[0-9a-f]{64}", name):
        raise RecordError(f"{wanted_by} names its output head {name!r}, which is no SHA-256")
    path = _path(folder, name)
    try:
        data = path.read_bytes()
    except OSError as e:
        raise RecordError(
            f"cannot read {path} ({e.strerror}), the output head that {wanted_by} refers to; copy "
            f"the folder {FOLDER}/ together with the batches, or draw the batch again"
        ) from e
    if hashlib.sha256(data).hexdigest() != name:
        raise RecordError(
            f"{path}, the output head that {wanted_by} refers to, is corrupt: its content is not "
            "what its name says. Restore it from a copy, or draw the batch again"
        )
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        rest = json.loads(header["__metadata__"]["head"])
        rounding = None if rest["round_to"] is None else ROUNDING[rest["round_to"]]
        tensors = load(data)
        return Head(
            tensors["weight"], tensors.get("bias"), rest["scale"], rest["soft_cap"], rounding
        )
    except (SafetensorError, KeyError, TypeError, ValueError) as e:
        raise RecordError(f"{path} does not hold an output head: {e!r}") from e


def _path(folder: Path, name: str) -> Path:
    return folder / FOLDER / f"{name}.safetensors"
