"""Stub: written next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offdrift.integrations.logs.types import Detected


def detect(paths: Sequence[str], *, columns: Mapping[str, str] = {}) -> Detected:  # noqa: B006
    raise NotImplementedError
