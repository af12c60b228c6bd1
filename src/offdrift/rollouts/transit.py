"""Batches on their way from a step to the disk: copied off the device, checked, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from offdrift.errors import BadValueError, ShapeError
from offdrift.rollouts.log import ROW_COLUMNS, TOKEN_COLUMNS
from offdrift.rollouts.logged import Logged
from offdrift.rollouts.unpacked import Unpacked
from offdrift.segments import Segments

SEQUENCES = (*(attribute for attribute, _ in ROW_COLUMNS.values()), "row")
INT32 = ("tokens", "rollout_version", "position")
"""Stored as 32-bit integers."""


def on_host(batch: Logged | Unpacked) -> tuple[Logged | Unpacked, list[torch.cuda.Event]]:
    """The batch in host memory of its own, without graph; and what to wait for before reading it.

    Nothing waits here for a CUDA device: its copies run on the current stream, into pinned memory,
    behind the work that makes the values. The copies on the device can be freed or changed at once.
    """
    events: dict[torch.device, torch.cuda.Event] = {}

    def copied(x: Any) -> Any:
        if isinstance(x, Mapping):
            return {name: copied(y) for name, y in x.items()}
        if not isinstance(x, Tensor):
            return x
        x = x.detach()
        if x.device.type != "cuda":
            return x.to("cpu", copy=True, memory_format=torch.contiguous_format)
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        events[x.device] = torch.cuda.Event()
        return host.copy_(x, non_blocking=True)

    held = replace(batch, **{f.name: copied(getattr(batch, f.name)) for f in fields(batch)})
    for device, event in events.items():
        event.record(torch.cuda.current_stream(device))
    return held, list(events.values())


def num_bytes(batch: Logged | Unpacked) -> int:
    """Memory that a copy of the batch takes, about: texts count one byte per character."""
    values = [getattr(batch, f.name) for f in fields(batch)]
    values += [x for v in values if isinstance(v, Mapping) for x in v.values()]
    tensors = sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))
    return tensors + sum(len(t) for v in values if isinstance(v, tuple) for t in v)


def present(batch: Logged | Unpacked) -> frozenset[str]:
    """Names of what the batch holds: batches that hold the same can share a file."""
    named = {f.name for f in fields(batch) if getattr(batch, f.name) is not None} - {"position"}
    return frozenset(named | {*batch.divergences, getattr(batch, "length_unit", "token")})


def check_shapes(batch: Logged) -> None:
    """Raise `ShapeError` unless all fields describe the same tokens and sequences."""
    b = len(batch.cu_seqlens) - 1
    by_token = {name: getattr(batch, name) for name in TOKEN_COLUMNS} | dict(batch.divergences)
    lengths = {name: len(x) for name, x in by_token.items() if x is not None}
    if len(set(lengths.values())) > 1:
        raise ShapeError(f"token fields of different lengths: {lengths}")
    for name in (*SEQUENCES, "prompts", "completions"):
        x = getattr(batch, name)
        if x is not None and len(x) != b:
            raise ShapeError(f"{name} has {len(x)} entries for {b} sequences")


def check_values(batch: Logged) -> None:
    """Raise unless `cu_seqlens` cuts the tokens, and integers fit where they are stored."""
    Segments(batch.cu_seqlens).check()
    for name in INT32:
        x = getattr(batch, name)
        if x is not None and len(x) and not -(2**31) <= int(x.min()) <= int(x.max()) < 2**31:
            raise BadValueError(
                f"{name} reaches from {int(x.min())} to {int(x.max())}, beyond 32 bits"
            )
    by_token = {name: getattr(batch, name) for name in TOKEN_COLUMNS} | dict(batch.divergences)
    for name, x in by_token.items():
        if x is not None and len(x) != batch.num_tokens:
            raise ShapeError(f"{name} has {len(x)} tokens, cu_seqlens ends at {batch.num_tokens}")


def joined(batches: Sequence[Logged]) -> Logged:
    """Batches that hold the same fields (`present`, `position` aside) as one, in order."""
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    whole = all(b.position is None for b in batches)
    lengths = torch.cat([b.cu_seqlens.diff() for b in batches])
    values: dict[str, Any] = {
        name: torch.cat([getattr(b, name) for b in batches])
        for name in (*TOKEN_COLUMNS, *SEQUENCES)
        if name != "position" and getattr(first, name) is not None
    }
    for name in ("prompts", "completions"):
        if getattr(first, name) is not None:
            values[name] = tuple(t for b in batches for t in getattr(b, name))
    return Logged(
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        length_unit=first.length_unit,
        position=None if whole else torch.cat([b.in_response for b in batches]),
        divergences={k: torch.cat([b.divergences[k] for b in batches]) for k in first.divergences},
        **values,
    )
