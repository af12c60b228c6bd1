"""Recipes that practitioners asked for by name: combinations as published with a model."""

from __future__ import annotations

from offdrift.methods.method import Method

ROWS: dict[str, Method] = {}
