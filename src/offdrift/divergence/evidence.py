"""Grades of evidence: how surely a divergence is known, and what it may therefore be used for.

    exact             from the full vocabulary of both policies: the number itself
    interval          from the top k of one and all of the other: rigorous lower and upper ends
    capped interval   the same lower end; an upper end that holds under a stated assumption
    sampled           from the one token that was drawn: an estimate, whatever its size

Rejecting needs a lower end (a token above the threshold by `lo` is above it); accepting, and every
guarantee, needs an upper end. Exact values and upper ends of intervals back a guarantee; an upper end
of a capped interval backs one only together with `assumes`, which the guarantee must then state; a
sample backs none. What is put together is known as surely as its weakest part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.errors import EvidenceError, ShapeError
from offdrift.numerics import check_tensor, clamped, concrete
from offdrift.texts import as_json


class Grade(StrEnum):
    """Certainty with which a divergence is known, best first."""

    EXACT = "exact"
    INTERVAL = "interval"
    CAPPED = "capped interval"
    SAMPLED = "sampled"

    @staticmethod
    def weakest(grades: Iterable[str]) -> Grade:
        """The grade of what several divergences together say.

        Example:
            >>> str(Grade.weakest(["capped interval", "exact"]))
            'capped interval'
        """
        order = list(Grade)
        return max((Grade(g) for g in grades), key=order.index)


@dataclass(frozen=True, repr=False)
class Divergence:
    """One divergence at every token, and how surely it is known.

    Args:
        name: what it is, first distribution first ("kl_rollout_current", "tv_rollout_current").
        grade: where the numbers come from.
        lo: lower end, nats (KL) or probability (TV). Rejection by `lo` is rigorous unless sampled.
        hi: upper end, the same tensor as `lo` unless the grade is an interval; may be +inf.
        assumes: what `hi` takes for granted; of capped intervals, and of them only.
        refuted: where the evidence contradicts `assumes`: there, `hi` does without it. A batch in
            which this happens speaks against the assumption at its other tokens, too.

    Raises: `EvidenceError` if the grade and `assumes` do not belong together.

    Example:
        >>> tv = Divergence.interval("tv", torch.tensor([0.1]), torch.tensor([0.3]))
        >>> tv.may_certify, tv.upper
        (True, tensor([0.3000]))
    """

    name: str
    grade: Grade
    lo: Float[Tensor, " n"]
    hi: Float[Tensor, " n"]
    assumes: str | None = None
    refuted: Bool[Tensor, " n"] | None = None

    def __post_init__(self) -> None:
        if (self.grade is Grade.CAPPED) != bool(self.assumes):
            raise EvidenceError(
                f'{self.name} has grade "{self.grade}" and assumes={self.assumes!r}; a capped '
                "interval states its assumption, and nothing else has one"
            )

    @staticmethod
    def exact(name: str, value: Float[Tensor, " n"]) -> Divergence:
        """A divergence computed over the full vocabulary."""
        return Divergence(name, Grade.EXACT, value, value)

    @staticmethod
    def interval(name: str, lo: Float[Tensor, " n"], hi: Float[Tensor, " n"]) -> Divergence:
        """A divergence known to lie between `lo` and `hi`."""
        return Divergence(name, Grade.INTERVAL, lo, hi)

    @staticmethod
    def capped(
        name: str, lo: Float[Tensor, " n"], hi: Float[Tensor, " n"], *, assumes: str, refuted: Bool[Tensor, " n"]
    ) -> Divergence:
        """A divergence known to be at least `lo` and, if `assumes` holds, at most `hi`."""
        return Divergence(name, Grade.CAPPED, lo, hi=hi, assumes=assumes, refuted=refuted)

    @staticmethod
    def sampled(name: str, value: Float[Tensor, " n"]) -> Divergence:
        """An estimate from one drawn token."""
        return Divergence(name, Grade.SAMPLED, value, value)

    @staticmethod
    def joined(parts: Sequence[tuple[Int[Tensor, " r"], Divergence]], n: int) -> Divergence:
        """One divergence of `n` tokens from parts, each with the tokens that it is about, which cover each token once.

        The weakest grade of the parts is the grade of the whole, and every assumption is stated,
        unless the whole is sampled: a sample has no upper end that could take something for granted.
        """
        divergences = [d for _, d in parts]
        grade = Grade.weakest(d.grade for d in divergences)
        rows = torch.cat([r for r, _ in parts])

        def placed(values: list[Tensor]) -> Tensor:
            together = torch.cat(values)
            return together.new_empty(n).index_copy_(0, rows.to(together.device), together)

        lo = placed([d.lo for d in divergences])
        same = all(d.hi is d.lo for d in divergences)
        hi = lo if same else placed([d.hi for d in divergences])
        name = divergences[0].name
        if grade is not Grade.CAPPED:
            return Divergence(name, grade, lo, hi)
        assumed = " and ".join(dict.fromkeys(d.assumes for d in divergences if d.assumes))
        flags = (torch.zeros_like(d.lo, dtype=torch.bool) if d.refuted is None else d.refuted for d in divergences)
        return Divergence(name, grade, lo, hi=hi, assumes=assumed, refuted=placed(list(flags)))

    @property
    def metrics(self) -> dict[str, float]:
        """Mean and largest value over the tokens, of the lower and the upper end; NaN without a token."""
        ends = {"": self.lo} if self.hi is self.lo else {"_low": self.lo, "_high": self.hi}
        numbers = {end: concrete(x).double() for end, x in ends.items()}
        kinds = {"mean": lambda x: x.mean(), "max": lambda x: x.max() if len(x) else x.mean()}
        return {f"{kind}{end}": float(of(x)) for end, x in numbers.items() for kind, of in kinds.items()}

    def to_frame(self) -> Any:
        """The tokens as a frame of pandas or polars: `lo`, `hi`, and `refuted` where something is assumed.

        Raises: `OffdriftError` if neither is installed.
        """
        from offdrift.notebook import frame

        tensors = {"lo": self.lo, "hi": self.hi} | ({} if self.refuted is None else {"refuted": self.refuted})
        return frame({name: concrete(x).tolist() for name, x in tensors.items()})

    def to_json(self, indent: int | None = None) -> str:
        """Name, grade, assumption and both ends of every token as JSON; null for what is infinite."""
        ends = {"lo": concrete(self.lo).tolist(), "hi": concrete(self.hi).tolist()}
        return as_json({"name": self.name, "grade": str(self.grade), "assumes": self.assumes, **ends}, indent)

    def __repr__(self) -> str:
        """Name, grade, tokens, mean and largest value; of an accelerator, which is not waited for, no value."""
        from offdrift.notebook import brief

        first = f"Divergence {self.name}: {self.grade}, {self.lo.shape[-1]:,} tokens"
        if not concrete(self.lo).is_cpu:
            return f"{first} on {self.lo.device}"
        sizes = ", ".join(f"{name} {x:.3g}" for name, x in self.metrics.items())
        return brief(f"{first}, {sizes}", f"  assumes {self.assumes}" if self.assumes else "")

    def _repr_html_(self) -> str:
        from offdrift.notebook import box, chart, paragraph, table

        words = f"{self.grade}, {self.lo.shape[-1]:,} tokens" + (f"; assumes {self.assumes}" if self.assumes else "")
        ends = {"lower end": self.lo, "upper end": self.hi}
        lines = [(end, chart(concrete(x).tolist(), name=f"{end} by token")) for end, x in ends.items()]
        sizes = [(name, f"{x:.4g}") for name, x in self.metrics.items()]
        return box(paragraph(words, strong=self.name), table([*sizes, *lines[: 1 if self.hi is self.lo else 2]]))

    def map(self, function: Callable[[Tensor], Tensor]) -> Divergence:
        """Apply `function` to every tensor, to choose other tokens or another device."""
        lo = function(self.lo)
        hi = lo if self.hi is self.lo else function(self.hi)
        refuted = None if self.refuted is None else function(self.refuted)
        return replace(self, lo=lo, hi=hi, refuted=refuted)

    @property
    def value(self) -> Float[Tensor, " n"]:
        """The number to show and to reject by: the value, or the interval's lower end."""
        return self.lo

    @property
    def may_certify(self) -> bool:
        """Whether `upper` exists: of exact values and of intervals (under `assumes`); not of samples."""
        return self.grade is not Grade.SAMPLED

    @property
    def upper(self) -> Float[Tensor, " n"]:
        """The number a guarantee may use; one that does must state `assumes`, if there is something.

        Raises: `EvidenceError` for a sampled divergence, which proves nothing.
        """
        if not self.may_certify:
            raise EvidenceError(
                f"{self.name} is a sampled estimate and backs no guarantee; record the rollout "
                'policy with evidence="full" or "hidden" (exact), or evidence=k for its top k (interval)'
            )
        return self.hi


# What one token drawn from *first* tells about two distributions, from l = log second(token) - log first(token)
# clamped to +-20. Reference: J. Schulman, "Approximating KL divergence", 2020; Li et al., arXiv:2512.23075v5, App. E.


def k1(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """-l: unbiased, signed estimate of KL(first || second), nats. Gradient: to `log_ratio`."""
    return -clamped(log_ratio)


def k2(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """l^2 / 2: treats a halved and a doubled probability alike. Gradient: to `log_ratio`."""
    return clamped(log_ratio).square() / 2


def k3(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """e^l - 1 - l: unbiased, non-negative. Gradient: to `log_ratio`.

    Too low under top-k or top-p sampling, by the mass that second puts outside first's filter.

    Example:
        >>> k3(torch.tensor([0.0, 0.6931]))
        tensor([0.0000, 0.3068])
    """
    limited = clamped(log_ratio)
    return limited.expm1() - limited


def abs_log_ratio(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """|l|, nats: the same regions as k2, on a scale that reads as a factor. Gradient: its sign."""
    return clamped(log_ratio).abs()


CERTAIN = 1e-12
"""Nats by which a token of a distribution of two falls short of probability 1."""


@dataclass(frozen=True)
class Distributions:
    """Whole distributions of the old and the current policy at `n` tokens, over one vocabulary.

    Raises: `ShapeError` if the three are not `[n, v]`, `[n, v]` and `[n]`; `BadValueError` for what is no tensor.
    """

    logits_old: Float[Tensor, "n v"]
    """Tempered logits or log-probs of the old policy; -inf is a token that it cannot draw. No gradient."""
    logits: Float[Tensor, "n v"]
    """Of the current policy; receives the gradient."""
    tokens: Int[Tensor, " n"]
    """The drawn tokens."""

    def __post_init__(self) -> None:
        check_tensor("logits_old", self.logits_old)
        check_tensor("logits", self.logits)
        check_tensor("tokens", self.tokens, integers=True)
        shape = tuple(self.logits.shape)
        if len(shape) != 2 or tuple(self.logits_old.shape) != shape or tuple(self.tokens.shape) != shape[:1]:
            raise ShapeError(
                f"logits_old has shape {tuple(self.logits_old.shape)}, logits {shape}, tokens "
                f"{tuple(self.tokens.shape)}; give [tokens, vocab] twice, and one drawn token for each row"
            )

    @staticmethod
    def of_two(logp_old: Float[Tensor, " n"], logp: Float[Tensor, " n"]) -> Distributions:
        """Distributions over {the drawn token, the rest}, from log-probs: what a vocabulary of two has.

        A log-prob above -1e-12 counts as that.

        Gradient: to `logp`.

        Example:
            >>> pair = Distributions.of_two(torch.tensor([-0.5]), torch.tensor([-1.0]))
            >>> pair.logits.logsumexp(-1).abs().max() < 1e-6
            tensor(True)
        """
        old, new = (x.clamp(max=-CERTAIN) for x in (logp_old, logp))
        pair = (torch.stack([x, torch.log(-torch.expm1(x))], -1) for x in (old, new))
        tokens = torch.zeros(len(logp), dtype=torch.int64, device=logp.device)
        return Distributions(next(pair), next(pair), tokens)

    def map(self, function: Any) -> Distributions:
        """The distributions at other tokens: `function` applied to every tensor, whose rows are tokens."""
        return Distributions(function(self.logits_old), function(self.logits), function(self.tokens))
