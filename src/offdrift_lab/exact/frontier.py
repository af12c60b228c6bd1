"""The frontier of bias and variance: every method against the exact gradient, over the horizon.

    bias = E[g] - grad J        P = <grad J, E[g]>^2 / (tr Var(g) + |bias|^2)

P is a step's progress over its error; the survey's Problem 1 conjectures that beyond 200 tokens it is largest for a
unit between token and sequence. Where sequences are too many to enumerate, mean and variance are exact by recursion
for estimators of the form

    g = A(y) M(y) sum_t f(s_t, y_t) h(s_t, y_t),    M = prod_t m(s_t, y_t),    h = onehot(y) - pi(. | s)

with a weight f of each token and a factor m that multiplies over the sequence (a ratio, or a gate's 1 or 0):

    n' = n K,    x' = x K + n (K o f h),    q' = q K + 2 x.(K o f h) + n (K o f^2 |h|^2)

are the mass of `M^k`, the sum and the sum of squares in every state, K the transition weights under mu times m^k.
All others are sampled, with rows whose mean is known exactly as control variates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.certificate.confidence import rule_of_three
from offdrift.correction import Correction
from offdrift.correction.weight import VariationalWeight
from offdrift.errors import BadValueError, check_choice
from offdrift.methods import METHODS
from offdrift.methods.describe import units
from offdrift.methods.method import Method
from offdrift_lab.exact.bias import exact_loss
from offdrift_lab.exact.markov import (
    Automaton,
    MarkovPolicy,
    from_logits,
    markov_divergences,
    markov_returns,
    return_gradient,
    shifted,
    walk,
)
from offdrift_lab.exact.policy import token_kl

# -- testbeds -------------------------------------------------------------------------------------

TESTBEDS = ("walk", "chain", "flip")
"""All are Markov policies, so the true gradient is exact at any horizon; the drift per token is the same at every one.

    walk    a random walk on 17 places, rewarded by its last place: recent tokens matter
    chain   every token may be fatal, once in T on average: all tokens matter alike
    flip    the chain, with all drift in one of its states, as when an expert's routing flips
"""
BISECTIONS = 40
PLACES = 8
"""Steps from the middle of the walk to either end."""
LIVING = 3
"""States of the chain that are not dead."""


@dataclass(frozen=True)
class Testbed:
    """One prompt, three policies, and the reward of every last state in [0, 1]."""

    __test__ = False  # pytest would take the name for a test case

    name: str
    rollout: MarkovPolicy
    old: MarkovPolicy
    current: MarkovPolicy
    rewards: Float[Tensor, " s"]

    @property
    def horizon(self) -> int:
        """Tokens in a sequence, T."""
        return self.rollout.horizon

    @property
    def kl_token(self) -> float:
        """Mean KL(rollout || current) of a token, nats."""
        return float(markov_divergences(self.rollout, self.current).mean_kl.mean())


def make_testbed(name: str, *, horizon: int, kl_token: float = 1e-3, seed: int = 0) -> Testbed:
    """The named testbed at a horizon and a drift.

    Half of the drift in logits is mismatch (rollout to old policy), half staleness (old to current).

    Args:
        name: "walk", "chain" or "flip".
        horizon: tokens in a sequence, T.
        kl_token: mean KL(rollout || current) of a token under the rollout policy, nats; 0 is on
            policy.

    Raises: `MethodError` for another name; `BadValueError` for a horizon below 2 or a KL that no
        scale of the drift reaches.

    Example:
        >>> round(make_testbed("walk", horizon=64, kl_token=1e-3).kl_token, 9)
        0.001
    """
    check_choice("testbed", name, TESTBEDS)
    if horizon < 2:
        raise BadValueError(f"horizon = {horizon}; drift adds up over at least 2 tokens")
    g = torch.Generator().manual_seed(seed)
    if name == "walk":
        machine = walk(3, PLACES)
        logits = torch.randn(1, 1, machine.states, 3, generator=g, dtype=torch.float64) / 2
        rollout = from_logits(machine, logits, horizon)
        rewards = torch.arange(machine.states, dtype=torch.float64) / (machine.states - 1)
    else:
        rollout, rewards = _chain(horizon, g)
    pushes = [torch.randn(rollout.tokens.shape, generator=g, dtype=torch.float64) for _ in "ab"]
    if name == "flip":
        pushes = [p * (torch.arange(p.shape[2]) == 1)[:, None] for p in pushes]
    scale = _scale(rollout, pushes[0] + pushes[1], kl_token)
    old = shifted(rollout, pushes[0], scale=scale)
    return Testbed(name, rollout, old, shifted(old, pushes[1], scale=scale), rewards)


def _chain(horizon: int, g: torch.Generator) -> tuple[MarkovPolicy, Tensor]:
    """Token 0 is fatal; any other leads to the living state of its number."""
    dead, vocab = LIVING, LIVING + 1
    states = torch.cat([torch.tensor([dead]), torch.arange(LIVING)]).repeat(LIVING + 1, 1)
    states[dead] = dead
    start = torch.tensor([1.0] + [0.0] * LIVING, dtype=torch.float64)
    logits = torch.randn(1, 1, LIVING + 1, vocab, generator=g, dtype=torch.float64) / 2
    # Odds of 1 to T - 1: probability 1/T of token 0, whatever the others are.
    logits[..., 0] = logits[..., 1:].logsumexp(-1) - math.log(horizon - 1)
    rewards = torch.tensor([1.0] * LIVING + [0.0], dtype=torch.float64)
    return from_logits(Automaton(states, start), logits, horizon), rewards


def _scale(rollout: MarkovPolicy, push: Tensor, kl_token: float) -> float:
    """The scale of `push` at which the mean token KL is `kl_token`."""

    def kl(scale: float) -> float:
        drifted = shifted(rollout, push, scale=scale)
        return float(markov_divergences(rollout, drifted).mean_kl.mean())

    low, high = 0.0, 1.0
    while kl(high) < kl_token and high < 64:
        high *= 2
    if not 0 <= kl_token <= kl(high):
        raise BadValueError(f"kl_token = {kl_token}: the drift reaches 0 to {kl(high):.3g} nats per token here")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if kl(middle) < kl_token else (low, middle)
    return low if kl_token == 0 else high


# A batch is one step's data: N answers to one prompt, advantages `R - J(mu)`, otherwise as in
# `offdrift_lab.exact.bias`. A method reduces to a coefficient c_t per token, and to the gradient
# g = sum_t c_t (onehot(y_t) - pi(. | s_t)).


TURNS = 8
"""Turns of a sequence at most, of equal length."""


@dataclass(frozen=True)
class DrawnSequences:
    """Sequences of a testbed: tokens, the state each was drawn in, and each sequence's reward."""

    tokens: Int[Tensor, "b t"]
    states: Int[Tensor, "b t"]
    rewards: Float[Tensor, " b"]

    def rows(self, which: slice) -> DrawnSequences:
        """Some of the sequences."""
        return DrawnSequences(self.tokens[which], self.states[which], self.rewards[which])


def draw(bed: Testbed, sequences: int, *, generator: torch.Generator) -> DrawnSequences:
    """Sequences drawn by the rollout policy."""
    tokens, states = bed.rollout.sample(sequences, generator=generator)
    last = bed.rollout.automaton.next_state[states[:, -1], tokens[:, -1]]
    return DrawnSequences(tokens, states, bed.rewards[last])


def all_sequences(bed: Testbed) -> tuple[DrawnSequences, Float[Tensor, " b"]]:
    """Every sequence that starts in the first state of the testbed, and its probability under mu."""
    machine, horizon = bed.rollout.automaton, bed.horizon
    number = torch.arange(machine.vocab**horizon)
    tokens = number[:, None] // machine.vocab ** torch.arange(horizon).flip(0) % machine.vocab
    state = machine.start.argmax().expand(len(number))
    states = []
    for t in range(horizon):
        states.append(state)
        state = machine.next_state[state, tokens[:, t]]
    sequences = DrawnSequences(tokens, torch.stack(states, 1), bed.rewards[state])
    return sequences, bed.rollout.tokens[0, 0].log()[sequences.states, tokens].sum(1).exp()


def coefficients(row: Method, bed: Testbed, drawn: DrawnSequences) -> Float[Tensor, "b t"]:
    """Minus the gradient of N times the row's loss with respect to each token's log-prob.

    On policy it is the advantage of the token's sequence. Gradient: none.

    Raises: `BadValueError` for a row whose gradient goes through whole distributions.
    """
    if "distributions" in row.needs:
        what = type(row.objective).__name__
        raise BadValueError(f"{what} takes its gradient through whole distributions, not drawn tokens; leave it out")
    sequences, horizon = drawn.tokens.shape
    turns = min(TURNS, horizon)
    policies = {"rollout": bed.rollout, "old": bed.old, "current": bed.current}
    laws = {name: policy.tokens[0, 0] for name, policy in policies.items()}
    states, tokens = drawn.states.reshape(-1), drawn.tokens.reshape(-1)
    logp = laws["current"].log()[states, tokens].requires_grad_()
    loss = exact_loss(
        row,
        laws,
        states,
        tokens,
        logp,
        rewards=drawn.rewards,
        baseline=markov_returns(bed.rollout, bed.rollout, bed.rewards[None]).rollout,
        turns=[horizon // turns + (i < horizon % turns) for i in range(turns)],
        divisor=1.0,
    )
    return -torch.autograd.grad(loss, logp)[0].view(sequences, horizon)


def gradients(bed: Testbed, drawn: DrawnSequences, c: Float[Tensor, "b t"], *, batch: int) -> Float[Tensor, "k d"]:
    """The gradient of each batch of `batch` consecutive sequences, flat over states and tokens."""
    states, vocab = bed.current.states, bed.current.vocab
    which = torch.arange(len(c)) // batch
    cell = (which[:, None] * states + drawn.states) * vocab + drawn.tokens
    pushed = c.new_zeros((int(which[-1]) + 1) * states * vocab)
    pushed = pushed.index_add(0, cell.reshape(-1), c.reshape(-1)).view(-1, states, vocab)
    return (pushed - bed.current.tokens[0, 0] * pushed.sum(-1, keepdim=True)).flatten(1) / batch


# -- estimates ------------------------------------------------------------------------------------

Table = Float[Tensor, "s v"]


class Moments(NamedTuple):
    """Moments of the gradient of one sequence."""

    mean: Float[Tensor, " d"]
    variance: float
    """Trace of the covariance."""


def exact_moments(bed: Testbed, each: Table, product: Table) -> Moments:
    """Mean and variance of `A M sum_t f h`.

    Args:
        each: f, weight of a token in a state.
        product: m, factor of a token in a state.
    """
    mu, pi = bed.rollout.tokens[0, 0], bed.current.tokens[0, 0]
    states, vocab = mu.shape
    advantage = bed.rewards - markov_returns(bed.rollout, bed.rollout, bed.rewards[None]).rollout
    push = torch.zeros(states, vocab, states * vocab, dtype=torch.float64)  # f h, flat over cells
    cells = torch.arange(states * vocab).view(states, vocab)
    push.scatter_(2, cells[..., None], 1.0)
    probabilities = torch.zeros(states, states * vocab, dtype=torch.float64)
    probabilities.scatter_(1, cells, pi)
    push = each[..., None] * (push - probabilities[:, None])

    first = _carried(bed, mu * product, push)
    second = _carried(bed, mu * product.square(), push)
    mean = advantage @ first[1]
    square = float(advantage.square() @ second[2])
    return Moments(mean, square - float(mean @ mean))


def _carried(bed: Testbed, weight: Table, push: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """n, x and q after the last token, per state."""
    machine, horizon = bed.rollout.automaton, bed.horizon
    states = machine.states
    to = torch.nn.functional.one_hot(machine.next_state, states).double()  # [s, v, s']
    moves = torch.einsum("sv,svz->sz", weight, to)
    pushed = torch.einsum("sv,svz,svd->szd", weight, to, push)
    squared = torch.einsum("sv,svz,svd->sz", weight, to, push.square())
    n = machine.start.clone()
    x = n.new_zeros(states, push.shape[-1])
    q = n.new_zeros(states)
    for _ in range(horizon):
        q = q @ moves + 2 * torch.einsum("sd,szd->z", x, pushed) + n @ squared
        x = moves.T @ x + torch.einsum("s,szd->zd", n, pushed)
        n = n @ moves
    return n, x, q


def known_moments(bed: Testbed) -> dict[str, Moments]:
    """The rows of the method table that have this form, with the table's thresholds."""
    mu, pi = bed.rollout.tokens[0, 0], bed.current.tokens[0, 0]
    w, one = pi / mu, torch.ones_like(mu)
    inside = (token_kl(mu, pi) <= 0.05).double()[:, None].expand_as(mu)
    forms = {
        "none": (one, one),
        "token_is": (w, one),
        "full_is": (one, w),
        "trm_max": (w, inside),
        "trm_ratio": (w, (w.log().abs() <= 0.1).double()),
    }
    return {name: exact_moments(bed, f, m) for name, (f, m) in forms.items()}


Family = Literal["uncorrected", "token", "prefix", "turn", "geometric", "variational", "sequence", "other"]
BETWEEN = ("prefix", "turn", "geometric", "variational")
"""The families between token and sequence, which the conjecture favors."""
EXTREMES = ("token", "sequence")
"""The families that it calls not best."""
PLAIN = {
    "token": "token_is",
    "prefix": "minpro",
    "turn": "segment_tis",
    "geometric": "geo_is",
    "variational": "vespo",
    "sequence": "full_is",
}
"""The simplest method of each family."""

ENUMERATED = 2**16
"""Largest number of sequences that is enumerated."""
ROWS = {name: row for name, row in METHODS.items() if "distributions" not in row.needs}
"""Methods whose gradient is a sum over drawn tokens of a coefficient times the gradient of the log-prob."""

CONTROLS = ("none", "token_is", "full_is")
"""Rows of `known_moments` that serve as control variates."""
ROUNDING = 1e-9
"""Share of a row's scatter, unexplained by its controls, that counts as rounding."""
LONG = 200
"""Tokens from which the conjecture holds."""


@dataclass(frozen=True)
class Estimate:
    """A method's gradient at one horizon; lengths are in units of |grad J|."""

    method: str
    family: Family
    gated: bool
    """Whether a gate may reject tokens or sequences, on top of the weight."""
    horizon: int
    bias: float
    """|E[g] - grad J|."""
    bias_se: float
    spread: float
    """sqrt(tr Var(g)) of one batch."""
    progress: float
    """P in units of |grad J|^2: the squared signal over the squared error."""
    progress_se: float
    how: Literal["enumeration", "recursion", "sampled"]


@dataclass(frozen=True)
class Verdict:
    """Family with the largest progress at one horizon."""

    horizon: int
    best: dict[str, Estimate]
    """The best method of every family, ungated or gated."""
    winner: Estimate
    tied: tuple[str, ...]
    """Other families whose best is within two standard errors, or half a percent, of the winner."""
    plain: Estimate | None
    """The winner among `PLAIN`, one method a family that was fixed beforehand; None if some are missing.
    Families have 1 to 75 rows, and the best of many is luckier than the best of few."""


def family(row: Method) -> Family:
    """The unit of a method's weights and objective, leaving gates aside.

    Example:
        >>> from offdrift.methods import method
        >>> family(method("token_is")), family(method("gspo")), family(method("geo_mask"))
        ('token', 'geometric', 'token')
    """
    if any(isinstance(w, VariationalWeight) for w in row.correction.weights):
        return "variational"
    bare = replace(row, correction=Correction((), row.correction.weights))
    if bare.objective.on is None and not bare.correction.weights:
        return "uncorrected"
    names = {u.removesuffix("_min") for u in units(bare)}
    for name in ("sequence", "geometric", "turn", "prefix", "token"):
        if name in names:
            return name
    return "other"


def frontier(
    bed: Testbed, *, rows: Mapping[str, Method] = ROWS, batch: int = 64, tokens: int = 2**20, seed: int = 0
) -> Iterator[Estimate]:
    """Bias, spread and progress of every row at the testbed's horizon, one after the other.

    All rows see the same sequences. Rows whose gradient is a sum over sequences are enumerated
    where that is possible; the others see batches.

    Args:
        batch: sequences per step, N, on which spread and progress depend.
        tokens: sampled in all; at least 16 batches are drawn, at most 64.

    Raises: `BadValueError` for a batch or a number of tokens below 1, or a testbed without gradient.
    """
    if batch < 1 or tokens < 1:
        raise BadValueError(f"batch = {batch}, tokens = {tokens}; give at least 1 of each")
    true = return_gradient(bed.current, bed.rewards[None])[0].sum(0).flatten()
    if not float(true.norm()) > 0:
        raise BadValueError(f"the gradient of {bed.name} at T = {bed.horizon} is 0: nothing to compare with")
    batches = min(64, max(16, tokens // (batch * bed.horizon)))
    sequences = draw(bed, batches * batch, generator=torch.Generator().manual_seed(seed))
    moments = known_moments(bed)
    controls = []  # rows with known moments on the same sequences, minus their expectation: mean 0
    for name in CONTROLS:
        c = coefficients(METHODS[name], bed, sequences)
        sample = _batches(bed, sequences, c, batch=batch, separable=True)
        mean, variance = moments[name]
        controls.append(_Batches(sample.g - mean, sample.variance - variance / batch))
    every = all_sequences(bed) if bed.rollout.vocab**bed.horizon <= ENUMERATED else None
    for name, row in rows.items():
        about = (name, family(row), bool(row.correction.gates), bed.horizon)
        if every is not None and not row.needs_whole_step:
            g = gradients(bed, every[0], coefficients(row, bed, every[0]), batch=1)
            mean = every[1] @ g
            variance = float(every[1] @ (g - mean).square().sum(1)) / batch
            yield Estimate(*about, *_exact(mean, variance, true), "enumeration")
        elif name in moments and row == METHODS.get(name):
            mean, variance = moments[name]
            yield Estimate(*about, *_exact(mean, variance / batch, true), "recursion")
        else:
            parts = [sequences.rows(slice(i * batch, (i + 1) * batch)) for i in range(batches)]
            pieces = parts if row.needs_whole_step else [sequences]
            c = torch.cat([coefficients(row, bed, piece) for piece in pieces])
            sample = _batches(bed, sequences, c, batch=batch, separable=not row.needs_whole_step)
            yield Estimate(*about, *_sampled(sample, controls, true, batch), "sampled")


def verdict(estimates: Sequence[Estimate]) -> Verdict:
    """The best family at one horizon, by progress minus two standard errors, and those tied with it.

    Raises: `BadValueError` if the estimates are of several horizons, or none.
    """
    if len({e.horizon for e in estimates}) != 1:
        raise BadValueError("a verdict is about one horizon; group the estimates first")
    best: dict[str, Estimate] = {}
    for e in estimates:
        if e.family not in best or _rank(e) > _rank(best[e.family]):
            best[e.family] = e
    winner = max(best.values(), key=_rank)
    tied = []
    for name, e in best.items():
        error = 2 * math.hypot(winner.progress_se, e.progress_se)
        near = abs(winner.progress - e.progress) <= max(error, 0.005 * winner.progress)
        tied += [name] if near and e is not winner else []
    plain = [e for e in estimates if PLAIN.get(e.family) == e.method]
    return Verdict(
        winner.horizon, best, winner, tuple(tied), max(plain, key=_rank) if len(plain) == len(PLAIN) else None
    )


def conjecture(verdicts: Sequence[Verdict]) -> str:
    """Say whether the conjecture holds on a testbed, from its verdicts beyond 200 tokens.

    "holds" if a unit between token and sequence is best at every such horizon, "fails" if token or
    sequence is, neither tied with the other side; "undecided" is the rest.
    """
    long = [v for v in verdicts if v.horizon >= LONG]
    if not long:
        return f"untested: no horizon of {LONG} tokens or more"
    between = [_within(v, BETWEEN) for v in long]
    extreme = [_within(v, EXTREMES) for v in long]
    result = "holds" if all(between) else "fails" if all(extreme) else "undecided"
    best = []
    for v in long:
        ties = f", tied with {' and '.join(v.tied)}" if v.tied else ""
        best.append(f"{v.winner.method} ({v.winner.family}{ties}) at {v.horizon}")
    return f"{result}: best {', '.join(best)}"


def _within(v: Verdict, families: Sequence[str]) -> bool:
    """Whether the winner and all that tie with it are of these families."""
    return v.winner.family in families and not {*BETWEEN, *EXTREMES} & {*v.tied} - {*families}


def _rank(e: Estimate) -> tuple[float, bool]:
    """Progress minus two standard errors, to four digits; at a tie exact numbers win.

    Luck in a few samples is no merit, and a limit that no sample met is not known to the last digit.
    """
    return float(f"{e.progress - 2 * e.progress_se:.4g}"), e.how != "sampled"


def _exact(
    mean: Float[Tensor, " d"], variance: float, true: Float[Tensor, " d"]
) -> tuple[float, float, float, float, float]:
    """bias, its error, spread, progress, its error: of exact moments."""
    size = float(true.norm())
    bias = float((mean - true).norm())
    error = variance + bias * bias
    signal = float(mean @ true) ** 2
    progress = math.inf if error == 0 else signal / error / size**2
    return bias / size, 0.0, math.sqrt(max(variance, 0.0)) / size, progress, 0.0


class _Batches(NamedTuple):
    """The gradient of each of k batches, and each one's estimate of tr Var."""

    g: Float[Tensor, "k d"]
    variance: Float[Tensor, " k"]


def _batches(bed: Testbed, drawn: DrawnSequences, c: Tensor, *, batch: int, separable: bool) -> _Batches:
    """Gradients of batches; where they are means over sequences, each batch estimates its variance."""
    if not separable or batch == 1:
        g = gradients(bed, drawn, c, batch=batch)
        return _Batches(g, (g - g.mean(0)).square().sum(1) * len(g) / (len(g) - 1))
    each = gradients(bed, drawn, c, batch=1)
    each = each.view(-1, batch, each.shape[1])
    return _Batches(each.mean(1), each.var(1).sum(1) / batch)


def _sampled(
    sample: _Batches, controls: Sequence[_Batches], true: Float[Tensor, " d"], batch: int
) -> tuple[float, float, float, float, float]:
    """Estimate bias, spread and progress from batches, without first-order bias, by the jackknife.

    A row whose limits no sample met is its control to the last digit, and the jackknife finds no error.
    Its errors are then those of the largest share q of sequences that could meet a limit and were not
    drawn (95 %), each with a gradient of usual size: q |g_i|, and 2 q |g_i| / |E g| of the progress.
    """
    size, n = float(true.norm()), len(sample.g)
    g = sample.g - _explained(sample.g, [c.g for c in controls])
    variance = sample.variance - _explained(sample.variance, [c.variance for c in controls])
    estimate = _statistics(g, variance, true)
    rest = [_statistics(_without(g, i), _without(variance, i), true) for i in range(n)]
    value = n * estimate - (n - 1) * torch.stack(rest).mean(0)
    error = ((n - 1) * torch.stack(rest).var(0, correction=0)).sqrt()
    bias, spread = value[:2].clamp(min=0).sqrt().tolist()
    bias_se = float(error[0]) / (2 * bias) if bias > 0 else math.sqrt(float(error[0]))
    progress, progress_se = max(float(value[2]), 0.0), float(error[2])
    if _scatter(g) <= ROUNDING * _scatter(sample.g):
        mean = float(sample.g.mean(0).norm())
        unmet = rule_of_three(n * batch) * math.hypot(math.sqrt(batch) * spread, mean)
        bias_se = max(bias_se, unmet)
        progress_se = max(progress_se, 2 * progress * unmet / mean)
    return bias / size, bias_se / size, spread / size, progress / size**2, progress_se / size**2


def _scatter(g: Float[Tensor, "k d"]) -> float:
    return float((g - g.mean(0)).norm())


def _explained(x: Float[Tensor, "k ..."], controls: Sequence[Tensor]) -> Float[Tensor, "k ..."]:
    """The part of the scatter that the controls explain: one coefficient for each, least squares."""
    columns = torch.stack([c.flatten() for c in controls], dim=1)
    scatter = torch.stack([(c - c.mean(0)).flatten() for c in controls], dim=1)
    beta = torch.linalg.pinv(scatter) @ (x - x.mean(0)).flatten()
    return (columns @ beta).view_as(x)


def _without(rows: Float[Tensor, "k ..."], i: int) -> Float[Tensor, "k1 ..."]:
    return torch.cat([rows[:i], rows[i + 1 :]])


def _statistics(
    g: Float[Tensor, "k d"], variance: Float[Tensor, " k"], true: Float[Tensor, " d"]
) -> Float[Tensor, " three"]:
    """|bias|^2 without the mean's own scatter, tr Var, and P."""
    mean, spread = g.mean(0), variance.mean().clamp(min=0)
    bias = (mean - true).square().sum() - g.var(0).sum() / len(g)
    signal = (mean @ true).square()
    return torch.stack([bias, spread, signal / (spread + bias.clamp(min=0))])
