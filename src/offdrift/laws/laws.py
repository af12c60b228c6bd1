"""`LAWS`: what holds for every method, whatever it is: each says in a sentence what is wrong on a batch, or nothing.

`failure` looks for a batch that breaks a law and removes sequences from it as long as it still does, so that what is
shown is small enough to follow by hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offdrift.batch_info import BatchInfo, Observed
from offdrift.correction import Correction, Gate, Weight
from offdrift.correction.weight import Weighted
from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.errors import MethodError
from offdrift.laws.batches import Batch, Given, Run, draw, masked, packed, padded, run, seen, segments_of, wild
from offdrift.logprobs import LogProbs
from offdrift.loss import policy_loss
from offdrift.methods import Method, override
from offdrift.methods.describe import by_path

SEEDS = range(4)
NOTHING_PASSES = Gate(statistic="k2", on="full", unit="token", high=-1.0)
EXEMPT = {
    ("derivative", "ProximalEwma"): "its limit on the ratio to the rollout policy is a constant, as published",
    ("derivative", "Flipped"): "the flipped ratio is a value, as published",
    ("derivative", "TurnNormalized"): "a turn's ratio is divided by a constant",
    ("derivative", "Preference"): "a pair's loss is split over its two answers, which may lie in two micro-batches",
    ("derivative", "Classified"): "all answers to a prompt carry its loss, and may lie in several micro-batches",
    ("ratios", "CovClipped"): "chance chooses its tokens, by a hash of log-probs",
}
"""Laws that an objective of the library breaks on purpose, and why."""
STEP = 1e-5
"""Nats by which a log-prob moves for a derivative, to either side."""
ROUNDING = 2e-4
"""Share of the largest gradient by which float32 may differ from float64."""


MEANT = "if a detach is meant, the objective says so with gradient='score'"
DETACHED = "its objective or penalty says that something is detached on purpose"


@dataclass(frozen=True)
class Failure:
    """A batch on which a method breaks a law."""

    words: str
    """What happened on it, with numbers."""
    batch: Batch | None = None
    """The smallest batch found; None where it took many to say so."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values: the words, and the batch's columns per sequence."""
        return {"words": self.words, "batch": None if self.batch is None else columns(self.batch)}


@dataclass(frozen=True)
class Law:
    """One law."""

    meaning: str
    """What holds, in a sentence."""
    breaks: Callable[[Method, Batch, int], str] | None = None
    """What is wrong on a batch, "" if nothing; the number is that of the batch, for junk and splits."""
    breaks_on_all: Callable[[Method], str] | None = None
    """What is wrong over many batches, for laws that say that something happens on one of them."""

    def exempt(self, row: Method) -> str:
        """Why the law is not asked of a method; "" if it is."""
        name = next(n for n, law in LAWS.items() if law is self)
        if name == "derivative" and not differentiable(row):
            return DETACHED
        return EXEMPT.get((name, type(row.objective).__name__), "")

    def failure(self, row: Method) -> Failure | None:
        """A batch that breaks the law, made small; None if there is none among those that are drawn."""
        if self.exempt(row):
            return None
        if self.breaks_on_all is not None:
            words = _said(self.breaks_on_all, row)
            return Failure(words) if words else None
        assert self.breaks is not None
        for seed in SEEDS:
            says = partial(_said, self.breaks, row)
            if says(batch := draw(seed), seed):
                small = smaller(batch, lambda b, says=says, seed=seed: bool(says(b, seed)))  # type: ignore[misc]
                return Failure(says(small, seed), small)
        return None

    def as_dict(self, row: Method) -> dict[str, Any]:
        """Hold a method to the law: `meaning`, `holds` (None if it is not asked), `exempt` (why) and `failure`."""
        exempt, failure = self.exempt(row), self.failure(row)
        return {
            "meaning": self.meaning,
            "holds": None if exempt else failure is None,
            "exempt": exempt,
            "failure": None if failure is None else failure.as_dict(),
        }


def _said(breaks: Callable[..., str], *arguments: Any) -> str:
    """Words for what is wrong on a batch, if only that the method fails on it."""
    try:
        return breaks(*arguments)
    except Exception as e:  # the code is the user's
        return f"it raises {type(e).__name__}: {e}"


def smaller(batch: Batch, broken: Callable[[Batch], bool]) -> Batch:
    """The batch without sequences that it takes none of to break a law, one after the other."""
    i = 0
    while i < len(batch.turns):
        left = [k for k in range(len(batch.turns)) if k != i]
        if left and broken(batch.chosen(left)):
            batch = batch.chosen(left)
        else:
            i += 1
    return batch


def columns(batch: Batch) -> dict[str, Any]:
    """The numbers of a batch that most methods read: one list per sequence."""
    names = {"mu": "logp_rollout", "old": "logp_old", "pi": "logp", "a": "advantages"}
    return {long: batch.column(short) for short, long in names.items()} | {"prompts": batch.groups.tolist()}


def differs(what: str, got: Tensor, expected: Tensor, *, share: float = 1e-9) -> str:
    """Words for where two results differ by more than a share of the largest; "" if nowhere."""
    got, expected = got.detach().double().reshape(-1), expected.detach().double().reshape(-1)
    gap = (got - expected).abs().nan_to_num(nan=math.inf)
    largest = float(expected.abs().nan_to_num(posinf=0).max()) if len(expected) else 0.0
    if not len(gap) or float(gap.max()) <= share * max(largest, 1e-3):
        return ""
    i = int(gap.argmax())
    where = f" of token {i}" if len(gap) > 1 else ""
    return f"{what}{where}: {float(got[i]):.6g}, expected {float(expected[i]):.6g}"


# -- the gradient ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FixedDecision:
    """A gate and a weight that repeat what was decided elsewhere."""

    kept: Tensor
    weighed: Tensor
    on: str | None
    exact = False
    advantage = "any"
    formula = "decided"

    def keep(self, logprobs: LogProbs, advantages: Tensor | None, batch_info: BatchInfo) -> Tensor:
        return self.kept

    def __call__(self, logprobs: LogProbs, advantages: Tensor | None, batch_info: BatchInfo) -> Weighted:
        return Weighted(self.weighed, ~self.kept)


def frozen(row: Method, case: Given) -> tuple[Method, Given]:
    """The row with its anchor, gates and weights replaced by what they made of this batch."""
    lp, correction = case.lp, row.correction
    if row.anchor is not None:
        lp = row.anchor(lp, case.batch_info)
        case = replace(case, lp=replace(lp, logp_old=lp.old.detach()))
    decided = correction(lp, case.advantages, case.batch_info)
    on = correction.weights[0].on if correction.weights else ""
    constant = FixedDecision(decided.keep, decided.weight.detach(), on)
    weights = (constant,) if correction.weights else ()
    gates = (constant,) if correction.gates else ()
    return replace(row, anchor=None, correction=Correction(gates, weights)), case  # type: ignore[arg-type]


def gradient_is_frozen(row: Method, batch: Batch, seed: int) -> str:
    case = packed(batch)
    got = run(row, case)
    constant, same = frozen(row, case)
    return differs("gradient", got.grad, run(constant, same).grad)


def differentiable(row: Method) -> bool:
    """Whether the loss is meant to be differentiated as it stands: nothing in it is detached on purpose."""
    objective, penalty = row.objective, row.penalty
    declared = getattr(objective, "gradient", "score" if objective.on is None else "unit")
    detached = (objective.on is not None and declared != "unit") or getattr(objective, "reads", None)
    return not detached and not getattr(objective, "holds", False) and penalty is None


def gradient_is_derivative(row: Method, batch: Batch, seed: int) -> str:
    """Compare autograd with central differences, with the decisions of gates and weights held fixed."""
    case = packed(batch)
    observed = seen(row, case)
    constant, case = frozen(row, case)
    got = run(constant, case, observed=observed).grad

    def loss(pi: Tensor) -> float:
        moved = replace(case, lp=replace(case.lp, logp=pi))
        both = Distributions.of_two(case.lp.old, pi)
        info = replace(moved.batch_info, observed=observed, distributions=both)
        with torch.no_grad():
            return float(policy_loss(moved.lp, constant, moved.advantages, info, normalizer=1.0).loss)

    pi = case.leaf.detach()
    steps = torch.eye(len(pi), dtype=pi.dtype) * STEP
    slopes = torch.tensor([(loss(pi + s) - loss(pi - s)) / (2 * STEP) for s in steps], dtype=pi.dtype)
    off = (got - slopes).abs() > 1e-4 * (1 + slopes.abs())
    kinks = off.clone()
    kinks[off] = _at_a_kink(loss, pi, steps[off])  # two losses a token, asked for only where autograd disagrees
    words = differs("gradient", got.where(~kinks, slopes), slopes, share=1e-5)
    return words and f"{words}, the derivative of the loss; {MEANT}"


def _at_a_kink(loss: Callable[[Tensor], float], pi: Tensor, steps: Tensor) -> Tensor:
    """Steps, each of one token, after which the loss has another slope to the left than to the right."""
    here = loss(pi)
    sides = [(loss(pi + s) - here, here - loss(pi - s)) for s in steps]
    return torch.tensor([abs(a - b) > 1e-3 * STEP * (1 + abs(a) / STEP) for a, b in sides], dtype=torch.bool)


def leaks(row: Method, batch: Batch, seed: int) -> str:
    case, leaves = all_leaves(batch)
    info = replace(case.batch_info, observed="this_batch")
    result = policy_loss(case.lp, row, case.advantages, info, normalizer=1.0)
    result.loss.backward()
    leaf = leaves.pop("pi")
    differentiated = getattr(row.objective, "reads", None)  # through it, the current policy
    through = [name for name, x in leaves.items() if x.grad is not None and name != differentiated]
    if through:
        return f"{through[0]} receives a gradient; only the current policy's log-probs may"
    return "" if leaf.grad is not None else "the current policy's log-probs receive no gradient"


def all_leaves(batch: Batch) -> tuple[Given, dict[str, Tensor]]:
    """A batch whose every number asks for a gradient."""
    t = {k: x.clone().requires_grad_() for k, x in batch.tokens.items()}
    t["rewards"] = batch.rewards.clone().requires_grad_()
    segments = segments_of(batch.turns, batch.groups)
    lp = LogProbs.pack(t["mu"], t["pi"], t["old"], logp_ref=t["ref"], segments=segments)
    case = packed(batch)
    exact = {k: Divergence.exact(k, t[k]) for k in case.batch_info.divergences}
    batch_info = replace(
        case.batch_info,
        divergences=exact,
        entropy=t["entropy"],
        rewards=t["rewards"],
        version_lag=t["lag"],
        distributions=Distributions.of_two(t["old"], t["pi"]),
    )
    return Given(lp=lp, leaf=t["pi"], advantages=t["a"], batch_info=batch_info), t


# -- how a batch is stored and split --------------------------------------------------------------


def pieces_add_up(row: Method, batch: Batch, seed: int) -> str:
    at_once = run(row, packed(batch))
    cases = [packed(batch.chosen([i])) for i in range(len(batch.turns))]
    observed = functools.reduce(Observed.merge, [seen(row, case) for case in cases])
    parts = [run(row, case, observed=observed) for case in cases]
    loss = torch.stack([r.loss for r in parts]).sum()
    return differs("sum of the pieces' losses", loss, at_once.loss) or differs(
        "gradient in pieces", torch.cat([r.grad for r in parts]), at_once.grad
    )


def order_changes_nothing(row: Method, batch: Batch, seed: int) -> str:
    order = list(range(len(batch.turns)))[::-1]
    at_once, got = run(row, packed(batch)), run(row, packed(batch.chosen(order)))
    return differs("loss in another order", got.loss, at_once.loss) or differs(
        "gradient in another order", got.grad, at_once.grad[batch.rows(order)]
    )


def masked_is_unseen(row: Method, batch: Batch, seed: int) -> str:
    at_once, (case, mask) = run(row, packed(batch)), masked(batch, seed)
    got = run(row, case)
    if bool((got.grad[~mask] != 0).any()):
        return "a masked position receives a gradient"
    return differs("loss with junk at masked positions", got.loss, at_once.loss) or differs(
        "gradient with junk at masked positions", got.grad[mask], at_once.grad
    )


def padded_is_packed(row: Method, batch: Batch, seed: int) -> str:
    flat = replace(batch, turns=[[n] for n in batch.lengths])  # padded input has no turns
    at_once, (case, mask) = run(row, packed(flat)), padded(flat, seed)
    got = run(row, case)
    return differs("loss of the padded batch", got.loss, at_once.loss) or differs(
        "gradient of the padded batch", got.grad[mask], at_once.grad
    )


# -- numbers --------------------------------------------------------------------------------------


def rounding_is_small(row: Method, batch: Batch, seed: int) -> str:
    near = batch.with_tokens(**{k: x.float().double() for k, x in batch.tokens.items()})
    wide = run(row, packed(near))
    narrow = run(row, packed(near.with_tokens(**{k: x.float() for k, x in near.tokens.items()})))
    if narrow.grad.dtype != torch.float32:
        return f"the gradient of float32 log-probs is {narrow.grad.dtype}"
    return differs("gradient in float32", narrow.grad, wide.grad, share=ROUNDING)


def rejected_is_zero(row: Method, batch: Batch, seed: int) -> str:
    shut = replace(row, correction=row.correction & NOTHING_PASSES, gate_scope="all")
    got = run(shut, packed(batch))
    if not got.result.loss.requires_grad:
        return "with everything rejected the loss has no graph to the current policy"
    if bool((got.grad != 0).any()) or got.loss != 0:
        return f"with everything rejected the loss is {float(got.loss):.6g}, and a token receives a gradient"
    return not_finite(got)


def far_apart(batch: Batch, sign: float, dtype: torch.dtype) -> Given:
    """Log-ratios of +-10,000 of every kind, in long sequences and short ones."""
    n = sum(batch.lengths)
    third = torch.arange(n) % 3
    tokens = {k: x.to(dtype) for k, x in batch.tokens.items()}
    for i, name in enumerate(("mu", "old", "pi")):
        tokens[name] = torch.full((n,), -1.0, dtype=dtype).where(third != i, -1e4)
    tokens["ref"] = tokens["mu"].flip(0)
    tokens["a"] = sign * torch.ones(n, dtype=dtype)
    return packed(batch.with_tokens(**tokens))


def extremes_are_finite(row: Method, batch: Batch, seed: int) -> str:
    for dtype in (torch.float32, torch.float64):
        for sign in (1.0, -1.0):
            if words := not_finite(run(row, far_apart(batch, sign, dtype))):
                return f"at log-ratios of 10,000 nats, in {str(dtype).removeprefix('torch.')}, {words}"
    impossible = {k: batch.tokens[k].clone() for k in ("mu", "old", "pi", "ref")}
    for i, x in enumerate(impossible.values()):
        x[i::5] = -torch.inf
    words = not_finite(run(row, packed(batch.with_tokens(**impossible))))
    return words and f"at tokens of probability 0, {words}"


def not_finite(got: Run) -> str:
    """The first result that is no finite number, in words; "" if all are."""
    stats = got.result.stats
    found = {
        "the loss": got.loss,
        "the gradient": got.grad,
        "a weight": got.result.corrected.weight,
        "a statistic": torch.cat([stats.sums.double(), stats.maxima.double().clamp(min=0)]),  # -inf of nothing
    }
    return next((f"{name} is not finite" for name, x in found.items() if not bool(x.isfinite().all())), "")


def weights_are_weights(row: Method, batch: Batch, seed: int) -> str:
    case = packed(batch)
    lp = case.lp if row.anchor is None else row.anchor(case.lp, case.batch_info)
    for part in row.correction.weights:
        w = part(lp, case.advantages, replace(case.batch_info, observed="this_batch")).weight
        if w.requires_grad:
            return f"[{part.formula}] carries a gradient"
        if bool((w < 0).any()):
            return f"[{part.formula}] is {float(w.min()):.6g} at token {int(w.argmin())}; a weight is at least 0"
    return ""


# -- parts ----------------------------------------------------------------------------------------

POLICIES = {"full": "old", "staleness": "mu", "mismatch": "pi"}
"""The policy that a part on each ratio does not read."""


def ratios_are_as_declared(row: Method, batch: Batch, seed: int) -> str:
    """Move the policy that a part's ratio does not have; what it decides must stay."""
    moved = {name: batch.with_tokens(**{name: batch.tokens[name] - 0.3}) for name in ("mu", "old")}
    for part in (row.objective, *row.correction.weights):
        others = ("mu", "old") if part.on is None else (POLICIES[part.on],)
        declared = {*getattr(part, "needs", ()), *(("old",) if getattr(part, "needs_old", False) else ())}
        for name in {"mu", "old"} & {*others} - declared:
            cases = [packed(b) for b in (batch, moved[name])]
            infos = [replace(case.batch_info, observed="this_batch") for case in cases]
            one, other = (part(case.lp, case.advantages, info)[0] for case, info in zip(cases, infos, strict=True))
            if words := differs(f"[{part.formula}]", other, one):
                who = {"mu": "the rollout policy", "old": "the old policy"}[name]
                return f"{words}, when only {who} moves, which on={part.on!r} says that it does not read"
    return ""


def every_part_acts(row: Method) -> str:
    """Leave out each gate and weight, and change each number: some batch must tell the difference."""
    cases = [packed(batch) for batch in wild()]
    results = [run(row, case) for case in cases]

    def tells(other: Method, case: Given, one: Run) -> bool:
        two = run(other, case)
        return not torch.equal(one.grad, two.grad) or not torch.equal(one.loss, two.loss)

    for what, others in simpler(replace(row, lr_scale=None)):
        if not any(tells(other, case, one) for case, one in zip(cases, results, strict=True) for other in others):
            return f"{what}: no loss and no gradient changes on {len(cases)} batches, of mild and of wild drift"
    return ""


def simpler(row: Method) -> Iterator[tuple[str, list[Method]]]:
    """The method without each gate and weight, and with each number of these and of the user's parts changed."""
    gates, weights = row.correction.gates, row.correction.weights
    for part in (*gates, *weights):
        left = Correction(tuple(g for g in gates if g != part), tuple(w for w in weights if w != part))
        yield f"leave out [{part.formula}]", [replace(row, correction=left)]
    for path, part in by_path(row).items():
        if not isinstance(part, Gate | Weight) and not hasattr(part, "inputs"):
            continue
        for field in fields(part):
            value = getattr(part, field.name)
            if not isinstance(value, float) or not value:
                continue
            others = []
            for factor in (1.1, 0.5, 2.0, 1e-3, 1e3):
                with suppress(MethodError):  # beyond what the part allows
                    others.append(override(row, {f"{path}.{field.name}": value * factor}))
            yield f"change {path}.{field.name} = {value:g}", others


LAWS: dict[str, Law] = {
    "derivative": Law(
        "the gradient is the derivative of the loss, gates and weights held fixed", gradient_is_derivative
    ),
    "constants": Law("to the gradient, what gates and weights decide is a constant", gradient_is_frozen),
    "leaks": Law("a gradient reaches the current policy's log-probs and nothing else", leaks),
    "pieces": Law("a batch is the sum of its pieces, however it is split over micro-batches and ranks", pieces_add_up),
    "order": Law("the order of the sequences changes nothing", order_changes_nothing),
    "masked": Law("masked positions may hold anything, and are not seen", masked_is_unseen),
    "padded": Law("padded input gives what packed input gives", padded_is_packed),
    "rounding": Law("float32 gives what float64 gives, up to rounding, in its own type", rounding_is_small),
    "rejected": Law("with everything rejected the loss is 0, with a graph", rejected_is_zero),
    "extremes": Law("log-ratios of 10,000 nats and tokens of probability 0 give finite numbers", extremes_are_finite),
    "weights": Law("a weight is at least 0 and carries no gradient", weights_are_weights),
    "ratios": Law("a part reads the ratio that it declares, so that none is counted twice", ratios_are_as_declared),
    "liveness": Law("every gate, every weight and every number acts on some batch", breaks_on_all=every_part_acts),
}
"""Every law by its name."""
