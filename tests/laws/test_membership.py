"""Who passes each gate of each row: units just inside, just outside and far outside of each bound."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from offdrift.correction import Correction, FollowingGate, Gate, LengthNeutralGate, RandomGate
from offdrift.laws.batches import DIVERGENCES, Batch, Run, packed, run
from offdrift.methods import METHODS, Method
from tests.laws.definitions import sequences_of, untouched
from tests.laws.handmade import ASIDE, MU, bernoulli_kl, binary_kl, k3, made, solve

TINY = 1e-9
"""Relative distance from a bound; rounding is a thousand times smaller."""
ALL = [(n, i, g) for n, row in METHODS.items() for i, g in enumerate(row.correction.gates)]
GATES = [(n, i) for n, i, g in ALL if isinstance(g, Gate)]
SHARES = [g for _, _, g in ALL if isinstance(g, RandomGate | FollowingGate)]
LENGTH_NEUTRAL = [(n, g) for n, _, g in ALL if isinstance(g, LengthNeutralGate)]
every_gate = pytest.mark.parametrize(("name", "i"), GATES)

P = math.exp(MU)
"""Probability of every token under the first of the two policies."""


def places(statistic: str, value: float) -> list[float]:
    """Log-ratios of one token at which a statistic has this value (of `ratio`: its log)."""
    if statistic == "ratio":
        return [value]
    if statistic == "k2":
        return [math.sqrt(2 * value), -math.sqrt(2 * value)]
    if statistic == "k3":
        return [solve(k3, value, 0, 5), solve(k3, value, -5, 0)]
    if statistic == "abs_log_ratio":
        return [value, -value]
    if statistic == "exp_abs_log_ratio":  # 1 and less: the policies agree, and there is nothing below
        return [math.log(max(value, 1.0)), -math.log(max(value, 1.0))]
    if statistic.startswith("binary_kl_"):
        return two_sided(statistic, value)
    if statistic == "ratio_error":
        return [math.log1p(value), *([math.log1p(-value)] if value < 1 else [])]
    if statistic == "binary_tv":
        return [math.log1p(max(value, -P * (1 - 1e-9)) / P)]  # no probability falls below 0
    if statistic == "binary_kl":
        return [solve(lambda l: binary_kl(P, l), value, -3, 1.1)]  # noqa: E741
    raise NotImplementedError(f"write down where {statistic} has a given value")


def two_sided(statistic: str, value: float) -> list[float]:
    """Log-ratios above and below 0 at which an unsigned binary KL has this value."""
    both = {
        "binary_kl_forward": lambda q: bernoulli_kl(P, q),
        "binary_kl_reverse": lambda q: bernoulli_kl(q, P),
        "binary_kl_max": lambda q: max(bernoulli_kl(P, q), bernoulli_kl(q, P)),
    }[statistic]
    of = lambda l: both(P * math.exp(l))  # noqa: E731, E741
    below, top = solve(of, value, -17, 0), 1.1
    return [solve(of, value, 0, top) if of(top) > value else below, below]  # large ones are beyond probability 1


@dataclass(frozen=True, kw_only=True)
class Case:
    """A unit (a token, or a sequence) whose statistic is `side` of a gate's range, and its A."""

    side: str
    a: float
    values: list[float]
    """The statistic of each token."""
    sign: int = 0
    """Which of the log-ratios that have these statistics."""


def bounds(gate: Gate) -> tuple[float | None, float | None]:
    """On the scale of `places`: logs for ratios."""
    ends = (gate.low, gate.high)
    if gate.statistic == "ratio":
        return tuple(None if x is None else math.log(x) for x in ends)  # type: ignore[return-value]
    return ends


def sides(gate: Gate) -> list[tuple[str, float]]:
    """Values just inside, just outside and far outside of each bound, and one in the middle."""
    low, high = bounds(gate)
    ends = [x for x in (low, high) if x is not None]
    middle = sum(ends) / 2 if len(ends) == 2 else (0.5 * ends[0] if ends[0] > 0 else 0.0)
    found = [("inside", middle)]
    if gate.statistic == "version_lag":
        assert low is None
        return [("inside", high), ("inside", 0.0), ("above", high + 1), ("above", 3 * high)]
    for x, out, beyond in ((low, -1, "below"), (high, 1, "above")):
        if x is not None:
            gap, far = TINY * abs(x), 0.4 * abs(x)
            found += [("inside", x - out * gap), (beyond, x + out * gap), (beyond, x + out * far)]
    return found


def of_unit(gate: Gate, value: float) -> list[float]:
    """The statistic of the tokens of a unit that has this value; only the right reduction finds it."""
    if gate.unit == "token":
        return [value]
    if gate.statistic == "version_lag":
        return [0.0, value, min(value, 1.0)]
    if gate.unit in ("seq_max", "from_first"):
        return [0.2 * value, value, 0.5 * value]
    parts = [0.5, 1.0, 1.5] if gate.unit == "seq_mean" else [1 / 6, 1 / 3, 1 / 2]
    return [x * value for x in parts]


TWO_SIDED = ("k2", "k3", "abs_log_ratio", "exp_abs_log_ratio", "ratio_error", "binary_kl_forward", "binary_kl_max")


def cases(gate: Gate) -> list[Case]:
    found = []
    for side, value in sides(gate):
        values = of_unit(gate, value)
        symmetric = gate.statistic in TWO_SIDED
        for sign in range(2 if symmetric else 1):
            found += [Case(side=side, a=a, values=values, sign=sign) for a in (1.0, -1.0, 0.0)]
    return found


def batch_of(gate: Gate, found: list[Case]) -> Batch:
    """One sequence per case; what the gate must not look at is on the other side of its bounds."""
    a = [c.a for c in found for _ in c.values]
    values = [x for c in found for x in c.values]
    lengths = [len(c.values) for c in found]
    if gate.statistic in ("kl", "tv"):
        wrong = {name: [9.0] * len(a) for name in DIVERGENCES}
        columns = {**wrong, column_of(gate): values}
        # A statistic without a sign moves outward where the log-ratio has the sign of the advantage.
        away = [math.copysign(0.01, x) for x in a]
        return made(gate.on, away, a, lengths=lengths, columns=columns)
    if gate.statistic == "version_lag":
        return made("full", [0.01] * len(a), a, lengths=lengths, columns={"lag": values})
    l = [places(gate.statistic, x)[c.sign] for c in found for x in c.values]  # noqa: E741
    # The first of the two policies has probability P, whichever it is.
    start = MU - ASIDE if gate.on == "staleness" else MU
    return made(gate.on, l, a, lengths=lengths, mu=start)


def column_of(gate: Gate) -> str:
    """Where a batch has the statistic that it is given."""
    pair = {"full": "rollout_current", "mismatch": "rollout_old", "staleness": "old_current"}
    return "lag" if gate.statistic == "version_lag" else f"{gate.statistic}_{pair[gate.on]}"


def passes(gate: Gate, case: Case) -> bool:
    """The table of who may be rejected; without advantage nobody, unless the gate asks for none."""
    if case.side == "inside":
        return True
    return {
        "any": False,
        "positive": case.a <= 0,
        "negative": case.a >= 0,
        "outward": case.a == 0 if gate.statistic in ("kl", "tv") else not (
            (case.side == "above" and case.a > 0) or (case.side == "below" and case.a < 0)
        ),
    }[gate.advantage]  # fmt: skip


def alone(row: Method, gate: Any) -> Method:
    """The row with one gate; an anchor would move the log-ratios away from where they are wanted."""
    return replace(row, correction=Correction((gate,), row.correction.weights), anchor=None)


def check_decided(row: Method, gate: Any, batch: Batch, expected: list[bool]) -> Run:
    """Exactly these tokens are kept; the others have no gradient, and these the one without gate."""
    keep = torch.tensor(expected)
    got = run(alone(row, gate), packed(batch))
    assert got.keep.tolist() == expected
    assert torch.equal(got.result.corrected.rejected_by[gate], ~keep)
    free = run(replace(alone(row, gate), correction=Correction((), row.correction.weights)), packed(batch))
    rest = untouched(row, sequences_of(batch))
    if not (row.penalty or getattr(row.objective, "pull", 0)):
        assert (rest == 0).all()
        assert (got.grad[~keep] == 0).all()
    torch.testing.assert_close(got.grad[~keep], rest[~keep], rtol=1e-9, atol=1e-15)
    if getattr(gate, "unit", "sequence") != "token" or getattr(row.objective, "unit", "token") == "token":
        torch.testing.assert_close(got.grad[keep], free.grad[keep], rtol=1e-12, atol=0)
    return got


@every_gate
def test_a_gate_keeps_what_is_inside_its_bounds(name, i):
    row = METHODS[name]
    gate = row.correction.gates[i]
    found = cases(gate)
    spared = gate.unit == "from_first"  # the first token stands before the one that is outside
    expected = [passes(gate, c) or (spared and t == 0) for c in found for t in range(len(c.values))]
    check_decided(row, gate, batch_of(gate, found), expected)
    assert len(found) >= 9
    assert any(expected)
    assert not all(expected)


@every_gate
def test_a_value_on_the_bound_is_inside(name, i):
    """Where a log-ratio, a divergence or a lag can be exactly on it."""
    row = METHODS[name]
    gate = row.correction.gates[i]
    for x in bounds(gate):
        if x is None:
            continue
        if gate.statistic in ("kl", "tv", "version_lag"):
            batch = made("full", [0.0], [1.0], columns={column_of(gate): [x]})
        elif gate.statistic in ("ratio", "abs_log_ratio"):
            # 0 - x is exact; so is the log-ratio that the library finds
            batch = made(gate.on, [0.0], [1.0], aside=0.0)
            zero = torch.zeros(1, dtype=torch.float64)
            names = {"mismatch": ("mu", "old"), "staleness": ("old", "pi"), "full": ("mu", "pi")}
            one, two = names[gate.on] if x >= 0 else names[gate.on][::-1]
            batch = batch.with_tokens(mu=zero, old=zero, pi=zero)
            batch = batch.with_tokens(**{one: zero - abs(x), two: zero})
        else:
            continue
        for a in (1.0, -1.0):
            check_decided(row, gate, batch.with_tokens(a=torch.tensor([a]).double()), [True])


@pytest.mark.parametrize(("name", "gate"), LENGTH_NEUTRAL)
def test_the_length_neutral_gate_weighs_by_what_is_left(name, gate):
    """Three tokens: omega = min(1, k eps, sqrt(k delta / 2)) with k = 2, 1, 0 tokens left."""
    omega = [min(1.0, k * gate.eps, math.sqrt(k * gate.delta / 2)) for k in (2, 1, 0)]
    z = sum(omega)
    found = []
    for s, kept in ((gate.high * (1 - TINY), True), (gate.high * (1 + TINY), False)):
        found.append(([s * z / omega[0], 0.0, 0.0], kept))
        found.append(([0.0, s * z / omega[1], 7.0], kept))  # the last token has weight 0
        found.append(([s, s, 0.5], kept))
    found.append(([9.0], True))  # a single token is exact, however far it moved
    for sign in (1, -1):
        chosen = [(e, kept) for e, kept in found if sign > 0 or max(e) < 1]
        l = [math.log1p(sign * x) for e, _ in chosen for x in e]  # noqa: E741
        expected = [kept for e, kept in chosen for _ in e]
        lengths = [len(e) for e, _ in chosen]
        for a in (1.0, -1.0):
            batch = made(gate.on, l, [a] * len(l), lengths=lengths)
            check_decided(METHODS[name], gate, batch, expected)
        assert len(set(expected)) == 2


def test_every_gate_of_the_table_was_looked_at():
    assert {type(g) for g in SHARES} == {RandomGate, FollowingGate}, "tests/correction/test_acceptance.py"
    assert len(GATES) + len(LENGTH_NEUTRAL) + len(SHARES) == len(ALL) >= 40
    conditions = {g.advantage for _, _, g in ALL if isinstance(g, Gate)}
    assert {"any", "negative", "outward"} <= conditions
