"""A share of a log, by prompts: the same one whoever reads the log, and in whatever order."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from jaxtyping import Int, UInt64

from offdrift.records.batch import Logged


def sampled(batch: Logged, rate: float, salt: str = "") -> Logged:
    """The sequences of a random share of the prompts, whole groups, in their order.

    Chance is a hash of the salt, the step and the row at which the group begins: whoever samples,
    and however often, draws the same ones.

    Args:
        rate: share of prompts, in [0, 1].
        salt: tells files apart, such as the file's name.
    """
    if rate >= 1:
        return batch
    chosen = prompt_keys(batch, salt) < np.uint64(max(rate, 0.0) * 2.0**64)
    return batch.select(torch.from_numpy(np.flatnonzero(chosen)))


def prompt_keys(batch: Logged, salt: str) -> UInt64[np.ndarray, " b"]:
    """64 random bits for each sequence, the same for the sequences of a step's prompt."""
    own = prompt_rows(batch).astype(np.uint64)
    seed = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        steps = batch.step.numpy().astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        return mixed(mixed(own ^ np.uint64(seed)) ^ steps)


def prompt_rows(batch: Logged) -> Int[np.ndarray, " b"]:
    """The row at which each sequence's prompt group begins in its step; its own without groups."""
    rows = batch.row.numpy()
    if batch.group_ids is None:
        return rows
    groups = np.stack([batch.step.numpy(), batch.group_ids.numpy()])
    _, index = np.unique(groups, axis=1, return_inverse=True)
    first = np.full(index.max(initial=-1) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, index.ravel(), rows)
    return first[index.ravel()]


def mixed(x: UInt64[np.ndarray, " b"]) -> UInt64[np.ndarray, " b"]:
    """A bijection of 64 bits that leaves no pattern (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(2**64 - 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
