"""What the runs of `benchmarks/severity.py` say of each rule: numbers with intervals, live levels, and the table of docs.

A run **loses its reward** within N updates of a finding at update u if an evaluation after u and at most at u + N is
below 70 % of the best evaluation up to u. A run whose last evaluation up to u is below 70 % of that best **had lost it
already**: such findings come too late to foretell anything and are counted apart. Findings with fewer than N updates
left are left out. The **base rate** is the share of all runs that had not lost their reward at u and lose it within N,
averaged over the updates at which the rule's findings were told.

Levels are set on half of the warm starts and tested on the other half.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.field.score import wilson

from offdrift.judge.rules import Rules, load_rules

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "severity.json"
RECORD = ROOT / "src" / "offdrift" / "judge" / "track_record.toml"
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- severity: made by benchmarks/severity.py -->", "<!-- severity: end -->"
HORIZONS = (10, 20, 40)
WITHIN = 20
"""The horizon that levels are set by, in updates."""
LOST = 0.3
"""Share of the best reward that is lost: `reward_lost` of the rules."""
STOP, ACT = 0.8, 0.5
"""Shares of runs that lose their reward from which on a level says so."""
MARGIN = 0.1
FEWEST = 10
"""Findings from which on a level is set by them."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Seen:
    """The findings of one rule, or all first ones of a level, over the runs of some starts."""

    told: int = 0
    """Findings told in time, with enough updates left."""
    fell: int = 0
    """Of those, in runs that lost their reward."""
    base: float = 0.0
    """Share of all runs at the same updates that lose it."""
    late: int = 0
    """Findings told when the reward was lost already."""
    still: int = 0
    """Of those, in runs that had it not back at the last evaluation within the horizon."""

    @property
    def share(self) -> float:
        return self.fell / self.told if self.told else 0.0

    def cells(self) -> list[str]:
        """Found, with interval, base rate, and what was told late."""
        late = f"{self.still} of {self.late}" if self.late else ""
        return [f"{self.fell} of {self.told}", _interval(self), f"{100 * self.base:.0f} %" if self.told else "", late]


def _interval(seen: Seen) -> str:
    if not seen.told:
        return ""
    low, high = wilson(seen.fell, seen.told)
    return f"{100 * low:.0f} to {100 * high:.0f} %"


def outcome(run: Row, update: int, within: int) -> str:
    """What becomes of a run after an update: "fell", "held"; "still", "back" if it had fallen already; "" unknown."""
    evals = run["held_out"]
    if update + within > evals[-1][0]:
        return ""
    before = [reward for at, reward in evals if at <= update]
    after = [reward for at, reward in evals if update < at <= update + within]
    floor = (1 - LOST) * max(before)
    if before[-1] < floor:
        return "still" if after[-1] < floor else "back"
    return "fell" if min(after) < floor else "held"


def base_rates(runs: Sequence[Row], within: int) -> Callable[[int], float]:
    """Share of the runs that have their reward at an update and lose it within so many."""

    @cache
    def rate(update: int) -> float:
        found = [outcome(run, update, within) for run in runs]
        at_risk = found.count("fell") + found.count("held")
        return found.count("fell") / at_risk if at_risk else 0.0

    return rate


def seen(runs: Sequence[Row], told: Callable[[Row], int | None], within: int, rate: Callable[[int], float]) -> Seen:
    """Count what became of the runs in which something was told.

    Args:
        told: the update at which it was told in a run; None if never.
    """
    pairs = [(run, update) for run in runs if (update := told(run)) is not None]
    found = [(outcome(run, update, within), update) for run, update in pairs]
    in_time = [update for how, update in found if how in ("fell", "held")]
    base = sum(map(rate, in_time)) / len(in_time) if in_time else 0.0
    counts = {key: sum(how == key for how, _ in found) for key in ("fell", "still", "back")}
    return Seen(len(in_time), counts["fell"], base, counts["still"] + counts["back"], counts["still"])


def of_rule(name: str) -> Callable[[Row], int | None]:
    """When a rule was first told in a run."""
    return lambda run: run["findings"].get(name)


def of_level(levels: Mapping[str, str], level: str) -> Callable[[Row], int | None]:
    """When any rule of a level was first told in a run."""
    return lambda run: min((at for rule, at in run["findings"].items() if levels.get(rule) == level), default=None)


def halves(runs: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Runs by whose numbers levels are set, and runs that test them: of other warm starts and seeds."""
    return [r for r in runs if r["start"] % 2 == 0], [r for r in runs if r["start"] % 2]


def supported(seen: Seen, severity: str) -> tuple[str, str]:
    """The level that the findings of a rule support, and why.

    A share counts from `STOP` or `ACT` on, if its interval does not reach `MARGIN` below: what is just over the line on
    the runs that set a level is under it on others. A level above the rule's own severity has to beat the base rate.
    """
    if seen.told >= FEWEST:
        fell, of, words = seen.fell, seen.told, f"lose their reward within {WITHIN} updates"
    elif seen.late >= FEWEST and seen.late > seen.told:
        fell, of, words = seen.still, seen.late, f"of those told after the loss are not back {WITHIN} updates later"
    elif severity == "stop":
        return "act", "too few findings for a forecast"
    else:
        return severity, "too few findings: as in an audit"
    low = wilson(fell, of)[0]
    level = next(
        (x for x, least in (("stop", STOP), ("act", ACT)) if fell >= least * of and low > least - MARGIN), "watch"
    )
    why = f"{100 * fell / of:.0f} % {words}"
    if seen.told >= FEWEST and _weaker(severity, level) and low <= seen.base:
        return severity, f"{why}, no more than other runs"
    return level, why


def levels_of(setting: Sequence[Row], rules: Rules) -> dict[str, tuple[str, str]]:
    """Live level and its reason, of every rule that was told in some run."""
    rate = base_rates(setting, WITHIN)
    table = {}
    for name in {rule for run in setting for rule in run["findings"]}:
        rule = rules.rules.get(name)
        if rule is None or rule.severity == "info":
            continue
        level, why = supported(seen(setting, of_rule(name), WITHIN, rate), rule.severity)
        if rule.fact and _weaker(level, rule.severity):
            level, why = rule.severity, FACT
        elif rule.letter == "A" and rule.severity == "act" and _weaker(level, "act"):
            level, why = "act", f"{why}; it names what to repair, whatever becomes of the reward"
        table[name] = (level, why)
    return table


FACT = "a fact: what it says is certain, and is no forecast"
ORDER = ("watch", "act", "stop")


def _weaker(one: str, other: str) -> bool:
    return ORDER.index(one) < ORDER.index(other)


def compact(packed: Row) -> Row:
    """What is stored of the packed runs: everything but the metrics."""
    runs = [
        {
            **{k: run[k] for k in ("family", "cell", "seed", "start")},
            "held_out": run["held_out"],
            "findings": {f["rule"]: f["update"] for f in reversed(run["findings"])},
        }
        for run in packed["runs"]
    ]
    return {"machine": packed["machine"], "runs": runs}


def record(runs: Sequence[Row], rules: Rules) -> str:
    """The file that judge reads: live level and numbers of every rule that was told in some run, as TOML."""
    setting, _ = halves(runs)
    levels, rate = levels_of(setting, rules), base_rates(runs, WITHIN)
    lines = [
        "# What became of training runs in which a rule was told for the first time, and the level it has while a run",
        "# is going on. Made by `python -m benchmarks.severity --table`; docs/diagnosis.md says how. Not edited by hand.",
        f"# told: in time, with {WITHIN} updates left; fell: of those, lost more than {100 * LOST:.0f} % of the best held-out reward",
        "# within them; base: share of all runs at the same updates; late: told after that loss; still: of those, not back.",
        "",
        f"runs = {len(runs)}",
        f"within = {WITHIN}",
    ]
    for name in (n for n in rules.rules if n in levels):
        level, why = levels[name]
        found = seen(runs, of_rule(name), WITHIN, rate)
        lines += ["", f"[rules.{name}]", f'level = "{level}"', f'why = "{why}"']
        lines += [f"{key} = {getattr(found, key)}" for key in ("told", "fell", "late", "still")]
        lines += [f"base = {found.base:.3f}"]
    return "\n".join(lines) + "\n"


def render(runs: Sequence[Row], rules: Rules) -> str:
    """The tables of the page, as Markdown."""
    setting, testing = halves(runs)
    levels = levels_of(setting, rules)
    by_family = {f: sum(r["family"] == f for r in runs) for f in dict.fromkeys(r["family"] for r in runs)}
    seeds, starts = len({r["seed"] for r in runs}), len({r["start"] for r in runs})
    lost = sum(lost_at(run) is not None for run in runs)
    head = (
        f"{len(runs)} runs ({', '.join(f'{n} of {f}' for f, n in by_family.items())}), {seeds} seeds, {starts} warm "
        f"starts; {lost} of them lose more than {100 * LOST:.0f} % of their best held-out reward at some time. "
        f"Levels were set on {len(setting)} runs and tested on {len(testing)}, of other starts and seeds."
    )
    return "\n".join([head, "", *_levels(testing, levels, rules), "", *_rules(runs, levels, rules), ""])


def lost_at(run: Row) -> int | None:
    """The update of the first evaluation that has lost more than `LOST` of the best before; None if none has."""
    best = 0.0
    for at, reward in run["held_out"]:
        if reward < (1 - LOST) * best:
            return at
        best = max(best, reward)
    return None


def _levels(testing: Sequence[Row], levels: Mapping[str, tuple[str, str]], rules: Rules) -> list[str]:
    """What the first finding of a level foretells, before and after, in runs that set nothing."""
    before = {name: rule.severity for name, rule in rules.rules.items()}
    now = before | {name: level for name, (level, _) in levels.items()}
    facts = {name for name, rule in rules.rules.items() if rule.fact}
    forecasts = {name: level for name, level in now.items() if name not in facts}
    rows = [["first of a run", "levels", *(f"within {n}" for n in HORIZONS), f"95 %, within {WITHIN}", "base rate"]]
    rows += [[*rows[0], "told after the loss, not back"]]
    rows = [rows[1], ["---", "---", *["---:"] * (len(rows[1]) - 2)]]
    for level in reversed(ORDER):
        for words, table in (("before", before), ("now", now), ("now, without facts", forecasts)):
            by = [seen(testing, of_level(table, level), n, base_rates(testing, n)) for n in HORIZONS]
            main = by[HORIZONS.index(WITHIN)]
            counts = [f"{x.fell} of {x.told}" for x in by]
            rows.append([level, words, *counts, *main.cells()[1:]])
    return _table(rows)


def _rules(runs: Sequence[Row], levels: Mapping[str, tuple[str, str]], rules: Rules) -> list[str]:
    """One row per rule that was told in some run."""
    setting, testing = halves(runs)
    rows = [[
        "rule", "in an audit", "live", "set on", "tested on", f"95 % of both, within {WITHIN}", "base rate",
        *(f"within {n}" for n in HORIZONS if n != WITHIN), "told after the loss, not back", "why this level",
    ]]  # fmt: skip
    rows.append(["---"] * 3 + ["---:"] * (len(rows[0]) - 4) + ["---"])
    for name in (n for n in rules.rules if n in levels):
        by = {n: seen(runs, of_rule(name), n, base_rates(runs, n)) for n in HORIZONS}
        parts = [seen(part, of_rule(name), WITHIN, base_rates(part, WITHIN)) for part in (setting, testing)]
        level, why = levels[name]
        rows.append([
            f"`{name}`", rules.rules[name].severity, level, *(f"{p.fell} of {p.told}" for p in parts),
            *by[WITHIN].cells()[1:3], *(f"{by[n].fell} of {by[n].told}" for n in HORIZONS if n != WITHIN),
            by[WITHIN].cells()[3], why,
        ])  # fmt: skip
    return _table(rows)


def _table(rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in rows]


def write(file: Path | None) -> None:
    """Store the packed runs, if a file of them is given; set the levels, and make the table of the page again."""
    if file is not None:
        content = compact(json.loads(gzip.decompress(file.read_bytes())))
        rows = ",\n".join(json.dumps(run, separators=(",", ":")) for run in content.pop("runs"))
        RESULTS.write_text(f'{json.dumps(content)[:-1]},\n"runs": [\n{rows}\n]}}\n', encoding="utf-8")
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    RECORD.write_text(record(runs, load_rules()), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{render(runs, load_rules())}\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(render(runs, load_rules()))
