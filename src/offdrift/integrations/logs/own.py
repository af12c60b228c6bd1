"""This library's own rollout records (`rollouts/*.parquet` of a run): the engine's side, complete."""

from __future__ import annotations

import json
from typing import Any

from offdrift.integrations.logs.source import Source

STORED = b"offdrift"
"""Key of the header of rollout records."""
LOGGED = b"offdrift.log"
"""Key of the header of logs in the plain schema."""

OWN_ROLLOUTS = Source(
    "offdrift-rollouts",
    "offdrift",
    "this library's rollout records",
    "their header",
    columns={"truncated": "finish"},
    step_in_name=r"(?:^|[/_.-])(\d+)\.parquet",
    note="they hold the engine's side alone; the log beside them holds the trainer's",
)


def header(metadata: dict[bytes, bytes] | None) -> dict[str, Any] | None:
    """The header of a log in the plain schema; None if the file has none."""
    if metadata is None or LOGGED not in metadata:
        return None
    try:
        stated = json.loads(metadata[LOGGED])
    except ValueError:
        return None
    return stated if isinstance(stated, dict) else None
