"""`Method`: a composition of parts, and what it needs, observes and adapts; `override` changes single values.

Gates, weights, objectives, an aggregate, a penalty and an anchor meet here and nowhere else. A row
of the table is such a composition with the words that go with it.

An anchor stands in for the old policy without a forward pass: `Interpolated` (A-3PO) puts it between the rollout and
the current policy, the closer to the current one the older a token is; `RolloutAsOld` (bypass) takes the rollout policy
itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import and_
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.advantages import AdvantageName
from offdrift.aggregate import AggregateName, NormalizerName, accepted_counts
from offdrift.batch_info import BatchInfo, Observed, StepSums, without_unscored
from offdrift.correction import Correction
from offdrift.correction.compose import GateLike, WeightLike, factors
from offdrift.errors import MethodError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.methods.lr_scale import EssScale
from offdrift.objectives import Objective
from offdrift.penalty import KLPenalty

AtZeroLag = Literal["current", "behaviour"]


def interpolated(
    logp_rollout: Float[Tensor, " n"],
    logp: Float[Tensor, " n"],
    version_lag: Float[Tensor, " n"] | Int[Tensor, " n"],
    *,
    at_zero_lag: AtZeroLag = "current",
) -> Float[Tensor, " n"]:
    """Log-probs of the policy one update back, interpolated in nats:

        log pi_old = log mu + alpha (log pi - log mu),    alpha = 1 - 1/d,  within [0, 1]

    The staleness ratio is then w^(1/d) and the mismatch ratio w^(1 - 1/d), w the full ratio: a clip
    on staleness acts on a tempered full ratio.

    Args:
        logp_rollout: log mu of the sampled tokens, nats.
        logp: log pi, nats.
        version_lag: d, updates between the weights that drew a token and the current ones.
        at_zero_lag: the anchor of tokens that the current weights drew (d <= 0): the current policy
            as in the paper, or the rollout policy as in AReaL's code.

    Gradient: none.

    Example:
        >>> mu, pi = torch.full((3,), -1.2), torch.full((3,), -0.8)
        >>> interpolated(mu, pi, torch.tensor([1, 2, 4]))
        tensor([-1.2000, -1.0000, -0.9000])

    Reference: A-3PO, arXiv:2512.06547; implemented in AReaL.
    """
    with torch.no_grad():
        d = version_lag.to(logp.dtype)
        alpha = (1 - 1 / d.where(d > 0, 1.0)).clamp(min=0)
        alpha = alpha.where(d > 0, 1.0 if at_zero_lag == "current" else 0.0)
        return torch.lerp(logp_rollout.to(logp.dtype), logp, alpha)


@dataclass(frozen=True, kw_only=True)
class Interpolated:
    """`interpolated` as the old policy of a batch; a recorded old policy is not read.

    Example:
        >>> Interpolated().formula
        'log pi_old = log mu + (1 - 1/d)(log pi - log mu), d = version lag; current policy at d = 0'
    """

    at_zero_lag: AtZeroLag = "current"
    needs = ("version_lag",)

    def __post_init__(self) -> None:
        check_choice("at_zero_lag", self.at_zero_lag, ("current", "behaviour"))

    @property
    def formula(self) -> str:
        """The anchor, in one line."""
        return (
            "log pi_old = log mu + (1 - 1/d)(log pi - log mu), d = version lag; "
            f"{'current' if self.at_zero_lag == 'current' else 'rollout'} policy at d = 0"
        )

    def __call__(self, logprobs: LogProbs, batch_info: BatchInfo) -> LogProbs:
        """Replace the batch's old policy by the interpolated one. Gradient: none through it.

        Raises: `EvidenceError` if the batch carries no version lag.
        """
        lag = batch_info.required("version_lag")
        old = interpolated(logprobs.logp_rollout, logprobs.current, lag, at_zero_lag=self.at_zero_lag)
        # A new object: log-ratios that the given batch has cached are not those to the new anchor.
        return replace(logprobs, logp_old=old)


@dataclass(frozen=True, kw_only=True)
class RolloutAsOld:
    """The rollout policy as the old policy of a batch (bypass mode): `mismatch` is 1 at every token.

        log pi_old = log mu,    so staleness = full

    Example:
        >>> RolloutAsOld().formula
        'log pi_old = log mu'

    Reference: bypass mode of verl's rollout correction.
    """

    @property
    def formula(self) -> str:
        """The anchor, in one line."""
        return "log pi_old = log mu"

    def __call__(self, logprobs: LogProbs, batch_info: BatchInfo) -> LogProbs:
        """Replace the batch's old policy by the rollout policy. Gradient: none through it."""
        return replace(logprobs, logp_old=logprobs.logp_rollout)


Anchor = Interpolated | RolloutAsOld


UNCORRECTED = Correction()

Bias = Literal["none", "none inside limits", "O(drift)", "O(drift^2)", "O(1)"]
"""How the expected gradient differs from that of the true return, by enumeration (`lab.bias`):
never; only once a limit acts; in proportion to the drift (or its square); or it does not vanish with
the drift."""

Status = Literal["stated", "implementation", "secondary", "unverified"]
"""Where the formula is from: a primary source, an official implementation, a secondary description,
or our best reading where no equation could be found (experimental)."""


OF_RATIO = {"seq_sum": "sequence", "seq_mean": "geometric"}
"""What a gate's unit is called where its statistic is the ratio: sums are of logs."""
UNSAID: dict[str, tuple[str, ...]] = {
    "GeometricClipped": ("geometric",),
    "PrefixClipped": ("prefix",),
    "PrefixMinClipped": ("prefix_min",),
    "EntropyGrouped": ("entropy_group",),
    "TurnNormalized": ("turn",),
    "LengthNeutralGate": ("seq_mean",),
}
"""Units of parts whose `unit` does not say all. Any other part with a ratio and no `unit` works on
tokens; a test perturbs single tokens of every method and fails where that is untrue."""


def part_units(part: Any) -> frozenset[str]:
    """Spans over which an objective, a gate or a weight compares policies; empty if it compares none.

    Example:
        >>> from offdrift.methods import METHODS
        >>> sorted(part_units(METHODS["gspo"].objective)), sorted(part_units(METHODS["trm_max"].correction.gates[0]))
        (['geometric'], ['worst'])
    """
    units = set(UNSAID.get(type(part).__name__, ()))
    unit: str | None = getattr(part, "unit", None)
    if unit is not None:
        names = {"seq_max": "worst"}
        names |= OF_RATIO if getattr(part, "statistic", None) == "ratio" else {}
        units.add(names.get(unit, unit))
    elif getattr(part, "on", None) is not None and not units:
        units.add("token")
    return frozenset(units)


@runtime_checkable
class MethodMaker(Protocol):
    """Protocol of functions that make a method from settings of their own."""

    @property
    def settings(self) -> dict[str, Any]: ...
    def changed(self, current: Method, changes: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """An objective, a correction and an aggregate, with whatever else the method prescribes.

    Raises: `MethodError` if objective and weights would count the same ratio twice.

    Example:
        >>> from offdrift.methods import METHODS
        >>> from offdrift.objectives import Reinforce
        >>> mine = Method(objective=Reinforce(), correction=METHODS["token_tis"].correction
        ...               & METHODS["trm_max"].correction, aggregate="token_mean")
        >>> mine.needs_divergences
        True
    """

    objective: Objective
    correction: Correction = UNCORRECTED
    aggregate: AggregateName = "seq_mean_token_sum"
    normalizer: NormalizerName = "sampled"
    """What the loss is divided by, see `aggregate.NormalizerName`."""
    penalty: KLPenalty | None = None
    """KL to the reference policy."""
    gate_scope: Literal["policy", "all"] = "policy"
    """Whether gates remove a token's penalty, too ("all", as in verl)."""
    anchor: Anchor | None = None
    """What stands in for the old policy; None: the recorded one."""
    old_policy: Literal["sampling", "ewma"] = "sampling"
    """Whose log-probs it was published with as `logp_old`: the training engine's at the weights that
    sampled, or those of averaged weights."""
    lr_scale: EssScale | None = None
    """Scales the learning rate of each step."""
    advantage: str | None = None
    """The advantage estimator it was published with; None: any."""
    summary: str = ""
    mechanism: str = ""
    """What keeps the policy near: the survey's column "trust-region mechanism"."""
    target: str = ""
    """The failure it was made for."""
    fails: str = ""
    """When it fails: one line."""
    bias: Bias | None = None
    """Of the expected gradient; asserted by enumeration."""
    reference: str = ""
    status: Status = "stated"
    made_by: MethodMaker | None = field(default=None, compare=False, repr=False)
    """The function of the user's that made it, and its settings (`offdrift.methods.load`)."""

    def __post_init__(self) -> None:
        check_choice("aggregate", self.aggregate, get_args(AggregateName))
        check_choice("normalizer", self.normalizer, get_args(NormalizerName))
        check_choice("gate_scope", self.gate_scope, ("policy", "all"))
        if self.advantage is not None and self.advantage not in get_args(AdvantageName):
            from offdrift.advantages import ADVANTAGES  # which knows estimators of the user's, too

            check_choice("advantage", self.advantage, tuple(ADVANTAGES))
        for weight in self.correction.weights:
            if factors(weight.on) & factors(self.objective.on):
                raise MethodError(
                    f"the objective already contains the {self.objective.on} ratio, a weight on "
                    f"{weight.on} would count it twice; use Reinforce(), or a weight on the other ratio"
                )

    @property
    def parts(self) -> tuple[Any, ...]:
        """Objective, gates, weights and the rest, in that order."""
        extra = (self.penalty, self.anchor, self.lr_scale)
        present = (x for x in extra if x is not None)
        return (self.objective, *self.correction.gates, *self.correction.weights, *present)

    @property
    def needs_divergences(self) -> bool:
        """Whether it reads divergences of whole distributions (recorded evidence), or the distributions themselves."""
        return self.correction.needs_divergences or getattr(self.objective, "exact", False)

    @property
    def divergences(self) -> frozenset[str]:
        """Names of the divergences that it reads, such as `kl_rollout_current` or `tv_old_current`."""
        read = (getattr(part, "reads", None) for part in self.parts)
        return frozenset(name for name in read if name is not None)

    @property
    def compares_old(self) -> bool:
        """Whether it reads whole distributions of the old and the current policy, or their divergences."""
        return "distributions" in self.needs or any(name.endswith("old_current") for name in self.divergences)

    @property
    def needs_old(self) -> bool:
        """Whether it reads recorded log-probs of the old policy."""
        if self.anchor is not None:
            return False
        on_old = ("mismatch", "staleness")
        return any(getattr(part, "needs_old", getattr(part, "on", None) in on_old) for part in self.parts)

    @property
    def needs_reference(self) -> bool:
        """Whether it reads log-probs of the reference policy."""
        return self.penalty is not None or getattr(self.objective, "needs_reference", False)

    @property
    def engine_units(self) -> frozenset[str]:
        """Spans over which it compares the rollout policy with the trainer's: of gates and weights on mismatch or full
        ratio, and of an objective on the full one. Empty if nothing of it corrects for the engine."""
        parts = (*self.correction.gates, *self.correction.weights, self.objective)
        own = (self.objective,)
        compares = [p for p in parts if p.on == "full" or (p.on == "mismatch" and p not in own)]
        lags = [p for p in compares if getattr(p, "statistic", None) == "version_lag"]
        return frozenset(unit for part in compares if part not in lags for unit in part_units(part))

    @property
    def whole_prompts(self) -> bool:
        """Whether a step must hold all answers to a prompt, as it does not where minibatches cut them apart."""
        return getattr(self.objective, "whole_prompts", False)

    @property
    def scores_old(self) -> bool:
        """Whether batches must be scored by the old policy, for its log-probs, divergences or entropy."""
        exact = any(name.endswith("rollout_old") for name in self.divergences)
        return self.needs_old or exact or "entropy" in self.needs

    @property
    def needs(self) -> frozenset[str]:
        """Fields of `BatchInfo` that it reads, besides divergences."""
        return frozenset(name for part in self.parts for name in getattr(part, "needs", ()))

    @property
    def observers(self) -> tuple[Any, ...]:
        """Parts that look at a whole step before they act."""
        return tuple(p for p in self.parts if hasattr(p, "observe") and getattr(p, "observes", True))

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"], batch_info: BatchInfo) -> Observed:
        """Observations of this method's parts on one piece of a step; merge them over pieces and ranks."""
        scored = without_unscored(logprobs, advantages, batch_info)
        statistics: dict[Any, StepSums] = {p: p.observe(*scored) for p in self.observers}
        if self.lr_scale is not None and self.correction.gates:
            statistics[self.lr_scale] = self.lr_scale.observe(*scored, self.correction(*scored).keep)
        if self.normalizer != "sampled":
            keep = self.correction(logprobs, advantages, batch_info).keep
            statistics["normalizer"] = accepted_counts(logprobs.segments, keep)
        return Observed({part: s for part, s in statistics.items() if s})

    @property
    def needs_whole_step(self) -> bool:
        """Whether a step of several pieces must be observed whole before any piece is pushed."""
        return bool(self.observers) or self.normalizer != "sampled"

    def next(self, observed: Observed) -> Method:
        """The method of the next step, where the objective or a gate adapts; else itself."""

        def adapted(part: Any) -> Any:
            statistics = observed.parts.get(part)
            return part if statistics is None or not hasattr(part, "next") else part.next(statistics)

        objective, gates = adapted(self.objective), tuple(adapted(gate) for gate in self.correction.gates)
        if (objective, gates) == (self.objective, self.correction.gates):
            return self
        return replace(self, objective=objective, correction=replace(self.correction, gates=gates))

    def describe(self) -> str:
        """One line: objective, gates, weights, aggregate, and the rest."""
        first = [part.formula for part in self.parts if part not in (self.lr_scale, self.penalty)]
        rest = [part.formula for part in (self.penalty, self.lr_scale) if part is not None]
        return "; ".join([*first, self.aggregate, *rest])

    def changes(self, since: Method) -> dict[str, Any]:
        """Numbers of the objective, the gates and the penalty that differ, as paths for `override`."""
        pairs = {name: (getattr(self, name), getattr(since, name)) for name in ("objective", "penalty")}
        gates = zip(self.correction.gates, since.correction.gates, strict=True)
        pairs |= {f"gate.{i}": pair for i, pair in enumerate(gates)}
        return {
            f"{name}.{f.name}": getattr(part, f.name)
            for name, (part, before) in pairs.items()
            if part is not None
            for f in fields(part)
            if getattr(part, f.name) != getattr(before, f.name)
        }


def row(
    objective: Objective,
    *parts: GateLike | WeightLike,
    aggregate: AggregateName = "token_mean",
    bias: Bias = "O(drift)",
    **words: Any,
) -> Method:
    """A row of the table: an objective, its gates and weights in any order, and what is said of them."""
    correction = reduce(and_, parts, UNCORRECTED)
    return Method(objective=objective, correction=correction, aggregate=aggregate, bias=bias, **words)


PLAIN = ("aggregate", "normalizer", "gate_scope", "advantage")
SINGLE = ("objective", "penalty", "anchor", "lr_scale")


def override(row: Method, changes: Mapping[str, Any]) -> Method:
    """The row with single values changed.

    Paths: `aggregate`, `normalizer`, `advantage`, `gate_scope`, `objective.FIELD`, `penalty.FIELD`,
    `anchor.FIELD`, `lr_scale.FIELD`, and `weight.FIELD` or `gate.FIELD` (if there is one; else
    `gate.0.FIELD`, `gate.1.FIELD`, ...). Nested mappings are paths, too. Each value has the type of its field
    (`offdrift.setting.typed`). Of a method that a function of the user's makes, arguments of that are settings, too.

    Raises: `MethodError` naming the path, the value, and the fields or values there are.

    Example:
        >>> from offdrift.methods import method
        >>> override(method("trm_max"), {"gate.high": 0.1}).correction.gates[0].high
        0.1
    """
    by_part: dict[str, dict[str, Any]] = {}
    plain = dict(flattened(changes))
    if row.made_by is not None:
        row, plain = row.made_by.changed(row, plain)
    for path, value in plain.items():  # all changes of a part at once: they may need each other
        part, _, name = path.rpartition(".")
        by_part.setdefault(part, {})[name] = value
    several = {"gates": list(row.correction.gates), "weights": list(row.correction.weights)}
    for part, values in by_part.items():
        row = _changed(row, part, values, several)
    # At once: weights of one method may have to agree with each other.
    correction = replace(row.correction, **{k: tuple(parts) for k, parts in several.items()})
    if correction == row.correction:
        return row
    scale, weights = row.lr_scale, row.correction.weights
    if scale is not None and scale.weight in weights:  # it goes on counting the weights that the loss has
        scale = replace(scale, weight=correction.weights[weights.index(scale.weight)])
    return replace(row, correction=correction, lr_scale=scale)


def flattened(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested mapping with its dotted path."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _changed(row: Method, part: str, values: Mapping[str, Any], several: dict[str, list[Any]]) -> Method:
    """The row with fields of one part changed; a gate or weight is changed in `several` instead."""
    from offdrift.setting import typed_fields

    path = ".".join(x for x in (part, next(iter(values))) if x)
    if not part and set(values) <= set(PLAIN):
        return replace(row, **typed_fields(row, values, ""))
    if part in SINGLE and getattr(row, part) is not None:
        return replace(row, **{part: replace(getattr(row, part), **typed_fields(getattr(row, part), values, part))})
    head, _, index = part.partition(".")
    if parts := several.get(f"{head}s"):
        count, name = len(parts), path.rpartition(".")[2]
        if index == "" and count > 1:
            raise MethodError(f"{path!r}: this method has {count} {head}s, say which: {head}.0.{name}, ...")
        i = int(index or 0) if (index or "0").isdecimal() else count
        if i >= count:
            raise MethodError(f"{path!r}: {head}s are numbered 0 to {count - 1}")
        parts[i] = replace(parts[i], **typed_fields(parts[i], values, part))
        return row
    settings = [] if row.made_by is None else list(row.made_by.settings)
    paths = ["aggregate", "objective.FIELD", "weight.FIELD", "gate.FIELD", "gate.0.FIELD", "penalty.FIELD"]
    raise MethodError(
        f"{path!r} is not a part of this method ({row.describe()}); paths are {', '.join(settings + paths)}"
    )
