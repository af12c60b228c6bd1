"""`System`: a technique that acts in an engine, a kernel, a scheduler or an optimizer, not in a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offdrift.methods.method import Status


@dataclass(frozen=True, kw_only=True)
class System:
    """A technique that no loss can contain.

    Example:
        >>> from offdrift.methods.systems import SYSTEMS
        >>> SYSTEMS["tbik"].target
        'engines with different tensor-parallel sizes'
    """

    title: str
    summary: str
    aggregation: str = "n/a"
    """At what level it works, where it works at one."""
    mechanism: str
    is_treatment: str = "none"
    target: str
    model_class: Literal["dense", "MoE", "both"] = "both"
    fails: str
    where: str
    """Who would have to implement it, and what part of it is here."""
    here: tuple[str, ...] = ()
    """Functions of this library that compute a part of it."""
    watch: tuple[str, ...] = ()
    """Metrics that show whether it works."""
    related: tuple[str, ...] = ()
    """Methods that correct what it leaves."""
    reference: str
    status: Status = "stated"
