"""verl's `rollout_correction` block as this library's parts, key by key.

The block is read as it stands: what verl would keep, weight or ignore is what the parts keep, weight
or ignore, its inverted k1 bands included. A key that verl does not have is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offdrift.correction import Correction, Gate, Weight, rejection
from offdrift.errors import MethodError, RecipeError
from offdrift.methods.method import Method
from offdrift.objectives import Clipped, Objective, Reinforce
from offdrift.ratios import RatioName

DEFAULTS: dict[str, Any] = {
    "rollout_is": None,
    "rollout_is_threshold": 2.0,
    "rollout_is_batch_normalize": False,
    "rollout_rs": None,
    "rollout_rs_threshold": None,
    "bypass_mode": False,
    "loss_type": "ppo_clip",
}
"""The keys, and what verl's trainer takes for those that are absent."""

UNITS = ("token", "sequence")
LOSSES = ("ppo_clip", "reinforce")


@dataclass(frozen=True)
class Mapped:
    """One configuration key of verl, its value, and the setting of offdrift that it becomes."""

    key: str
    value: Any
    ours: str


@dataclass(frozen=True)
class RolloutCorrection:
    """The block, read: `str` of it is a table of keys and what they map to."""

    method: Method
    """Decoupled: the driver's share, its correction of the mismatch; the objective is the actor's
    `loss_mode` and stands here as REINFORCE. Bypass: the whole loss."""
    bypass: bool
    rows: tuple[Mapped, ...]

    def __str__(self) -> str:
        wide = max(len(r.key) for r in self.rows)
        values = max(len(str(r.value)) for r in self.rows)
        return "\n".join(f"{r.key:{wide}}  {r.value!s:{values}}  {r.ours}" for r in self.rows)


def read_rollout_correction(config: Mapping[str, Any] | None) -> RolloutCorrection:
    """Read `algorithm.rollout_correction`: a dict, an omegaconf node or verl's own dataclass.

    Raises: `RecipeError` naming an unknown key or a value that verl would refuse, too.

    Example:
        >>> print(read_rollout_correction({"rollout_is": "token", "rollout_rs": "seq_max_k2",
        ...                                "rollout_rs_threshold": 0.05}))
        rollout_is                  token       weight token ratio(mismatch), truncate above 2
        rollout_is_threshold        2.0         cap of the weight
        rollout_is_batch_normalize  False       weights as they are
        rollout_rs                  seq_max_k2  keep if seq_max k2(mismatch) <= 0.05
        rollout_rs_threshold        0.05        bound of the gate
        bypass_mode                 False       decoupled: the driver corrects the mismatch of the engines
        loss_type                   ppo_clip    read in bypass mode only
    """
    config = config or {}
    block = DEFAULTS | {key: config[key] for key in config if key != "_target_"}
    for key in block:
        if key not in DEFAULTS:
            near = difflib.get_close_matches(str(key), DEFAULTS, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise RecipeError(f"rollout_correction has no key {key!r}; {hint}verl 0.9 has {', '.join(DEFAULTS)}")
    if block["loss_type"] not in LOSSES:
        raise RecipeError(f"loss_type={block['loss_type']!r} is not one of {LOSSES}")
    bypass = bool(block["bypass_mode"])
    on: RatioName = "full" if bypass else "mismatch"
    gates, weight = _gates(block, on), _weight(block, on)
    clips = bypass and block["loss_type"] == "ppo_clip"
    objective: Objective = Clipped(on="full", dual_clip=3.0) if clips else Reinforce()
    method = Method(
        objective=objective,
        correction=Correction(gates, () if weight is None or clips else (weight,)),
        aggregate="token_mean",
    )
    formulas = "; ".join(gate.formula for gate in gates)
    rejects = formulas or "no gate"
    if "k1" in str(block["rollout_rs"]):
        rejects += " (bands as verl applies them: to the inverse ratio)"
    weighs, ends = ("no weights", "not read") if weight is None else (weight.formula, "cap of the weight")
    if weight is not None and weight.floor:
        ends = "band of the weight"
    if weight is not None and clips:
        weighs = "nothing: the ratio is in the objective already; verl computes it for metrics alone"
    ours = {
        "rollout_is": weighs,
        "rollout_is_threshold": ends,
        "rollout_is_batch_normalize": "weights as they are",
        "rollout_rs": rejects,
        "rollout_rs_threshold": "bound of the gate" if gates else "not read",
        "bypass_mode": "decoupled: the driver corrects the mismatch of the engines",
        "loss_type": "read in bypass mode only",
    }
    if weight is not None and weight.normalize:
        ours["rollout_is_batch_normalize"] = "mean 1 over the batch"
    if bypass:
        ours["bypass_mode"] = "bypass: old log-probs are the rollout's, all in the loss"
        ours["loss_type"] = objective.formula
    return RolloutCorrection(method, bypass, tuple(Mapped(key, block[key], ours[key]) for key in DEFAULTS))


def _weight(block: Mapping[str, Any], on: RatioName) -> Weight | None:
    """The weight of the block, or None."""
    unit, threshold = block["rollout_is"], block["rollout_is_threshold"]
    if unit is None:
        return None
    if unit not in UNITS:
        raise RecipeError(f"rollout_is={unit!r} is not one of {(None, *UNITS)}")
    try:
        ends = [float(x) for x in str(threshold).split("_")]
        band = {"floor": ends[0], "outside": "mask"} if len(ends) == 2 else {}
        if isinstance(threshold, bool) or len(ends) > 2 or 0 in ends:
            raise ValueError
        normalize = bool(block["rollout_is_batch_normalize"])
        return Weight(on=on, unit=unit, cap=ends[-1], normalize=normalize, **band)
    except ValueError as e:
        raise RecipeError(
            f'rollout_is_threshold={threshold!r} is no positive cap (2.0) and no band ("0.5_5.0", lower end first)'
        ) from e


def _gates(block: Mapping[str, Any], on: RatioName) -> tuple[Gate, ...]:
    """One gate per mode. verl applies k1 bands to the inverse ratio; so does this."""
    if block["rollout_rs"] is None:
        return ()
    names = (x.strip() for x in str(block["rollout_rs"]).split(","))
    modes = list(dict.fromkeys(filter(None, names)))
    thresholds = [x.strip() for x in str(block["rollout_rs_threshold"]).split(",")]
    if len(thresholds) not in (1, len(modes)):
        raise RecipeError(
            f"rollout_rs_threshold={block['rollout_rs_threshold']!r} gives {len(thresholds)} "
            f"thresholds for {len(modes)} modes ({', '.join(modes)}); give one, or one for each"
        )
    for mode in modes:
        if not mode.endswith(("_k1", "_k2", "_k3")):
            raise RecipeError(f"rollout_rs={mode!r} is not one of verl's modes, as seq_mean_k3 is")
    try:
        pairs = zip(modes, thresholds if len(thresholds) > 1 else thresholds * len(modes), strict=True)
        return tuple(rejection(mode, x, on=on, k1_band="verl") for mode, x in pairs)
    except MethodError as e:
        raise RecipeError(f"rollout_rs={block['rollout_rs']!r}: {e}") from e
