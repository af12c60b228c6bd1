"""Stub: written next."""

from __future__ import annotations

from offdrift.integrations.logs.types import Detected, Piece


def pieces(found: Detected, *, piece_bytes: int = 64 << 20) -> list[Piece]:
    raise NotImplementedError
