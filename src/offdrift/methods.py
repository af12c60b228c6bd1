"""`METHODS`: every named method as a composition of parts; the only place where parts meet.

A row says which objective, which gates, which weight, how token losses are aggregated, where it
comes from and when it fails. A new method made of known parts is one row here. Rows hold the
published values; `override` changes single values for one run, and `Correction` composes freely.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, get_args

from offdrift.aggregate import AggregateName
from offdrift.correction import Correction, Gate, Weight
from offdrift.errors import MethodError, check_choice
from offdrift.objectives import ImportanceSampled, Objective, Reinforce
from offdrift.ratios import RatioName

UNCORRECTED = Correction()
TRM = "Li et al., Trust Region Masking, arXiv:2512.23075v5"
TIS = "Yao et al., Your efficient RL framework secretly brings you off-policy RL training, 2025"


@dataclass(frozen=True, kw_only=True)
class Method:
    """An objective, a correction and an aggregate, with their source.

    Raises: `MethodError` if objective and weight would count the same ratio twice.

    Example:
        >>> mine = Method(objective=Reinforce(), correction=METHODS["token_tis"].correction
        ...               & METHODS["trm_max"].correction, aggregate="token_mean")
        >>> mine.needs_divergences
        True
    """

    objective: Objective
    correction: Correction = UNCORRECTED
    aggregate: AggregateName = "seq_mean_token_sum"
    summary: str = ""
    fails: str = ""
    """When it fails: one line."""
    reference: str = ""

    def __post_init__(self) -> None:
        check_choice("aggregate", self.aggregate, get_args(AggregateName))
        weight = self.correction.weight
        if weight is None or self.objective.on is None:
            return
        if _factors(weight.on) & _factors(self.objective.on):
            raise MethodError(
                f"the objective already contains the {self.objective.on} ratio, a weight on "
                f"{weight.on} would count it twice; use Reinforce(), or a weight on the other ratio"
            )

    @property
    def needs_divergences(self) -> bool:
        """Whether it reads divergences of whole distributions (recorded evidence)."""
        return self.correction.needs_divergences

    @property
    def needs_old(self) -> bool:
        """Whether it reads log-probs of the old policy."""
        parts = [self.objective.on, *(g.on for g in self.correction.gates)]
        if self.correction.weight is not None:
            parts.append(self.correction.weight.on)
        return any(on in ("mismatch", "staleness") for on in parts)

    def describe(self) -> str:
        """One line: objective, gates, weight, aggregate."""
        words = [_short(self.objective), *map(_short_gate, self.correction.gates)]
        if self.correction.weight is not None:
            words.append(_short_weight(self.correction.weight))
        return "; ".join([*words, self.aggregate])


def _seq_gate(statistic: str, unit: str, high: float) -> Gate:
    return Gate(statistic=statistic, on="full", unit=unit, high=high)  # type: ignore[arg-type]


def _trm(*gates: Gate, summary: str, fails: str) -> Method:
    return Method(
        objective=ImportanceSampled(on="full"),
        correction=Correction(gates),
        summary=summary,
        fails=fails,
        reference=f"{TRM}, section 4.3 and Algorithm 1",
    )


FEW_ACCEPTED = "rejects almost everything once drift is strong; below 70 % acceptance nothing is learned reliably"
DETECTOR = "a detector, not a guarantee: rare tokens give false alarms, unsampled tokens none"

METHODS: dict[str, Method] = {
    "none": Method(
        objective=Reinforce(),
        aggregate="token_mean",
        summary="no correction: the policy gradient as if the data were on-policy",
        fails="whenever the policies differ",
        reference="Williams, 1992",
    ),
    "token_tis": Method(
        objective=Reinforce(),
        correction=Correction(weight=Weight(on="full", unit="token", cap=2.0)),
        aggregate="token_mean",
        summary="each token weighted by its ratio, truncated at 2",
        fails="biased for sequence rewards; the bias grows with length and drift",
        reference=TIS,
    ),
    "seq_tis": Method(
        objective=Reinforce(),
        correction=Correction(weight=Weight(on="full", unit="sequence", cap=2.0)),
        summary="each sequence weighted by its product of ratios, truncated at 2",
        fails="long sequences: the product vanishes or explodes",
        reference=TIS,
    ),
    "trm_max": _trm(
        _seq_gate("kl", "seq_max", 0.05),
        summary="reject a sequence if the exact KL of any token exceeds 0.05 nat",
        fails=FEW_ACCEPTED + "; long sequences are rejected more often",
    ),
    "trm_avg": _trm(
        _seq_gate("kl", "seq_mean", 0.001),
        summary="reject a sequence if its mean exact KL per token exceeds 0.001 nat",
        fails="one catastrophic token hides in a long sequence",
    ),
    "trm_max_avg": _trm(
        _seq_gate("kl", "seq_max", 0.1),
        _seq_gate("kl", "seq_mean", 0.002),
        summary="both criteria, each looser: worst token 0.1, mean 0.002 nat",
        fails=FEW_ACCEPTED,
    ),
    "trm_max_k2": _trm(
        _seq_gate("k2", "seq_max", 0.05),
        summary="trm_max with the sampled stand-in k2 = (log w)^2 / 2",
        fails=DETECTOR,
    ),
    "trm_avg_k3": _trm(
        _seq_gate("k3", "seq_mean", 0.001),
        summary="trm_avg with the sampled stand-in k3 = w - 1 - log w",
        fails=DETECTOR,
    ),
    "trm_max_avg_k2_k3": _trm(
        _seq_gate("k2", "seq_max", 0.1),
        _seq_gate("k3", "seq_mean", 0.002),
        summary="trm_max_avg with the sampled stand-ins k2 and k3",
        fails=DETECTOR,
    ),
}


def method(name: str) -> Method:
    """The row of that name.

    Raises: `MethodError` naming the rows there are.

    Example:
        >>> method("trm_max").describe()
        'importance_sampled(full); keep if seq_max kl(full) <= 0.05; seq_mean_token_sum'
    """
    if name not in METHODS:
        raise MethodError(f"no method {name!r}; the table has {', '.join(sorted(METHODS))}")
    return METHODS[name]


def override(row: Method, changes: Mapping[str, Any]) -> Method:
    """The row with single values changed, by dotted path.

    Paths: `aggregate`, `objective.FIELD`, `weight.FIELD`, `gate.FIELD` (if there is one gate) or
    `gate.0.FIELD`, `gate.1.FIELD`, ...

    Raises: `MethodError` naming the path and the fields there are.

    Example:
        >>> override(method("trm_max"), {"gate.high": 0.1}).correction.gates[0].high
        0.1
    """
    for path, value in changes.items():
        row = _changed(row, path, value)
    return row


def _changed(row: Method, path: str, value: Any) -> Method:
    head, _, rest = path.partition(".")
    correction = row.correction
    if path == "aggregate":
        return replace(row, aggregate=value)
    if head == "objective":
        return replace(row, objective=_with_field(row.objective, rest, value, path))
    if head == "weight" and correction.weight is not None:
        weight = _with_field(correction.weight, rest, value, path)
        return replace(row, correction=replace(correction, weight=weight))
    if head == "gate" and correction.gates:
        index, _, name = rest.rpartition(".")
        gates = list(correction.gates)
        if index == "" and len(gates) > 1:
            raise MethodError(
                f"{path!r}: this method has {len(gates)} gates, say which: gate.0.{name}, ..."
            )
        i = int(index or 0) if (index or "0").isdigit() else len(gates)
        if i >= len(gates):
            raise MethodError(f"{path!r}: gates are numbered 0 to {len(gates) - 1}")
        gates[i] = _with_field(gates[i], name, value, path)
        return replace(row, correction=replace(correction, gates=tuple(gates)))
    raise MethodError(
        f"{path!r} is not a part of this method ({row.describe()}); "
        "paths are aggregate, objective.FIELD, weight.FIELD, gate.FIELD, gate.0.FIELD"
    )


def _with_field(part: Any, name: str, value: Any, path: str) -> Any:
    assert is_dataclass(part)
    names = [f.name for f in fields(part)]
    if name not in names:
        raise MethodError(f"{path!r}: {type(part).__name__} has no {name!r}, only {names}")
    return replace(part, **{name: value})  # type: ignore[type-var]


def _factors(on: RatioName) -> set[str]:
    """A ratio as the set of its two factors."""
    return {"mismatch", "staleness"} if on == "full" else {on}


def _short(objective: Objective) -> str:
    names = {
        "Reinforce": "reinforce",
        "ImportanceSampled": "importance_sampled",
        "Clipped": "ppo_clip",
    }
    name = names.get(type(objective).__name__, type(objective).__name__)
    return f"{name}({objective.on})" if objective.on else name


def _short_gate(gate: Gate) -> str:
    low = "" if gate.low is None else f"{gate.low:g} <= "
    high = "" if gate.high is None else f" <= {gate.high:g}"
    only = "" if gate.advantage == "any" else f" where advantage is {gate.advantage}"
    return f"keep if {low}{gate.unit} {gate.statistic}({gate.on}){high}{only}"


def _short_weight(weight: Weight) -> str:
    cap = "" if weight.cap is None else f", {weight.outside} above {weight.cap:g}"
    return f"weight {weight.unit} ratio({weight.on}){cap}"
