"""Shapes of drift as plain data: which contrasts are real, which of them says most, and how drift goes over the steps.

A contrast is real if all comparisons (per token, against equal noise on all logits, and within the same sequences or
steps) differ `shape_times`-fold at `shape_z` standard errors, the worse side has a gap that matters, and the other is
large enough that it would have shown it. About a hundred contrasts are looked at: at five
standard errors one log in ten thousand has a false one (Bonferroni). Of several real ones the first is that which says
most about where the gap is: KL(share of the gap || share of the tokens) of both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from offdrift.audit.shapes import BIN, BINS, COLUMNS, CROSS, DATED, FIRST, SIDE, SIDES, Shapes, StepSeries
from offdrift.judge import load_rules

EARLY = 4
"""Places at the beginning that are too few to say that responses agreed before they parted."""
SPREAD = 0.35
"""Share of an even gap, above which the other end of the responses has the gap too."""
BY_PLACE, PREFERRED = ("beyond", "grows", "some", "carried", "beginning", "end", "long"), 1.1
"""Kinds by place; another kind that says as much, up to this factor, stands before them."""


SIGNED = {"seen": ("seen", "seen_more")}
"""Contrasts by the sign of log-ratios, and their kinds where the second policy finds side A likelier, or less so."""


class Side(NamedTuple):
    """Sums of one side."""

    sums: np.ndarray

    def __getattr__(self, name: str) -> float:
        if name in COLUMNS:
            return float(self.sums[COLUMNS.index(name)])
        raise AttributeError(name)

    @property
    def sequences(self) -> float:
        return float(self.sums[len(COLUMNS)])

    @property
    def matched(self) -> float:
        """Gap, weighted so that it compares with the other side's like with like."""
        return float(self.sums[len(COLUMNS) + 1])

    @property
    def mean_gap(self) -> float:
        """Nats per token."""
        return self.gap / max(self.n, 1.0)

    @property
    def ratio_mean(self) -> float:
        return 1 + self.excess / max(self.n, 1.0)

    @property
    def ratio_z(self) -> float:
        """Distance of the mean ratio from 1 in standard errors, clustered by sequence and centered."""
        b = max(self.sequences, 1.0)
        variance = self.sums[SIDE - 1] - self.excess**2 / b
        return self.excess / math.sqrt(max(variance * b / max(b - 1, 1.0), 1e-300)) if b > 1 else 0.0

    @property
    def corr(self) -> float:
        """Correlation of both policies' log-probs."""
        n = max(self.n, 1.0)
        xx, yy = self.xx - self.x**2 / n, self.yy - self.y**2 / n
        return (self.xy - self.x * self.y / n) / math.sqrt(max(xx * yy, 1e-300))

    @property
    def corr_high(self) -> float:
        """Upper end of that correlation: three standard errors of a quarter of the tokens, for they are not
        independent."""
        return self.corr + 6 / math.sqrt(max(self.n, 1.0))


def shape_table(shapes: Shapes, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Return the `shapes` entry of `audit.json`: where the gap is and how it changes; empty if no token was compared.

    on, population   ratio, and "same" if only sequences of lag 0 are compared, else "all"
    looked_at        contrasts
    whole            numbers of all tokens: gap, mean ratio and its z, mean log-ratio and its z, correlation
    found            the real contrasts, the one that says most first: kind, where, gap there and elsewhere,
                     times, z, share of the gap and of the tokens, and of the worse side mean ratio, correlation, and
                     the gap of the first step with four standard errors added (`first_high`)
    over_steps       how the gap goes over the steps: trend and numbers; of lag 0 as `over_steps_same`
    kinds            two kinds of sequences, if there are

    Args:
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.
    """
    limits = load_rules().limits if limits is None else limits
    on = next((x for x in ("mismatch", "full") if f"{x}/all/whole" in shapes.contrasts), None)
    if on is None:
        return {}
    same = shapes.contrasts.get(f"{on}/same/whole")
    enough = same is not None and Side(same).sequences >= limits["shape_same"]
    people = "same" if enough else "all"
    prefix = f"{on}/{people}/"
    own = {k.removeprefix(prefix): v for k, v in shapes.contrasts.items() if k.startswith(prefix)}
    everything = own.pop("whole")
    whole = Side(everything[:SIDE])
    rows = [row for name, v in own.items() for row in _rows(name, v, own, limits)]
    rows += [row for name in SIGNED if name in own for row in _signed(name, own[name], whole, limits)]
    for kind in ("worker", "rank", "environment"):
        rows += _of_names(kind, shapes.named.get(prefix + kind, {}), limits)
    looked_at = len(own) + sum(len(x) for k, x in shapes.named.items() if k.startswith(prefix))
    found = [r for r in rows if r["real"]]
    kinds = _two_kinds({part: shapes.kinds.get(f"{prefix}{part}") for part in ("whole", "head", "tail")}, limits)
    found += [] if kinds is None else [kinds]
    # Two kinds of responses that a rank, a worker or an environment explains are not a finding of their own.
    found.sort(key=lambda r: -r["says"] * (1.0 if r["kind"] in (*BY_PLACE, "kinds") else PREFERRED))
    beginning = shapes.beginnings.get(f"{on}/{people}")
    content = {
        "on": on,
        "population": people,
        "looked_at": looked_at,
        "whole": {**_numbers(whole), **_log_ratio(everything)},
        "found": [{k: v for k, v in r.items() if k != "real"} | at_first(r, beginning) for r in found[:12]],
        "over_steps": over_steps(shapes.steps.get(f"{on}/all"), limits),
        "over_steps_same": over_steps(shapes.steps.get(f"{on}/same"), limits),
    }
    return content


def _numbers(side: Side) -> dict[str, float]:
    return {
        "gap": side.mean_gap, "tokens": side.n, "sequences": side.sequences, "ratio_mean": side.ratio_mean,
        "ratio_z": side.ratio_z, "corr": side.corr, "corr_high": side.corr_high,
    }  # fmt: skip


def _log_ratio(v: np.ndarray) -> dict[str, float]:
    """Mean log-ratio of all tokens and its distance from 0 in standard errors, clustered by sequence and centered.

    A token drawn from the rollout policy as it was logged has a mean log-ratio of -KL, so z is not far above 0.
    """
    side, at = Side(v[:SIDE]), CROSS.index("l")
    b, squares = side.sequences, float(v[2 * SIDE :].reshape(2 * len(CROSS), -1)[at, at])
    variance = squares - side.l**2 / max(b, 1.0)
    z = side.l / math.sqrt(max(variance * b / (b - 1), 1e-300)) if b > 1 else 0.0
    return {"l_mean": side.l / max(side.n, 1.0), "l_z": z}


def at_first(row: Mapping[str, Any], beginning: StepSeries | None) -> dict[str, float]:
    """The gap on a contrast's worse side at the first step, and the most that it may be there, at four standard errors;
    empty if the first step has too little of it, or is the last one, too.
    """
    if beginning is None or len(beginning.keys) < 2 or row.get("contrast") not in DATED:
        return {}
    place = DATED.index(row["contrast"]) * SIDES
    sides = beginning.table[0, place : place + SIDES].reshape(2, -1)
    n, gap, square = sides[0 if row["inside"] else 1].tolist()
    if not n or not sides[:, 0].all():
        return {}
    return {"first": gap / n, "first_high": (gap + 4 * math.sqrt(square)) / n}


class Found(NamedTuple):
    """Name of a contrast and of its worse side."""

    kind: str
    where: str


def _named(name: str, inside: bool) -> Found | None:
    """The kind of a contrast and the words for its worse side; None if nothing follows from it."""
    stem, _, number = name.partition("_")
    if name.endswith("_of_cut"):
        c = int(name.split("_")[1])
        places = "token" if c == 1 else f"{c} tokens"
        return Found("end", f"in the last {places} of responses that reach the length limit") if inside else None
    if stem == "first" and number.isdigit():
        c = int(number)
        if not inside:
            return Found("beyond", f"from token {c:,} of the response on")
        where = "at the first token of each response" if c == 1 else f"in the first {c:,} tokens of the response"
        return Found("first_tokens" if c <= 4 else "beginning", where)
    if stem == "last":
        c = int(number)
        if not inside:
            return None
        return (
            Found("last_token", "at the last token of each response")
            if c == 1
            else Found("end", f"in the last {c} tokens of the response")
        )
    if stem == "longer":
        return Found("long", f"in responses of more than {int(number):,} tokens") if inside else None
    fixed: dict[tuple[str, bool], Found] = {
        ("truncated", True): Found("long", "in responses that reach the length limit"),
        ("later_turns", True): Found("turns", "in the turns after the first"),
        ("later_turns", False): Found("first_turn", "in the first turn"),
        ("seen", True): Found("seen", "on tokens that occurred before in the response"),
        ("seen", False): Found("unseen", "on tokens that occur for the first time in the response"),
        ("later_of_group", True): Found("group", "in all responses to a prompt except the first"),
        ("later_of_group", False): Found("group", "in the first response to each prompt"),
        ("after_switch", True): Found("switch", "after a change of weights inside the response"),
    }
    return fixed.get((name, inside))


def _rows(
    name: str, v: np.ndarray, every: Mapping[str, np.ndarray], limits: Mapping[str, float]
) -> list[dict[str, Any]]:
    """The row of a contrast, for its worse side; none where nothing follows from that side."""
    a, b, products = Side(v[:SIDE]), Side(v[SIDE : 2 * SIDE]), v[2 * SIDE :].reshape(2 * len(CROSS), -1)
    if min(a.sequences, b.sequences) < limits["shape_few"] or min(a.n, b.n) < limits["shape_few"]:
        return []
    inside = a.mean_gap >= b.mean_gap
    found = _named(name, inside)
    if found is None:
        return []
    worse, other = (a, b) if inside else (b, a)
    zs, times = [], []
    for of in ("n", "expected"):
        ratios = [s.gap / max(getattr(s, of), 1e-300) for s in (a, b)]
        zs.append((ratios[0] - ratios[1]) / max(_error(products, of, (a, b), ratios), 1e-300) * (1 if inside else -1))
        worse_ratio, other_ratio = ratios if inside else ratios[::-1]
        times.append(worse_ratio / max(other_ratio, 1e-9))
    times.append(worse.matched / max(other.matched, 1e-300))
    square = products[0 if inside else len(CROSS), 0 if inside else len(CROSS)]
    # A gap that few sequences carry comes by chance in none of the few tokens of the other side, whose error, taken
    # from these tokens, is then too small: (sum S)^2 / sum S^2 sequences carry it; as many in proportion are expected.
    if worse.gap**2 / max(square, 1e-300) * other.n / worse.n < 2 * limits["shape_few"]:
        return []
    if found.kind == "group":
        # Were all off alike, as many sequences in effect would carry the gap as carry the tokens.
        of_tokens = products[at_n := (0 if inside else len(CROSS)) + CROSS.index("n"), at_n]
        if worse.gap**2 * of_tokens < limits["shape_alike"] * square * worse.n**2:
            return []
    if found.kind == "beyond":
        # Few sequences that carry the gap, of those that reach the place.
        if worse.gap**2 < limits["shape_carried"] * square * worse.sequences:
            if int(name.split("_")[1]) < EARLY:
                return []
            found = Found("carried", f"{found.where}, in some of the responses")
        elif not _sharp(int(name.split("_")[1]), every, limits):
            found = Found("grows", found.where)
    row = _row(found, worse, other, times=min(times), z=min(zs), limits=limits)
    return [row | {"contrast": name, "inside": inside}]


def _row(
    found: Found, worse: Side, other: Side, *, times: float, z: float, limits: Mapping[str, float]
) -> dict[str, Any]:
    share = worse.gap / max(worse.gap + other.gap, 1e-300)
    tokens = worse.n / (worse.n + other.n)
    return {
        "kind": found.kind,
        "where": found.where,
        "gap": worse.mean_gap,
        "elsewhere": other.mean_gap,
        "times": times,
        "z": z,
        "share": share,
        "tokens": tokens,
        "sequences": worse.sequences,
        "ratio_mean": worse.ratio_mean,
        "ratio_z": worse.ratio_z,
        "corr": worse.corr,
        "corr_high": worse.corr_high,
        "says": _says(share, tokens),
        "real": z >= limits["shape_z"]
        and times >= limits["shape_times"]
        and worse.mean_gap >= limits["kl_uneven"]
        and worse.sequences >= limits["shape_few"],
    }


def _signed(name: str, v: np.ndarray, whole: Side, limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """The row of a contrast whose log-ratios have one sign on its one side and the other on the other.

    Log-ratios are taken less their regression on the rollout's log-prob, so that no temperature passes for it.
    """
    a, b, products = Side(v[:SIDE]), Side(v[SIDE : 2 * SIDE]), v[2 * SIDE :].reshape(2 * len(CROSS), -1)
    if min(a.sequences, b.sequences) < limits["shape_few"] or min(a.n, b.n) < limits["shape_few"]:
        return []
    variance = whole.xx - whole.x**2 / whole.n
    slope = (whole.xy - whole.xx - whole.x * whole.l / whole.n) / max(variance, 1e-300)
    level = (whole.l - slope * whole.x) / whole.n
    vector, means = np.zeros(2 * len(CROSS)), []
    for i, side in enumerate((a, b)):
        means.append((side.l - slope * side.x) / side.n - level)
        scale, at = (1 if i == 0 else -1) / side.n, i * len(CROSS)
        for column, factor in (("l", 1.0), ("x", -slope), ("n", -level - means[-1])):
            vector[at + CROSS.index(column)] += scale * factor
    sequences = max(a.sequences, b.sequences)
    error = math.sqrt(max(float(vector @ products @ vector), 0.0) * sequences / max(sequences - 1, 1.0))
    z = abs(means[0] - means[1]) / max(error, 1e-300)
    apart = abs(means[0] - means[1])
    found = Found(SIGNED[name][means[0] < means[1]], "on tokens that occurred before in the response")
    row = _row(found, a, b, times=a.mean_gap / max(b.mean_gap, 1e-9), z=z, limits=limits)
    small = apart**2 < 0.25 * whole.mean_gap
    # The mean ratio of a side is the mass that the second policy gives it, over the rollout's: a penalty moves mass
    # from one side to the other. Other inputs leave both at 1, and a record of another distribution raises both.
    moved = a.ratio_z if means[0] > means[1] else -a.ratio_z
    real = z >= 2 * limits["shape_z"] and apart >= 0.02 and not small
    real = real and moved >= limits["shape_z"] and a.excess * b.excess < 0
    gap = max(a.mean_gap, b.mean_gap)  # the other side is shifted too: what is left is renormalized
    signs = {"contrast": name, "inside": a.mean_gap >= b.mean_gap}
    return [row | signs | {"gap": gap, "says": row["says"] + 1, "signed": apart, "real": real}]


def _says(share: float, tokens: float) -> float:
    """KL of the two sides' shares of the gap from their shares of the tokens, nats."""
    pairs = ((share, tokens), (1 - share, 1 - tokens))
    return sum(s * math.log(s / max(q, 1e-300)) for s, q in pairs if s > 0)


def _error(products: np.ndarray, of: str, sides: tuple[Side, Side], ratios: list[float]) -> float:
    """Standard error of the difference of two ratios gap / `of`, clustered by sequence."""
    gap, base, half = CROSS.index("gap"), CROSS.index(of), len(CROSS)
    vector = np.zeros(2 * half)
    for i, (side, ratio) in enumerate(zip(sides, ratios, strict=True)):
        scale = (1 if i == 0 else -1) / max(getattr(side, of), 1e-300)
        vector[i * half + gap] += scale
        vector[i * half + base] -= scale * ratio
    b = max(sides[0].sequences, sides[1].sequences)
    return math.sqrt(max(float(vector @ products @ vector), 0.0) * b / max(b - 1, 1.0))


def _sharp(cut: int, every: Mapping[str, np.ndarray], limits: Mapping[str, float]) -> bool:
    """Whether the gap changes within an octave around a place more than within all octaves before it."""
    sums = [(c, every[f"first_{c}"][: len(COLUMNS)]) for c in FIRST if f"first_{c}" in every]
    means: dict[int, float] = {}
    at = COLUMNS.index("n"), COLUMNS.index("gap")
    before = np.zeros(len(COLUMNS))
    for c, x in sums:
        part = x - before
        if part[at[0]] >= limits["shape_few"]:
            means[c] = part[at[1]] / part[at[0]]
        before = x
    last = every[f"first_{sums[-1][0]}"]
    beyond = last[SIDE : SIDE + len(COLUMNS)]
    behind = [m for c, m in means.items() if c > cut][:1]
    if not behind and beyond[at[0]] >= limits["shape_few"]:
        behind = [beyond[at[1]] / beyond[at[0]]]
    ahead = [m for c, m in means.items() if c <= cut][-2:]
    if not behind or not ahead:
        return True
    return bool(behind[0] >= limits["shape_sharp"] * max(min(ahead), 1e-9))


def _of_names(kind: str, names: Mapping[str, np.ndarray], limits: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each name against all others."""
    rows = []
    total = np.sum(list(names.values()), axis=0) if len(names) > 1 else None
    for name, x in names.items() if total is not None else ():
        side, other = Side(x[:SIDE]), Side((total - x)[:SIDE])
        if min(side.sequences, other.sequences) < limits["shape_few"] or side.mean_gap < other.mean_gap:
            continue
        products = [v[SIDE:].reshape(len(CROSS), -1) for v in (x, total - x)]
        zeros = np.zeros_like(products[0])
        both = np.block([[products[0], zeros], [zeros, products[1]]])
        zs, times = [], []
        for of in ("n", "expected"):
            ratios = [s.gap / max(getattr(s, of), 1e-300) for s in (side, other)]
            zs.append((ratios[0] - ratios[1]) / max(_error(both, of, (side, other), ratios), 1e-300))
            times.append(ratios[0] / max(ratios[1], 1e-9))
        row = _row(Found(kind, f"in what {kind} {name} has"), side, other, times=min(times), z=min(zs), limits=limits)
        rows.append(row | {"name": name})
    return rows


def _two_kinds(tables: Mapping[str, np.ndarray | None], limits: Mapping[str, float]) -> dict[str, Any] | None:
    """Some responses that are apart from the others: over their whole length, from a place on, or at the beginning.

    Few tokens of a quarter may hide two kinds, so that a place is named only if the other quarter has next to no gap.
    """
    rows = {part: _kinds(table, limits) for part, table in tables.items()}
    whole, head, tail = rows["whole"], rows["head"], rows["tail"]
    many, few = (0.0 if row is None else row["sequences"] for row in (tail, head))
    if tail is not None and few < 0.6 * many:
        if _even(tail, tables["head"]):
            return whole or _over_all(tail)
        return tail | {"kind": "some", "where": f"from a place on, in {tail['share_of']:.0%} of the responses"}
    if head is not None and many < 0.6 * few:
        if _even(head, tables["tail"]):
            return whole or _over_all(head)
        return head | {"kind": "beginning", "where": f"in the first quarter of {head['share_of']:.0%} of the responses"}
    return whole


def _over_all(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "kind": "kinds", "where": f"in {row['share_of']:.0%} of the responses, over their whole length"}


def _even(row: Mapping[str, Any], other: np.ndarray | None) -> bool:
    """Whether the other quarter's mean gap is a good part of what it is if the same responses are apart there, too."""
    if other is None or not other[:, 2].sum():
        return False
    return bool(other[:, 1].sum() / other[:, 2].sum() > SPREAD * row["share_of"] * row["gap"])


def _kinds(table: np.ndarray | None, limits: Mapping[str, float]) -> dict[str, Any] | None:
    """Two kinds of sequences with next to nothing between them; None if there are not."""
    if table is None or table[:, 0].sum() < 4 * limits["shape_few"]:
        return None
    count, best = table[:, 0], None
    total = count.sum()
    for low in range(1, BINS - 5):
        for width in (4, 6, 8):
            between = count[low : low + width].sum()
            least = min(count[:low].sum(), count[low + width :].sum())
            if (
                least >= max(limits["shape_few"], limits["shape_kind"] * total)
                and between <= limits["shape_valley"] * least
            ):
                best = max(best or (0, 0, 0), (width, least, low))
    if best is None:
        return None
    width, _, low = best
    upper, lower = table[low + width // 2 :].sum(0), table[: low + width // 2].sum(0)
    if min(upper[2], lower[2]) == 0 or lower[3] / lower[2] < 0.2 * upper[3] / upper[2]:
        return None  # certain tokens differ little, whatever the engine
    gap, elsewhere = float(upper[1] / upper[2]), float(lower[1] / lower[2])
    if gap < max(limits["kl_uneven"], limits["shape_times"] * elsewhere):
        return None
    share, tokens = float(upper[1] / (upper[1] + lower[1])), float(upper[2] / (upper[2] + lower[2]))
    return {
        "kind": "kinds",
        "where": f"in {upper[0] / total:.0%} of the responses, over their whole length",
        "gap": gap, "elsewhere": elsewhere, "times": gap / max(elsewhere, 1e-9),
        "z": math.sqrt(min(upper[0], lower[0])), "share": share, "tokens": tokens, "sequences": float(upper[0]),
        "share_of": float(upper[0] / total), "says": _says(share, tokens), "between": width * BIN,
    }  # fmt: skip


# -- over the steps ---------------------------------------------------------------------------------------------------


def over_steps(series: StepSeries | None, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Classify how the gap per token changes over the steps; empty for fewer than three steps.

        trend    "sawtooth"    it rises and falls back at least twice, `shape_times`-fold
                 "jump"        it changes at one step, as much, and stays
                 "spike"       some steps are apart, as much, and the last ones are not
                 "growing"     the last third is above the middle one, and twice the first
                 "saturating"  the last third is twice the first, and not above the middle one
                 "falling"     the first third is twice the last
                 "flat"        none of these
        since    the step of a jump
        first, last   gap of the first step, and mean over the last third

    Errors are clustered by sequence; what is called apart is so at four standard errors.
    """
    if series is None or len(series.keys) < 3:
        return {}
    times = (load_rules().limits if limits is None else limits)["shape_times"]
    sums = series.table
    gaps, errors = _means(sums)
    thirds = [_means(part.sum(0)[None]) for part in np.array_split(sums, 3)]
    first, middle, last = ((float(m[0]), float(e[0])) for m, e in thirds)
    content: dict[str, Any] = {
        "trend": "flat", "points": len(gaps), "first": float(gaps[0]), "last": last[0], "middle": middle[0],
        "largest": float(gaps.max()),
    }  # fmt: skip
    content |= _changed(gaps, errors, series.keys, times) or {}
    if content["trend"] == "flat":
        if _above(last, first, 2.0):
            content["trend"] = "growing" if _above(last, middle, 1.2) and len(gaps) >= 4 else "saturating"
        elif _above(first, last, 2.0):
            content["trend"] = "falling"
    return content


def _means(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    b, n, gap, square, product, size = sums.T
    mean = gap / np.maximum(n, 1.0)
    variance = np.maximum(square - 2 * mean * product + mean**2 * size, 0.0) * b / np.maximum(b - 1, 1.0)
    return mean, np.sqrt(variance) / np.maximum(n, 1.0)


def _above(a: tuple[float, float], b: tuple[float, float], times: float) -> bool:
    """Whether one mean is that many times another, and above it by four standard errors."""
    return a[0] >= times * max(b[0], 1e-9) and a[0] - b[0] >= 4 * math.hypot(a[1], b[1])


def _changed(gaps: np.ndarray, errors: np.ndarray, steps: np.ndarray, times: float) -> dict[str, Any] | None:
    """A sawtooth, a jump or a spike; None if there is none of them."""
    points = list(zip(gaps.tolist(), errors.tolist(), strict=True))
    drops = [i for i in range(1, len(points)) if _above(points[i - 1], points[i], times)]
    rises = [i for i in range(1, len(points)) if _above(points[i], points[i - 1], 1.2)]
    between = [any(a < i < b for i in rises) for a, b in zip([0, *drops], drops)]
    if sum(between) >= 2:
        return {"trend": "sawtooth", "falls": len(drops)}
    apart = _split(points, times)
    if apart is not None and apart < len(points):
        later = [g for g, _ in points[apart:]]
        third = max(1, len(later) // 3)
        if np.mean(later[-third:]) < 2 * np.mean(later[:third]):
            return {"trend": "jump", "since": int(steps[apart]), "before": float(np.mean(gaps[:apart]))}
    middle = float(np.median(gaps))
    odd = [i for i, p in enumerate(points) if _above(p, (middle, 0.0), times)]
    if odd and 3 * len(odd) <= len(points) and odd[-1] < len(points) - 1 and odd[0] > 0:
        return {"trend": "spike", "since": int(steps[odd[0]]), "steps": len(odd)}
    return None


def _split(points: list[tuple[float, float]], times: float) -> int | None:
    """The step before which every gap is a third of every gap from it on at most; the one that sets them apart most."""
    best: tuple[float, int] | None = None
    size: Callable[[tuple[float, float]], float] = lambda p: p[0]  # noqa: E731
    for k in range(1, len(points)):
        before, after = max(points[:k], key=size), min(points[k:], key=size)
        if _above(after, before, times):
            best = max(best or (0.0, 0), (after[0] / max(before[0], 1e-9), k))
    return None if best is None else best[1]
