"""Replay every method of the table on a log: tokens kept, weights, and effective sample size.

Many rows share gates, weights and clips. Parts are frozen, so equal parts of different methods are one key, and each
decides once per batch (`Decisions`). What it decided is counted per row, as sums that can be added (`Counterfactual`).
What a part cannot decide is a sentence, not an exception: a log that lacks something still answers the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt64
from torch import Tensor

from offdrift.audit.facets import LENGTH_CUTS
from offdrift.batch_info import BatchInfo
from offdrift.correction.weight import Weighted
from offdrift.divergence.evidence import Divergence
from offdrift.errors import EvidenceError, OffdriftError, RecordError
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, Method, override
from offdrift.methods.table import FAMILIES
from offdrift.numerics import log_sums, one_thread, shared_ratios
from offdrift.objectives import Objective
from offdrift.objectives.base import ClipsInLog, LoggedClip
from offdrift.records.batch import Logged
from offdrift.texts import text_id

STEPS = 256
"""Steps that are looked at together: every one of them is a view of its own, of some 90 KiB."""
OBSERVERS: frozenset[Any] = frozenset(p for row in METHODS.values() for p in row.observers)
"""Parts that look at a whole step."""


@dataclass(frozen=True, eq=False)
class LoggedView:
    """A logged batch as parts of methods take it."""

    batch: Logged
    first_update: bool = False
    """Whether the old policy stands in for the current one."""

    @cached_property
    def logprobs(self) -> LogProbs:
        """The batch packed and validated; without the rollout policy's, the trainer's two."""
        return self.batch.trained() if self.batch.logp_rollout is None else self.batch.logprobs()

    @cached_property
    def batch_info(self) -> BatchInfo:
        """Inputs for methods besides log-probs: divergences, entropy, rewards and version lags."""
        logged = self.batch
        exact = {name: Divergence.exact(name, x) for name, x in logged.divergences.items()}
        return BatchInfo(divergences=exact, entropy=logged.entropy, rewards=logged.rewards, version_lag=logged.lag)

    @cached_property
    def steps(self) -> list[tuple[Int[Tensor, " k"], LoggedView]]:
        """Each step's tokens, and the step as a view of its own."""
        step = self.batch.step
        sequences = [(step == s).nonzero().squeeze(-1) for s in step.unique()]
        if len(sequences) == 1:
            return [(torch.arange(self.batch.num_tokens), self)]
        parts = [(self.batch.segments.rows(which), which) for which in sequences]
        return [(rows, replace(self, batch=self.batch.select(which))) for rows, which in parts if len(rows)]

    def call(self, method: Method, function: Callable[..., Any]) -> Any:
        """The result of a part on this batch, as a method with its anchor hands it over."""
        logprobs, batch_info = self.logprobs, self.batch_info
        if method.anchor is not None:
            logprobs = method.anchor(logprobs, batch_info)
        return function(logprobs, self.batch.advantages, batch_info)

    def call_by_step(self, method: Method, function: Callable[..., Any]) -> Any:
        """Call a function on the tokens of each step separately, and join the results in token order."""
        results = [(rows, step.call(method, function)) for rows, step in self.steps]
        rows = torch.cat([r for r, _ in results])

        def joined(parts: list[Tensor]) -> Tensor:
            together = torch.cat(parts)
            return torch.empty_like(together).index_copy_(0, rows, together)

        if not isinstance(results[0][1], Weighted):
            return joined([x for _, x in results])
        weights: list[Weighted] = [w for _, w in results]
        log_weight = joined([w.log_weight() for w in weights])
        return Weighted(joined([w.weight for w in weights]), joined([w.limited for w in weights]), lambda: log_weight)


Decision = tuple[Any, bool] | str
"""What a part decides and whether at the first update; or why it decides nothing."""


class Decided(NamedTuple):
    """Decision of a correction for every token; a field is None where no part of the method decides it."""

    keep: Bool[Tensor, " n"] | None
    weight: Float[Tensor, " n"] | None
    limited: Bool[Tensor, " n"] | None
    first_update: bool
    log_weight: Float[Tensor, " n"] | None = None
    """Logs of the weights, where the guard of `exp` may have changed one of them."""


class Decisions:
    """The decisions of any number of methods about one batch.

    Gates and clips are remembered; of the weights only the last, so ask about methods with equal weights one after the
    other. A reason why not comes from the last view that was tried.
    """

    def __init__(self, batch: Logged) -> None:
        self.views = [LoggedView(batch)]
        if batch.logp is None and batch.logp_old is not None:
            self.views.append(LoggedView(at_first_update(batch), first_update=True))
        self._answers: dict[Hashable, Decision] = {}
        self._weights: tuple[Hashable, Decided | str] = (None, "")

    def unanswerable(self, method: Method) -> str:
        """Why the log cannot say what a method would have done with it; "" if it may."""
        batch = self.views[0].batch
        if not batch.num_tokens and (batch.pairs or batch.logp_rollout is not None):
            return "no token in the log has log-probs of every policy"
        parts = (*method.correction.gates, *method.correction.weights, method.objective)
        of_staleness = method.anchor is None and all(getattr(part, "of", part.on) == "staleness" for part in parts)
        if batch.logp_rollout is not None or of_staleness:
            return ""
        return "the log holds no log-probs of the rollout policy"

    def correction(self, method: Method) -> Decided | str:
        """Apply the method's gates and weights to the batch; a sentence with the reason if the log lacks an input."""
        gates = []
        for gate in method.correction.gates:
            decision = self._once(("gate", gate, method.anchor), method, gate, gate.keep)
            if isinstance(decision, str):
                return decision
            gates.append(decision)
        key = (method.correction.weights, method.anchor)
        if key != self._weights[0]:
            self._weights = (key, self._weighted(method))
        weighted = self._weights[1]
        if isinstance(weighted, str):
            return weighted
        keep = functools.reduce(torch.logical_and, (keep for keep, _ in gates)) if gates else None
        return weighted._replace(keep=keep, first_update=weighted.first_update or any(late for _, late in gates))

    def clipped(self, method: Method) -> tuple[Bool[Tensor, " n"], bool, bool] | None:
        """Tokens whose loss the objective's clip changes, whether at the first update, and whether these are all.

        None if it has no clip, or the log cannot say. At the first update nothing is stale, so a clip
        of staleness says nothing there.
        """
        objective = method.objective
        if not clips(objective):
            return None

        def clipped(logprobs: LogProbs, advantages: Tensor | None, batch_info: BatchInfo) -> Any:
            if isinstance(objective, ClipsInLog):
                return objective.clipped_in_log(logprobs, batch_info)
            if advantages is None:
                raise EvidenceError("what a clip does depends on the advantages; log them")
            return objective(logprobs, advantages, batch_info).clipped

        decision = self._once(("clip", objective, method.anchor), method, objective, clipped)
        if isinstance(decision, str) or (decision[1] and objective.on == "staleness"):
            return None
        clip, late = decision
        mask, complete = clip if isinstance(clip, LoggedClip) else (clip, True)
        return mask, late, complete

    def _weighted(self, method: Method) -> Decided | str:
        """The product of the method's weights, and what their limits touched."""
        refused = self._ask(method, None, lambda *arguments: None)
        if isinstance(refused, str):
            return refused  # nothing is said about a log whose log-probs are no log-probs
        decisions = []
        for part in method.correction.weights:
            decision = self._ask(method, part, part)
            if isinstance(decision, str):
                return decision
            decisions.append(decision)
        if not decisions:
            return Decided(None, None, None, False)
        parts: list[Weighted] = [w for w, _ in decisions]
        guarded = any(w.guarded() for w in parts)
        return Decided(
            keep=None,
            weight=functools.reduce(torch.mul, (w.weight for w in parts)),
            limited=functools.reduce(torch.logical_or, (w.limited for w in parts)),
            first_update=any(late for _, late in decisions),
            log_weight=functools.reduce(torch.add, (w.log_weight() for w in parts)) if guarded else None,
        )

    def _once(self, key: Hashable, method: Method, part: Any, call: Callable[..., Any]) -> Decision:
        if key not in self._answers:
            self._answers[key] = self._ask(method, part, call)
        return self._answers[key]

    def _ask(self, method: Method, part: Any, call: Callable[..., Any]) -> Decision:
        reason = ""
        for view in self.views:
            try:
                observes = part in OBSERVERS or part in method.observers
                whole = not observes or len(view.steps) == 1
                return (view.call if whole else view.call_by_step)(method, call), view.first_update
            except OffdriftError as e:
                reason = str(e)
        return reason


def at_first_update(batch: Logged) -> Logged:
    """The batch with its old policy as the current one, as at the first update on it."""
    divergences = {
        name.replace("_old", "_current"): x for name, x in batch.divergences.items() if name.endswith("_rollout_old")
    }
    return replace(batch, logp=batch.logp_old, divergences={**divergences, **batch.divergences})


@cache
def clips(objective: Objective) -> bool:
    """Whether an objective reports a clip at all, tried on a small batch."""
    from offdrift.methods.probe import batch as probe  # a method is tried where one is asked about

    tiny = probe()
    return objective(tiny.logprobs, tiny.advantages, tiny.batch_info).clipped is not None


COUNTED = (
    "sequences", "tokens", "first_update", "kept_sequences", "kept_tokens", "length", "kept_length", "weight",
    "limited", "clipped", "clip_tokens", "clip_partly",
)  # fmt: skip
"""Sums of each row; after them, sequences and kept sequences of each length bucket.

`clip_partly` are tokens of a log that shows some of those that the clip changed, and perhaps not all.
"""
AT = {name: i for i, name in enumerate(COUNTED)}
NUMBERS = (
    "kept_tokens", "kept_sequences", "kept_length_ratio", "weight_mean", "weight_max", "limited_frac", "ess_frac",
    "clipped_frac", "acceptance_by_length",
)  # fmt: skip
"""What `Counterfactual.table` says of each row."""
COLUMNS = len(COUNTED) + 2 * (len(LENGTH_CUTS) + 1)

WIDE = {"gate.low": 0.99, "gate.high": 1.01}
"""The geometric band that is advised where one is needed; verl's default is ten times narrower."""

GEOMETRIC = (
    "decoupled_geo_rs", "decoupled_geo_rs_token_tis", "decoupled_geo_rs_seq_tis", "bypass_pg_geo_rs",
    "bypass_pg_geo_rs_token_tis",
)  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """A row of the table, as published or with other settings."""

    method: Method
    family: str
    settings: Mapping[str, float] = field(default_factory=dict)
    code: Mapping[str, str] | None = None
    """File, attribute and hash of a method that is in no table."""


CANDIDATES: dict[str, Candidate] = {
    name: Candidate(row, family) for family, rows in FAMILIES.items() for name, row in rows.items()
} | {f"{name}(0.99_1.01)": Candidate(override(METHODS[name], WIDE), "presets", WIDE) for name in GEOMETRIC}
"""Every row of `METHODS`, and the geometric presets with the band that the survey advises."""


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """Mergeable counts of what each candidate did; make them with `Counterfactual.of`."""

    sums: Float[np.ndarray, "rows columns"]
    largest: Float[np.ndarray, " rows"]
    """Largest weight of a kept token."""
    logs: Float[np.ndarray, "rows 2"]
    """Logs of the sums of w and of w^2."""
    why_not: tuple[str, ...]
    """Per row, why it could not be tried on some batch; "" if it could always."""
    names: tuple[str, ...] = tuple(CANDIDATES)
    """Of the rows: the candidates, and methods in a user's code."""

    def __post_init__(self) -> None:
        if self.names[: len(CANDIDATES)] != tuple(CANDIDATES) or self.sums.shape != (len(self.names), COLUMNS):
            raise RecordError("these counts are about other methods or columns than this version's; count again")

    @staticmethod
    @torch.no_grad()
    def of(batch: Logged, also: tuple[str, ...] = ()) -> Counterfactual:
        """Try every candidate on a batch; about 80 bytes per token are needed beside it.

        `also` are absolute names of methods in a user's code, which this process has loaded. Parts that look at a
        whole step are given what the batch holds of each step. In a log without log-probs of the current policy,
        methods that read them are tried at the first update, where the current policy is the old one.

        Example:
            >>> one = torch.tensor([0, 1])
            >>> log = Logged(cu_seqlens=one, step=one[:1], row=one[1:], response_lengths=one[1:],
            ...              logp_rollout=torch.tensor([-1.0]), logp_old=torch.tensor([-0.5]))
            >>> rows = {row["name"]: row for row in Counterfactual.of(log).table()}
            >>> rows["decoupled_token_is"]["weight_mean"], rows["decoupled_k3_rs"]["kept_tokens"]
            (1.6487212181091309, 0.0)
        """
        if len(firsts := batch.step.unique()[::STEPS].contiguous()) > 1:
            which = torch.searchsorted(firsts, batch.step, right=True)
            parts = (batch.select((which == i).nonzero().squeeze(-1)) for i in range(1, len(firsts) + 1))
            return functools.reduce(Counterfactual.merge, (Counterfactual.of(part, also) for part in parts))
        names = (*CANDIDATES, *also)
        sums, largest, why_not = np.zeros((len(names), COLUMNS)), np.zeros(len(names)), [""] * len(names)
        logs = np.full((len(names), 2), -np.inf)
        done: dict[Any, tuple[np.ndarray, float, np.ndarray] | str] = {}  # equal corrections are counted once
        counts = _Counts.of(batch)

        def replay(decisions: Decisions, candidates: list[tuple[int, Method]]) -> None:
            for i, method in candidates:
                if why := decisions.unanswerable(method):
                    why_not[i] = why
                    continue
                key = (method.correction, method.anchor)
                if key not in done:
                    decided = decisions.correction(method)
                    done[key] = decided if isinstance(decided, str) else counts.row(decided)
                row = done[key]
                if isinstance(row, str):
                    why_not[i] = row
                    continue
                sums[i], largest[i], logs[i] = row
                if (clip := decisions.clipped(method)) is not None:
                    mask, late, complete = clip
                    sums[i, AT["clipped"]] = _count(mask)
                    sums[i, AT["clip_tokens"]] = len(mask)
                    sums[i, AT["clip_partly"]] = 0 if complete else len(mask)
                    sums[i, AT["first_update"]] += late

        with one_thread():
            with shared_ratios():
                replay(Decisions(batch), _sharing_weights())
            for i, name in enumerate(also, len(CANDIDATES)):  # code of a user may write into what it is given
                replay(Decisions(batch.select(torch.arange(batch.num_sequences))), [(i, _candidate(name).method)])
        return Counterfactual(sums, largest, logs, tuple(why_not), names)

    def merge(self, other: Counterfactual) -> Counterfactual:
        """The counts of both together: counts exactly, sums of weights up to rounding."""
        return Counterfactual(
            self.sums + other.sums,
            np.maximum(self.largest, other.largest),
            np.logaddexp(self.logs, other.logs),
            tuple(a or b for a, b in zip(self.why_not, other.why_not, strict=True)),
            self.names,
        )

    def table(self) -> list[dict[str, Any]]:
        """One row per candidate, ready for JSON; numbers are None where `why_not` says why.

            kept_tokens         share of tokens that no gate rejects and whose weight is not 0
            kept_sequences      share of sequences with a kept token
            kept_length_ratio   mean length of kept sequences / mean length of all
            weight_mean         mean weight of kept tokens
            weight_max          largest weight of a kept token
            limited_frac        share of tokens whose weight its limits changed
            ess_frac            (sum w)^2 / (n sum w^2), w the weight, 0 where not kept, n all tokens
            clipped_frac        share of tokens whose loss the objective's own clip or projection changed
            clipped_at_least    whether it is a lower end: the log lacks what would show all of them
            clips               whether the objective has a clip; without `clipped_frac`, the log cannot tell
            acceptance_by_length   share of kept sequences by length bucket, see `LENGTH_CUTS`

        Reference: definitions as in `stats.metrics`; masked weights count as rejected here.
        """
        columns = (self.sums, self.largest, self.logs, self.why_not)
        return [_described(*row) for row in zip(self.names, *columns, strict=True)]


def _candidate(name: str) -> Candidate:
    """The candidate of a name. Raises: `RecordError` for code that this process was not asked to run."""
    if name in CANDIDATES:
        return CANDIDATES[name]
    from offdrift.methods.load import IN_CODE, code_source, loaded

    if (method := loaded(name)) is None:
        raise RecordError(f"these counts are about {name}, too; count again with --also {name}")
    return Candidate(method, IN_CODE, code=code_source(name).as_dict())


@functools.cache
def _sharing_weights() -> list[tuple[int, Method]]:
    """The table's candidates with their row, those with equal weights together."""
    rows = [(i, candidate.method) for i, candidate in enumerate(CANDIDATES.values())]
    order = {m.correction.weights: i for i, m in reversed(rows)}
    return sorted(rows, key=lambda row: order[row[1].correction.weights])


@dataclass(frozen=True, eq=False)
class _Counts:
    """Counts of what was decided about one batch."""

    cuts: Int[Tensor, " cuts"]
    lengths: Float[np.ndarray, " b"]
    """Of responses with a scored token; 0 else."""
    scored: Float[np.ndarray, " b"]
    """1 where a response has a scored token."""
    bucket: Int[np.ndarray, " b"]

    @staticmethod
    def of(batch: Logged) -> _Counts:
        scored = (batch.cu_seqlens.diff() > 0).numpy().astype(np.float64)
        lengths = batch.response_lengths.numpy().astype(np.float64)
        return _Counts(batch.cu_seqlens, lengths * scored, scored, np.searchsorted(LENGTH_CUTS, lengths))

    def row(self, decided: Decided) -> tuple[Float[np.ndarray, " columns"], float, Float[np.ndarray, " 2"]]:
        """`COUNTED` (clips aside) and the buckets of one correction, the largest weight, and `logs`."""
        tokens, accepted = int(self.cuts[-1]), decided.keep
        weight = decided.weight
        if weight is not None and not bool(weight.min() > 0):
            accepted = weight > 0 if accepted is None else accepted & (weight > 0)
        kept_tokens = tokens if accepted is None else _count(accepted)
        total, square, largest = float(kept_tokens), float(kept_tokens), float(kept_tokens > 0)
        if weight is not None and tokens:
            used = weight if accepted is None else weight * accepted
            total = float(used.sum(dtype=torch.float64))
            square = float((used * used).sum(dtype=torch.float64))
            largest = float(used.max())
        logs = torch.tensor([total, square], dtype=torch.float64).log()
        if decided.log_weight is not None:
            log_w = decided.log_weight
            logs = log_sums(log_w if accepted is None else log_w.where(accepted, -torch.inf))
        sequences = self.scored
        if accepted is not None and tokens:  # 1 where a sequence has a kept token
            sequences = np.zeros_like(self.scored)
            filled = self.scored > 0
            sequences[filled] = np.logical_or.reduceat(accepted.numpy(), self.cuts[:-1].numpy()[filled])
        limited = 0 if decided.limited is None else _count(decided.limited)
        counted = [
            self.scored.sum(), tokens, decided.first_update, sequences.sum(), kept_tokens, self.lengths.sum(),
            sequences @ self.lengths, total, limited, 0, 0, 0,
        ]  # fmt: skip
        bins = len(LENGTH_CUTS) + 1
        buckets = [np.bincount(self.bucket, weights=x, minlength=bins) for x in (self.scored, sequences)]
        return np.concatenate([counted, *buckets]), largest, logs.numpy()


def _count(marked: Bool[Tensor, " n"]) -> int:
    """Number of marked tokens; by numpy, five times as fast."""
    return int(np.count_nonzero(marked.numpy()))


def _described(
    name: str, sums: Float[np.ndarray, " columns"], largest: float, logs: Float[np.ndarray, " 2"], why: str
) -> dict[str, Any]:
    """One row of the table."""
    candidate, n = _candidate(name), dict(zip(COUNTED, sums.tolist(), strict=False))
    everyone, kept = np.split(sums[len(COUNTED) :], 2)
    correction = candidate.method.correction
    # The ratios that the correction reads; the objective's if it corrects nothing.
    ratios = dict.fromkeys(p.on for p in (*correction.gates, *correction.weights)) or {candidate.method.objective.on: 0}
    row = {
        "name": name if candidate.code is None else Path(name).name,
        "family": candidate.family,
        "settings": dict(candidate.settings),
        "on": " and ".join(on or "none" for on in ratios) + (", at the first update" if n["first_update"] else ""),
        "gates": "; ".join(g.formula for g in correction.gates),
        "weights": "; ".join(w.formula for w in correction.weights),
        "clips": clips(candidate.method.objective),
        "sampled_sequences": int(n["sequences"]),
    } | ({} if candidate.code is None else {"code": dict(candidate.code)})
    if not n["tokens"]:
        return row | dict.fromkeys(NUMBERS) | {"clipped_at_least": False, "why_not": why or "no sequence was tried"}
    total, square = logs.tolist()
    return row | {
        "kept_tokens": n["kept_tokens"] / n["tokens"],
        "kept_sequences": n["kept_sequences"] / n["sequences"],
        "kept_length_ratio": _over(n["kept_length"] * n["sequences"], n["kept_sequences"] * n["length"]),
        "weight_mean": _over(n["weight"], n["kept_tokens"]),
        "weight_max": float(largest) if n["kept_tokens"] else None,
        "limited_frac": n["limited"] / n["tokens"],
        "ess_frac": math.exp(2 * total - square) / n["tokens"] if square > -math.inf else 0.0,
        "clipped_frac": _over(n["clipped"], n["clip_tokens"]),
        "clipped_at_least": bool(n["clip_partly"]),
        "acceptance_by_length": [_over(k, b) for k, b in zip(kept, everyone, strict=True)],
        "why_not": None,
    }


def _over(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


# -- a share of a log, by prompts: the same one whoever reads the log, and in whatever order --------


def sampled(batch: Logged, rate: float, salt: str = "") -> Logged:
    """The sequences of a random share `rate` of the prompts, whole groups, in their order.

    Chance is a hash of the salt (the file's name), the step and the row at which the group begins: whoever samples,
    and however often, draws the same ones.
    """
    if rate >= 1:
        return batch
    first = batch.row.numpy()  # the row at which each sequence's group begins in its step; its own without groups
    if batch.group_ids is not None:
        groups = np.stack([batch.step.numpy(), batch.group_ids.numpy()])
        _, index = np.unique(groups, axis=1, return_inverse=True)
        lowest = np.full(index.max(initial=-1) + 1, np.iinfo(np.int64).max)
        np.minimum.at(lowest, index.ravel(), first)
        first = lowest[index.ravel()]
    seed = text_id(salt) & (2**64 - 1)
    with np.errstate(over="ignore"):
        steps = batch.step.numpy().astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        keys = mixed(mixed(first.astype(np.uint64) ^ np.uint64(seed)) ^ steps)
    return batch.select(torch.from_numpy(np.flatnonzero(keys < np.uint64(max(rate, 0.0) * 2.0**64))))


def mixed(x: UInt64[np.ndarray, " b"]) -> UInt64[np.ndarray, " b"]:
    """A bijection of 64 bits that leaves no pattern (the finalizer of SplitMix64)."""
    with np.errstate(over="ignore"):
        x = (x + np.uint64(0x9E3779B97F4A7C15)) & np.uint64(2**64 - 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
