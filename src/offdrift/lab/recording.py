"""Recorded drift: per token, how far a real training engine was from a real rollout engine.

A recording is a compressed numpy archive of two arrays `[sequences, tokens]`, `log_ratio` and `kl`,
and a `name`. It holds numbers only: no tokens, no text, and nothing in it is ever unpickled.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from offdrift.errors import RecordError
from offdrift.lab.length_bias import Stream

FOLDER = Path(__file__).with_name("recordings")


def packaged() -> list[Path]:
    """The recordings that come with the library (`benchmarks/record_drift.py` made them)."""
    return sorted(FOLDER.glob("*.npz"))


def write_recording(stream: Stream, path: Path) -> None:
    """Store a stream, as it is."""
    arrays = {"log_ratio": stream.log_ratio.numpy(), "kl": stream.kl.numpy()}
    np.savez_compressed(path, name=np.array(stream.name), **arrays)  # type: ignore[arg-type]


def read_recording(path: Path) -> Stream:
    """Read a stream back.

    Raises: `RecordError` naming the file if it is missing, corrupt, or not a recording.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            name, log_ratio, kl = str(file["name"]), file["log_ratio"], file["kl"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise RecordError(
            f"{path} is not a recording of drift: {error}; make one with benchmarks/record_drift.py"
        ) from error
    good = log_ratio.ndim == 2 and log_ratio.shape == kl.shape and kl.size > 0
    if not good or not np.isfinite(log_ratio).all() or not (kl >= 0).all():
        raise RecordError(
            f"{path}: log_ratio {log_ratio.shape} and kl {kl.shape} must be finite, [sequences, "
            "tokens] alike, and no KL negative"
        )
    return Stream(name, torch.from_numpy(log_ratio).float(), torch.from_numpy(kl).float())
