"""Pickles of other people: an allow-list of harmless names, and nothing else is ever called.

A pickle is a program. These readers run one in which every name that could do harm is missing: any
global that is not on the list ends the reading, before anything has been called; and what is on the list
cannot be changed.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from offdrift.errors import RecordError
from offdrift.integrations.logs.files import Bytes


class TensorBatch:
    """What SkyRL's batches unpickle to: their state, and nothing that acts."""

    __slots__ = ("state",)

    def __init__(self, state: object) -> None:
        self.state = state


class Named:
    """What a name of the pickle stands for: it can be called and passed on, never changed.

    A pickle may set attributes of whatever it is handed. What it is handed outlives the pickle, so
    there are none to set: no class, no function, no `__dict__`.
    """

    __slots__ = ("_call",)
    _call: Callable[..., object]

    def __init__(self, call: Callable[..., object]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._call(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> None:
        raise RecordError(f"the pickle sets {name} of what reads it, which no log needs; it was refused")  # fmt: skip


def _uncallable(*args: object, **kwargs: object) -> object:
    raise RecordError("the pickle makes a batch in a way that SkyRL does not; it was refused")


REBUILT = Named(lambda cls, state: TensorBatch(state))
"""Stands for SkyRL's `_rebuild_tensor_batch`."""
BATCH = Named(_uncallable)
"""Stands for SkyRL's classes, which are only passed to `_rebuild_tensor_batch`."""
DEVICE = Named(lambda *args, **kwargs: "cpu")

BATCHES = "training_batch"
"""Last part of the module that SkyRL's batches come from; its package moved between versions."""


class Harmless(pickle.Unpickler):
    """Unpickles builtin containers, SkyRL's batches as their state, and refuses all else."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        parts = module_name.split(".")
        if parts[0].startswith("skyrl") and parts[-1] == BATCHES:
            if global_name == "_rebuild_tensor_batch":
                return REBUILT
            if global_name in ("TensorBatch", "TrainingInputBatch", "TrainingOutputBatch"):
                return BATCH
        if (module_name, global_name) == ("torch", "device"):
            return DEVICE
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return collections.OrderedDict  # built in: the interpreter lets nobody change it
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
