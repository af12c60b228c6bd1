"""`policy_loss`: a method's loss and drift statistics for one batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.aggregate import accepted_scale, aggregate, normalizer_of
from offdrift.batch_info import NO_INFO, PER_SEQUENCE, BatchInfo, Observed, without_unscored
from offdrift.correction import Corrected
from offdrift.errors import BadValueError, EvidenceError, MethodError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.methods import method as row
from offdrift.notebook import box, paragraph
from offdrift.numerics import concrete, transformed
from offdrift.ratios import log_ratio
from offdrift.segments import Segments
from offdrift.stats.drift import REFUSED, DriftStats
from offdrift.texts import as_json


@dataclass(frozen=True, repr=False)
class PolicyLoss:
    """Loss of one batch, with the decisions and statistics behind it."""

    loss: Float[Tensor, ""]
    """To be minimized; carries the gradient to `logp`, also when everything was rejected (zero)."""
    corrected: Corrected
    """What gates and weights decided, per token."""
    observed: Observed
    """What the method's observing parts saw: `batch_info.observed`, else what they see of this batch."""
    summarize: Callable[[], DriftStats]
    """Computes `stats`."""

    @cached_property
    def stats(self) -> DriftStats:
        """Mergeable statistics of the batch, still on its device, computed when first asked for.

        They are four fifths of the work on a few tokens. Asked for after `loss.backward()`, an accelerator is busy with
        the gradient while the host prepares them; asked for before, it waits.
        """
        return self.summarize()

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric of the batch by name: `stats.metrics`."""
        return self.stats.metrics

    def to_frame(self) -> Any:
        """The metrics as a frame, see `DriftStats.to_frame`."""
        return self.stats.to_frame()

    def to_json(self, indent: int | None = None) -> str:
        """The loss and the metrics as JSON; null for what is not known."""
        loss = concrete(self.loss).tolist()
        return as_json({"loss": loss, "grade": self.stats.grade, "metrics": self.metrics}, indent)

    def __repr__(self) -> str:
        """Loss, tokens kept and their mean weight, without computing `stats`; of an accelerator no value."""
        keep, loss = concrete(self.corrected.keep), concrete(self.loss)
        if not loss.is_cpu:
            return f"PolicyLoss: {keep.shape[-1]:,} tokens on {loss.device}"
        value = f"{float(loss):.6g}" if loss.ndim == 0 else f"of shape {tuple(loss.shape)}"
        weight = concrete(self.corrected.weight)[keep].double().mean().item()
        mean = f", mean weight {weight:.4g}" if keep.any() else ""
        return f"PolicyLoss: loss {value}, {int(keep.sum()):,} of {keep.numel():,} tokens kept{mean}"

    def _repr_html_(self) -> str:
        return box(paragraph(repr(self).removeprefix("PolicyLoss: "), strong="PolicyLoss"), self.stats._repr_html_())

    def plus(self, sums: Callable[[], Mapping[str, Tensor | float]]) -> PolicyLoss:
        """Return the loss with more sums in its statistics (`DriftStats.plus`), computed together with them."""
        return replace(self, summarize=lambda: self.stats.plus(sums()))


def policy_loss(
    logprobs: LogProbs,
    method: Method | str,
    advantages: Float[Tensor, " n"],
    batch_info: BatchInfo = NO_INFO,
    *,
    normalizer: float | Float[Tensor, ""] | None = None,
    horizon: int | None = None,
) -> PolicyLoss:
    """Loss of one batch, or of one piece of it, under a method.

        loss = sum over kept tokens of  weight * objective(advantage)  / normalizer
               + sum over all tokens of  regularizer + coef * KL(current || reference)  / normalizer

    Rejected tokens contribute exactly zero to the first sum and stay in the normalizer (Algorithm 1
    divides by the number of sequences sampled, not accepted), unless `method.normalizer` says that
    peers' denominators are wanted. A token that the engine did not score (`LogProbs.unscored`) is
    one of the rejected. `batch_info.sample_weight` multiplies the terms of both sums.

    Args:
        logprobs: packed log-probs; `logp` carries the gradient.
        method: a row of `METHODS`, by itself or by name, any other composition, or the name of one in code.
        advantages: per token, signed, finite; no gradient is taken through them.
        batch_info: what else the method may need: divergences, entropy, vocab, rewards, version_lag,
            observed, sample_weight, distributions (see `BatchInfo`).
        normalizer: what the sum is divided by, over all pieces and ranks of the step; None if this
            batch is the whole step.
        horizon: tokens per sequence, for aggregate="fixed".

    A batch without a trainable token has the loss 0, with a graph to `logp`.

    Raises: `EvidenceError` if the method needs what the batch does not carry, or looks at the whole
        step (`method.needs_whole_step`) while `normalizer` says that this may be a piece of it and
        `batch_info.observed` is missing; `BadValueError` naming an advantage (or another input that the method
        reads) that is not finite, or a normalizer that is not positive; `MethodError` for what is no
        method; `ShapeError`.

    Example:
        >>> import torch
        >>> from offdrift.methods import method
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.9]),
        ...                    segments=Segments.from_lengths([2]))
        >>> policy_loss(lp, method("trm_max_k2"), torch.ones(2)).loss
        tensor(-2.1052)

    Reference: Li et al., arXiv:2512.23075v5, eq. 22 and Algorithm 1.
    """
    method = row(method) if isinstance(method, str) else method
    unread = _check(logprobs, method, advantages, batch_info=batch_info, normalizer=normalizer, horizon=horizon)
    observed = batch_info.observed
    if observed is None and normalizer is not None and method.needs_whole_step:
        raise EvidenceError(
            "this method looks at the whole step before it acts on a piece of it, and normalizer= "
            "says that this batch may be a piece: give BatchInfo(observed=...) (what method.observe says of "
            'every piece, merged), or BatchInfo(observed="this_batch") if this batch is the whole step '
            f"({method.describe()})"
        )
    segments, how = logprobs.segments, method.aggregate
    advantages = advantages.detach()
    anchored = logprobs if method.anchor is None else method.anchor(logprobs, batch_info)
    if not isinstance(observed, Observed):
        observed = method.observe(anchored, advantages, batch_info)
    batch_info = replace(batch_info, observed=observed)
    corrected = method.correction(anchored, advantages, batch_info)
    scored = without_unscored(anchored, advantages, batch_info)
    token_losses = method.objective(*scored).scatter_to_all(anchored)
    scale = None  # what turns sampled denominators into the ones that the method asks for
    if method.normalizer != "sampled":
        counts = observed.parts["normalizer"]
        scale = accepted_scale(segments, corrected.keep, counts, how=how, name=method.normalizer)

    def accepted(x: Tensor) -> Tensor:
        # where, not a product: a rejected token's loss may be huge, and huge * 0 is how NaN is born.
        x = x.where(corrected.keep, 0.0)
        return x if scale is None else x * scale.to(x.dtype)

    token_loss = accepted(corrected.weight * token_losses.loss)
    regularizer, kl = _regularizer(method, anchored, token_losses.regularizer)
    if regularizer is not None:
        token_loss = token_loss + (accepted(regularizer) if method.gate_scope == "all" else regularizer)
    if batch_info.sample_weight is not None:
        token_loss = token_loss * segments.spread(batch_info.sample_weight).to(token_loss.dtype)
    if normalizer is None:
        normalizer = normalizer_of(segments, how=how, horizon=horizon) or 1.0
    loss = aggregate(token_loss, segments, how=how, normalizer=normalizer)

    def summarize() -> DriftStats:
        stats = DriftStats.of(logprobs, corrected, divergences=batch_info.divergences, clipped=token_losses.clipped)
        of_objective = getattr(method.objective, "sums", None)
        with torch.no_grad():
            if of_objective is not None:
                stats = stats.plus(of_objective(scored[0], scored[2]))
            if kl is not None:
                stats = stats.with_sum("reference/kl", logprobs.select_scored(kl).sum())
        return stats.plus({f"{REFUSED}{name}": n for name, n in unread.items()}) if unread else stats

    result = PolicyLoss(loss, corrected, observed, summarize)
    if transformed():  # what a transformation of `torch.func` made dies with it
        assert result.stats is not None
    return result


def _regularizer(method: Method, logprobs: LogProbs, own: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Per-token terms that weights never scale, and the KL to the reference policy among them."""
    penalty = method.penalty
    if penalty is None:
        return own, None
    ratio = log_ratio(logprobs, on="full") if penalty.needs_ratio else None
    kl = penalty(logprobs.current, logprobs.reference, log_ratio=ratio)
    if penalty.place == "loss":
        own = penalty.coef * kl if own is None else own + penalty.coef * kl
    return own, kl.detach()


def _check(
    logprobs: LogProbs, method: Method, advantages: Tensor, batch_info: BatchInfo, normalizer: Any, horizon: int | None
) -> dict[str, Tensor]:
    """Refuse what is not about this batch, or not a number. One transfer to the host, or none: see `with_current`.

    Returns: what was not read: how many values of an input are not finite, if `logprobs` were not read either.
    """
    for name, x, kind in (("logprobs", logprobs, LogProbs), ("method", method, Method)):
        if not isinstance(x, kind):
            way = "make them with LogProbs.pack" if kind is LogProbs else "give a name or a Method"
            raise MethodError(f"{name} is a {type(x).__name__}, not a {kind.__name__}; {way}")
    inputs = batch_info.inputs(logprobs, advantages)
    read = ("advantages", "sample_weight", *(k for k in ("entropy", "rewards", "version_lag") if k in method.needs))
    numbers = {k: x for k in read if (x := inputs.get(k)) is not None and len(x)}
    if logprobs.unread is not None:
        later = {k: (~x.detach().isfinite()).count_nonzero() for k, x in numbers.items()}
        if isinstance(normalizer, Tensor):
            x = _one_number(normalizer)
            later["normalizer"], normalizer = (~((x > 0) & x.isfinite())).count_nonzero().to(advantages.device), None
        _check_counts(normalizer, horizon)
        return {**logprobs.unread, **later}
    # A sum of finite numbers may overflow in half precision; the extremes do not.
    ends = [e.double() for x in numbers.values() for e in torch.aminmax(concrete(x))]
    if isinstance(normalizer, Tensor):
        ends.append(concrete(_one_number(normalizer)).to(advantages.device).min())
    on_host = torch.stack(ends).tolist() if ends else []
    if isinstance(normalizer, Tensor):
        normalizer = on_host.pop()
    for name, low, high in zip(numbers, on_host[::2], on_host[1::2], strict=True):
        if not (math.isfinite(low) and math.isfinite(high)):
            _raise_not_finite(name, numbers[name], logprobs.segments)
    _check_counts(normalizer, horizon)
    return {}


def _one_number(normalizer: Tensor) -> Float[Tensor, ""]:
    if normalizer.numel() != 1:
        raise ShapeError(f"normalizer has shape {tuple(normalizer.shape)}; give one number")
    return normalizer.detach().double().reshape(())


def _check_counts(normalizer: float | None, horizon: int | None) -> None:
    for name, x in (("normalizer", normalizer), ("horizon", horizon)):
        number = isinstance(x, int | float) and not isinstance(x, bool)
        if x is not None and not (number and 0 < x < math.inf):
            raise BadValueError(f"{name}={x!r} must be a positive, finite number: a count of tokens or sequences")


def _raise_not_finite(name: str, x: Tensor, segments: Segments) -> None:
    if (whole := concrete(x)).shape != x.shape:
        bad = int((~whole.isfinite()).sum())
        raise BadValueError(f"{name} holds {bad} numbers that are not finite, in batches that torch.func maps over")
    x = whole
    at = int((~x.isfinite()).nonzero()[0])
    sequence, where = at, ""
    if name not in PER_SEQUENCE:
        sequence = int(segments.seq_ids[at])
        where = f" at trainable token {at - int(segments.cu_seqlens[sequence])}"
    raise BadValueError(
        f"{name} of sequence {sequence} is {x[at].item()}{where}; mask the token, drop the "
        "sequence, or find out where the number comes from"
    )
