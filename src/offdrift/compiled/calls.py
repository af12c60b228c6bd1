"""Calls of compiled functions: which tensors they can read, and how they get them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from offdrift.numerics import transformed


def in_memory(*tensors: Tensor) -> bool:
    """Whether the numbers lie in memory that a function of C++ can read, and no transformation must see them."""
    # Subclasses (of FSDP, of tracers) have no such memory.
    plain = all(type(t) in (Tensor, Parameter) and t.is_cpu and t.layout is torch.strided for t in tensors)
    return plain and not transformed()


def call(function: Callable[..., int], arguments: tuple[Tensor | int | None, ...]) -> int:
    """The function with the addresses of tensors, null for None, and integers of 64 bits."""
    return function(
        *(
            ctypes.c_int64(x) if isinstance(x, int) else ctypes.c_void_p(None if x is None else x.data_ptr())
            for x in arguments
        )
    )
