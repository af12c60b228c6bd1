"""What to train with, given a measured zero-update mismatch: a method, and thresholds that fit it.

Between engines with the same weights everything a gate rejects, it rejects for nothing. The threshold
that lets 99 % of this clean data pass is therefore the least that makes sense: its floor. Once the
policy moves, its own updates come on top, so a published threshold that lies above the floor stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from offdrift.check.calibrate import Calibrated, calibrated, settings
from offdrift.check.measure import Measured
from offdrift.check.verdict import Level
from offdrift.divergence.evidence import Divergence
from offdrift.errors import EvidenceError
from offdrift.methods import METHODS

ACCEPTANCE = 0.99
DENSE, SPARSE = ("trm_max", "trm_max_k2"), ("icepop",)
"""By preference: a sequence is judged by its worst token, exactly if that can be; single tokens
where experts make outliers of single tokens."""

WHY = {
    "trm_max": "rejects a sequence for its worst token, by exact KL: never by chance",
    "trm_max_k2": "rejects a sequence for its worst token",
    "icepop": "masks single tokens, which is what differs where experts are routed differently",
}
LOWER = ("gate.low", "weight.floor")
"""Settings that reject what is below them; the others reject what is above."""


def recommended(
    found: Measured, *, level: Level, mixture_of_experts: bool = False
) -> dict[str, Any]:
    """The `recommended` entry of `check.json`.

    No correction is recommended for a pair that is to be repaired: it would hide what is wrong.
    Calibrated settings of all main methods are listed either way.

    Args:
        found: the baseline.
        level: of the verdict.
        mixture_of_experts: whether the model routes tokens.
    """
    table = _calibrated(found)
    nothing = {"method": None, "settings": {}, "acceptance": ACCEPTANCE, "snippets": {}, "calibrated": [asdict(c) for c in table]}  # fmt: skip
    if level in ("act", "stop"):
        return {**nothing, "why": "repair the pair first: a correction would hide what is wrong"}
    for name in SPARSE if mixture_of_experts else DENSE:
        rows = [c for c in table if c.method == name]
        if rows:
            return {
                **nothing,
                "method": name,
                "settings": fitting(name, table),
                "floor": settings(table, name),
                "published": published(name, settings(table, name)),
                "why": _why(name, rows, found),
                "snippets": snippets(name, table),
            }
    return {**nothing, "why": "nothing was recorded that a threshold could be calibrated on"}


def published(name: str, paths: Iterable[str]) -> dict[str, float]:
    """The values that the table of methods has at these paths.

    Example:
        >>> published("trm_max", ["gate.high"])
        {'gate.high': 0.05}
    """
    correction: Any = METHODS[name].correction
    parts = {"gate": correction.gates, "weight": correction.weights}
    found = {}
    for path in paths:
        part, _, field = path.rpartition(".")
        value = getattr(parts[part][0], field)
        if value is not None:
            found[path] = float(value)
    return found


def fitting(name: str, table: list[Calibrated]) -> dict[str, float]:
    """Of each published setting and its floor, the one that rejects less."""
    floor = settings(table, name)
    known = published(name, floor)
    laxer = {path: min if path in LOWER else max for path in floor}
    return {path: laxer[path](x, known.get(path, x)) for path, x in floor.items()}


def snippets(name: str, table: list[Calibrated]) -> dict[str, str]:
    """The recommendation as configuration, by framework; the nearest that each of them offers.

    verl has no gate on exact KL: its worst-token k2 gate stands in. TRL masks tokens, in a band.
    """
    found = {"offdrift": _offdrift(name, fitting(name, table))}
    k2, band = fitting("trm_max_k2", table), fitting("icepop", table)
    if name == "icepop" and band:
        low, high = band["weight.floor"], band["weight.cap"]
        found["verl"] = _verl(is_="token", is_threshold=f"{low:.6g}_{high:.6g}")
    elif k2:
        found["verl"] = _verl(rs="seq_max_k2", rs_threshold=f"{k2['gate.high']:.6g}")
    if band:
        found["trl"] = (
            "GRPOConfig(\n    vllm_importance_sampling_correction=True,\n"
            '    vllm_importance_sampling_mode="token_mask",\n'
            f"    vllm_importance_sampling_clip_min={band['weight.floor']:.6g},\n"
            f"    vllm_importance_sampling_clip_max={band['weight.cap']:.6g},\n)"
        )
    return found


def _calibrated(found: Measured) -> list[Calibrated]:
    if found.logged is None:
        return []
    divergences = {name: Divergence.exact(name, x) for name, x in found.logged.divergences.items()}
    try:
        return calibrated(found.logged.logprobs(), divergences, acceptance=ACCEPTANCE)
    except EvidenceError:
        return []


def _why(name: str, rows: Sequence[Calibrated], found: Measured) -> str:
    one = rows[-1]
    unit, count = ("tokens", found.tokens) if name == "icepop" else ("sequences", found.sequences)
    known = published(name, [one.setting]).get(one.setting)
    said = f"{WHY[name]}. The engines alone reach {one.setting} = {one.value:.3g}, which accepts {one.acceptance:.1%} of these {count:,} clean {unit}, and of fresh ones at least {one.low:.0%} (95 % confidence)"
    if known is None:
        return said
    if known >= one.value:
        return f"{said}; the published {known:g} is {known / one.value:.2g} times that, which is the room left for policy updates"
    return f"{said}; the published {known:g} would reject clean data"


def _offdrift(name: str, changes: Mapping[str, float]) -> str:
    values = ", ".join(f'"{path}" = {value:.6g}' for path, value in changes.items())
    return f'method = "{name}"\noverride = {{ {values} }}'


def _verl(
    *, is_: str = "null", is_threshold: str = "2.0", rs: str = "null", rs_threshold: str = "null"
) -> str:
    return (
        "algorithm:\n  rollout_correction:\n"
        f"    rollout_is: {is_}\n    rollout_is_threshold: {is_threshold}\n"
        f"    rollout_rs: {rs}\n    rollout_rs_threshold: {rs_threshold}"
    )
