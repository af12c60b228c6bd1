"""verl's `rollout_correction` block as this library's parts, key by key.

The block is read as it stands: what verl would keep, weight or ignore is what the parts keep, weight
or ignore, its inverted k1 bands included. A key that verl does not have is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
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
    block = Block(DEFAULTS | {key: config[key] for key in config if key != "_target_"})
    method = block.method
    ours = {**block.words_of_weight(), **block.words_of_gates(), **block.words_of_mode()}
    rows = tuple(Mapped(key, block.values[key], ours[key]) for key in DEFAULTS)
    return RolloutCorrection(method, block.bypass, rows)


@dataclass(frozen=True)
class Block:
    """The values of the block by their keys, all of them, and the parts that they ask for.

    Raises: `RecipeError` naming an unknown key or a value that verl would refuse, too; a part's, where it is read.
    """

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key in self.values:
            if key not in DEFAULTS:
                near = difflib.get_close_matches(str(key), DEFAULTS, n=1, cutoff=0.4)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise RecipeError(f"rollout_correction has no key {key!r}; {hint}verl 0.9 has {', '.join(DEFAULTS)}")
        if self.values["loss_type"] not in LOSSES:
            raise RecipeError(f"loss_type={self.values['loss_type']!r} is not one of {LOSSES}")

    @property
    def bypass(self) -> bool:
        """Whether the rollout's log-probs stand in for old ones, and the loss does all of the correction."""
        return bool(self.values["bypass_mode"])

    @property
    def on(self) -> RatioName:
        """The ratio that gates and weight act on."""
        return "full" if self.bypass else "mismatch"

    @property
    def clips(self) -> bool:
        """Whether the objective is a clipped one, in which the ratio stands already."""
        return self.bypass and self.values["loss_type"] == "ppo_clip"

    @cached_property
    def objective(self) -> Objective:
        """The loss of bypass mode; REINFORCE where the actor's own stands behind the driver."""
        return Clipped(on="full", dual_clip=3.0) if self.clips else Reinforce()

    @property
    def method(self) -> Method:
        """The parts together; see `RolloutCorrection`."""
        gates, weights = self.gates, () if self.weight is None or self.clips else (self.weight,)
        return Method(objective=self.objective, correction=Correction(gates, weights), aggregate="token_mean")

    @cached_property
    def weight(self) -> Weight | None:
        """The weight that the block asks for, also where verl computes it for metrics alone."""
        unit, threshold = self.values["rollout_is"], self.values["rollout_is_threshold"]
        if unit is None:
            return None
        if unit not in UNITS:
            raise RecipeError(f"rollout_is={unit!r} is not one of {(None, *UNITS)}")
        try:
            ends = [float(x) for x in str(threshold).split("_")]
            band = {"floor": ends[0], "outside": "mask"} if len(ends) == 2 else {}
            if isinstance(threshold, bool) or len(ends) > 2 or 0 in ends:
                raise ValueError
            normalize = bool(self.values["rollout_is_batch_normalize"])
            return Weight(on=self.on, unit=unit, cap=ends[-1], normalize=normalize, **band)
        except ValueError as e:
            raise RecipeError(
                f'rollout_is_threshold={threshold!r} is no positive cap (2.0) and no band ("0.5_5.0", lower end first)'
            ) from e

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """One gate per mode. verl applies k1 bands to the inverse ratio; so does this."""
        written, threshold = self.values["rollout_rs"], self.values["rollout_rs_threshold"]
        if written is None:
            return ()
        names = (x.strip() for x in str(written).split(","))
        modes = list(dict.fromkeys(filter(None, names)))
        thresholds = [x.strip() for x in str(threshold).split(",")]
        if len(thresholds) not in (1, len(modes)):
            raise RecipeError(
                f"rollout_rs_threshold={threshold!r} gives {len(thresholds)} "
                f"thresholds for {len(modes)} modes ({', '.join(modes)}); give one, or one for each"
            )
        for mode in modes:
            if not mode.endswith(("_k1", "_k2", "_k3")):
                raise RecipeError(f"rollout_rs={mode!r} is not one of verl's modes, as seq_mean_k3 is")
        try:
            pairs = zip(modes, thresholds if len(thresholds) > 1 else thresholds * len(modes), strict=True)
            return tuple(rejection(mode, x, on=self.on, k1_band="verl") for mode, x in pairs)
        except MethodError as e:
            raise RecipeError(f"rollout_rs={written!r}: {e}") from e

    def words_of_weight(self) -> dict[str, str]:
        """The settings of offdrift that the keys of the weight become."""
        weight = self.weight
        if weight is None:
            words = ("no weights", "not read", "weights as they are")
        else:
            nothing = "nothing: the ratio is in the objective already; verl computes it for metrics alone"
            words = (
                nothing if self.clips else weight.formula,
                "band of the weight" if weight.floor else "cap of the weight",
                "mean 1 over the batch" if weight.normalize else "weights as they are",
            )
        return dict(zip(("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize"), words, strict=True))

    def words_of_gates(self) -> dict[str, str]:
        """The settings of offdrift that the keys of the gates become."""
        rejects = "; ".join(gate.formula for gate in self.gates) or "no gate"
        if "k1" in str(self.values["rollout_rs"]):
            rejects += " (bands as verl applies them: to the inverse ratio)"
        return {"rollout_rs": rejects, "rollout_rs_threshold": "bound of the gate" if self.gates else "not read"}

    def words_of_mode(self) -> dict[str, str]:
        """The settings of offdrift that the mode and the loss become."""
        if self.bypass:
            mode, loss = "bypass: old log-probs are the rollout's, all in the loss", self.objective.formula
        else:
            mode, loss = "decoupled: the driver corrects the mismatch of the engines", "read in bypass mode only"
        return {"bypass_mode": mode, "loss_type": loss}
