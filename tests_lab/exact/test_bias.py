"""Expected gradients agree with loops over sequences, and the table claims what enumeration finds."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from offdrift.correction import Correction, Weight
from offdrift.correction.weight import Weighted
from offdrift.errors import BadValueError, ShapeError
from offdrift.methods import METHODS, Method, method
from offdrift.objectives import ImportanceSampled, Reinforce
from offdrift.objectives.base import TokenLoss
from offdrift.ratios import stopped_log_ratio
from offdrift_lab.exact import TabularPolicy, random_policies
from offdrift_lab.exact.bias import (
    LARGE,
    ROUNDING,
    SMALL,
    DriftProblem,
    expected_gradient,
    measured_bias,
    policy_of,
    random_problem,
    relative_bias,
    standard_problems,
    true_gradient,
)

PROBLEMS = standard_problems()
every_problem = pytest.mark.parametrize("i", range(len(PROBLEMS)))
SCALES = (SMALL, 0.05, LARGE)
every_scale = pytest.mark.parametrize("scale", SCALES)


@pytest.mark.parametrize("name", METHODS)
def test_the_table_claims_what_enumeration_finds(name):
    row = METHODS[name]
    measured = measured_bias(row)
    assert row.bias is not None, f'{name} claims nothing; measured: bias="{measured}"'
    assert row.bias == measured


# -- against loops over sequences, written from the definitions ------------------------------------


def gradient_of(row: Method, problem: DriftProblem, scale: float) -> Tensor:
    old, logits = problem.drifted(scale)
    return expected_gradient(row, problem.rollout, old, logits, problem.rewards)


@dataclass
class Path:
    """One sequence: its probabilities and what a coefficient may depend on, token by token."""

    number: int
    mu: list[float]
    old: list[float]
    pi: list[float]
    kl: list[float]
    """KL(mu || pi) at the token's context."""
    scores: Tensor
    """Gradient of each token's log pi with respect to the logits."""
    advantage: float = 0.0
    reward: float = 0.0

    @property
    def w(self) -> list[float]:
        return [p / m for p, m in zip(self.pi, self.mu)]

    @property
    def r(self) -> list[float]:
        return [p / o for p, o in zip(self.pi, self.old)]


def paths(problem: DriftProblem, scale: float) -> list[Path]:
    old, logits = problem.drifted(scale)
    current = policy_of(logits)
    found = []
    v, horizon = problem.rollout.vocab, problem.rollout.horizon
    for number, tokens in enumerate(itertools.product(range(v), repeat=horizon)):
        path = Path(number, [], [], [], [], torch.zeros(horizon, *logits.shape).double())
        context = first = 0
        for t, token in enumerate(tokens):
            m, o, p = (x.levels[t][0, context].tolist() for x in (problem.rollout, old, current))
            path.mu.append(m[token])
            path.old.append(o[token])
            path.pi.append(p[token])
            path.kl.append(sum(x * math.log(x / y) for x, y in zip(m, p)))
            row = torch.tensor(p, dtype=torch.float64)
            path.scores[t, first + context] = torch.eye(v).double()[token] - row
            context, first = context * v + token, first + v**t
        found.append(path)
    baseline = sum(math.prod(p.mu) * float(problem.rewards[p.number]) for p in found)
    for path in found:
        path.reward = float(problem.rewards[path.number])
        path.advantage = path.reward - baseline
    return found


def by_loop(problem: DriftProblem, scale: float, coefficient: Callable[[Path], list[float]]) -> Tensor:
    """sum_y mu(y) A(y) sum_t c_t(y) grad log pi(y_t)."""
    total = torch.zeros_like(problem.to_old)
    for path in paths(problem, scale):
        c = torch.tensor(coefficient(path), dtype=torch.float64)
        total += math.prod(path.mu) * path.advantage * torch.einsum("t,tcv->cv", c, path.scores)
    return total


def same(x: float, path: Path) -> list[float]:
    return [x] * len(path.mu)


def clipped(path: Path) -> list[float]:
    """PPO with dual clip 3 on pi / old."""
    push = []
    for p, o in zip(path.pi, path.old):
        r = p / o
        stopped = r > 1.2 if path.advantage > 0 else r < 0.8 or r > 3
        push.append(0.0 if stopped else r)
    return push


FLOORS = {True: 0.8, False: 0.9}
CAPS = {(True, True): 11, (True, False): 1.2, (False, True): 1.2, (False, False): 101}
"""DISPO's limits by whether the answer is correct, and whether its advantage is positive."""


def masked_and_clipped(path: Path) -> list[float]:
    """PPO's clip on pi / old, nothing where the product of old / mu exceeds 3."""
    rho = math.prod(o / m for o, m in zip(path.old, path.mu))
    stopped = [r > 1.2 if path.advantage > 0 else r < 0.8 for r in path.r]
    return [0.0 if rho > 3 or stop else rho * r for r, stop in zip(path.r, stopped)]


COEFFICIENTS: dict[str, Callable[[Path], list[float]]] = {
    "none": lambda y: same(1.0, y),
    "token_is": lambda y: y.w,
    "full_is": lambda y: same(math.prod(y.w), y),
    "token_tis": lambda y: [min(w, 2.0) for w in y.w],
    "seq_tis": lambda y: same(min(math.prod(y.w), 2.0), y),
    "seq_mis": lambda y: same(math.prod(y.w) if math.prod(y.w) <= 3 else 0.0, y),
    "geo_is": lambda y: same(min(math.prod(y.w) ** (1 / len(y.w)), 2.0), y),
    "trm_max": lambda y: y.w if max(y.kl) <= 0.05 else same(0.0, y),
    "trm_avg": lambda y: y.w if sum(y.kl) / len(y.kl) <= 0.001 else same(0.0, y),
    "disabled": clipped,
    "topr": lambda y: same(min(math.prod(y.w), 1.0) if y.reward <= 0 else 1.0, y),
    "echo2": lambda y: [min(w, 2.0) for w in y.w],
    "decoupled_seq_mis": masked_and_clipped,
    "dispo_paper": lambda y: [min(max(r, 0.8), 11) if y.reward > 0 else min(r, 101) for r in y.r],
    "dispo": lambda y: [min(max(r, FLOORS[y.reward > 0]), CAPS[y.reward > 0, y.advantage > 0]) for r in y.r],
}


@every_problem
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_expected_gradient_is_the_sum_over_all_sequences(name, i):
    compared = 0
    for scale in SCALES:
        g = gradient_of(METHODS[name], PROBLEMS[i], scale)
        expected = by_loop(PROBLEMS[i], scale, COEFFICIENTS[name])
        torch.testing.assert_close(g, expected, rtol=0, atol=1e-12)
        compared += g.numel()
    assert compared >= 3 * 12


@every_problem
def test_limits_are_neither_everywhere_nor_nowhere(i):
    """At 0.05 and 1, the drifts of the comparison above; otherwise it would compare no limit."""
    many, few = paths(PROBLEMS[i], LARGE), paths(PROBLEMS[i], 0.05)
    assert 0 < sum(math.prod(y.w) > 3 for y in many) < len(many) / 2
    assert 0 < sum(0.0 in clipped(y) for y in many) < len(many)
    assert any(sum(y.kl) / len(y.kl) <= 0.001 for y in few)
    assert any(max(y.kl) > 0.05 for y in many)


@dataclass(frozen=True)
class Probe:
    """REINFORCE that remembers what it was given."""

    calls: tuple[list, ...] = field(default=([],), compare=False)
    on = None
    formula = "probe"

    def __call__(self, logprobs, advantages, batch_info=None) -> TokenLoss:
        self.calls[0].append((logprobs, batch_info))
        return Reinforce()(logprobs, advantages)


def test_batch_info_is_that_of_the_population():
    problem, probe = PROBLEMS[0], Probe(([],))
    old, logits = problem.drifted(LARGE)
    expected_gradient(Method(objective=probe), problem.rollout, old, logits, problem.rewards)
    ((batch, batch_info),) = probe.calls[0]
    found = paths(problem, LARGE)
    numbers = [y.number for y in found for _ in range(round(216 * math.prod(y.mu)))]
    assert len(numbers) == 216 == len(batch.segments)
    torch.testing.assert_close(batch_info.rewards, problem.rewards[numbers])
    by_token = [(m, o, p) for i in numbers for m, o, p in zip(found[i].mu, found[i].old, found[i].pi)]
    for k, x in enumerate((batch.logp_rollout, batch.old, batch.current.detach())):
        expected = torch.tensor([row[k] for row in by_token], dtype=torch.float64).log()
        torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
    assert len(by_token) == 3 * 216
    policies = {"rollout": problem.rollout, "old": old, "current": policy_of(logits)}
    assert len(batch_info.divergences) == 6
    for name, divergence in batch_info.divergences.items():
        kind, *two = name.split("_")
        levels = [policies[which].levels for which in two]
        pairs = [[level[t][0, i // 3 ** (3 - t)].tolist() for level in levels] for i in numbers for t in range(3)]
        kl = [sum(a * math.log(a / b) for a, b in zip(*pair)) for pair in pairs]
        tv = [sum(abs(a - b) for a, b in zip(*pair)) / 2 for pair in pairs]
        assert divergence.value.tolist() == pytest.approx(kl if kind == "kl" else tv, abs=1e-12), name
    rows = old.levels[0][0, 0]
    assert batch_info.entropy[0].item() == pytest.approx(-float((rows * rows.log()).sum()), abs=1e-12)
    assert (batch_info.version_lag == 1).all()
    assert batch_info.vocab == 3
    assert torch.equal(batch.reference, batch.old)
    assert batch.segments.turns.lengths.tolist() == [1, 2] * 216
    assert len(batch.segments.groups) == 1


@every_problem
@every_scale
def test_the_true_gradient_is_that_of_the_expected_reward(i, scale):
    problem = PROBLEMS[i]
    _, logits = problem.drifted(scale)
    total = torch.zeros_like(logits)
    for path in paths(problem, scale):
        total += math.prod(path.pi) * problem.rewards[path.number] * path.scores.sum(0)
    torch.testing.assert_close(true_gradient(logits, problem.rewards), total, rtol=0, atol=1e-14)
    assert float(total.norm()) > 0.03


@every_problem
def test_self_normalization_divides_by_the_mean_weight_of_the_population(i):
    mean = sum(math.prod(y.mu) * min(math.prod(y.w), 2.0) for y in paths(PROBLEMS[i], LARGE))
    assert mean < 0.95
    g = gradient_of(METHODS["normalized_tis"], PROBLEMS[i], LARGE)
    expected = gradient_of(METHODS["seq_tis"], PROBLEMS[i], LARGE) / mean
    torch.testing.assert_close(g, expected, rtol=0, atol=1e-12)


# -- what is known to hold --------------------------------------------------------------------------


@every_problem
@pytest.mark.parametrize("scale", [0.0, SMALL, 0.1, 1.0, 2.0])
def test_exact_sequence_importance_sampling_is_unbiased_at_any_drift(i, scale):
    assert relative_bias(METHODS["full_is"], scale, problems=[PROBLEMS[i]]) < 1e-12


TRM = [n for n, m in METHODS.items() if m.objective == ImportanceSampled() and m.correction.gates]


@every_problem
@pytest.mark.parametrize("name", TRM)
def test_where_nothing_is_rejected_trust_region_masking_is_token_is(name, i):
    assert not METHODS[name].correction.weights
    g = gradient_of(METHODS[name], PROBLEMS[i], SMALL)
    expected = gradient_of(METHODS["token_is"], PROBLEMS[i], SMALL)
    torch.testing.assert_close(g, expected, rtol=0, atol=1e-15)


@every_problem
@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean", "fixed"])
def test_aggregates_do_not_show_where_lengths_are_equal(i, how):
    row = METHODS["full_is"]
    assert row.aggregate == "seq_mean_token_sum"
    g = gradient_of(replace(row, aggregate=how), PROBLEMS[i], 0.3)
    torch.testing.assert_close(g, gradient_of(row, PROBLEMS[i], 0.3), rtol=0, atol=1e-15)


def test_penalties_do_not_count():
    with_penalty = [n for n, m in METHODS.items() if m.penalty is not None]
    for name in with_penalty:
        without = replace(METHODS[name], penalty=None)
        assert relative_bias(METHODS[name], 0.3) == relative_bias(without, 0.3)


# -- how biases are told apart ---------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong:
    """The exact weight of a sequence, changed by a function of its log."""

    change: Callable[[Tensor], Tensor]
    on = "full"
    advantage: str = "any"
    formula = "wrong on purpose"

    def __call__(self, logprobs, advantages=None, batch_info=None) -> Weighted:
        s = logprobs.segments
        log_w = s.spread(s.sum(stopped_log_ratio(logprobs, on="full")))
        weight = self.change(log_w)
        return Weighted(weight, weight > torch.inf)


def with_weight(change: Callable[[Tensor], Tensor]) -> Method:
    return Method(objective=Reinforce(), correction=Correction(weights=(Wrong(change),)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda x: x.exp(), "none"),
        (lambda x: x.exp().where(x.abs() < 0.01, 0.0), "none inside limits"),
        (lambda x: (-x).exp(), "O(drift)"),  # an inverted ratio
        (lambda x: 1 + x, "O(drift^2)"),
        (lambda x: 0.99 * x.exp(), "O(1)"),
        (lambda x: (x - 1e-3).exp(), "O(1)"),
    ],
)
def test_orders_of_bias(change, expected):
    assert measured_bias(with_weight(change)) == expected


def test_a_bias_that_follows_no_law_is_an_error():
    with pytest.raises(BadValueError, match=r"order 0\.5 in the drift"):
        measured_bias(with_weight(lambda x: x.exp() + x.abs().sqrt()))


def test_the_size_of_a_bias():
    assert relative_bias(with_weight(lambda x: 0.9 * x.exp()), 0.7) == pytest.approx(0.1, abs=1e-12)
    quarter = [relative_bias(with_weight(lambda x: 1 + x), s) for s in (1e-3, 5e-4)]
    assert quarter[0] / quarter[1] == pytest.approx(4, rel=0.01)


@dataclass(frozen=True)
class Ascent:
    """REINFORCE that maximizes the loss."""

    on = None
    formula = "L = A log pi"

    def __call__(self, logprobs, advantages, batch_info=None) -> TokenLoss:
        return TokenLoss(advantages * logprobs.current)


def test_a_wrong_sign_is_a_bias_of_two():
    assert measured_bias(Method(objective=Ascent())) == "O(1)"
    assert relative_bias(Method(objective=Ascent()), 0.0) == pytest.approx(2, abs=1e-12)


def test_a_weight_on_the_wrong_ratio_is_seen():
    row = Method(objective=Reinforce(), correction=Correction(weights=(Weight(on="mismatch", unit="sequence"),)))
    assert measured_bias(row) == "O(drift)"
    right = replace(row, correction=row.correction & Weight(on="staleness", unit="sequence"))
    assert measured_bias(right) == "none"


def test_the_thresholds_leave_room():
    """Rounding is far below a bias of second order, at the drift where both are told apart."""
    assert relative_bias(METHODS["full_is"], SMALL) < ROUNDING / 100
    assert relative_bias(with_weight(lambda x: 1 + x), SMALL) > ROUNDING * 10


# -- refusals --------------------------------------------------------------------------------------


def test_an_irrational_rollout_policy_is_refused():
    mu = random_policies(1, vocab=2, horizon=2, generator=torch.Generator().manual_seed(0))
    logits, rewards = torch.zeros(3, 2).double(), torch.ones(4).double()
    with pytest.raises(BadValueError, match="multiples of 1/N"):
        expected_gradient(method("none"), mu, mu, logits, rewards)


def test_policies_on_different_trees_are_refused():
    mu = TabularPolicy.independent([[0.5, 0.5]] * 2)
    other = TabularPolicy.independent([[0.5, 0.5]] * 3)
    three, seven = torch.zeros(3, 2).double(), torch.zeros(7, 2).double()
    four = torch.ones(4).double()
    for old, logits, rewards, words in (
        (other, three, four, "old has shape"),
        (mu, seven, four, "logits has shape"),
        (mu, three, four[:3], "rewards has shape"),
    ):
        with pytest.raises(ShapeError, match=words):
            expected_gradient(method("none"), mu, old, logits, rewards)
    with pytest.raises(ShapeError, match="5 contexts"):
        policy_of(torch.zeros(5, 2))


def test_random_problems_are_what_they_say():
    problem = random_problem([[3, 2, 1]], horizon=2, seed=5)
    rows = torch.cat([level[0] for level in problem.rollout.levels])
    assert rows.shape == (4, 3)
    for row in rows:
        torch.testing.assert_close(row.sort().values, torch.tensor([1, 2, 3]).double() / 6)
    old, logits = problem.drifted(0.5)
    torch.testing.assert_close(logits, rows.log() + 0.5 * (problem.to_old + problem.to_current))
    torch.testing.assert_close(old.law(), policy_of(rows.log() + 0.5 * problem.to_old).law())
    old, logits = problem.drifted(0.0)
    torch.testing.assert_close(old.law(), problem.rollout.law())
    torch.testing.assert_close(policy_of(logits).law(), problem.rollout.law())
