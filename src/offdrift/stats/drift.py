"""`DriftStats`: everything the metrics need from a batch, as numbers that can be added.

Sums are added, extremes are compared, logs of sums are joined by `logaddexp`, so that any split gives what one pass
gives. A sum of ratios that divides another is kept as its log, whatever its size; only sums that are shown by
themselves have their exponentials limited. Statistics describe the *sampled* tokens, before any gate; what gates and
weights did is counted beside them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from offdrift.correction import Corrected
from offdrift.divergence.evidence import Divergence, Grade
from offdrift.errors import BadValueError
from offdrift.logprobs import LogProbs
from offdrift.numerics import (
    LOG_RATIO_LIMIT,
    NEAR,
    PASS,
    asked,
    blocks,
    clamped,
    concrete,
    largest_of,
    log_sums,
    totals,
    transformed,
    vector_of,
)
from offdrift.ratios import stopped_log_ratio, swept
from offdrift.segments import Segments
from offdrift.stats.alphas import PAIRS, reweighted_tv, tv_bins
from offdrift.stats.digits import NO_DIGITS, Exact, joined, replaced, rounded, rounded_logs, settled
from offdrift.stats.metrics import metric_rows, metrics_html, summarize
from offdrift.texts import as_json

if TYPE_CHECKING:
    from offdrift.compiled.passes import RatioSums

SHARE = 100
"""One in so many tokens is in the tail, and at least one."""


@dataclass
class Tails:
    """Collects k3 of every token of a step, on its device.

    As `{on}/k3` shows it, with l limited at 20: tokens beyond count alike, and outweigh all others.
    """

    k3: dict[str, list[Float[Tensor, " k"]]] = field(default_factory=lambda: defaultdict(list))

    @torch.no_grad()
    def add(self, logprobs: LogProbs) -> None:
        """Note the tokens of a piece that the engine scored."""
        logprobs = logprobs.scored
        for on, second in SECOND.items():
            if (logprobs.logp_old if second == "old" else logprobs.logp) is None:
                continue
            ratio = clamped(stopped_log_ratio(logprobs, on=on))  # type: ignore[arg-type]
            self.k3[on].append(ratio.expm1() - ratio)

    def sums(self, gather: Callable[[object], list]) -> dict[str, Tensor]:
        """Sums for `{on}/k3_top_share`: k3 of the 1 % of tokens with the largest k3, and of all.

        Args:
            gather: one object of every process, in every process.

        Example:
            >>> from offdrift.segments import Segments
            >>> zero = torch.full((200,), -1.0)
            >>> off = zero.clone()
            >>> off[[3, 7]] = -2.0
            >>> tails = Tails()
            >>> tails.add(LogProbs.pack(zero, off, segments=Segments.from_lengths([200])))
            >>> sums = tails.sums(lambda part: [part])
            >>> bool(sums["full/k3_top"] == sums["full/k3_binned"])
            True
        """
        # Some process may have seen nothing, and must take part all the same.
        available = set().union(*gather(list(self.k3)))
        tails = {}
        for on in (name for name in SECOND if name in available):
            k3 = torch.cat(self.k3[on]).double() if on in self.k3 else torch.zeros(0).double()
            worst = -(-sum(gather(len(k3))) // SHARE)
            largest = k3.topk(min(worst, len(k3))).values
            tops, totals = zip(*gather((largest.cpu(), k3.sum().cpu())), strict=True)
            tails[f"{on}/k3_top"] = torch.cat(tops).topk(worst).values.sum()
            tails[f"{on}/k3_binned"] = torch.stack(totals).sum()
        return tails


Named = dict[str, Tensor]

REFUSED = "refused/"
"""Begins the names of counts of values that no policy can produce, which reading the sums refuses."""

SECOND = {"mismatch": "old", "full": "current"}
"""The policy that each ratio compares the rollout policy with."""


@dataclass(frozen=True, repr=False)
class DriftStats:
    """Mergeable sufficient statistics of any number of batches.

    A notebook shows their metrics, and how a divergence goes along responses.

    `sums`, `maxima` and `logs` follow `sum_names`, `max_names` and `log_names`; `logs` are logarithms
    of sums. `by_position` holds, per response position, the summed divergence of each exact or
    interval evidence and the number of tokens.
    """

    sum_names: tuple[str, ...]
    sums: Float[Tensor, " s"]
    max_names: tuple[str, ...]
    maxima: Float[Tensor, " m"]
    log_names: tuple[str, ...]
    logs: Float[Tensor, " l"]
    by_position: Mapping[str, Float[Tensor, " horizon"]]
    grade: str = "sampled"
    """Grade of the divergences summed here; the weakest, if batches differ."""
    exact_sums: Exact = NO_DIGITS
    exact_logs: Exact = NO_DIGITS
    """Digits of sums that compiled passes added up, and of those whose logs are kept: they merge to the same bits."""

    @staticmethod
    def of(
        logprobs: LogProbs,
        corrected: Corrected | None = None,
        *,
        divergences: Mapping[str, Divergence] | None = None,
        clipped: Tensor | None = None,
    ) -> DriftStats:
        """Summarize one batch. No gradient, no host transfer beyond the segments' own.

        Tokens that the engine did not score are counted (`unscored`) and in no other sum.

        Args:
            logprobs: the batch; ratios whose policies are absent are left out.
            corrected: what gates and weight decided.
            divergences: exact or interval divergences of the batch.
            clipped: tokens whose loss a clip changed.

        Example:
            >>> from offdrift.segments import Segments
            >>> lp = LogProbs.pack(torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.9]),
            ...                    segments=Segments.from_lengths([2]))
            >>> DriftStats.of(lp).to_host()["full/n"]
            2.0

        Reference: metrics of verl's rollout correction; log-PPL gap: Li et al.,
        arXiv:2512.23075v5, eq. 25.
        """
        unscored = logprobs.unscored
        if unscored is not None:
            of = logprobs.select_scored
            divergences = {k: d.map(of) for k, d in (divergences or {}).items()}
            corrected = None if corrected is None else corrected.map(of)
            clipped = None if clipped is None else of(clipped)
            logprobs = logprobs.scored
        with torch.no_grad():
            sums: Named = {}
            maxima: Named = {}
            logs: Named = {}
            segments = logprobs.segments
            sums["n"], sums["b"] = segments.cu_seqlens[-1], (segments.lengths > 0).sum()
            has_current, has_old = logprobs.logp is not None, logprobs.logp_old is not None
            available = {"mismatch": has_old, "staleness": has_current and has_old, "full": has_current}
            _ratios([on for on in available if available[on]], logprobs, sums, maxima, logs)
            if available["staleness"]:
                sums["staleness/tv_reweighted"] = _reweighted_tv(logprobs)
            if unscored is not None:
                sums["unscored"] = unscored.count_nonzero()
            if corrected is not None:
                _decisions(logprobs, corrected, sums, maxima, logs)
            if clipped is not None:
                sums["objective/clipped"] = clipped.count_nonzero()
            by_position = _divergences(logprobs, divergences or {}, sums, maxima)
            sums, exact_sums = settled(sums, rounded)
            logs, exact_logs = settled(logs, rounded_logs)
            sums = dict(sorted(sums.items(), key=lambda item: str(item[1].dtype)))  # see `vector_of`
        grades = [str(d.grade) for d in (divergences or {}).values()]
        return DriftStats(
            tuple(sums),
            vector_of(sums.values(), logprobs.logp_rollout),
            tuple(maxima),
            maxima=vector_of(maxima.values(), logprobs.logp_rollout),
            log_names=tuple(logs),
            logs=vector_of(logs.values(), logprobs.logp_rollout),
            by_position=by_position,
            grade=str(Grade.weakest(grades)) if grades else "sampled",
            exact_sums=exact_sums,
            exact_logs=exact_logs,
        )

    def merge(self, other: DriftStats) -> DriftStats:
        """The statistics of both together. Associative and commutative, up to rounding.

        To the last bit for counts, maxima, and what compiled passes summed: `exact_sums`, `exact_logs`.
        """
        sum_names, sums = _joined(self.sum_names, self.sums, other.sum_names, other.sums, torch.add)
        max_names, maxima = _joined(self.max_names, self.maxima, other.max_names, other.maxima, torch.maximum)
        log_names, logs = _joined(self.log_names, self.logs, other.log_names, other.logs, torch.logaddexp)
        positions = dict(self.by_position)
        for name, x in other.by_position.items():
            short, long = sorted((x, positions.get(name, x[:0])), key=len)
            positions[name] = long + torch.cat([short, short.new_zeros(len(long) - len(short))])
        grade = str(Grade.weakest([self.grade, other.grade]))
        exact_sums = self.exact_sums.merge(other.exact_sums, mine=self.sum_names, theirs=other.sum_names)
        exact_logs = self.exact_logs.merge(other.exact_logs, mine=self.log_names, theirs=other.log_names)
        return DriftStats(
            sum_names,
            replaced(sum_names, sums, exact_sums, rounded),
            max_names,
            maxima=maxima,
            log_names=log_names,
            logs=replaced(log_names, logs, exact_logs, rounded_logs),
            by_position=positions,
            grade=grade,
            exact_sums=exact_sums,
            exact_logs=exact_logs,
        )

    @staticmethod
    def merge_all(stats: Iterable[DriftStats]) -> DriftStats:
        """Merge any number (at least one) of statistics."""
        return functools.reduce(DriftStats.merge, stats)

    def plus(
        self, sums: Mapping[str, Tensor | float], maxima: Mapping[str, Tensor | float] | None = None
    ) -> DriftStats:
        """Add sums and maxima, under names of their own.

        A sum whose count is not the batch's brings it along: `x/n` beside `x`.
        """
        largest = maxima or {}
        return replace(
            self,
            sum_names=(*self.sum_names, *sums),
            sums=torch.cat([self.sums, vector_of(sums.values(), self.sums)]),
            max_names=(*self.max_names, *largest),
            maxima=torch.cat([self.maxima, vector_of(largest.values(), self.maxima)]),
        )

    def only(self, *prefixes: str) -> DriftStats:
        """The sums and maxima whose names begin so."""
        sums = [i for i, name in enumerate(self.sum_names) if name.startswith(prefixes)]
        maxima = [i for i, name in enumerate(self.max_names) if name.startswith(prefixes)]
        return replace(
            self,
            sum_names=tuple(self.sum_names[i] for i in sums),
            sums=self.sums[sums],
            max_names=tuple(self.max_names[i] for i in maxima),
            maxima=self.maxima[maxima],
            exact_sums=self.exact_sums.only([self.sum_names[i] for i in sums]),
        )

    def with_sum(self, name: str, value: Shaped[Tensor, ""]) -> DriftStats:
        """Add one sum, under a name of its own."""
        return self.plus({name: value})

    def with_max(self, name: str, value: Shaped[Tensor, ""]) -> DriftStats:
        """Add one maximum, under a name of its own."""
        return self.plus({}, {name: value})

    @property
    def metrics(self) -> dict[str, float]:
        """Every metric that these statistics allow, by name: `summarize`, with one transfer to the host."""
        return summarize(self)

    def to_frame(self) -> Any:
        """The metrics as a frame of pandas or polars, a row for each: value, unit, direction and formula.

        Raises: `OffdriftError` if neither is installed.
        """
        from offdrift.notebook import columns_of, frame

        return frame(columns_of(metric_rows(self.metrics)))

    def to_json(self, indent: int | None = None) -> str:
        """The metrics as JSON, with the `grade` of the evidence; null for what is not known."""
        return as_json({"grade": self.grade, "metrics": self.metrics}, indent)

    def __repr__(self) -> str:
        """Tokens, sequences, and the KL of the first two ratios; of an accelerator, which is not waited for, names."""
        from offdrift.notebook import brief

        if not concrete(self.sums).is_cpu:
            return f"DriftStats: {len(self.sum_names)} sums on {self.sums.device}, {self.grade} evidence"
        sums = dict(zip(self.sum_names, concrete(self.sums).tolist(), strict=True))
        counts = f"{sums.get('n', 0):,.0f} tokens in {sums.get('b', 0):,.0f} sequences"
        pairs = [name.removesuffix("/k3") for name in sums if name.endswith("/k3")]
        sizes = [(on, sums[f"{on}/k3"] / sums[f"{on}/n"]) for on in pairs if sums.get(f"{on}/n")]
        drifts = [f"  {on}: KL {k3:.3g} nat per token (k3)" for on, k3 in sizes]
        return brief(f"DriftStats: {counts}, {self.grade} evidence", *drifts)

    def _repr_html_(self) -> str:
        from offdrift.notebook import box, chart, paragraph, table

        charts = []
        for name in sorted(self.by_position.keys() - {"n"}):
            title, means = f"mean {name} by position", self.by_position[name] / self.by_position["n"].clamp(min=1)
            charts.append((title, chart(means.tolist(), name=title)))
        return box(paragraph(f"{self.grade} evidence", strong="DriftStats"), metrics_html(self.metrics), table(charts))

    def cpu(self) -> DriftStats:
        """Return the statistics on the CPU, to be sent to another process."""
        positions = {name: x.cpu() for name, x in self.by_position.items()}
        vectors = {"sums": self.sums.cpu(), "maxima": self.maxima.cpu(), "logs": self.logs.cpu()}
        return replace(self, **vectors, by_position=positions)

    def to_host(self) -> dict[str, float]:
        """All sums, extremes and logs of sums by name: the one transfer to the host.

        Raises: `BadValueError` if a batch that was not looked at before (`LogProbs.with_current`) held values that are
            no log-probs, or advantages that are not finite.
        """
        values = torch.cat([self.sums, self.maxima, self.logs]).tolist()
        numbers = dict(zip((*self.sum_names, *self.max_names, *self.log_names), values))
        refused = {k.removeprefix(REFUSED): int(x) for k, x in numbers.items() if k.startswith(REFUSED) and x > 0}
        if refused:
            what = ", ".join(f"{name}: {n}" for name, n in refused.items())
            raise BadValueError(
                f"values that are no log-probs (NaN, or above 0) or not finite, by field: {what}. They are in the "
                "gradient: do not take the step, but zero_grad(); LogProbs.pack(..., logp=...) in place of "
                "with_current says which they are"
            )
        return numbers


def _perplexities(nll: Mapping[str, Float[Tensor, " b"]], segments: Segments) -> Named:
    """Sums over sequences of each policy's mean negative log-likelihood, and of its exponential."""
    rows = torch.stack(list(nll.values()))
    ppl = rows.clamp(max=LOG_RATIO_LIMIT).exp().where(segments.lengths > 0, 0.0)
    both = torch.stack([rows, ppl], -1).sum(1)
    return {f"{name}/{kind}": both[i, j] for i, name in enumerate(nll) for j, kind in enumerate(("nll", "ppl"))}


TOKEN_SUMS = ("l", "l_limited", "l2", "abs", "k3", "excess_abs", "w", "w2", "p", "p2", "d", "d2", "pd", "d_abs")
TOKEN_MAXIMA = ("l_max", "-l_min", "d_abs_max")
TOKEN_LOGS = ("log_w", "log_w2")


SEQUENCE_SUMS = ("mean", "mean_abs", "ppl_ratio")
SEQUENCE_MAXIMA = ("mean_max", "-mean_min")
SEQUENCE_LOGS = ("log_product", "log_product2")


def _ratios(names: list[str], logprobs: LogProbs, sums: Named, maxima: Named, logs: Named) -> None:
    """Statistics of the ratios, by token and by sequence, and perplexities of the policies."""
    sweeps = {on: swept(logprobs, on=on) for on in names}  # type: ignore[arg-type]
    complete = {on: sweep for on, sweep in sweeps.items() if sweep is not None}
    if names and len(complete) == len(names):
        _swept_ratios(complete, logprobs.segments, sums, maxima, logs)
        return
    segments = logprobs.segments
    nll = {"rollout": -(segments.total(logprobs.logp_rollout) / segments.lengths.clamp(min=1))}
    means = _plain_ratios(names, logprobs, sums, maxima, logs)
    # mean log second = mean log rollout + mean log-ratio
    nll |= {SECOND[on]: nll["rollout"] - means[on] for on in SECOND if on in means}
    sums.update(_perplexities(nll, segments))


def _swept_ratios(sweeps: Mapping[str, RatioSums], segments: Segments, sums: Named, maxima: Named, logs: Named) -> None:
    """Statistics and perplexities from compiled passes: of sums, and of sums whose logs are kept, the digits."""
    n, b = segments.cu_seqlens[-1], (segments.lengths > 0).sum()
    for on, sweep in sweeps.items():
        sums[f"{on}/n"], sums[f"{on}/b"] = n, b
        added, policies, in_logs = sweep.digits.split([17, 4, 4])
        _name(on, (sums, (*TOKEN_SUMS, *SEQUENCE_SUMS), added), (logs, (*TOKEN_LOGS, *SEQUENCE_LOGS), in_logs))
        _name(on, (maxima, (*TOKEN_MAXIMA, *SEQUENCE_MAXIMA), sweep.maxima))
        if on in SECOND:
            columns = (f"{name}/{kind}" for name in ("rollout", SECOND[on]) for kind in ("nll", "ppl"))
            sums.update(zip(columns, policies.unbind(), strict=True))


def _name(on: str, *columns: tuple[Named, tuple[str, ...], Tensor]) -> None:
    for kind, names, row in columns:
        kind.update({f"{on}/{name}": x for name, x in zip(names, row.unbind(), strict=True)})


def _plain_ratios(names: list[str], logprobs: LogProbs, sums: Named, maxima: Named, logs: Named) -> dict[str, Tensor]:
    """Statistics of the ratios, by token and by sequence; returns each sequence's mean log-ratio.

    An accelerator takes all ratios at once, since it waits for launches more than for data; a CPU one after the other,
    in blocks that fit a core's cache.
    """
    segments = logprobs.segments
    raw = [stopped_log_ratio(logprobs, on=on) for on in names]  # type: ignore[arg-type]
    first = [logprobs.old if on == "staleness" else logprobs.logp_rollout for on in names]
    if not names:
        return {}
    if raw[0].is_cpu:
        tables = [_joined_blocks(*pair) for pair in zip(first, raw, strict=True)]
        added, largest, in_logs = (torch.stack(x) for x in zip(*tables, strict=True))
    else:
        added, largest, in_logs = _token_pass(torch.stack(first), torch.stack(raw))
    total = torch.stack([segments.total(x) for x in raw])  # float32 would round a sum of 10^4 nats by 10^-3
    filled, nothing = segments.lengths > 0, -torch.inf
    mean = total / segments.lengths.clamp(min=1)
    of_sequences = torch.stack([mean, mean.abs(), clamped(-mean).exp().where(filled, 0.0)]).sum(-1)
    ends = torch.stack([mean, -mean]).where(filled, nothing).amax(-1)
    products = log_sums(total.where(filled, nothing))
    n, b = segments.cu_seqlens[-1], filled.sum()
    for i, on in enumerate(names):
        sums[f"{on}/n"], sums[f"{on}/b"] = n, b
        _name(on, (sums, TOKEN_SUMS, added[i]), (maxima, TOKEN_MAXIMA, largest[i]), (logs, TOKEN_LOGS, in_logs[i]))
        _name(
            on,
            (sums, SEQUENCE_SUMS, of_sequences[:, i]),
            (maxima, SEQUENCE_MAXIMA, ends[:, i]),
            (logs, SEQUENCE_LOGS, products[i]),
        )
    return dict(zip(names, mean.unbind(), strict=True))


def _joined_blocks(first: Float[Tensor, " n"], raw: Float[Tensor, " n"]) -> tuple[Tensor, Tensor, Tensor]:
    parts = zip(*(_token_pass(*block) for block in blocks(first, raw, size=PASS)), strict=True)
    added, largest, in_logs = (torch.stack(x) for x in parts)
    return added.sum(0), largest.amax(0), in_logs.logsumexp(0)


def _token_pass(
    first: Float[Tensor, "*ratios k"], raw: Float[Tensor, "*ratios k"]
) -> tuple[Float[Tensor, "*ratios sums"], Float[Tensor, "*ratios maxima"], Float[Tensor, "*ratios logs"]]:
    """`TOKEN_SUMS`, `TOKEN_MAXIMA` and `TOKEN_LOGS` of a block.

    Three exponentials per token; on a host, where asking costs nothing, two if no |l| is beyond `NEAR`.
    """
    on_host = raw.is_cpu and raw.ndim == 1 and len(raw) > 0 and not transformed()
    if on_host:  # both ends in one reading
        low, high = raw.aminmax()
        largest = [high, -low]
    else:
        largest = [largest_of(raw), largest_of(-raw)]
    near = on_host and all(float(x.max()) <= NEAR for x in largest)
    limited = clamped(raw)
    excess = limited.expm1()  # ratio - 1, exact for small log-ratios
    p = first.exp()
    d = p * excess  # second - first, as probabilities; the clamp would hide a token's whole rise
    if not near:
        d = d.where(raw <= LOG_RATIO_LIMIT, (first + raw).exp() - p)
    d_abs = d.abs()
    added = totals(
        raw, limited, (limited, limited), raw.abs(),
        excess - limited, excess.abs(), excess, (excess, excess),
        p, (p, p), d, (d, d), (p, d), d_abs,
    )  # fmt: skip
    # Sums of w = 1 + excess and of w^2, shown by themselves; what is divided comes from log_sums.
    more, more2 = added[..., 6], added[..., 7]
    added[..., 7] = raw.shape[-1] + 2 * more + more2
    added[..., 6] = raw.shape[-1] + more
    in_logs = added[..., 6:8].log() if near else log_sums(raw)
    return added, torch.stack([*largest, largest_of(d_abs)], -1).double(), in_logs


def _decisions(logprobs: LogProbs, corrected: Corrected, sums: Named, maxima: Named, logs: Named) -> None:
    segments, weight = logprobs.segments, corrected.weight
    sums["gate/kept_tokens"] = _marked(corrected.keep)
    if corrected.rejected_by:
        accepted = segments.any(corrected.keep)
    else:
        accepted = segments.lengths > 0
    sums["gate/kept_sequences"] = accepted.sum()
    for i, (gate, rejected) in enumerate(corrected.rejected_by.items()):
        sums[f"gate/{i}/rejected_tokens"] = _marked(rejected)
        kind = (gate.on, getattr(gate, "unit", None), getattr(gate, "statistic", None))
        # What such a gate rejects by is the sum of a mismatch and a staleness term.
        if kind == ("full", "seq_mean", "ratio") and logprobs.logp_old is not None:
            gone = segments.any(rejected)
            sums[f"gate/{i}/rejected_sequences"] = gone.sum()
            for on in ("mismatch", "staleness"):
                mean = -segments.mean(stopped_log_ratio(logprobs, on=on))
                sums[f"gate/{i}/rejected_{on}"] = _summed(mean.where(gone, 0.0))
    sums["weight/w"], sums["weight/w2"], changed, largest = _joined_weight_passes(weight, segments)
    # Of a single weight the extremes are these; an accelerator is not asked for them.
    extremes = (
        (-float(largest[1]), float(largest[0]))
        if len(corrected.weighted) == 1 and weight.is_cpu and not transformed()
        else None
    )
    if any(w.guarded(extremes) for w in corrected.weighted):
        logs["weight/log_w"], logs["weight/log_w2"] = _guarded_sums(corrected, segments)
    else:
        for name in ("w", "w2"):
            added = sums[f"weight/{name}"]
            logs[f"weight/log_{name}"] = added if added.ndim else added.log()  # digits
    sums["weight/limited"] = _marked(corrected.limited)
    sums["weight/changed"] = changed.long()
    maxima["weight/w_max"], maxima["weight/-w_min"] = largest.unbind()


def _reweighted_tv(logprobs: LogProbs) -> Tensor:
    mismatch, staleness = (stopped_log_ratio(logprobs, on=on) for on in ("mismatch", "staleness"))
    if asked():
        from offdrift.compiled.passes import reweighted_tv as digits_of_tv

        if (row := digits_of_tv(mismatch, staleness, logprobs.segments.cu_seqlens)) is not None:
            return row
    return reweighted_tv(mismatch, staleness)


def _summed(x: Float[Tensor, " n"], segments: Segments | None = None) -> Tensor:
    """A sum of numbers of sequences, or of tokens of these segments; its digits by compiled passes."""
    if asked():
        from offdrift.compiled.passes import digits

        if (row := digits(x if segments is None else segments.total(x))) is not None:
            return row
    return x.sum()


def _guarded_sums(corrected: Corrected, segments: Segments) -> Tensor:
    """Logs of the sums of weights and of their squares, without the guard of `exp`; by compiled passes their digits.

    There only tokens that the guard touched are taken by their logs, so that a weight counts alike in every batch.
    """
    log_weight = corrected.log_weight()
    if asked():
        from offdrift.compiled.passes import digits_of_exp, weight_sums

        beyond = functools.reduce(torch.logical_or, (w.beyond() for w in corrected.weighted))
        within = weight_sums(corrected.weight.where(~beyond, 0.0), segments.cu_seqlens)
        outside = digits_of_exp(log_weight[beyond])
        if within is not None and outside is not None:
            return joined(within[0], outside)
    return log_sums(log_weight)


def _marked(x: Bool[Tensor, " n"]) -> Int[Tensor, ""]:
    """Number of marked tokens. A sum of bools would first copy them to int64; numpy counts faster than torch."""
    if x.is_cpu and not transformed():
        return torch.tensor(np.count_nonzero(x.numpy()))
    return x.count_nonzero()


def _joined_weight_passes(weight: Float[Tensor, " n"], segments: Segments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of w and w^2 (of compiled passes their digits) and of w other than 1; the maxima of w and of -w."""
    if asked():
        from offdrift.compiled.passes import weight_sums

        if (sums := weight_sums(weight, segments.cu_seqlens)) is not None:
            (w, w2), changed, largest = sums
            return w, w2, changed, largest
    parts = zip(*(_weight_pass(block) for (block,) in blocks(weight)), strict=True)
    added, largest = (torch.stack(x) for x in parts)
    w, w2, changed = added.sum(0).unbind()
    return w, w2, changed, largest.amax(0)


def _weight_pass(weight: Float[Tensor, " k"]) -> tuple[Float[Tensor, " sums"], Float[Tensor, " maxima"]]:
    """Sums of w, w^2 and of w other than 1, and the maxima of w and of -w, of a block."""
    exact = weight.double()  # float32 would lose the spread of weights that are all near 1
    added = torch.stack([exact.sum(), torch.dot(exact, exact), (weight != 1).count_nonzero().double()])
    if not len(weight):
        return added, torch.full_like(added[:2], -torch.inf)
    return added, torch.stack([weight.amax(), -weight.amin()]).double()


def _divergences(
    logprobs: LogProbs, divergences: Mapping[str, Divergence], sums: Named, maxima: Named
) -> dict[str, Tensor]:
    """Totals, extremes and per-position sums of divergences (their lower ends, if intervals)."""
    if not divergences:
        return {}
    position = logprobs.segments.position
    horizon = logprobs.segments.longest

    def at_position(x: Tensor) -> Tensor:
        return torch.zeros(horizon, dtype=torch.float64, device=x.device).index_add(0, position, x.double())

    by_position = {"n": at_position(torch.ones_like(logprobs.logp_rollout))}
    for name, d in divergences.items():
        sums[f"divergence/{name}"] = _summed(d.lo, logprobs.segments)
        maxima[f"divergence/{name}_max"] = largest_of(d.lo)
        if name in PAIRS:
            sums.update(tv_bins(name, d.lo))
            if d.grade in (Grade.INTERVAL, Grade.CAPPED):
                maxima[f"divergence/{name}_max_high"] = largest_of(d.hi)
        by_position[name] = at_position(d.lo)
    return by_position


def _joined(names_a, a, names_b, b, combine):
    """Combine two named vectors; a name that only one has is taken from it."""
    if names_a == names_b:
        return names_a, combine(a, b)
    left, right = dict(zip(names_a, a)), dict(zip(names_b, b))
    merged = {**left, **right}
    merged.update({k: combine(left[k], right[k]) for k in left.keys() & right.keys()})
    return tuple(merged), torch.stack(list(merged.values()))
