"""`BatchEvidence`: what a certificate needs from a batch, as a few numbers per sequence.

Confidence needs independent draws, so sequences keep a row each; micro-batches and ranks combine by concatenation,
and everything comes to the host in one transfer. Rows hold ends of what is known, never estimates of a divergence.
Ratios are those of the current to the rollout policy, limited above at e^20, which can only lower the lower ends that
guarantees use. A token without evidence, or one that the engine did not score (`LogProbs.unscored`), has KL in
[0, inf] and TV in [0, 1]; the ratio of an unscored one counts as 0, so that means of ratios times rewards >= 0 are
lower ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from offdrift.certificate.control import control_sums
from offdrift.certificate.regions import TrustRegion
from offdrift.divergence.evidence import Divergence, Grade
from offdrift.errors import MethodError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.numerics import LOG_RATIO_LIMIT
from offdrift.ratios import stopped_log_ratio
from offdrift.segments import Segments

KL, TV = "kl_rollout_current", "tv_rollout_current"

COLUMNS = (
    "length",  # tokens
    "reward",  # NaN if none was given
    "kept",  # 1 if no token was rejected
    "unscored",  # tokens that the engine did not score
    "excess",  # sum_t (w_t - 1), with w_t = 0 of unscored tokens
    "log_product",  # sum_t log w_t, nats; -inf with an unscored token
    "worst",  # max_t |log w_t|, nats; inf with an unscored token
    "kl_low",  # max_t of the lower ends, nats
    "kl_high",  # max_t of the upper ends
    "tv_low",
    "tv_high",
    "kl_total",  # sum_t of the upper ends
    "kl_sum",  # sum_t min(KL upper end, delta): an upper end where KL <= delta holds
    # sum_t KL upper end, up to the first that exceeds delta or eps, or one that was not scored, which
    # counts as delta: at most T delta
    "prefix_kl",
    "prefix_k3",  # sum_t k3(w_t), k3(u) = u - 1 - log u, of the scored tokens that prefix_kl counts, nats
    "refuted",  # 1 if a token contradicts what its capped interval assumes
    "shift",  # sum_t omega_t min(TV upper end, eps, sqrt(delta/2)): the adaptive sum
    "prefix_shift",  # the same of the tokens that prefix_kl counts
    "control",  # S of `certificate.control`, whose mean is 0; NaN without exact means, or with an unscored token
)
"""One number per sequence each."""


@dataclass(frozen=True)
class BatchEvidence:
    """Mergeable evidence about any number of sequences; make one with `BatchEvidence.of`."""

    region: TrustRegion
    columns: Float[Tensor, "b c"]
    """`COLUMNS` of every sequence, float64."""
    group_ids: Int[Tensor, " b"] | None
    """Prompt of each sequence, the same id wherever it is met; None if all prompts differ."""
    tv_by_position: Float[Tensor, " horizon"]
    """Upper ends of TV, limited by the region's, summed over sequences at each position."""
    grades: Mapping[str, Grade]
    """Grade of each divergence; the weakest, if tokens differ; sampled where there is none."""
    rewarded: bool
    """Whether rewards were given."""
    assumes: frozenset[str] = frozenset()
    """What upper ends take for granted, in words (caps on a tail)."""

    @staticmethod
    @torch.no_grad()
    def of(
        logprobs: LogProbs,
        rewards: Float[Tensor, " b"] | None = None,
        *,
        region: TrustRegion,
        divergences: Mapping[str, Divergence] | None = None,
        keep: Bool[Tensor, " n"] | None = None,
        ratio_means: Float[Tensor, " n"] | None = None,
    ) -> BatchEvidence:
        """The evidence of one batch. Gradient: none. No transfer to the host.

        Args:
            logprobs: the batch, with the current policy; `group_ids` of its segments say which
                sequences share a prompt, and must not depend on what was sampled.
            rewards: one per sequence; absent, nothing is said about J.
            region: the limits to certify; sums of what they limit are taken here.
            divergences: by name, `kl_rollout_current` and `tv_rollout_current` are read. Sampled
                ones back nothing and count as absent.
            keep: tokens that no gate rejected; a sequence with a rejected token is rejected. A gate that
                decides by the whole batch (a quantile, a group) ties sequences together, and intervals
                that count accepted ones then take for granted that it hardly does.
            ratio_means: E_mu[min(w_t, C) | c_t] of each token, exact: `control.ratio_means`. With it the direct
                guarantee takes control variates.

        Raises: `ShapeError` if there is not one reward per sequence.

        Example:
            >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]),
            ...                    segments=Segments.from_lengths([2]))
            >>> evidence = BatchEvidence.of(lp, torch.tensor([1.0]), region=TrustRegion(horizon=4, delta=0.05))
            >>> round(float(evidence.column("excess")), 4)  # e^-0.1 + e^0.1 - 2
            0.01
        """
        segments = logprobs.segments
        if rewards is not None and rewards.shape != (len(segments),):
            raise ShapeError(
                f"rewards has shape {tuple(rewards.shape)} for {len(segments)} sequences; give one reward per sequence"
            )
        kl, tv = _ends(KL, divergences, logprobs), _ends(TV, divergences, logprobs)
        position = segments.position.clamp(max=region.horizon - 1)
        lengths = segments.lengths.double()
        log_w, unscored = stopped_log_ratio(logprobs, on="full").double(), torch.zeros_like(lengths)
        if logprobs.unscored is not None:
            unscored = segments.sum(logprobs.unscored.double())
            log_w = log_w.masked_fill(logprobs.unscored, -torch.inf)
        limited_above = log_w.clamp(max=LOG_RATIO_LIMIT)
        # k3 of a token that was not scored is at least 0.
        k3 = torch.where(log_w > -torch.inf, limited_above.expm1() - limited_above, 0.0)
        refuted = torch.zeros_like(lengths)
        for d in _used(divergences):
            if d.refuted is not None:
                refuted = torch.maximum(refuted, segments.max(d.refuted.double()))
        # The smallest upper end of TV: its own, Pinsker's, and the region's, which is the premise.
        limited = torch.minimum(tv[1], (kl[1] / 2).sqrt()).double().clamp(max=region.token_tv)
        omega = torch.as_tensor(_weights(region), device=limited.device)[position]
        columns = {
            "length": lengths,
            "reward": torch.full_like(lengths, torch.nan) if rewards is None else rewards.double().to(lengths.device),
            "kept": torch.ones_like(lengths) if keep is None else segments.min(keep.double(), empty=1.0),
            "unscored": unscored,
            "excess": segments.sum(limited_above.expm1()),
            "log_product": segments.sum(log_w),
            "worst": segments.max(log_w.abs()),
            **_divergences(
                kl, tv, limited * omega, k3=k3, region=region, segments=segments, unscored=logprobs.unscored
            ),
            "refuted": refuted,
            "control": torch.full_like(lengths, torch.nan),
        }
        if ratio_means is not None:
            sums = control_sums(limited_above, ratio_means, segments)
            columns["control"] = sums.masked_fill(unscored > 0, torch.nan)
        grades = {k: Grade.SAMPLED if d is None else d.grade for k in (KL, TV) for d in [(divergences or {}).get(k)]}
        return BatchEvidence(
            region,
            torch.stack([columns[name] for name in COLUMNS], dim=1),
            segments.group_ids,
            tv_by_position=limited.new_zeros(region.horizon).index_add(0, position, limited),
            grades=grades,
            rewarded=rewards is not None,
            assumes=frozenset(d.assumes for d in _used(divergences) if d.assumes),
        )

    def __len__(self) -> int:
        return len(self.columns)

    def column(self, name: str) -> Float[Tensor, " b"]:
        """One of `COLUMNS`."""
        return self.columns[:, COLUMNS.index(name)]

    def merge(self, other: BatchEvidence) -> BatchEvidence:
        """The evidence of both together; certificates do not depend on the order of prompt groups.

        Raises: `MethodError` if the two are about different limits; `ShapeError` if only one has
            groups, or rewards.
        """
        return BatchEvidence.merge_all([self, other])

    @staticmethod
    def merge_all(parts: Iterable[BatchEvidence]) -> BatchEvidence:
        """Merge any number (at least one) of batches."""
        parts = list(parts)
        first = parts[0]
        ids = [] if first.group_ids is None else [p.group_ids for p in parts]
        for part in parts:
            if part.region != first.region:
                raise MethodError(
                    f"batches about {first.region} and {part.region} do not add up; build all "
                    "evidence of a certificate with the same region"
                )
        kinds = {"group_ids": {p.group_ids is None for p in parts}, "rewards": {p.rewarded for p in parts}}
        for name, kind in kinds.items():
            if len(kind) > 1:
                raise ShapeError(f"some batches have {name} and some have none; give all or none")
        return replace(
            first,
            columns=torch.cat([p.columns.to(first.columns.device) for p in parts]),
            group_ids=torch.cat([x.to(first.columns.device) for x in ids if x is not None]) if ids else None,
            tv_by_position=torch.stack([p.tv_by_position.to(first.columns.device) for p in parts]).sum(0),
            grades={k: Grade.weakest(p.grades[k] for p in parts) for k in first.grades},
            assumes=frozenset().union(*(p.assumes for p in parts)),
        )

    def cpu(self) -> BatchEvidence:
        """Return the evidence on the CPU, to be sent to another process."""
        ids = None if self.group_ids is None else self.group_ids.cpu()
        return replace(self, columns=self.columns.cpu(), group_ids=ids, tv_by_position=self.tv_by_position.cpu())

    def to_host(self) -> HostEvidence:
        """All numbers as arrays: the one transfer to the host."""
        parts = [self.columns.flatten(), self.tv_by_position]
        if self.group_ids is not None:  # the same 64 bits: no id is too large for a float
            parts.append(self.group_ids.long().view(torch.float64))
        flat = torch.cat(parts).cpu().numpy()
        b, c = self.columns.shape
        table = flat[: b * c].reshape(b, c)
        return HostEvidence(
            {name: table[:, i] for i, name in enumerate(COLUMNS)},
            None if self.group_ids is None else flat[-b:].view(np.int64),
            flat[b * c : b * c + self.region.horizon],
        )


@dataclass(frozen=True)
class HostEvidence:
    """`BatchEvidence` as numpy arrays."""

    columns: Mapping[str, Float[np.ndarray, " b"]]
    group_ids: Int[np.ndarray, " b"] | None
    tv_by_position: Float[np.ndarray, " horizon"]

    def __getitem__(self, name: str) -> Float[np.ndarray, " b"]:
        return self.columns[name]


Ends = tuple[Tensor, Tensor]


def _divergences(
    kl: Ends, tv: Ends, shift: Tensor, k3: Tensor, region: TrustRegion, segments: Segments, unscored: Tensor | None
) -> dict[str, Float[Tensor, " b"]]:
    inside = kl[1] <= region.delta
    if region.eps is not None:
        inside = inside & (tv[1] <= region.eps)
    violations = segments.position.where(~inside, region.horizon).to(kl[1].dtype)
    first = segments.spread(segments.min(violations))
    accepted = segments.position < first
    prefix_k3 = segments.sum(k3.where(accepted, 0.0))
    prefix = kl[1].double().where(accepted, 0.0)
    if unscored is not None:
        # Whether a token was scored may depend on which one was drawn. Leaving its context out would
        # make the sum too small; its limit is an upper end where it is met, and decided beforehand.
        edge = unscored & (segments.position == first)
        accepted = accepted | edge
        prefix = prefix.masked_fill(edge, region.delta)
    high = {"kl_high": segments.max(kl[1]).double(), "tv_high": segments.max(tv[1]).double()}
    low = {
        "kl_low": high["kl_high"] if kl[0] is kl[1] else segments.max(kl[0]).double(),
        "tv_low": high["tv_high"] if tv[0] is tv[1] else segments.max(tv[0]).double(),
    }
    return {
        **high,
        **low,
        "kl_total": segments.sum(kl[1].double()),
        "kl_sum": segments.sum(kl[1].double().clamp(max=region.delta)),
        "prefix_kl": segments.sum(prefix),
        "prefix_k3": prefix_k3,
        "shift": segments.sum(shift),
        "prefix_shift": segments.sum(shift.where(accepted, 0.0)),
    }


def _ends(
    name: str, divergences: Mapping[str, Divergence] | None, logprobs: LogProbs
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Lower and upper end of every token; NaN is a violation, and unknown above.

    A token that the engine did not score has no evidence, whatever the record of it says: the end of
    a top-k interval rests on the log-prob of the drawn token.
    """
    d, largest = (divergences or {}).get(name), 1.0 if name == TV else torch.inf
    if d is None or not d.may_certify:
        low = torch.zeros_like(logprobs.logp_rollout)
        return low, torch.full_like(low, largest)
    low = d.lo.nan_to_num(nan=largest, posinf=largest).clamp(0.0, largest)
    same = d.lo is d.hi
    high = low if same else d.hi.nan_to_num(nan=largest, posinf=largest).clamp(0.0, largest)
    if logprobs.unscored is None:
        return low, high
    return low.masked_fill(logprobs.unscored, 0.0), high.masked_fill(logprobs.unscored, largest)


@functools.lru_cache(maxsize=4)
def _weights(region: TrustRegion) -> Float[np.ndarray, " t"]:
    return region.weights()


def _used(divergences: Mapping[str, Divergence] | None) -> list[Divergence]:
    return [d for k, d in (divergences or {}).items() if k in (KL, TV) and d.may_certify]
