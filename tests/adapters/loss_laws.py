"""Laws of a framework's hook that returns a loss, whatever the framework's own shapes are.

A hook is given as `run(batch, tokens, sequences)`: what the framework would add to the step's loss for
this piece, and the gradient to the current log-probs, when the whole step has so many trainable tokens
and sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from offdrift.errors import BadValueError
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import Method
from tests.adapters.hooked import Batch, batch, poisoned

Run = Callable[[Batch, float, float], tuple[float, Tensor]]
FIELDS = ("rollout", "old", "current", "advantages")
HORIZON = 16


def counts(given: Batch) -> tuple[float, float]:
    """Trainable tokens, and sequences that have one."""
    return float(given.mask.sum()), float((given.mask.sum(1) > 0).sum())


def rows(given: Batch, index: Tensor) -> Batch:
    return replace(given, **{f.name: getattr(given, f.name)[index] for f in fields(given)})


def expected(method: Method, given: Batch, tokens: float, sequences: float) -> tuple[float, Tensor]:
    """The library's own loss of the batch, with the step's denominators."""
    current = given.current.clone().requires_grad_()
    logprobs = LogProbs.pack(given.rollout, current, given.old, mask=given.mask)
    how = method.aggregate
    count = {"token_mean": tokens, "fixed": sequences * HORIZON}.get(how, sequences)
    advantages = logprobs.like_caller(given.advantages)
    loss = policy_loss(logprobs, method, advantages, normalizer=count).loss
    loss.backward()
    assert current.grad is not None
    return float(loss.detach()), current.grad


def same(run: tuple[float, Tensor], want: tuple[float, Tensor], rel: float = 1e-5) -> None:
    assert run[0] == pytest.approx(want[0], rel=rel, abs=1e-7)
    torch.testing.assert_close(run[1], want[1], rtol=rel, atol=1e-7)


def learns(gradient: Tensor) -> None:
    assert int((gradient != 0).sum()) > 5


def check_loss(run: Run, method: Method) -> None:
    """The loss and its gradient are the library's, and not trivially so."""
    given = batch(spread=3e-4)  # within what the strictest gates let through
    want = expected(method, given, *counts(given))
    assert want[0] != 0
    assert int((want[1] != 0).sum()) > 5
    same(run(given, *counts(given)), want)


def check_padding(run: Run) -> None:
    """What stands at masked positions is irrelevant, and gets no gradient."""
    given = batch()
    loss, gradient = run(given, *counts(given))
    learns(gradient)
    assert int((~given.mask).sum()) > 15
    assert not bool(gradient[~given.mask].any())
    for value in (math.nan, 1e9, -math.inf):
        other = {f: poisoned(getattr(given, f), given.mask, value) for f in FIELDS}
        again, its = run(replace(given, **other), *counts(given))
        assert again == loss
        assert torch.equal(its, gradient)


def check_order(run: Run) -> None:
    """Permuting sequences permutes the gradient and leaves the loss."""
    given = batch()
    loss, gradient = run(given, *counts(given))
    learns(gradient)
    order = torch.tensor([3, 5, 0, 4, 1, 2])
    again, its = run(rows(given, order), *counts(given))
    same((again, its), (loss, gradient[order]))


def check_split(run: Run) -> None:
    """Micro-batches add up to the whole; one of them has no trainable token."""
    given = batch()
    whole = run(given, *counts(given))
    learns(whole[1])
    cuts = [torch.tensor(i) for i in ([0, 3], [1], [2, 4], [5])]
    parts = [run(rows(given, i), *counts(given)) for i in cuts]
    gradient = torch.zeros_like(whole[1])
    for i, (_, part) in zip(cuts, parts, strict=True):
        gradient[i] = part
    same((sum(loss for loss, _ in parts), gradient), whole)


def check_all_masked(run: Run) -> None:
    """Nothing to learn: zero, with a zero gradient, whatever is in the tensors."""
    given = replace(batch(), mask=torch.zeros_like(batch().mask))
    nan = {f: torch.full_like(getattr(given, f), math.nan) for f in FIELDS}
    loss, gradient = run(replace(given, **nan), 7.0, 3.0)
    assert loss == 0.0
    assert not bool(gradient.any())


UNSCORED = (-9999.0, -math.inf, -1e9)
"""What stands for a rollout log-prob that no engine gave."""


def unscored(given: Batch, value: float) -> tuple[Batch, Batch]:
    """The batch with rollout log-probs that were not scored, a whole sequence of them and single ones;
    and with those tokens masked."""
    some = given.mask & (torch.arange(given.mask.shape[1]) % 4 == 1)
    some[2] = given.mask[2]
    assert 8 < int(some.sum()) < int(given.mask.sum()) - 8
    return (replace(given, rollout=given.rollout.masked_fill(some, value)), replace(given, mask=given.mask & ~some))


def check_unscored(run: Run) -> None:
    """Of a token mean: an unscored token trains nothing, decides nothing, and stays in the denominator."""
    given = batch()
    for value in UNSCORED:
        with_them, without = unscored(given, value)
        loss, gradient = run(with_them, *counts(given))
        learns(gradient)
        assert math.isfinite(loss)
        same((loss, gradient), run(without, *counts(given)))


def check_bad_advantages(run: Run) -> None:
    """An advantage that is not finite is an error that names it, where the token may train."""
    given = batch()
    for value in (math.nan, math.inf, -math.inf):
        advantages = given.advantages.clone()
        advantages[0, given.mask[0].nonzero()[1]] = value
        with pytest.raises(BadValueError, match="advantages"):
            run(replace(given, advantages=advantages), *counts(given))


def check_all_rejected(run: Run) -> None:
    """Of a run whose method rejects everything: zero, finite, and a graph."""
    given = batch()
    loss, gradient = run(given, *counts(given))
    assert loss == 0.0
    assert not bool(gradient.any())


SOME: dict[str, dict[str, float]] = {"geo_mask": {"gate.low": 0.9, "gate.high": 1.1}}
"""Settings under which a method keeps some sequences of `batch()` and rejects others."""

REJECTS_ALL = {"gate.low": 50.0, "gate.high": 60.0}
"""Settings of `geo_mask` under which no sequence is kept."""
