"""Verdicts of docs/evidence.toml, which people state and rules refuse, by regimes and by stored results.

`verdict` is what is said of a claim. `found` is what the runs here say where the verdict cannot: where the source does
not state its regime, and where model, length, drift or learning rate are ten times or more from the source's, or the
cause of drift is another one. `refused` lists the rules that a row breaks, and `judged` lets none of those pass. `seen`
is the smallest difference that the runs would have shown, from their stored pairs.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from offdrift.errors import BadValueError
from offdrift.stats.seeds import over_seeds, student_t

Row = Mapping[str, Any]
VERDICTS = ("reproduced", "falsified here", "other regime", "undecided", "untestable here")
"""Everything that can have come of a claim."""
DECIDED = ("reproduced", "falsified here")
KINDS = ("runs", "counts", "exact", "none")
"""What a number of a claim is: what training came to, cases with a scatter of their own, enumerated, or no number."""
EXACT = ("offdrift lab ", "offdrift bound ", "python benchmarks/arithmetic.py")
"""How the commands of enumerated claims begin."""
TRAINING = ("offdrift sweep ", "offdrift train ")
NO_REGIME = {
    "simulation": ("offdrift lab ", "python benchmarks/plan_"),
    "statistics": ("offdrift lab coverage ",),
}
"""Counts that depend on no model, and how the commands begin that make them."""
RATIO, SEEDS, LEVEL = 10.0, 8, 0.05
"""Factor from which on a regime is another one; seeds or pairs that decide, or the sign-flip p that does."""
COMPARED = ("parameters", "tokens", "kl", "lr")
"""Numbers of a regime: parameters of the model, tokens of a response, KL per token (nat), learning rate."""
MOST_FLIPPED = 20
"""Pairs whose patterns of signs are enumerated: 2^20."""


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p of a mean difference: the share of sign patterns whose mean is at least as far from 0.

    Raises: `BadValueError` for more than `MOST_FLIPPED` pairs.

    Example:
        >>> sign_flip_p([0.1, 0.2, 0.3, 0.1]), sign_flip_p([0.1, -0.1])
        (0.125, 1.0)

    Reference: Fisher, The Design of Experiments, 1935, section 21.
    """
    n, observed = len(differences), abs(math.fsum(differences))
    if n > MOST_FLIPPED:
        raise BadValueError(f"{n} pairs have 2^{n} patterns of signs; take Student's test beyond {MOST_FLIPPED}")
    patterns = itertools.product((1, -1), repeat=n)
    beyond = sum(
        abs(math.fsum(s * d for s, d in zip(p, differences, strict=True))) >= observed - 1e-12 for p in patterns
    )
    return beyond / 2**n


def smallest_difference(deviation: float, n: int, *, power: float = 0.8, alpha: float = LEVEL) -> float:
    """Smallest true difference that n pairs show at level alpha with a probability of `power`, about.

        (t_{1 - alpha/2, n-1} + t_{power, n-1}) s / sqrt(n)

    Args:
        deviation: standard deviation s of the pairs' differences.
        n: pairs, at least 2.

    Example:
        >>> round(smallest_difference(0.1, 8), 3), round(smallest_difference(0.1, 4), 3)
        (0.115, 0.208)
    """
    if n < 2:
        raise BadValueError(f"n = {n}: one pair has no scatter; take two or more")
    return (student_t(alpha, n - 1) + student_t(2 * (1 - power), n - 1)) * deviation / math.sqrt(n)


@lru_cache(maxsize=64)
def _stored(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def pairs(contrast: Row, results: Path) -> list[float]:
    """Differences of a contrast by seed, as stored results have them.

    Args:
        contrast: `data`, a file of `results`; `arm`, one or several, and `less`, the arm that is taken off, "start" for
            the reward before training, or "nothing" where differences are stored; `where` and `less_where`, values of
            settings, or a list of such values (runs of all that match are averaged by seed); `what`, "end" or "change",
            the end less the start; `sweep` and `changes` where a file has several. What is taken off may be in
            another file, or of other changes: `less_data`, `less_sweep`, `less_changes`, and `start_of`, the arm whose
            start it is.
        results: the folder of stored results.

    Raises: `BadValueError` where no seed has both.
    """
    less, where, what = contrast["less"], contrast.get("where", {}), contrast.get("what", "end")
    runs = list(_runs(_stored(results / contrast["data"]), contrast))
    ends = _by_seed(runs, contrast["arm"], where, what)
    if less == "nothing":
        return [ends[seed] for seed in sorted(ends)]
    if "less_data" in contrast:
        of = {"sweep": contrast.get("less_sweep"), "changes": contrast.get("less_changes", contrast.get("changes", []))}
        other = {**contrast, **{k: x for k, x in of.items() if x is not None}}
        runs = list(_runs(_stored(results / contrast["less_data"]), other))
    if less == "start":
        less, what = contrast.get("start_of", contrast["arm"]), "start"
    base = _by_seed(runs, less, contrast.get("less_where", where), what)
    both = sorted(ends.keys() & base.keys())
    if not both:
        raise BadValueError(f"no seed of {contrast['data']} has both sides of {dict(contrast)}")
    return [ends[seed] - base[seed] for seed in both]


def has_runs(file: Path) -> bool:
    """Whether a stored result holds training runs, with the rewards that they came to."""
    document = _stored(file)
    runs = document.get("runs", ()) if isinstance(document, dict) else ()
    rows = list(runs.values()) if isinstance(runs, dict) else runs if isinstance(runs, list) else []
    return "sweeps" in document or any({"held_out", "value", "evals"} & set(row) for row in rows[:1])


def _by_seed(runs: Iterable[Row], arms: str | list[str], where: Row | list[Row], what: str) -> dict[int, float]:
    """Mean over the runs of these arms and of these values, seed by seed."""
    names, wheres = [arms] if isinstance(arms, str) else arms, where if isinstance(where, list) else [where]
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        values = run["values"]
        matches = any(all(values.get(key) == value for key, value in of.items()) for of in wheres)
        if run["arm"] in names and matches and (what in run or what == "change"):
            value = run["end"] - run["start"] if what == "change" else run[what]
            by_seed.setdefault(run["seed"], []).append(value)
    return {seed: fmean(x) for seed, x in by_seed.items()}


def _runs(document: Any, contrast: Row) -> Iterator[dict[str, Any]]:
    """Runs of a stored result: arm, values, seed, end, and start where it is stored."""
    if isinstance(document.get("sweeps"), dict):
        for arm, row in document["sweeps"][contrast["sweep"]]["arms"].items():
            for seed, end in row["held_out_by_seed"].items():
                start = {"start": row["held_out"][0]["mean"]} if "held_out" in row else {}
                yield {"arm": arm, "values": {}, "seed": int(seed), "end": end, **start}
    elif "sweeps" in document:
        changes = contrast.get("changes", [])
        for sweep in document["sweeps"]:
            if sweep["name"] == contrast.get("sweep", sweep["name"]) and sweep["changes"] == changes:
                yield from sweep["runs"]
    elif "stacks" in document:
        yield from stack_runs(document["stacks"])
    elif "rows" in document:
        yield from itertools.chain.from_iterable(map(row_runs, document["rows"]))
    elif isinstance(document.get("runs"), dict):
        for run in document["runs"].values():
            start, end = run["evals"][0][1], run["evals"][-1][1]
            yield {"arm": run["arm"], "values": {"cell": run["cell"]}, "seed": run["seed"], "start": start, "end": end}
    elif "runs" in document:
        yield from itertools.chain.from_iterable(map(repeated_runs, itertools.count(), document["runs"]))
    else:
        for part in document.values():
            yield from ({**run, "end": run["value"]} for run in part["runs"])


def stack_runs(stacks: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Differences that a factorial has stored; `repaired` stacks are within the budget. Stacks share their seeds."""
    for stack in stacks:
        for arm in ("token_tis", "trm_max"):
            for seed, difference in enumerate(stack[arm]):
                yield {"arm": arm, "values": {"repaired": not stack["over"]}, "seed": seed, "end": difference}


def row_runs(row: Row) -> Iterator[dict[str, Any]]:
    """Runs of a row: rewards before and after, progress over the token's ratio by method, or acceptance over a run."""
    ends = [row[key] for key in ("after", "dense_after") if key in row]
    if ends:
        start = row.get("before", row.get("dense_before"))
        yield {"arm": row["arm"], "values": {}, "seed": row["seed"], "end": ends[0], "start": start}
    elif "methods" in row:
        values = {"tokens": row["tokens"], "kl": row["asked_kl"]}
        for m in row["methods"]:
            yield {"arm": m["method"], "values": values, "seed": row["seed"], "end": m["over_token"][0]}
    elif "drafter" in row:
        of_run = row["speculative/accepted_frac"]
        values = {"task": row["task"]}
        yield {"arm": row["drafter"], "values": values, "seed": row["seed"], "end": of_run[-1], "start": of_run[0]}


def repeated_runs(number: int, run: Row) -> Iterator[dict[str, Any]]:
    """A run with its value; or one that was repeated with a fix, as two arms of the same seed."""
    if "fixed" in run:
        for arm in ("first", "fixed") if run["fixed"] is not None else ():
            yield {"arm": arm, "values": {}, "seed": number, "end": run[arm]["held_out"][-1]}
    elif run["value"] is not None:
        yield {**run, "end": run["value"]}


class Seen(NamedTuple):
    """Power of the pairs of a claim's runs."""

    smallest: float
    """Smallest difference shown with 80 % power, about."""
    pairs: int
    p: float | None
    """Exact sign-flip p; None where single pairs are not stored, or there are more than `MOST_FLIPPED`."""
    student: float | None
    """Student's p of the same pairs."""
    mean: float
    """Mean difference."""


def seen(row: Row, results: Path) -> Seen | None:
    """Power of a claim's runs; None without a contrast.

    A contrast `{ data, interval, n }` is the path to a stored mean and interval (of 95 %, or with its confidence),
    which stands for the n runs that it was made of, and has no p. Contrasts of several testbeds count together.
    """
    contrasts = row.get("contrast", [])
    if not contrasts:
        return None
    if "interval" in contrasts[0]:
        n = contrasts[0]["n"]
        path = contrasts[0]["interval"]
        interval = reduce(lambda x, key: x[key], path, _stored(results / contrasts[0]["data"]))
        named = isinstance(interval, dict)
        mean, low, high = [interval[key] for key in ("mean", "low", "high")] if named else interval
        level = 1 - interval["confidence"] if named else LEVEL
        deviation = (high - low) / 2 / student_t(level, n - 1) * math.sqrt(n)
        return Seen(smallest_difference(deviation, n), n, None, None, mean)
    d = [x for contrast in contrasts for x in pairs(contrast, results)]
    p = sign_flip_p(d) if len(d) <= MOST_FLIPPED else None
    return Seen(smallest_difference(stdev(d), len(d)), len(d), p, over_seeds(d).p, fmean(d))


def differs(here: Sequence[Row], there: Row) -> list[str]:
    """Parts of a regime in which the nearest testbed is `RATIO` times or more from the source, or has another cause.

    Example:
        >>> differs([{"parameters": 1e6, "tokens": 7, "cause": "lag"}], {"parameters": 8e9, "cause": "engine"})
        ['parameters', 'cause']
        >>> differs([{"lr": 4e-4}, {"lr": 2e-6}], {"lr": 1e-6})
        []
    """

    def parts(one: Row) -> list[str]:
        both = [key for key in COMPARED if one.get(key) and there.get(key)]
        far = [k for k in both if max(one[k], there[k]) / min(one[k], there[k]) >= RATIO]
        causes = causes_of(one.get("cause", "")), causes_of(there.get("cause", ""))
        return far + ["cause"] * (all(causes) and not causes[0] & causes[1])

    return min(map(parts, here), key=len, default=[])


def causes_of(text: str) -> set[str]:
    """Causes of drift that a regime names: engine, lag, or whatever else its first word is.

    Example:
        >>> sorted(causes_of("engine, 8 bits; lag of 31 updates"))
        ['engine', 'lag']
    """
    return {part.split()[0].strip(",") for part in re.split(r"; ", text) if part.strip()}


def refused(
    row: Row,
    far: Sequence[str] = (),
    powers: Sequence[Seen] = (),
    *,
    stated: bool = True,
    trained: Sequence[str] = (),
) -> list[str]:
    """Rules that a claim's row breaks; none where its verdict may stand.

    Args:
        far: parts of the regime that differ, of `differs`.
        powers: of the claim's stored pairs, of all together and then of each contrast, of `seen`.
        stated: whether the source states the size of its model. Where it does not, what training came to here cannot be
            said of the claim.
        trained: files of the claim that hold training runs.

    Example:
        >>> row = {"verdict": "reproduced", "kind": "runs", "seeds": 4, "says": "more", "here": ["a"], "there": "b"}
        >>> refused(row, [], [Seen(0.1, 4, 0.125, 0.1, 0.2)])
        ['4 seeds with p = 0.125: eight, or an exact p below 0.05, or undecided']
        >>> refused(row | {"seeds": 8}, ["lr"], [Seen(0.1, 8, 0.01, 0.1, 0.2)])
        ['reproduced at another regime (lr): other regime']
        >>> refused(row | {"seeds": 8}, [], [Seen(0.1, 8, 0.01, 0.1, -0.2)])
        ['reproduced: the claim says more, and the mean of its pairs is -0.2']
    """
    return [
        *contradictions(row, stated=stated),
        *other_kinds(row, trained=trained),
        *other_pairs(row, powers),
        *beyond_runs(row, powers),
        *beyond_pairs(row, powers),
        *beyond_regime(row, far, stated=stated),
    ]


def contradictions(row: Row, *, stated: bool) -> list[str]:
    """Fields of a row that contradict each other."""
    verdict, kind, finding = row["verdict"], row["kind"], row.get("found", row["verdict"])
    elsewhere = verdict == "other regime" or ("found" in row and verdict == "undecided" and not stated)
    open_ones = ("undecided", "untestable here")
    checks = (
        (verdict in VERDICTS and kind in KINDS, f"verdict {verdict!r}, kind {kind!r}: of {VERDICTS} and {KINDS}"),
        (row.get("about", "library") == "library", f"about = {row.get('about')!r}: the library, or left out"),
        ("found" not in row or finding in DECIDED, f"found {finding!r}: of {DECIDED}"),
        (
            ("found" in row) == elsewhere,
            f"`found` stands beside other regime, and beside undecided where the source states no size, not {verdict}",
        ),
        (
            ("why" in row) == (verdict in open_ones),
            f"{verdict} {'needs no' if 'why' in row else 'without'} `why`",
        ),
        (
            (kind == "runs") == ("seeds" in row) and (kind == "runs" or not {"contrast", "p"} & set(row)),
            "seeds, contrast and p are of runs, and runs have seeds",
        ),
        ("there" not in row or bool(row.get("here")), "`there` without `here`"),
    )
    return [reason for holds, reason in checks if not holds]


def other_kinds(row: Row, *, trained: Sequence[str]) -> Iterator[str]:
    """Claims of a kind that the commands and files of a row do not make."""
    kind, commands, free = row["kind"], row.get("command", ()), row.get("no_regime")
    if kind == "exact" and not all(c.startswith(EXACT) for c in commands):
        yield "exact: its commands enumerate nothing"
    if kind in ("exact", "none") and (trained or any(c.startswith(TRAINING) for c in commands)):
        yield f"{kind}, and its commands or files train"
    made = kind == "counts" and not trained and all(c.startswith(NO_REGIME.get(free or "", ())) for c in commands)
    if free is not None and not made:
        yield f"no_regime = {free!r}: counts of {tuple(NO_REGIME)}, by the commands that make them"


def other_pairs(row: Row, powers: Sequence[Seen]) -> Iterator[str]:
    """Numbers of seeds and values of p that are not those of the stored pairs."""
    contrasts, commands = row.get("contrast", ()), row.get("command", ())
    if powers and powers[0].pairs != row.get("seeds"):
        yield f"seeds = {row.get('seeds')}, and {powers[0].pairs} pairs are stored"
    if "p" in row and (row.get("about") != "library" or contrasts or row["p"] < 2 / 2 ** row.get("seeds", 0)):
        yield "p is computed from stored pairs; stated only of what is the library's, not below 2 of 2^seeds patterns"
    if len({(c["data"], c.get("sweep"), *c.get("changes", ())) for c in contrasts}) < len(contrasts):
        yield "two contrasts of the same runs are one: seeds would count twice"
    for recipe in {sweep for c in contrasts if (sweep := c.get("sweep"))}:
        if not any(f"recipes/{recipe}.toml" in c for c in commands):
            yield f"a contrast is of {recipe}, which no command runs"


def beyond_runs(row: Row, powers: Sequence[Seen]) -> Iterator[str]:
    """Findings beyond the number and the p of their runs, and runs whose p is no finding."""
    finding, seeds, p = row.get("found", row["verdict"]), row.get("seeds", 0), row.get("p")
    if powers:  # beyond `MOST_FLIPPED` pairs Student's
        p = powers[0].p if powers[0].p is not None else powers[0].student
    told = p is not None and p < LEVEL
    if finding in DECIDED and row["kind"] == "none":
        yield f"{finding} without a number"
    if row["kind"] != "runs":
        return
    if finding not in DECIDED and seeds >= SEEDS and told:
        yield f"{row['verdict']}, and p of its {seeds} pairs is {p:.2g}: a finding"
    if finding in DECIDED and not told:
        enough = f"p of its own pairs is {p if p is None else f'{p:.2g}'}: undecided"
        few = f"{seeds} seeds with p = {p}: eight, or an exact p below {LEVEL}, or undecided"
        yield few if seeds < SEEDS else f"{finding}, and {enough}"


def beyond_pairs(row: Row, powers: Sequence[Seen]) -> Iterator[str]:
    """Findings that their pairs do not show, by their direction or on one testbed."""
    finding, says = row.get("found", row["verdict"]), row.get("says")
    if finding not in DECIDED or row["kind"] != "runs" or not powers:
        return
    for one in powers[1:] if len(powers) > 2 else ():
        if one.pairs < SEEDS and (one.p is None or one.p >= LEVEL):
            yield f"{finding} on pooled pairs, of which {one.pairs} on one testbed have p = {one.p}: each by itself"
    if says not in ("more", "less"):
        yield f"{finding}, and `says` does not tell whether the claim is `more` or `less` of the contrast"
    elif (says == "more") != ((powers[0].mean > 0) == (finding == "reproduced")):
        yield f"{finding}: the claim says {says}, and the mean of its pairs is {powers[0].mean:+.3g}"


def beyond_regime(row: Row, far: Sequence[str], *, stated: bool) -> Iterator[str]:
    """Verdicts beyond the regime that was tested."""
    verdict, kind, finding = row["verdict"], row["kind"], row.get("found", row["verdict"])
    if verdict == "other regime" and (not far or finding not in DECIDED):
        yield "other regime, and the regimes do not differ" if not far else f"other regime, found {finding}"
    if verdict not in DECIDED or row.get("about") == "library":
        return
    if far:
        yield f"{verdict} at another regime ({', '.join(far)}): other regime"
    elif kind in ("runs", "counts") and not {"there", "no_regime"} & set(row):
        yield f"{verdict} without the regime of its source: `here` and `there`, or `no_regime`"
    elif kind in ("runs", "counts") and not stated and "no_regime" not in row:
        yield f"{verdict} of a source that states no size: undecided"


def judged(evidence: Path, results: Path) -> list[dict[str, Any]]:
    """The claims of a file, as `examined`.

    Raises: `BadValueError` for every verdict that is `refused`, and as `examined`.
    """
    rows = examined(evidence, results)
    wrong = [f"{row['claim']!r}: {reason}" for row in rows for reason in row["refused"]]
    if wrong:
        raise BadValueError(f"{evidence.name} says more than its rules allow:\n" + "\n".join(wrong))
    return rows


def examined(evidence: Path, results: Path) -> list[dict[str, Any]]:
    """Claims of a file with their findings, regimes, power, and the rules that each breaks (`refused`), in order.

    Args:
        evidence: the file: `[sources]` and `[testbeds]`, regimes by name, and `[[claim]]`.
        results: the folder of stored results; its regimes.json has the testbeds that were measured.

    Raises: `BadValueError` for a regime or a contrast that is not there.
    """
    document = tomllib.loads(evidence.read_text(encoding="utf-8"))
    testbeds = {**_stored(results / "regimes.json"), **document["testbeds"]}
    rows = []
    for row in document["claim"]:
        unknown = [name for name in row.get("here", []) if name not in testbeds]
        if unknown or row.get("there", "") not in {"", *document["sources"]}:
            raise BadValueError(f"{unknown or row['there']} of {row['claim']!r} is no regime of {evidence.name}")
        here = {name: testbeds[name] for name in row.get("here", [])}
        there = document["sources"][row["there"]] if "there" in row else {}
        power = seen(row, results)
        p = power.p if power and power.p is not None else row.get("p")
        far = differs(list(here.values()), there)
        stated = "parameters" in there
        made: dict[str, Any] = {
            "testbeds": here,
            "of_source": there,
            "far": far,
            "seen": power,
            "p_sign_flip": p,
            "stated": stated,
        }
        single = [seen({"contrast": [contrast]}, results) for contrast in row.get("contrast", ())]
        trained = [file for file in row.get("data", ()) if has_runs(results / Path(file).name)]
        powers = [x for x in (power, *single) if x is not None]
        made["refused"] = refused(row, far, powers, stated=stated, trained=trained)
        rows.append({"found": row["verdict"], **row, **made})
    return rows
