"""`Shapes`: where, when and in whom the two policies are apart, as sums that can be added.

The gap of a token is Huber's function of its log-ratio, l^2 / 2 up to one nat and |l| - 1/2 beyond: about the KL where
that is small, and no single token decides a mean. A contrast compares the tokens of one side with all others. Gaps of
one engine differ with how certain tokens are, so each is also held against (1 - p)^2, what equal noise on all logits
gives; what counts is the smaller of both comparisons.

Two sides may differ because other sequences, or other steps, have tokens on them: drift that grows over the steps is
larger in long responses where these grow, too. So both sides are compared once more like with like: tokens of the same
sequence, or sequences of the same step, weighted as Mantel and Haenszel do,

    matched gap of A = sum_s gap_A n_B / (n_A + n_B)      over sequences, or steps, s; of B the same

Every sum is over sequences, with its squares: errors are clustered by sequence. Of a chunk of a log at most `SAMPLED`
tokens count, whole sequences in equal distances. Logs that state lags are compared among the sequences of lag 0, if
there are enough, because lag has a shape of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from offdrift.audit.facets import joined
from offdrift.numerics import at_least_float32
from offdrift.records.batch import ROW_BITS, Files, Logged

SAMPLED = 2**16
"""Tokens of a chunk that are looked at, about."""
FLOOR = 0.0025
"""Least (1 - p)^2: arithmetic leaves an error on certain tokens too."""
LIMIT = 20.0
"""Nats to which log-ratios are limited."""
COLUMNS = ("n", "gap", "expected", "x", "y", "xx", "yy", "xy", "l", "excess")
"""Sums over the tokens of one side: x and y are log-probs of the rollout and the second policy, l = y - x, excess
e^l - 1."""
SIDE = len(COLUMNS) + 3
"""Numbers of one side: `COLUMNS`, sequences, the gap matched with that of the other side, and the sum over sequences of
the squared excess."""
CROSS = ("gap", "n", "expected", "x", "l")
"""Columns whose products, over both sides, give standard errors."""
SIZE = 2 * SIDE + (2 * len(CROSS)) ** 2
FIRST = sorted({round(2 ** (i / 2)) for i in range(36)})
"""Places at which a response is cut in two: two in each octave."""
LAST = (1, 2, 4, 8, 16)
"""Places before the end at which it is cut."""
BEHIND_GAP = 3
"""Places that are left out between two tokens, from which on the second begins another turn."""
BINS, BIN = 48, 0.5
"""Histogram of the sequences' mean log2 gap, less the median of their step: bins, and their width."""
TINY = 1e-7
"""Least gap over expected gap: what lies below is equal."""
LONG_ENOUGH, CELL = 16, 8
"""Tokens of a sequence, and sequences of a step, from which on they enter that histogram."""
POINTS = 512
"""Steps that are kept apart; of more, neighbors are one."""
EARLIEST = 8
"""First steps of a log, of which the contrasts `DATED` are kept one by one."""
LONGER = tuple(64 * 2**i for i in range(11))
"""Lengths of responses that are compared with shorter ones."""
DATED = (
    *(f"first_{c}" for c in FIRST),
    *(f"last_{c}{cut}" for c in LAST for cut in ("", "_of_cut")),
    *(f"longer_{length}" for length in LONGER),
    *("truncated", "later_turns", "seen"),
)
"""Contrasts that a fault in labels, inputs, positions or records makes, which is there from the first step on."""
SIDES = 6
"""Columns of a contrast of `DATED`: tokens, gap and sum over sequences of the squared gap, of both sides."""
NAMES, OTHERS = 256, "(others)"
RANK = re.compile(r"rank[_-]?(\d{1,6})(?=[._/-]|$)")
"""Where the path of a file tells the rank that wrote it."""

Table = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class StepSeries:
    """Sums by step: sequences, tokens, gap, and the products gap gap, gap n, n n over sequences."""

    width: int = 1
    keys: Int[np.ndarray, " k"] = field(default_factory=lambda: np.zeros(0, np.int64))
    table: Float[np.ndarray, "k sums"] = field(default_factory=lambda: np.zeros((0, 6)))

    @staticmethod
    def of(keys: np.ndarray, values: np.ndarray, width: int = 1) -> StepSeries:
        """Rows that share `key // width` added up, on a grid wide enough for `POINTS`."""
        while True:
            keys_once, place = np.unique(keys // width, return_inverse=True)
            if len(keys_once) <= POINTS:
                break
            width *= 2
        table = np.zeros((len(keys_once), values.shape[1]))
        np.add.at(table, place.reshape(-1), values)
        return StepSeries(width, keys_once * width, table)

    def merge(self, other: StepSeries) -> StepSeries:
        """Join two series; rows of the same step are added up."""
        keys, rows = np.concatenate([self.keys, other.keys]), np.concatenate([self.table, other.table])
        return StepSeries.of(keys, rows, max(self.width, other.width))

    def earliest(self) -> StepSeries:
        """The first `EARLIEST` steps alone."""
        return StepSeries(self.width, self.keys[:EARLIEST], self.table[:EARLIEST])


@dataclass(frozen=True)
class Shapes:
    """Sums of contrasts, by ratio and population: "mismatch/all/last_1"; "same" holds the sequences of lag 0."""

    contrasts: Table = field(default_factory=dict)
    named: Mapping[str, Table] = field(default_factory=dict)
    """Sums of the sequences of each worker, rank and environment, by "mismatch/all/worker"."""
    steps: Mapping[str, StepSeries] = field(default_factory=dict)
    beginnings: Mapping[str, StepSeries] = field(default_factory=dict)
    """Of the first steps, `SIDES` columns of each contrast of `DATED`, by population."""
    kinds: Table = field(default_factory=dict)
    """Histograms of sequences, by the whole of them and by their first and last quarter ("mismatch/all/tail"): count,
    gap, tokens and expected gap of each bin."""

    @staticmethod
    def of(batch: Logged, *, file: Files = "") -> Shapes:
        """Look at one batch, the policies that score its tokens being the rollout's and the trainer's.

        Args:
            file: where it was logged, one or several: its path may tell a rank.
        """
        second, on = (batch.logp, "full") if batch.logp_old is None else (batch.logp_old, "mismatch")
        if batch.logp_rollout is None or second is None or not batch.num_tokens:
            return Shapes()
        flags = _of_sequences(batch)
        filled = batch.cu_seqlens.diff() > 0
        chosen = filled.nonzero().squeeze(-1)
        chosen = chosen[:: max(1, batch.num_tokens // SAMPLED)]
        flags = {name: x[chosen.numpy()] for name, x in flags.items()}
        part = batch if len(chosen) == batch.num_sequences else batch.select(chosen)
        return _summed(part, on, flags, _names(part, file))

    def merge(self, other: Shapes) -> Shapes:
        """The sums of both."""
        return Shapes(
            joined(np.add, self.contrasts, other.contrasts),
            joined(lambda a, b: _fewest(joined(np.add, a, b)), self.named, other.named),
            joined(StepSeries.merge, self.steps, other.steps),
            joined(lambda a, b: a.merge(b).earliest(), self.beginnings, other.beginnings),
            joined(np.add, self.kinds, other.kinds),
        )


def _fewest(names: Table) -> dict[str, np.ndarray]:
    """The first `NAMES` in order; those beyond are one."""
    ordered = sorted(names.keys() - {OTHERS})
    beyond = [names[n] for n in (*ordered[NAMES:], *([OTHERS] if OTHERS in names else []))]
    return {n: names[n] for n in ordered[:NAMES]} | ({OTHERS: np.sum(beyond, axis=0)} if beyond else {})


def _of_sequences(batch: Logged) -> dict[str, np.ndarray]:
    """Properties of whole sequences: True for those of side A, and of None where the log does not say."""
    flags: dict[str, np.ndarray] = {}
    lengths = batch.response_lengths.numpy()
    cut = None if batch.truncated is None else batch.truncated.numpy() == 1
    if cut is None and batch.length_unit == "token":
        cut = lengths == lengths.max()
        cut = cut if 3 <= cut.sum() < len(cut) else None
    if cut is not None:
        flags["truncated"] = cut
    if batch.group_ids is not None:
        _, first = np.unique(batch.group_ids.numpy(), return_index=True)
        later = np.ones(len(lengths), dtype=bool)
        later[first] = False
        flags["later_of_group"] = later
    for length in LONGER:
        if batch.length_unit == "token" and lengths.min() <= length < lengths.max():
            flags[f"longer_{length}"] = lengths > length
    return flags


def rank_of(file: str) -> str:
    """The number of the rank that a path names; "" for none.

    Example:
        >>> rank_of("step_3/rank_12.jsonl"), rank_of("log.jsonl")
        ('12', '')
    """
    ranks = RANK.findall(file)
    return ranks[-1] if ranks else ""


def _ranks(batch: Logged, files: Files) -> np.ndarray | None:
    """The rank of each sequence, by the path of its file; None where the paths name none."""
    ranks = np.array([rank_of(files)] if isinstance(files, str) else [rank_of(file) for file in files])
    which = batch.row.numpy() >> ROW_BITS if len(ranks) > 1 else np.zeros(batch.num_sequences, dtype=np.int64)
    names = ranks[which]
    return names if names.all() else None


def _names(batch: Logged, file: Files) -> dict[str, np.ndarray]:
    """By kind, what each sequence is called."""
    names = {"worker": batch.workers, "rank": batch.ranks, "environment": batch.environments}
    given = {kind: np.array([t[:80] for t in texts]) for kind, texts in names.items() if texts is not None}
    if "rank" not in given and (ranks := _ranks(batch, file)) is not None:
        given["rank"] = ranks
    return given


def _summed(batch: Logged, on: str, flags: Mapping[str, np.ndarray], names: Mapping[str, np.ndarray]) -> Shapes:
    """The sums of a batch whose sequences all have tokens."""
    cuts = batch.cu_seqlens.numpy()
    columns = _columns(batch, on)
    running = _running(columns)
    size = _running(np.log2(columns[1:2] / columns[2:3] + TINY))[0]
    total = (running[:, cuts[1:]] - running[:, cuts[:-1]]).T

    def at(places: np.ndarray) -> np.ndarray:
        return (running[:, places] - running[:, cuts[:-1]]).T

    def among(tokens: np.ndarray) -> np.ndarray:
        part, ends = _running(columns[:, tokens]), np.concatenate([[0], np.cumsum(tokens)])[cuts]
        return (part[:, ends[1:]] - part[:, ends[:-1]]).T

    sides = {
        "whole": total,
        **_by_place(batch, at, total),
        **{name: total * flag[:, None] for name, flag in flags.items()},
        **{name: among(tokens) for name, tokens in _of_tokens(batch).items()},
    }
    if (cut := flags.get("truncated")) is not None:
        sides |= {f"{n}_of_cut": x * cut[:, None] for n, x in sides.items() if n.startswith("last_")}
    lag = None if batch.lag is None else batch.segments.max(batch.lag.double()).numpy()
    populations: dict[str, np.ndarray] = {"all": np.ones(len(total), dtype=bool)}
    if lag is not None:
        populations["same"] = lag == 0
    contrasts, named, steps, beginnings, kinds = {}, {}, {}, {}, {}
    step = batch.step.numpy()
    moment = np.unique(step, return_inverse=True)[1].reshape(-1)
    for people, chosen in populations.items():
        if not chosen.any():
            continue
        key = f"{on}/{people}"
        if people != "all" and chosen.all():  # the same sums again
            for sums in (contrasts, named, steps, beginnings, kinds):
                sums |= {k.replace("/all", f"/{people}", 1): v for k, v in sums.items()}
            continue
        contrasts |= {f"{key}/{name}": x for name, x in _contrasts(sides, total, chosen, flags, moment).items()}
        for kind, texts in names.items():
            named[f"{key}/{kind}"] = _fewest(_by_name(texts[chosen], total[chosen]))
        steps[key] = StepSeries.of(step[chosen], _of_series(total[chosen]))
        beginnings[key] = _beginning(sides, total, chosen, step)
        for part, inner in _quarters(cuts).items():
            kinds[f"{key}/{part}"] = _histogram(size, running, inner, step=step, lag=lag, chosen=chosen)
    return Shapes(contrasts, named, steps, beginnings, kinds)


def _beginning(
    sides: Mapping[str, np.ndarray], total: np.ndarray, chosen: Bool[np.ndarray, " b"], step: Int[np.ndarray, " b"]
) -> StepSeries:
    """Sum both sides of each contrast of `DATED`, at each of the first steps of the chosen sequences."""
    keys = np.unique(step[chosen])[:EARLIEST]
    early = chosen & (step <= keys[-1])
    at_step = (step[early] == keys[:, None]).astype(np.float64)
    everybody = total[early, :2]
    table = np.zeros((len(keys), len(DATED), SIDES))
    for i, name in enumerate(DATED):
        if name in sides:
            one = sides[name][early, :2]
            both = np.concatenate([one, np.square(one[:, 1:]), everybody - one, np.square((everybody - one)[:, 1:])], 1)
            table[:, i] = at_step @ both
    return StepSeries(1, keys, table.reshape(len(keys), -1))


def _running(rows: np.ndarray) -> np.ndarray:
    """Sums of all tokens before each, and of all, of each row."""
    sums = torch.zeros(len(rows), rows.shape[1] + 1, dtype=torch.float64)
    torch.cumsum(torch.from_numpy(rows), 1, out=sums[:, 1:])  # six times as fast as numpy's along rows
    return sums.numpy()


def _columns(batch: Logged, on: str) -> Float[np.ndarray, "columns n"]:
    """`COLUMNS` of each token."""
    second = batch.logp_old if on == "mismatch" else batch.logp
    assert batch.logp_rollout is not None
    assert second is not None
    x = at_least_float32(batch.logp_rollout).double().numpy()
    l = np.clip(at_least_float32(second).double().numpy() - x, -LIMIT, LIMIT)  # noqa: E741
    size = np.abs(l)
    gap = np.where(size < 1, l * l / 2, size - 0.5)
    expected = np.square(1 - np.exp(np.minimum(x, 0.0))) + FLOOR
    y = x + l
    return np.stack([np.ones_like(x), gap, expected, x, y, x * x, y * y, x * y, l, np.expm1(l)])


def _by_place(batch: Logged, at: Callable[[np.ndarray], np.ndarray], total: np.ndarray) -> dict[str, np.ndarray]:
    """Side A of every cut of the responses: the first places, and the last ones."""
    cuts, lengths = batch.cu_seqlens.numpy(), batch.response_lengths.numpy()
    sequence = np.arange(len(lengths))
    if batch.position is None:

        def place(of: np.ndarray | int) -> np.ndarray:
            return np.clip(cuts[:-1] + of, cuts[:-1], cuts[1:])
    else:
        position = batch.position.numpy().astype(np.int64)
        stride = int(max(position.max(initial=0), lengths.max(initial=0))) + 2
        keys = np.repeat(sequence * stride, np.diff(cuts)) + position.clip(0, stride - 1)

        def place(of: np.ndarray | int) -> np.ndarray:
            return np.clip(np.searchsorted(keys, sequence * stride + np.clip(of, 0, stride - 1)), cuts[:-1], cuts[1:])

    longest = int(lengths.max(initial=0))
    sides = {f"first_{c}": at(place(c)) for c in FIRST if c < longest}
    if batch.length_unit == "token":
        sides |= {f"last_{c}": total - at(place(np.maximum(lengths - c, 0))) for c in LAST if c < longest}
    return sides


def _of_tokens(batch: Logged) -> dict[str, Bool[np.ndarray, " n"]]:
    """Tokens of side A by properties of their own."""
    cuts, flags = batch.cu_seqlens.numpy(), {}
    sequence = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    starts = np.zeros(len(sequence), dtype=bool)
    starts[cuts[:-1]] = True
    turn = None
    if batch.turn_ids is not None:
        turn = batch.turn_ids.numpy() != np.repeat(batch.turn_ids.numpy()[cuts[:-1]], np.diff(cuts))
    elif batch.position is not None:
        behind = np.concatenate([[False], np.diff(batch.position.numpy()) > BEHIND_GAP]) & ~starts
        count = np.cumsum(behind)
        turn = count > np.repeat(count[cuts[:-1]], np.diff(cuts))
    if turn is not None and turn.any():
        flags["later_turns"] = turn
    if batch.tokens is not None:
        tokens = batch.tokens.numpy().astype(np.int64)
        _, first = np.unique(sequence * (int(tokens.max(initial=0)) + 1) + tokens, return_index=True)
        repeated = np.ones(len(tokens), dtype=bool)
        repeated[first] = False
        if repeated.any():
            flags["seen"] = repeated
    if batch.rollout_version is not None:
        version = batch.rollout_version.numpy()
        switched = version != np.repeat(version[cuts[:-1]], np.diff(cuts))
        if switched.any():
            flags["after_switch"] = switched
    return flags


AT_ONCE = 2**14
"""Sequences, times sides, whose contrasts are taken together: temporaries of a few MiB."""


def _contrasts(
    sides: Mapping[str, np.ndarray],
    total: np.ndarray,
    chosen: Bool[np.ndarray, " b"],
    flags: Mapping[str, np.ndarray],
    moment: Int[np.ndarray, " b"],
) -> dict[str, Float[np.ndarray, " sums"]]:
    """`_contrast` of every side, over the chosen sequences."""
    everybody, like = total[chosen], moment[chosen]
    count, contrasts = max(1, AT_ONCE // len(everybody)), {}
    inside = [name for name in sides if name not in flags]
    for first in range(0, len(inside), count):
        names = inside[first : first + count]
        sums = _contrast(np.stack([sides[name][chosen] for name in names]), everybody, None)
        contrasts |= zip(names, sums, strict=True)
    contrasts |= {name: _contrast(sides[name][None, chosen], everybody, like)[0] for name in flags}
    return {name: contrasts[name] for name in sides}


def _contrast(
    side: Float[np.ndarray, "k b columns"], total: Float[np.ndarray, "b columns"], like: np.ndarray | None
) -> Float[np.ndarray, "k sums"]:
    """The numbers of both sides and their products over sequences; `like` is the step of each, or None where a sequence
    may have tokens on both sides and is compared with itself."""
    other = total - side
    numbers = []
    for x, y in ((side, other), (other, side)):
        a, b = (v[..., :2] if like is None else _added(v[..., :2], like) for v in (x, y))
        matched = (a[..., 1] * b[..., 0] / np.maximum(a[..., 0] + b[..., 0], 1.0)).sum(-1)
        counts = [(x[..., 0] > 0).sum(-1), matched, np.square(x[..., -1]).sum(-1)]
        numbers += [x.sum(-2), np.stack(counts, -1)]
    at = [COLUMNS.index(name) for name in CROSS]
    both = np.concatenate([side[..., at], other[..., at]], -1)
    return np.concatenate([*numbers, (both.swapaxes(-1, -2) @ both).reshape(len(side), -1)], -1)


def _added(rows: Float[np.ndarray, "k b columns"], places: Int[np.ndarray, " b"]) -> Float[np.ndarray, "k p columns"]:
    """Rows of the same place added up."""
    sums = np.zeros((len(rows), int(places.max(initial=-1)) + 1, rows.shape[-1]))
    for table, values in zip(sums, rows, strict=True):
        np.add.at(table, places, values)
    return sums


def _by_name(texts: np.ndarray, total: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers of one side, and its products, by name."""
    at = [COLUMNS.index(name) for name in CROSS]
    sums = {}
    for name in np.unique(texts):
        x = total[texts == name]
        own = x[:, at]
        numbers = [x.sum(0), [len(x), 0.0, np.square(x[:, -1]).sum()], (own.T @ own).reshape(-1)]
        sums[str(name) or "(no name)"] = np.concatenate(numbers)
    return sums


def _of_series(total: np.ndarray) -> Float[np.ndarray, "b sums"]:
    n, gap = total[:, 0], total[:, 1]
    return np.stack([np.ones_like(n), n, gap, gap * gap, gap * n, n * n], 1)


def _quarters(cuts: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """First token, and the one behind the last, of each sequence, of its first and of its last quarter."""
    starts, ends = cuts[:-1], cuts[1:]
    quarter = (ends - starts) // 4
    return {"whole": (starts, ends), "head": (starts, starts + quarter), "tail": (ends - quarter, ends)}


def _histogram(
    size: np.ndarray,
    running: np.ndarray,
    inner: tuple[np.ndarray, np.ndarray],
    step: np.ndarray,
    lag: np.ndarray | None,
    chosen: np.ndarray,
) -> Float[np.ndarray, "bins columns"]:
    """Sequences by the mean log2 of gap over expected gap of some of their tokens, less its median over their step
    and lag; `size` holds running sums of that logarithm."""
    starts, ends = inner
    keep = chosen & (ends - starts >= LONG_ENOUGH // 4)
    table = np.zeros((BINS, 4))
    if not keep.any():
        return table
    starts, ends = starts[keep], ends[keep]
    score = (size[ends] - size[starts]) / (ends - starts)
    total = (running[:3, ends] - running[:3, starts]).T
    cells = np.stack([step, np.zeros_like(step) if lag is None else lag], 1)[keep]
    _, cell, count = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    cell = cell.reshape(-1)
    first = np.concatenate([[0], count.cumsum()[:-1]])
    middle = score[np.lexsort((score, cell))][first + count // 2]
    place = np.clip(np.floor((score - middle[cell]) / BIN) + BINS // 2, 0, BINS - 1).astype(int)
    enough = count[cell] >= CELL
    values = np.stack([np.ones_like(score), total[:, 1], total[:, 0], total[:, 2]], 1)
    np.add.at(table, place[enough], values[enough])
    return table
