"""Which return a step raises: the gradient of the code's own loss, against enumerated returns.

Three prompts. A response is `a`, `b c` or `b d`; at each token both choices are equally likely, so that of four
equally likely draws two are `a`. Every group of n draws of a prompt stands once in the batch: its loss is the
expected one, and statistics of the whole batch are those of a batch without end.
"""

import math
from itertools import product

import pytest
import torch

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.aggregate import AggregateName
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import method, override
from offdrift.methods.describe import AGGREGATES, DEFAULT_ADVANTAGE, facts, trained_return
from offdrift.methods.table import METHODS
from offdrift.segments import Segments

DRAWS = (0, 0, 1, 2)
"""The responses `a`, `b c`, `b d` (0, 1, 2) as often as four draws hold them."""
LAW = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
LENGTH = torch.tensor([1, 2, 2])
RIGHT = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]], dtype=torch.float64)
"""Reward of each response to each prompt."""
OTHER = torch.tensor([[0, 1, 0], [1, 1, 0], [0, 0, 1]], dtype=torch.float64)
"""A second component of it, for gdpo."""
HORIZON = 5
OMEGA = torch.tensor([1.0, 0.5], dtype=torch.float64)
CRITIC = torch.tensor([[0.3, 0.8], [0.1, 0.4], [0.9, 0.2]], dtype=torch.float64)
"""A critic's value of each prompt's first and second context; wrong, as critics are."""


def log_law(logits: torch.Tensor) -> torch.Tensor:
    """Log-probs of tokens, `[prompt, response, position]`, from logits `[prompt, position, choice]`."""
    lp = logits.log_softmax(-1)
    nothing = torch.zeros_like(lp[:, 0, 0])
    tokens = [(lp[:, 0, 0], nothing), (lp[:, 0, 1], lp[:, 1, 0]), (lp[:, 0, 1], lp[:, 1, 1])]
    return torch.stack([torch.stack(pair, -1) for pair in tokens], 1)


def loss_gradient(how: str, aggregate: AggregateName, n: int) -> torch.Tensor:
    """Gradient of what a step maximizes, at equal policies, to the logits."""
    return gradient_over(torch.tensor(list(product(DRAWS, repeat=n))), None, how, aggregate)


def gradient_over(
    groups: torch.Tensor, chances: torch.Tensor | None, how: str, aggregate: AggregateName
) -> torch.Tensor:
    """The same for these groups of responses to every prompt, each as likely as its chance."""
    n = groups.shape[1]
    response = groups.repeat(3, 1).flatten()
    prompt = torch.arange(3).repeat_interleave(groups.numel())
    segments = Segments.from_lengths(LENGTH[response], group_ids=torch.arange(3 * len(groups)).repeat_interleave(n))
    logits = torch.zeros(3, 2, 2, dtype=torch.float64, requires_grad=True)
    at = segments.spread(prompt), segments.spread(response), segments.position
    logp = log_law(logits)[at]
    lp = LogProbs.pack(logp.detach(), logp, segments=segments)
    inputs = {
        "values": CRITIC[at[0], at[2]],
        "greedy_rewards": CRITIC[prompt, 0],
        "components": torch.stack([RIGHT[prompt, response], OTHER[prompt, response]], 1),
        "component_weights": OMEGA,
        "logp_old": logp.detach(),
        "sum_pi_squared": torch.full_like(logp.detach(), 0.5),
        "grad_norm_squared": LENGTH[response].double(),
    }
    credit = advantages(RIGHT[prompt, response], segments, how=how, **inputs)  # type: ignore[arg-type]
    if chances is not None:
        credit = credit * segments.spread(chances.repeat(3).repeat_interleave(n)) * len(groups)
    row = override(method("token_is"), {"aggregate": aggregate})
    loss = policy_loss(lp, row, credit, horizon=HORIZON).loss
    return -torch.autograd.grad(loss, logits)[0]


def return_gradient(rewards: torch.Tensor) -> torch.Tensor:
    """Gradient of the mean of a reward `[prompt, response]` over prompts and responses, at equal policies."""
    logits = torch.zeros(3, 2, 2, dtype=torch.float64, requires_grad=True)
    mean = (log_law(logits).sum(-1).exp() * rewards).sum(1).mean()
    return torch.autograd.grad(mean, logits)[0]


def standardized(p: float, n: int) -> tuple[float, float]:
    """Mean GRPO advantage of a right and of a wrong answer among n - 1 siblings, of which each is right with p.

    With m of n right, mean m/n and variance m (n - m) / (n (n - 1)): sqrt((n - m)(n - 1) / (n m)) if right,
    -sqrt(m (n - 1) / (n (n - m))) if wrong, and 0 where all are alike.
    """
    right = wrong = 0.0
    for k in range(n):  # right siblings
        chance = math.comb(n - 1, k) * p**k * (1 - p) ** (n - 1 - k)
        right += chance * math.sqrt((n - k - 1) * (n - 1) / (n * (k + 1)))
        wrong -= chance * math.sqrt(k * (n - 1) / (n * (n - k)))
    return right, wrong


def by_outcome(rewards: torch.Tensor, values: list[tuple[float, float]]) -> torch.Tensor:
    """For each prompt one number for its right and one for its wrong responses."""
    right, wrong = torch.tensor(values, dtype=torch.float64).T
    return torch.where(rewards > 0, right[:, None], wrong[:, None])


def weighed(how: str, n: int) -> torch.Tensor:
    """Mean advantage given prompt and response, by formula; whitening up to its constants."""
    shares = (RIGHT * LAW).sum(1)
    if how in ("rloo", "rloo_vectorized"):
        return RIGHT - shares[:, None]
    if how == "batch_mean":  # here one batch holds all groups
        return RIGHT - shares.mean()
    if how == "remax":
        return RIGHT - CRITIC[:, :1]
    if how in ("dr_grpo", "gpg", "reinforce_plus_plus_baseline"):
        return (RIGHT - shares[:, None]) * (n - 1) / n
    if how in ("grpo", "grpo_vectorized"):
        return by_outcome(RIGHT, [standardized(p, n) for p in shares.tolist()])
    if how == "grpo_passk":  # the only right one among n leads by 1, and the deviation is 1 / sqrt(n)
        return by_outcome(RIGHT, [(math.sqrt(n) * (1 - p) ** (n - 1), 0.0) for p in shares.tolist()])
    if how == "gdpo":
        parts = [by_outcome(c, [standardized(p, n) for p in (c * LAW).sum(1).tolist()]) for c in (RIGHT, OTHER)]
        return OMEGA[0] * parts[0] + OMEGA[1] * parts[1]
    assert how in ("gae", "reinforce_plus_plus")
    return RIGHT.clone()


WHITENED = ("gdpo", "reinforce_plus_plus_baseline", "gae", "reinforce_plus_plus")
SCALED = ("gpg", *WHITENED)
"""By a positive number of the batch."""
LIMITS = ("opo", "optimal_token_baseline", "tir_optimal_token_baseline", "opob")
"""Whose baseline contains the response itself, as one of n, with a weight of its own."""


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("how", [name for name in ADVANTAGES if name not in LIMITS])
def test_a_step_raises_the_mean_of_this_reward(how, aggregate):
    about = trained_return(aggregate, how)
    by_length = aggregate == "seq_mean_token_mean"
    if about["return"] is None:
        assert how == "rl_zvp" or (how, by_length) == ("gae", True)
        return
    n = 4
    expected = weighed(how, n)
    if how in WHITENED:  # over tokens: long responses count more in the mean that is taken off
        expected = expected - (expected * LAW * LENGTH).sum() / (3 * (LAW * LENGTH).sum())
    if by_length:
        expected = expected / LENGTH
    unit = {"token_mean": 1.5, "fixed": HORIZON}.get(aggregate, 1.0)  # the mean length is 1/2 + 2/2
    got, want = loss_gradient(how, aggregate, n), return_gradient(expected) / unit
    if how in SCALED:
        got, want = got / got.norm(), want / want.norm()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)
    # What is said to be J is J: the gradient points where that of E[R] does, and otherwise it does not.
    cosine = torch.cosine_similarity(got.flatten(), return_gradient(RIGHT).flatten(), dim=0)
    if about["is_j"]:
        assert cosine > 1 - 1e-9
    elif how not in ("grpo", "grpo_vectorized") or by_length:
        assert cosine < 1 - 1e-3


@pytest.mark.parametrize("how", LIMITS)
def test_a_baseline_that_contains_the_response_is_harmless_among_many(how):
    """The distance to the gradient of J shrinks as 1 / n, and is not 0: groups by how often they hold each response."""
    assert ADVANTAGES[how].provided == "many answers to each prompt"
    distances = []
    for n in (10, 40):
        counts = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
        groups = torch.tensor([[0] * a + [1] * b + [2] * c for a, b, c in counts])
        chances = [math.comb(n, a) * math.comb(n - a, b) / 2**a / 4 ** (n - a) for a, b, _ in counts]
        assert sum(chances) == pytest.approx(1)
        got = gradient_over(groups, torch.tensor(chances, dtype=torch.float64), how, "seq_mean_token_sum")
        distances.append(float((got - return_gradient(RIGHT)).norm() / return_gradient(RIGHT).norm()))
    assert 0.5 > distances[0] > 3 * distances[1] > 0.01


def test_what_an_advantage_stands_for_is_what_the_formulas_say():
    """By p, the share of right answers: the gap between a right and a wrong answer is the weight of the prompt."""
    shares, sigma = (0.1, 0.3, 0.5, 0.8), [math.sqrt(p * (1 - p)) for p in (0.1, 0.3, 0.5, 0.8)]
    gaps = {n: [right - wrong for right, wrong in (standardized(p, n) for p in shares)] for n in (2, 3, 8, 1000)}
    assert ADVANTAGES["grpo"].stands_for == "R / sigma"
    assert gaps[1000] == pytest.approx([1 / s for s in sigma], rel=0.01)
    # Two or three answers: every prompt has the same weight, 1 / sqrt(2) and 2 / sqrt(3), and GRPO raises J.
    assert gaps[2] == pytest.approx([0.5**0.5] * 4, rel=1e-12)
    assert gaps[3] == pytest.approx([2 / 3**0.5] * 4, rel=1e-12)
    # At most (n - 1) / sqrt(n), as a prompt is hardly ever solved, where 1 / sigma has no limit.
    right, wrong = standardized(1e-9, 8)
    assert right - wrong == pytest.approx(7 / math.sqrt(8), rel=1e-6)
    assert max(gaps[8]) < 7 / math.sqrt(8)
    assert ADVANTAGES["grpo_passk"].stands_for == "(1 - p)^(n - 1) R"
    assert {row.stands_for for name, row in ADVANTAGES.items() if name not in ("grpo", "grpo_vectorized")} == {
        "R",
        "(1 - p)^(n - 1) R",
        "sum_k omega_k R_k / sigma_k",
        "",  # rl_zvp: none known
    }


def test_reward_per_token_falls_while_the_return_rises():
    """Third prompt alone, R = 1 for `a` and `b c`: from (1/2, 1/4, 1/4) to (.2, .56, .24), J rises by .01.

    E[(R - 3/4) / |y|] falls: from (1/4)(1/2) + (1/8)(1/4) - (3/8)(1/4) = 1/16 to .05 + .07 - .09 = .03.
    """
    law = torch.tensor([0.2, 0.56, 0.24], dtype=torch.float64)
    per_token = (RIGHT[2] - 0.75) / LENGTH
    assert float((RIGHT[2] * (law - LAW)).sum()) == pytest.approx(0.01, abs=1e-12)
    assert float((per_token * LAW).sum()) == pytest.approx(1 / 16, abs=1e-12)
    assert float((per_token * law).sum()) == pytest.approx(0.03, abs=1e-12)
    # The first steps of the way there: logits of `a` against `b`, and of `c` against `d`.
    toward = law - LAW
    first = torch.tensor([toward[0] / LAW[0], -toward[0] / (1 - LAW[0])])
    second = torch.tensor([toward[1] / LAW[1], toward[2] / LAW[2]]) - first[1]
    way = torch.stack([first, second])
    slopes = {a: float((loss_gradient("rloo", a, 4)[2] * way).sum()) for a in AGGREGATES}
    assert [a for a in AGGREGATES if slopes[a] < 0] == ["seq_mean_token_mean"]
    assert slopes["seq_mean_token_sum"] == pytest.approx(0.01 / 3, abs=1e-12)  # one prompt of three
    assert slopes["token_mean"] == pytest.approx(0.01 / 3 / 1.5, abs=1e-12)
    assert slopes["seq_mean_token_mean"] == pytest.approx((0.03 - 1 / 16) / 3, abs=1e-12)


def test_the_mean_over_sigma_falls_while_the_return_rises():
    """A prompt solved half of the time gains .040, one solved once in twenty loses .035: J rises by .0025.

    Groups of eight: a prompt's weight is the mean gap between a right and a wrong answer's advantage.
    """
    shares, gains = (0.5, 0.05), (0.040, -0.035)
    n, slope = 8, 0.0
    for p, gain in zip(shares, gains):
        logit = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
        objective = 0.0
        for right in range(n + 1):
            rewards = (torch.arange(n) < right).double()
            segments = Segments.from_lengths([1] * n, group_ids=torch.zeros(n, dtype=torch.long))
            logp = torch.where(
                rewards > 0, torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)
            )
            lp = LogProbs.pack(logp.detach(), logp, segments=segments)
            row = override(method("token_is"), {"aggregate": "seq_mean_token_sum"})
            chance = math.comb(n, right) * p**right * (1 - p) ** (n - right)
            loss = policy_loss(lp, row, advantages(rewards, segments, how="grpo")).loss
            objective = objective - chance * loss
        (slope_of_logit,) = torch.autograd.grad(objective, logit)
        right, wrong = standardized(p, n)
        assert float(slope_of_logit) == pytest.approx((right - wrong) * p * (1 - p), rel=1e-5)
        slope += float(slope_of_logit) / (p * (1 - p)) * gain / 2
    assert sum(gains) / 2 == pytest.approx(0.0025)
    assert slope < -0.003


@pytest.mark.parametrize("name", [n for n, row in METHODS.items() if not hasattr(row.objective, "trained_return")])
def test_every_row_says_what_it_raises_and_how_that_would_be_j(name):
    row = METHODS[name]
    about = facts(name, row)["trained_return"]
    assert about == trained_return(row.aggregate, row.advantage or DEFAULT_ADVANTAGE)
    settings = dict(change.split("=") for change in about["for_j"])
    aggregate = settings.get("override.aggregate", row.aggregate)
    mended = trained_return(aggregate, settings.get("optim.advantage", about["advantage"]))
    assert mended["is_j"]
    assert ("not J" in about["words"]) is (not about["is_j"] and about["return"] is not None)
