"""`Tally`: everything that an audit counts in a log, as numbers that can be added.

A batch becomes a tally in one pass, by one thread, in blocks whose bounds depend on the batch alone; so tallies that
are merged in the order of the pieces of a log are the same to the last bit whoever computed them.

`Worst` is the part of it that is not a number: the sequences and tokens that drifted most, with what is needed to look
at them. A sequence ranks by its sum of e^l - 1 - l, an estimate in nats of how far the two policies are apart on the
whole of it; a token by |l|. Ties go to the earlier place in the log, so that parts may be merged in any order.
"""

from __future__ import annotations

import functools
import heapq
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt64
from torch import Tensor

from offdrift.audit.counterfactual import mixed
from offdrift.audit.facets import OTHERS, Facets, by_step, chunks, joined, name_of, runs
from offdrift.audit.shape_table import shape_table
from offdrift.audit.shapes import Shapes, rank_of
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.numerics import at_least_float32, clamped, one_thread
from offdrift.ratios import stopped_log_ratio
from offdrift.records.batch import ROW_BITS, Files, Logged, origin
from offdrift.records.schema import HELD, OLD_STATUS, PADDING, POLICIES
from offdrift.stats import DriftStats, Histogram, signature, summarize
from offdrift.stats.histogram import LENGTH, LOG_RATIO, REWARD
from offdrift.stats.signature import PerSequence

SEQUENCES, TOKENS = 20, 50
WINDOW = 600
"""Tokens of a sequence that are shown, around its worst one."""
PROMPT_CHARACTERS, COMPLETION_CHARACTERS, CONTEXT_CHARACTERS = 2000, 6000, 160
"""How much text is kept."""

Entry = dict[str, Any]


@dataclass(frozen=True)
class Worst:
    """The worst sequences and tokens, worst first, as plain data."""

    sequences: tuple[Entry, ...] = ()
    tokens: tuple[Entry, ...] = ()

    @staticmethod
    def of(batch: Logged, on: str, per_sequence: PerSequence, *, file: Files) -> Worst:
        """The worst of one batch of a file, by the ratio `on` ("mismatch" or "full") and its sums by sequence."""
        score = (per_sequence.excess - per_sequence.total).where(per_sequence.lengths > 0, -torch.inf)
        largest = _largest(score, SEQUENCES).tolist()
        sequences = (_sequence(batch, on, i, float(score[i]), file) for i in largest)
        return Worst(_best(sequences, "k3_sum", SEQUENCES), _worst_tokens(batch, on, per_sequence, file))

    def merge(self, other: Worst) -> Worst:
        """The worst of both."""
        return Worst(
            _best((*self.sequences, *other.sequences), "k3_sum", SEQUENCES),
            _best((*self.tokens, *other.tokens), "abs_log_ratio", TOKENS),
        )

    def as_dict(self) -> dict[str, list[Entry]]:
        """Return the worst sequences and tokens as plain data."""
        return {"sequences": list(self.sequences), "tokens": list(self.tokens)}


def _best(entries: Iterable[Entry], score: str, keep: int) -> tuple[Entry, ...]:
    def place(e: Entry) -> tuple[Any, ...]:
        return (-e[score], e["file"], e["row"], e.get("position", 0))

    return tuple(heapq.nsmallest(keep, entries, key=place))


def _largest(x: Float[Tensor, " n"], keep: int) -> Int[Tensor, " k"]:
    """Places of the largest positive values: all that beat the last one, and its first equals."""
    if not len(x):
        return x.new_zeros(0, dtype=torch.int64)
    least = x.topk(min(keep, len(x))).values[-1].clamp(min=torch.finfo(x.dtype).tiny)
    places = (x >= least).nonzero().squeeze(-1)
    return places[torch.sort(x[places], descending=True, stable=True).indices[:keep]]


def _log_ratio(batch: Logged, on: str, at: slice | Tensor) -> Float[Tensor, " k"]:
    second = batch.logp_old if on == "mismatch" else batch.logp
    assert second is not None
    assert batch.logp_rollout is not None
    return at_least_float32(second[at]) - at_least_float32(batch.logp_rollout[at])


def _worst_tokens(batch: Logged, on: str, per_sequence: PerSequence, file: Files) -> tuple[Entry, ...]:
    """The worst tokens: the k-th largest |l| is at least the k-th largest of the sequences' own maxima."""
    assert batch.logp_rollout is not None
    worst = per_sequence.worst
    least = worst.topk(min(TOKENS, len(worst))).values[-1]
    rows = batch.segments.rows((worst >= least).nonzero().squeeze(-1))
    log_ratios = _log_ratio(batch, on, rows)
    largest = _largest(log_ratios.abs(), TOKENS)
    rows, log_ratios = rows[largest], log_ratios[largest]
    of = torch.searchsorted(batch.cu_seqlens, rows, right=True) - 1
    starts, ends = batch.cu_seqlens[of], batch.cu_seqlens[of + 1]
    positions = rows - starts if batch.position is None else batch.position[rows]
    share = (positions.double() + 0.5) / torch.maximum(batch.response_lengths[of], positions + 1)
    if batch.length_unit != "token":
        share = ((rows - starts).double() + 0.5) / (ends - starts)
    columns = {
        "position": positions.tolist(),
        "token": [None] * len(rows) if batch.tokens is None else batch.tokens[rows].tolist(),
        "log_ratio": log_ratios.tolist(),
        "abs_log_ratio": log_ratios.abs().tolist(),
        "logp_rollout": batch.logp_rollout[rows].tolist(),
    }
    values_of = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    places = {i: _place(batch, i, file) for i in of.unique().tolist()}
    entries = [
        {
            **places[i],
            **values,
            "context": _excerpt(batch.completions, i, at, CONTEXT_CHARACTERS),
            "context_is": "near",  # located by the token's share of the response: a log has no tokenizer
        }
        for i, at, values in zip(of.tolist(), share.tolist(), values_of, strict=True)
    ]
    return _best(entries, "abs_log_ratio", TOKENS)


def _sequence(batch: Logged, on: str, i: int, score: float, file: Files) -> Entry:
    start, end = batch.cu_seqlens[i : i + 2].tolist()
    l = _log_ratio(batch, on, slice(start, end))  # noqa: E741
    worst = int(l.abs().argmax())
    first = max(0, min(worst - WINDOW // 2, len(l) - WINDOW))
    shown = slice(start + first, min(start + first + WINDOW, end))
    assert batch.logp_rollout is not None
    kl = batch.divergences.get("kl_rollout_old" if on == "mismatch" else "kl_rollout_current")
    share = (worst + 0.5) / len(l)
    return {
        **_place(batch, i, file),
        "reward": None if batch.rewards is None or not batch.rewards[i].isfinite() else float(batch.rewards[i]),
        "advantage": None if batch.advantages is None else float(batch.advantages[start:end].double().mean()),
        "length": int(batch.response_lengths[i]),
        "on": on,
        "max_abs_log_ratio": float(l[worst].abs()),
        "k3_mean": score / len(l),
        "k3_sum": score,
        "prompt": _excerpt(batch.prompts, i, 1.0, PROMPT_CHARACTERS),
        "completion": _excerpt(batch.completions, i, share, COMPLETION_CHARACTERS),
        "tokens": None if batch.tokens is None else batch.tokens[shown].tolist(),
        "first": first,
        "turns": _turn_starts(batch, start, end),
        "log_ratio": l[first : first + WINDOW].tolist(),
        "logp_rollout": batch.logp_rollout[shown].tolist(),
        "kl": None if kl is None else kl[shown].tolist(),
    }


def _turn_starts(batch: Logged, start: int, end: int) -> list[int] | None:
    """The first token of every turn of a response, counted from the response's own first one."""
    if batch.turn_ids is None:
        return None
    ids = batch.turn_ids[start:end]
    return [0, *(1 + (ids[1:] != ids[:-1]).nonzero()[:, 0]).tolist()]


def _place(batch: Logged, i: int, file: Files) -> Entry:
    worker = {} if batch.workers is None else {"worker": name_of("worker", batch.workers[i])}
    name, row = origin(file, int(batch.row[i]))
    return {"step": int(batch.step[i]), "file": name, "row": row, **worker}


def _excerpt(texts: tuple[str, ...] | None, i: int, share: float, width: int) -> str | None:
    """So many characters around a share of the text; an ellipsis where something was left out."""
    if texts is None:
        return None
    text = texts[i]
    first = max(0, min(int(share * len(text)) - width // 2, len(text) - width))
    left, right = "…" if first else "", "…" if first + width < len(text) else ""
    return f"{left}{text[first : first + width]}{right}"


SAME_ADVANTAGE = 2e-3
"""Share of their span by which two equal advantages may differ: rounding, and what keeps deviations off 0."""
MAX_POINTS = 2000
MAX_STEPS_SEEN = 2**20
"""Distinct step numbers that are remembered, to count and to name them."""
GROUPS_SEEN = 2**20
"""Distinct groups that are remembered, those with the smallest hashes; of more, their number is estimated, to .1 %."""


@dataclass(frozen=True)
class StepTally:
    """Statistics and histograms of one step."""

    stats: DriftStats
    histograms: Mapping[str, Histogram]
    """By name: "mismatch/log_ratio", "reward", "response_length", ..."""

    @staticmethod
    def of(batch: Logged, per_sequence: Mapping[str, PerSequence]) -> StepTally:
        """Summarize the sequences of one step, given the sums of each sequence by ratio."""
        logprobs = None  # what ratios can be made of
        if batch.num_tokens and batch.logp_rollout is not None:
            logprobs = batch.logprobs()
        elif batch.num_tokens and batch.pairs:
            logprobs = batch.trained()
        histograms = {"response_length": Histogram.of(batch.response_lengths.double(), LENGTH)}
        if batch.rewards is not None:
            histograms["reward"] = Histogram.of(batch.rewards[batch.rewards.isfinite()], REWARD)
        stats = _scored(batch, logprobs, per_sequence)
        for on in () if logprobs is None else (on for on in logprobs.detached_log_ratios if on in batch.pairs):
            raw = stopped_log_ratio(logprobs, on=on)  # type: ignore[arg-type]
            histograms[f"{on}/log_ratio"] = Histogram.of(raw, LOG_RATIO)
        sums, maxima = _facts(batch)
        return StepTally(stats.plus(sums, maxima), histograms)

    def merge(self, other: StepTally) -> StepTally:
        """Merge statistics and histograms of two parts."""
        return StepTally(self.stats.merge(other.stats), joined(Histogram.merge, self.histograms, other.histograms))

    def metrics(self) -> dict[str, float]:
        """Every metric of the table that was logged."""
        sums = {}
        for name, h in self.histograms.items():
            if name.endswith("/log_ratio") and h.n:
                on = name.removesuffix("/log_ratio")
                sums[f"{on}/k3_top"], sums[f"{on}/k3_binned"] = h.k3_top()
        return summarize(self.stats.plus(sums))

    def counted(self, name: str) -> int:
        """One of the counts: "sequences", or "n", the scored tokens."""
        return int(self.stats.sums[self.stats.sum_names.index(name)])

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Quantiles of each histogram."""
        return {name: h.quantiles() for name, h in self.histograms.items() if h.n}


def _scored(batch: Logged, logprobs: LogProbs | None, per_sequence: Mapping[str, PerSequence]) -> DriftStats:
    """Compute drift statistics of the scored tokens. Divergences by position are left to the facets."""
    if logprobs is None:
        nothing, grade = (torch.zeros(2, dtype=torch.float64), "exact" if batch.divergences else "sampled")
        return DriftStats(("n", "b"), nothing, (), nothing[:0], (), nothing[:0], {}, grade)
    exact = {k: Divergence.exact(k, x) for k, x in batch.divergences.items()}  # type: ignore[arg-type]
    stats = replace(DriftStats.of(logprobs, divergences=exact), by_position={})
    shape = signature(logprobs, advantages=batch.advantages, position=batch.position, per_sequence=dict(per_sequence))
    counts = {f"divergence/{name}/n": float(batch.num_tokens) for name in exact}
    stats = stats.plus(shape | counts)
    return stats if batch.logp_rollout is not None else stats.only("n", "b", "staleness/", "diverg")


def _facts(batch: Logged) -> tuple[dict[str, Tensor | float], dict[str, Tensor | float]]:
    """Rewards, lengths, lags and entropy, each with its own count: a log may lack any of them."""
    b, n, length = batch.num_sequences, batch.num_tokens, batch.response_lengths
    sums: dict[str, Tensor | float] = {"sequences": float(b), "length": length.sum(), "length/n": float(b)}
    maxima: dict[str, Tensor | float] = {"length_max": length.max()} if b else {}
    if batch.trainable is not None:
        sums["unscored"] = float(batch.trainable.sum()) - n
    if batch.rewards is not None:
        finite = batch.rewards.isfinite()
        sums |= {"reward": batch.rewards.double().where(finite, 0.0).sum(), "reward/n": finite.sum()}
        maxima |= _ends("reward", batch.rewards[finite])
    if batch.temperatures is not None:
        maxima |= _ends("temperature", batch.temperatures[batch.temperatures.isfinite()])
    if batch.mix_alpha is not None:
        stated = batch.mix_alpha.isfinite()
        alpha = batch.mix_alpha.double().where(stated, 0.0).sum()
        sums |= {"fusion/alpha": alpha, "fusion/responses": stated.sum()}
    if batch.truncated is not None:
        sums |= {"truncated": batch.truncated.count_nonzero(), "truncated/n": float(b)}
    if not n:
        return sums, maxima
    token_sums, token_maxima = _token_facts(batch)
    return sums | token_sums | _advantages(batch), maxima | token_maxima


def _ends(name: str, values: Tensor) -> dict[str, Tensor | float]:
    """The largest value and the smallest, as maxima; nothing of none."""
    return {f"{name}_max": values.max(), f"-{name}_min": -values.min()} if len(values) else {}


def _advantages(batch: Logged) -> dict[str, Tensor | float]:
    """Rewards beside mean advantages of responses, where a log has both."""
    if batch.rewards is None or batch.advantages is None:
        return {}
    rewards, lengths = batch.rewards.double(), batch.segments.lengths
    advantages = batch.segments.total(batch.advantages) / lengths.clamp(min=1)
    both = rewards.isfinite() & advantages.isfinite() & (lengths > 0)
    r, a = rewards.where(both, 0.0), advantages.where(both, 0.0)
    sums = {"n": both.sum(), "reward": r.sum(), "reward2": r.square().sum(), "mean": a.sum(), "mean2": a.square().sum()}
    sums |= {"product": (r * a).sum()} | placed_advantages(
        r[both], a[both], None if (g := batch.group_ids) is None else g[both]
    )
    return {f"advantage/{name}": value for name, value in sums.items()}


def placed_advantages(
    rewards: Float[Tensor, " b"], advantages: Float[Tensor, " b"], groups: Int[Tensor, " b"] | None
) -> dict[str, float]:
    """Advantages of one step that are, in some order, those of its rewards, and how many stand at another response.

    Rewards, less the mean of their group, and that over the group's deviation, each up to scale and offset: where one
    of them has the same sorted values as the advantages, whose each advantage is is known.
    """
    r, a = rewards.numpy(), advantages.numpy()
    nothing = {"varied_steps": 0.0, "same_steps": 0.0, "same": 0.0, "misplaced": 0.0}
    if len(r) < 2 or np.ptp(r) == 0 or np.ptp(a) == 0:
        return nothing
    from_rewards = [r]
    if groups is not None:
        _, of = np.unique(groups.numpy(), return_inverse=True)
        siblings = np.bincount(of)
        centered = r - (np.bincount(of, r) / siblings)[of]
        deviation = np.sqrt(np.bincount(of, centered**2) / siblings)[of]
        scaled = np.divide(centered, deviation, out=np.zeros_like(r), where=deviation > 0)
        from_rewards += [centered, scaled]
    misplaced = [n for x in from_rewards if (n := _misplaced(x, a)) is not None]
    same = {"same_steps": 1.0, "same": float(len(a)), "misplaced": float(min(misplaced))} if misplaced else {}
    return nothing | {"varied_steps": 1.0, **same}


def _misplaced(x: Float[np.ndarray, " b"], a: Float[np.ndarray, " b"]) -> int | None:
    """Count the values of `a` away from a rising line that takes sorted `x` to sorted `a`; None without such a line."""
    ordered, goal, span = np.sort(x), np.sort(a), np.ptp(a)
    if np.ptp(x) == 0:
        return None
    fit = (x - ordered[0]) / np.ptp(x) * span + goal[0]
    if np.abs(np.sort(fit) - goal).max() > SAME_ADVANTAGE * span:
        return None
    return int((np.abs(fit - a) > 2 * SAME_ADVANTAGE * span).sum())


def _token_facts(batch: Logged) -> tuple[dict[str, Tensor | float], dict[str, Tensor | float]]:
    """Old log-probs, lags, reuse, mixed versions, turns and entropy of a batch that has tokens."""
    n = float(batch.num_tokens)
    sums: dict[str, Tensor | float] = {}
    maxima: dict[str, Tensor | float] = {}
    if batch.old_status is not None:
        status, lengths = batch.old_status, batch.segments.lengths.double()
        stated = (status >= 0) & (status < len(OLD_STATUS))  # a log may say anything
        for code, name in enumerate(OLD_STATUS):
            sums[f"old/{name}"] = lengths.where(status == code, 0.0).sum()
            sums[f"old/{name}/n"] = lengths.where(stated, 0.0).sum()
    if batch.lag is not None and batch.version is not None:
        sums |= {"version_lag": batch.lag.sum(), "version_lag/n": n}
        maxima["version_lag_max"] = batch.lag.max()
        maxima["-version_lag_min"] = -batch.lag.min()
    if batch.version is not None:
        maxima |= {"version_max": batch.version.max(), "-version_min": -batch.version.min()}
    if batch.updates_before is not None:
        before = batch.updates_before.double() * batch.segments.lengths
        sums |= {"updates_before": before.sum(), "updates_before/n": n}
    if batch.logp_last is not None and batch.logp is not None:
        moved = clamped(at_least_float32(batch.logp_last) - at_least_float32(batch.logp)).double()
        sums |= {"reuse/k3": (moved.expm1() - moved).sum(), "reuse/k3/n": n}
    if batch.rollout_version is not None:
        drawn_by, filled = batch.rollout_version.double(), batch.segments.lengths > 0
        maxima["rollout_version_max"] = drawn_by.max()
        several = batch.segments.max(drawn_by, empty=0.0) > batch.segments.min(drawn_by, empty=0.0)
        if batch.newest_version is not None:
            several |= batch.newest_version > batch.segments.min(drawn_by, empty=0.0)
        sums |= {"mixed": several.count_nonzero(), "mixed/n": filled.count_nonzero()}
    if (turns := batch.segments.turns) is not None:
        sums |= {"turns": float(len(turns)), "turns/n": batch.segments.lengths.count_nonzero()}
    if batch.advantages is not None:
        advantages = batch.advantages
        if not all(bool(x.isfinite()) for x in advantages.aminmax()):  # one that is not finite is at an end
            advantages = advantages[advantages.isfinite()]
        sums["advantage/tokens"] = float(len(advantages))
        maxima |= _ends("advantage", advantages)
    if batch.entropy is not None:
        sums |= {"current/entropy": batch.entropy.double().sum(), "current/entropy/n": n}
        if (scored := batch.logp if batch.logp is not None else batch.logp_old) is not None:
            sums |= entropy_sums(batch.entropy.double(), scored.double())
    return sums, maxima


def entropy_sums(entropy: Float[Tensor, " n"], logp: Float[Tensor, " n"]) -> dict[str, Tensor]:
    """Entropies beside log-probs: their sum is 0 on average for tokens that are drawn from the policy of both."""
    finite = entropy.isfinite() & logp.isfinite()
    h, l = entropy.where(finite, 0.0), logp.where(finite, 0.0)  # noqa: E741
    sums = {"n": finite.sum(), "over": (h + l).sum(), "square": (h + l).square().sum()}
    return {f"surprise/{x}": s for x, s in {**sums, "h": h.sum(), "h2": h.square().sum(), "hl": (h * l).sum()}.items()}


@dataclass(frozen=True)
class Timeline:
    """Points by their number on the grid."""

    width: int = 1
    points: Mapping[int, StepTally] = field(default_factory=dict)
    steps: Int[np.ndarray, " steps"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The distinct step numbers, ascending; at most `MAX_STEPS_SEEN`."""

    def merge(self, other: Timeline) -> Timeline:
        """Merge two timelines on the coarser of their grids; on a coarser one yet if that has too many points."""
        width = max(self.width, other.width)
        points = joined(StepTally.merge, self.widened(width).points, other.widened(width).points)
        steps = np.union1d(self.steps, other.steps)[:MAX_STEPS_SEEN]
        merged = Timeline(width, points, steps)
        return merged.widened(width * width_for(np.fromiter(points, np.int64)))

    def widened(self, width: int) -> Timeline:
        """Return the timeline on a grid of `width` steps per point, a multiple of the present width."""
        if width == self.width:
            return self
        points: dict[int, StepTally] = {}
        for key in sorted(self.points):
            wide = key * self.width // width
            points[wide] = points[wide].merge(self.points[key]) if wide in points else self.points[key]
        return Timeline(width, points, self.steps)

    def whole(self) -> StepTally:
        """Everything, added up in the order of steps."""
        return functools.reduce(StepTally.merge, (self.points[key] for key in sorted(self.points)))

    def rows(self) -> list[dict[str, Any]]:
        """One row for each point, in order: the first step in it, counts, metrics and quantiles."""
        table = []
        for key, point in sorted(self.points.items()):
            at = np.searchsorted(self.steps, key * self.width)
            step = int(self.steps[at]) if at < len(self.steps) else key * self.width
            counts = {"sequences": point.counted("sequences"), "tokens": point.counted("n")}
            table.append({"step": step, **counts, **point.metrics(), "quantiles": point.quantiles()})
        return table


def width_for(steps: Int[np.ndarray, " s"]) -> int:
    """The smallest power of two that leaves at most `MAX_POINTS` distinct values of step // width.

    Example:
        >>> width_for(np.arange(2000)), width_for(np.arange(1, 2001)), width_for(np.arange(1, 2002))
        (1, 1, 2)
    """
    width = 1
    while len(np.unique(steps // width)) > MAX_POINTS:
        width *= 2
    return width


def groups_of(batches: Sequence[Logged]) -> UInt64[np.ndarray, " g"]:
    """Hashes of the ids of the groups of some batches."""
    ids = [mixed(b.group_ids.unique().numpy().astype(np.uint64)) for b in batches if b.group_ids is not None]
    return fewer_groups(np.concatenate([np.zeros(0, np.uint64), *ids]))


def fewer_groups(hashes: UInt64[np.ndarray, " g"]) -> UInt64[np.ndarray, " g"]:
    """Return the hashes, or the smallest where there are many: the same in whatever order parts are merged."""
    return hashes if len(hashes) < 2 * GROUPS_SEEN else np.unique(hashes)[:GROUPS_SEEN]


def count_of_groups(hashes: UInt64[np.ndarray, " g"]) -> int:
    """Number of distinct prompt groups: exact if few, else estimated from the k-th smallest hash.

        (k - 1) 2^64 / h_k,   k = GROUPS_SEEN

    Reference: Bar-Yossef et al., Counting Distinct Elements in a Data Stream, 2002.
    """
    distinct = np.unique(hashes)
    if len(distinct) < GROUPS_SEEN:
        return len(distinct)
    return round((GROUPS_SEEN - 1) * 2.0**64 / float(distinct[GROUPS_SEEN - 1]))


PRINTED = 256
"""Tokens from the beginning of a response that its print is of."""
SURPRISE = 40.0
"""Nats that these have to be worth, so that no second draw gives them: at most once in 10^17."""
TOGETHER = np.uint64(0x2545F4914F6CDD1D)
"""An odd number: numbers of one token are joined by its powers."""
PRINTS_KEPT = 2**16
"""Prints that are remembered, those with the smallest numbers: of a larger log, a sample of its responses."""


@dataclass(frozen=True)
class Repeats:
    """Prints of responses: hashes of their first log-probs under every policy, by which a second copy is recognized.

    Equal are responses of one length whose log-probs are the same to the last bit and whose age is the same, so that
    neither a batch that is trained on for several epochs nor one from a replay buffer counts, if its log shows it.
    """

    responses: Int[np.ndarray, "5 k"] = field(default_factory=lambda: np.zeros((5, 0), np.int64))
    """Print, step, file, row and group of each response."""
    below: int = 2**63 - 1
    """Prints from here on are forgotten."""

    @staticmethod
    def of(batch: Logged, file: Files = "") -> Repeats:
        """The prints of a batch."""
        policies = [x for name in POLICIES if (x := getattr(batch, name)) is not None]
        if not policies or not batch.num_tokens:
            return Repeats()
        filled = (lengths := batch.cu_seqlens.diff()) > 0
        starts = batch.cu_seqlens[:-1][filled].numpy()
        # Places of the tokens that are printed, made of the responses: most tokens of long ones are not looked at.
        printed = np.minimum(lengths[filled].numpy(), PRINTED).astype(np.int64)
        begins = np.cumsum(printed) - printed
        place = np.arange(printed.sum()) - np.repeat(begins, printed)
        some = np.repeat(starts, printed) + place
        first, *others = (at_least_float32(x).float().numpy().take(some) for x in policies)
        terms = first.view(np.uint32).astype(np.uint64)
        for x in others:
            terms = terms * TOGETHER + x.view(np.uint32)
        if batch.tokens is not None:
            terms = terms * TOGETHER + batch.tokens.numpy().take(some).astype(np.uint64)
        of_place = mixed(np.arange(PRINTED, dtype=np.uint64)) | np.uint64(1)
        terms = (terms ^ terms >> np.uint64(31)) * of_place.take(place)
        prints = np.add.reduceat(terms, begins)
        rare = np.add.reduceat(first, begins) < -SURPRISE
        age = None if batch.lag is None else batch.lag[starts]
        for x in (lengths[filled], None if batch.updates_before is None else batch.updates_before[filled], age):
            prints = prints if x is None else mixed(prints ^ x.numpy().astype(np.uint64))
        names = file if isinstance(file, tuple) else (file,)
        files = np.array([zlib.crc32(name.encode()) for name in names])[(batch.row[filled] >> ROW_BITS).numpy()]
        rows = batch.row[filled] & (1 << ROW_BITS) - 1
        groups = torch.full_like(rows, -1) if batch.group_ids is None else batch.group_ids[filled]
        table = np.stack([(prints >> np.uint64(1)).astype(np.int64), batch.step[filled], files, rows, groups])
        return Repeats(table[:, rare]).merge(Repeats())

    def merge(self, other: Repeats) -> Repeats:
        """Prints of both, or the smallest where there are many: the same in whatever order parts are merged."""
        below, table = min(self.below, other.below), np.concatenate([self.responses, other.responses], 1)
        table = table[:, table[0] < below]
        if table.shape[1] > PRINTS_KEPT:
            below = max(int(np.partition(table[0], PRINTS_KEPT)[PRINTS_KEPT]), 1)
            table = table[:, table[0] < below]
        return Repeats(table, below)

    def copies(self) -> dict[str, Any]:
        """Responses that stand in the log again, as counts and places.

        known     responses that were compared
        again     of these, those beyond the first of each; without what a greedy engine gives
        evenly    how often each response of the log is there, if nearly all are there equally often; else 0
        steps     steps of which responses stand again
        files     checksums of the names of files in which they stand
        first     step, checksum of the file, and row of one response, and of its copy
        """
        table = self.responses[:, np.lexsort(self.responses[::-1])]
        nothing = {"known": table.shape[1], "again": 0, "evenly": 0, "steps": [], "files": [], "first": []}
        copy = np.concatenate([[False], table[0, 1:] == table[0, :-1]])[: table.shape[1]]
        if not copy.any():
            return nothing
        counts = np.unique(table[0], return_counts=True)[1]
        sizes, often = np.unique(counts, return_counts=True)
        evenly = int(sizes[often.argmax()]) if often.max() >= MOST_EVENLY * len(counts) else 1
        if evenly == 1:
            copy &= ~self._one_answer(table)
        if not copy.any():
            return nothing
        of_copy, one = np.isin(table[0], table[0, copy]), int(copy.argmax())
        return nothing | {
            "again": int(copy.sum()),
            "evenly": evenly if evenly > 1 else 0,
            "steps": np.unique(table[1, of_copy]).tolist(),
            "files": np.unique(table[2, of_copy]).tolist(),
            "first": [table[1:4, one - 1].tolist(), table[1:4, one].tolist()],
        }

    @staticmethod
    def _one_answer(table: Int[np.ndarray, "5 k"]) -> np.ndarray:
        """Responses beside an equal one to the same prompt at the same step, where all of its answers are equal and
        most prompts have several: a greedy engine gives them."""
        _, of, sizes = np.unique(table[[1, 4]], axis=1, return_inverse=True, return_counts=True)
        of = of.reshape(-1)
        answers = np.bincount(np.unique(np.stack([of, table[0]]), axis=1)[0], minlength=len(sizes))
        beside = np.concatenate([[False], (table[[0, 1, 4], 1:] == table[[0, 1, 4], :-1]).all(0)])
        return beside & (answers[of] == 1) & (table[4] != -1) & (np.median(sizes) > 1)


MOST_EVENLY = 0.9
"""Share of the responses that stand in a log equally often, from which on all do but for its ends."""


@dataclass(frozen=True)
class Tally:
    """Counts, a timeline, facets and the worst of any number of batches."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """"rows", "sequences", "tokens"; "has/FIELD", the sequences that hold a field;
    "trainable", the tokens that may train, scored or not; "compared", those that two policies score;
    "partly", those that two policies score and a third does not; "unscored/FIELD/CAUSE", those that
    a policy does not score; "empty", the responses without a token; "ahead", tokens drawn by newer
    weights than were trained; "unit/UNIT", the sequences whose lengths are in that unit; "named/KIND/NAME", those
    of a rank, a worker, an environment or a file; "lost/KIND/NAME", the tokens of it that cannot be compared."""
    timeline: Timeline = field(default_factory=Timeline)
    facets: Facets = field(default_factory=Facets)
    shapes: Shapes = field(default_factory=Shapes)
    worst: Worst = field(default_factory=Worst)
    groups: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    """Hashes of the ids of the groups of sequences; one that several batches hold stands there several times."""
    repeats: Repeats = field(default_factory=Repeats)

    @staticmethod
    def of(batch: Logged, *, file: Files = "") -> Tally:
        """Summarize one batch of logged sequences.

        Args:
            batch: at least one sequence, in any order of steps.
            file: where it was logged, one file or several.

        Raises: `BadValueError` if a log-prob is one that no policy can produce.

        Example:
            >>> log = Logged(cu_seqlens=torch.tensor([0, 2]), step=torch.tensor([1]),
            ...     row=torch.tensor([1]), response_lengths=torch.tensor([2]),
            ...     logp_rollout=torch.tensor([-1.0, -2.0]), logp=torch.tensor([-1.1, -1.9]))
            >>> round(Tally.of(log).as_dict()["overall"]["full/k3"], 5)
            0.005
        """
        with torch.no_grad(), one_thread():
            ordered = by_step(batch)
            steps = batch.step.unique().numpy()
            width = width_for(steps)
            timeline, facets, shapes, per_sequence = Timeline(width), Facets(), Shapes(), []
            for chunk in chunks(ordered):
                own_facets, own = Facets.of(chunk)
                points, first = {}, 0
                for key, run in runs(chunk, width):
                    last = first + run.num_sequences
                    points[key] = StepTally.of(run, {on: s.select(first, last) for on, s in own.items()})
                    first = last
                timeline, facets = timeline.merge(Timeline(width, points)), facets.merge(own_facets)
                shapes = shapes.merge(Shapes.of(chunk, file=file))
                per_sequence.append(own)
            worst = Worst()
            # A chunk without tokens has sequences too, but no sums.
            if batch.logp_rollout is not None and batch.num_tokens and per_sequence[0]:
                on = next(iter(per_sequence[0]))  # the ratio that drift is judged by
                worst = Worst.of(ordered, on, PerSequence.cat([own[on] for own in per_sequence]), file=file)
        groups = groups_of([batch])
        return Tally(
            _counts(batch, file),
            Timeline(width, timeline.points, steps),
            facets,
            shapes=shapes,
            worst=worst,
            groups=groups,
            repeats=functools.reduce(Repeats.merge, (Repeats.of(chunk, file) for chunk in chunks(batch)), Repeats()),
        )

    @staticmethod
    def over(batches: Sequence[Logged], *, file: Files = "") -> Tally:
        """Summarize batches of one reading, which may hold different fields; at least one with a sequence."""
        filled = [b for b in batches if b.num_sequences]
        return functools.reduce(Tally.merge, (Tally.of(b, file=file) for b in filled))

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return self.counts.get("tokens", 0)

    def merge(self, other: Tally) -> Tally:
        """Merge two tallies. Associative up to rounding; the same order of parts gives the same bits."""
        return Tally(
            _fewer_named(Counter(self.counts) + Counter(other.counts)),
            self.timeline.merge(other.timeline),
            self.facets.merge(other.facets),
            shapes=self.shapes.merge(other.shapes),
            worst=self.worst.merge(other.worst),
            groups=fewer_groups(np.concatenate([self.groups, other.groups])),
            repeats=self.repeats.merge(other.repeats),
        )

    def as_dict(self, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Return the numbers of `audit.json` as plain data; unknown values are NaN or absent.

        counts       rows, sequences, tokens, steps, prompts (groups of sequences; of more than 2^20 an estimate),
                     dropped tokens by field, the unit of response lengths
        has          fields that at least one sequence holds
        overall      metrics of the whole log; grade and quantiles are beside it
        steps        the same of each step; beyond 2000 steps, of `steps_per_point` step numbers
        histograms   of the log-ratio by ratio
        facets       metrics by length, position, advantage, lag and token class, by worker and by what drew: there
                     `{on}/k3_se` is a standard error, clustered by sequence, and a worker's `worst_frac` its share
                     of `worst`'s sequences
        shapes       where the gap is and how it goes over the steps (`shape_table`)
        worst        sequences and tokens

        Args:
            limits: thresholds by name (`Rules.limits`), by which the shapes are judged, if not the built-in ones.
        """
        whole, timeline = self.timeline.whole(), self.timeline
        unscored: Counter[str] = Counter()  # tokens that each policy does not score, for whatever cause
        for name, n in self._under("unscored/").items():
            if name == PADDING:
                continue
            unscored[name.partition("/")[0]] += n
        units, facets = list(self._under("unit/")), self.facets.rows()
        worst = [entry.get("worker") for entry in self.worst.sequences]
        own = {row["label"] for row in facets["worker"]}
        worst = [name if name in own else OTHERS for name in worst if name is not None]
        for row in facets["worker"] if worst else []:
            row["worst_frac"] = worst.count(row["label"]) / len(worst)
        content = {
            "counts": {
                "rows": self.counts["rows"],
                "sequences": self.counts["sequences"],
                "tokens": self.tokens,
                "steps": len(timeline.steps),
                "prompts": count_of_groups(self.groups) or None,
                "trainable": self.counts.get("trainable", self.tokens),
                "unscored": dict(unscored),
                "empty": self.counts.get("empty", 0),
                "length_unit": units[0] if len(units) == 1 else "mixed",
            },
            "has": list(self._under("has/")),
            "overall": whole.metrics(),
            "quantiles": whole.quantiles(),
            "grade": whole.stats.grade,
            "steps": timeline.rows(),
            "steps_per_point": timeline.width,
            "histograms": {
                name.removesuffix("/log_ratio"): h.as_dict()
                for name, h in whole.histograms.items()
                if name.endswith("/log_ratio")
            },
            "facets": facets,
            "shapes": shape_table(self.shapes, limits),
            "worst": self.worst.as_dict(),
        }
        return content

    def _under(self, prefix: str) -> dict[str, int]:
        return {k.removeprefix(prefix): n for k, n in self.counts.items() if k.startswith(prefix)}


NAMED_PARTS = 2048
"""Parts with a name that are counted apart; of more, those that lost most."""


def parts_by_name(batch: Logged, file: Files) -> dict[str, int]:
    """Sequences by rank, worker, environment and file, and the tokens of each that cannot be compared."""
    lengths = batch.cu_seqlens.diff()
    lost = ((lengths if batch.trainable is None else batch.trainable) - lengths).tolist()
    ranks, files = batch.ranks, [origin(file, row)[0] for row in batch.row.tolist()]
    if ranks is None and any(map(rank_of, set(files))):
        ranks = tuple(map(rank_of, files))
    kinds = {"rank": ranks, "worker": batch.workers, "environment": batch.environments, "file": files}
    counts: Counter[str] = Counter()
    for kind, names in kinds.items():
        for name, n in Counter(names or ()).items():
            counts[f"named/{kind}/{name[-NAME_LENGTH:]}"] += n
        for name, n in zip(names or (), lost):
            if n:
                counts[f"lost/{kind}/{name[-NAME_LENGTH:]}"] += n
    return _fewer_named(counts)


NAME_LENGTH = 120
"""Characters of a part's name that count, the last ones."""


def _fewer_named(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts with at most `NAMED_PARTS` parts of a name: those that lost most, then the first in order."""
    named = [name for name in counts if name.startswith(("named/", "lost/"))]
    if len(named) <= 2 * NAMED_PARTS:
        return dict(counts)
    parts = {name.partition("/")[2] for name in named}
    chosen = sorted(parts, key=lambda part: (-counts.get(f"lost/{part}", 0), part))[:NAMED_PARTS]
    gone = {f"{of}/{part}" for part in parts.difference(chosen) for of in ("named", "lost")}
    return {name: n for name, n in counts.items() if name not in gone}


def _counts(batch: Logged, file: Files) -> dict[str, int]:
    b = batch.num_sequences
    counts = {"rows": len(batch.row.unique()), "sequences": b, "tokens": batch.num_tokens}
    fields = [name for name in HELD if getattr(batch, name) is not None]
    counts |= {f"has/{name}": b for name in (*fields, *batch.divergences)}
    if batch.rewards is not None:
        counts["has/rewards"] = int(batch.rewards.isfinite().sum())
    trainable = batch.cu_seqlens.diff() if batch.trainable is None else batch.trainable
    unscored = {name: int(n.sum()) for name, n in batch.unscored.items()}
    absent = [n for name, n in unscored.items() if getattr(batch, name.partition("/")[0], 0) is None]
    counts |= {f"unscored/{name}": n for name, n in unscored.items()}
    counts |= {
        "trainable": int(trainable.sum()),
        "compared": batch.num_tokens if batch.pairs else 0,
        "partly": max(absent, default=0) if batch.pairs else 0,
        "empty": int((batch.response_lengths == 0).sum()) if batch.response_lengths.any() else 0,
        "ahead": batch.ahead,
    }
    return counts | parts_by_name(batch, file) | {f"unit/{batch.length_unit}": b}
