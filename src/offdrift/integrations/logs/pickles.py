"""Pickles of other people: an allow-list of harmless names, and nothing else is ever called.

A pickle is a program. These readers run one in which every name that could do harm is missing: any
global that is not on the list ends the reading, before anything has been called.
"""

from __future__ import annotations

import collections
import io
import pickle
from typing import Any

import numpy as np
import torch

from offdrift.errors import RecordError
from offdrift.integrations.logs.files import Bytes


class TensorBatch:
    """What SkyRL's batches unpickle to: their state, and nothing that acts."""

    state: object = None


def rebuilt(cls: type[TensorBatch], state: object) -> TensorBatch:
    """Stands for SkyRL's `_rebuild_tensor_batch`."""
    batch = TensorBatch()
    batch.state = state
    return batch


def _device(*args: object, **kwargs: object) -> str:
    return "cpu"


BATCHES = "training_batch"
"""Last part of the module that SkyRL's batches come from; its package moved between versions."""


class Harmless(pickle.Unpickler):
    """Unpickles builtin containers, SkyRL's batches as their state, and refuses all else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        parts = module_name.split(".")
        if parts[0].startswith("skyrl") and parts[-1] == BATCHES:
            if global_name == "_rebuild_tensor_batch":
                return rebuilt
            if global_name in ("TensorBatch", "TrainingInputBatch", "TrainingOutputBatch"):
                return TensorBatch
        if (module_name, global_name) == ("torch", "device"):
            return _device
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise RecordError(
            f"the pickle asks for {module_name}.{global_name}, which no log needs; it was not run"
        )


def load_pickle(file: Bytes) -> Any:
    """What a pickle holds; `RecordError` if it asks for anything but data."""
    return Harmless(file).load()


def load_torch(file: Bytes) -> Any:
    """What `torch.save` wrote: tensors, builtin containers and NumPy arrays.

    Raises: `RecordError` naming what the file asks for beyond that.
    """
    try:
        with torch.serialization.safe_globals(_NUMPY):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as e:
        first = str(e).split("\n\n")[0].splitlines()
        reason = next((line for line in str(e).splitlines() if "GLOBAL" in line), first[-1])
        raise RecordError(f"the file asks for more than data, and was not run: {reason}") from e


_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    np._core.multiarray.scalar,  # type: ignore[attr-defined]
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    *{type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?")},
]


def tensor_of(stated: Any) -> torch.Tensor:
    """A tensor from SkyRL's own serialization of it."""
    if stated.get("format") == "torch":
        return torch.load(io.BytesIO(stated["data"]), map_location="cpu", weights_only=True)
    flat = np.frombuffer(stated["data"], dtype=np.dtype(stated["dtype"]))
    return torch.from_numpy(flat.reshape(stated["shape"]).copy())
