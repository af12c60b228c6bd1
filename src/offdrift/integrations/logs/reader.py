"""Stub: written next."""

from __future__ import annotations

from offdrift.integrations.logs.types import Detected, Piece, Read


def read(piece: Piece, found: Detected) -> Read:
    raise NotImplementedError
