"""What `benchmarks/out_of_sample.py` found: numbers with intervals, and the tables of docs/diagnosis.md.

python -m benchmarks.out_of_sample_tables        # writes the page's tables from results/out_of_sample.json
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.out_of_sample_cases import NAMES, REGIMES

from offdrift.certificate import clopper_pearson
from offdrift.stats.seeds import over_seeds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "out_of_sample.json"
BEFORE = ROOT / "benchmarks" / "results" / "out_of_sample_before.json"
"""The runs of seed 0, judged by the rules of their time; what they showed was mended, so they judge nothing since."""
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- out of sample: made by benchmarks/out_of_sample_tables.py -->", "<!-- out of sample: end -->"
LOST = 0.7
"""A run has lost what it could do when its last held-out reward is below this share of its first."""
HARMFUL = 0.02
"""KL in nat per token from which the survey no longer calls a run healthy."""
Row = dict[str, Any]


def planted_of(row: Row) -> list[str]:
    """The causes of a run."""
    return [p["cause"] for p in row["case"]["plants"]]


def names(cause: str) -> tuple[str, ...]:
    """What a finding of this cause is called."""
    return NAMES.get(cause, (cause,))


def listed(row: Row, cause: str) -> bool:
    """Whether a planted cause is among the findings."""
    return any(name in row["causes"] for name in names(cause))


def first(row: Row) -> str:
    """What stands first, "clean" if nothing does."""
    return row["causes"][0] if row["causes"] else "clean"


def is_right(row: Row) -> bool:
    """Whether the first finding names a planted cause, or a clean run has none."""
    planted = planted_of(row)
    return any(first(row) in names(cause) for cause in planted) if planted else not row["causes"]


def lost(result: Row) -> bool:
    """Whether a run unlearned the task."""
    return result["held_out"][-1] < LOST * result["held_out"][0]


def share(events: int, draws: int) -> str:
    """A share with its exact interval, in words."""
    if not draws:
        return "none"
    e = clopper_pearson(events, draws)
    return f"{events} of {draws} ({100 * e.low:.0f} to {100 * e.high:.0f} %)"


def counted(rows: Sequence[Row], holds: Callable[[Row], bool]) -> str:
    """In how many of the rows something holds."""
    return share(sum(map(holds, rows)), len(rows))


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers that are quoted elsewhere."""
    clean, one = [r for r in rows if not planted_of(r)], [r for r in rows if len(planted_of(r)) == 1]
    two = [r for r in rows if len(planted_of(r)) == 2]
    large = [r for r in one if r["first"]["k3"] > HARMFUL]
    fixed = [r for r in rows if r["fixed"] is not None]
    return {
        "runs": len(rows),
        "clean and silent": counted(clean, is_right),
        "one cause, first": counted(one, is_right),
        "one cause, among the findings": counted(one, lambda r: listed(r, planted_of(r)[0])),
        "one cause, silent": counted(one, lambda r: not r["causes"]),
        "one cause, KL above .02, first": counted(large, is_right),
        "one cause, KL above .02, among the findings": counted(large, lambda r: listed(r, planted_of(r)[0])),
        "any cause, first": counted([*one, *two], is_right),
        "two causes, one of them first": counted(two, is_right),
        "two causes, both among the findings": counted(two, lambda r: all(listed(r, c) for c in planted_of(r))),
        "two causes, one at least among the findings": counted(two, lambda r: any(listed(r, c) for c in planted_of(r))),
        "first finding, of all with one": dict(Counter(r["applied"] for r in rows if r["causes"])),
        "all fixes": fixes(fixed),
        "fixes by configuration": fixes([r for r in fixed if r["applied"] == "configuration"]),
        "fixes by repair": fixes([r for r in fixed if r["applied"] == "repair"]),
        "fixes where the first finding was right": fixes([r for r in fixed if is_right(r)]),
        "fixes where it was wrong": fixes([r for r in fixed if not is_right(r)]),
    }


def fixes(rows: Sequence[Row]) -> dict[str, str]:
    """What fixes did, runs repeated with the same seed."""
    gains = [r["fixed"]["held_out"][-1] - r["first"]["held_out"][-1] for r in rows]
    ratios = [math.log10(ratio) for r in rows if (ratio := drift_ratio(r)) is not None]
    before = [r for r in rows if lost(r["first"])]
    return {
        "runs": str(len(rows)),
        "KL at most half": counted(rows, halved),
        "KL times, geometric mean": _mean(ratios, lambda x: f"{10**x:.2g}"),
        "held-out reward": _mean(gains, lambda x: f"{x:+.3f}"),
        "held-out reward up by more than .1": counted(rows, lambda r: gain(r) > 0.1),
        "held-out reward down by more than .1": counted(rows, lambda r: gain(r) < -0.1),
        "loss averted": counted(before, lambda r: not lost(r["fixed"])),
        "loss brought about": counted([r for r in rows if not lost(r["first"])], lambda r: lost(r["fixed"])),
        "no finding afterwards": counted(rows, lambda r: not r["causes_after"]),
    }


def gain(row: Row) -> float:
    """What the fix did to the held-out reward."""
    return row["fixed"]["held_out"][-1] - row["first"]["held_out"][-1]


def drift_ratio(row: Row) -> float | None:
    """KL after the fix over KL before; below 1e-7 nat is rounding. None where either is not a number."""
    before, after = row["first"]["k3"], row["fixed"]["k3"]
    if not all(isinstance(x, (int, float)) and math.isfinite(x) for x in (before, after)):
        return None
    return max(after, 1e-7) / max(before, 1e-7)


def halved(row: Row) -> bool:
    """Whether drift is at most half of what it was."""
    ratio = drift_ratio(row)
    return ratio is not None and ratio <= 0.5


def _mean(values: Sequence[float], text: Callable[[float], str]) -> str:
    if not values:
        return "none"
    m = over_seeds(values)
    if not math.isfinite(m.low):
        return f"{text(m.mean)} ({len(values)} run)"
    return f"{text(m.mean)} ({text(m.low)} to {text(m.high)})"


def render(content: Row, before: Row | None = None) -> str:
    """The section's tables, with the first one's numbers of earlier runs beside it."""
    rows = content["runs"]
    one, numbers = [r for r in rows if len(planted_of(r)) == 1], summary(rows)
    parts = [f"{len(rows)} runs, seed {content['seed']}; shares with exact 95 % intervals, means with Student's."]
    columns = {f"{len(rows)} runs, seed {content['seed']}": numbers}
    if before is not None and before["seed"] != content["seed"]:
        columns[f"before: {len(before['runs'])} runs, seed {before['seed']}"] = summary(before["runs"])
    shown = {name: headline(x) for name, x in columns.items()}
    parts.append(table([
        ["", *shown], ["---"] * (1 + len(shown)), *([k, *(x[k] for x in shown.values())] for k in headline(numbers)),
    ]))  # fmt: skip
    parts.append("One cause planted, and what stands first:\n\n" + matrix(rows))
    causes = sorted({c for r in rows for c in planted_of(r)})
    parts.append("By cause, alone or with another:\n\n" + table([
        ["cause", "among the findings", "first, where it is alone", "nothing reported, where it is alone"],
        ["---"] * 4,
        *([c, counted([r for r in rows if c in planted_of(r)], lambda r, c=c: listed(r, c)),
           counted(alone := [r for r in one if planted_of(r) == [c]], is_right),
           counted(alone, lambda r: not r["causes"])] for c in causes),
    ]))  # fmt: skip
    parts.append("By what the pipeline is:\n\n" + table([
        ["pipeline", "right first finding, or silence where clean"], ["---", "---"],
        *([g, counted([r for r in rows if r["case"]["regime"] == g], is_right)] for g in REGIMES),
    ]))  # fmt: skip
    keys = ("all fixes", "fixes by configuration", "fixes by repair", "fixes where the first finding was right",
            "fixes where it was wrong")  # fmt: skip
    parts.append("What the first finding's fix does:\n\n" + table([
        ["", *keys], ["---"] * (1 + len(keys)), *([k, *(numbers[x][k] for x in keys)] for k in numbers[keys[0]]),
    ]))  # fmt: skip
    parts.append("By fix:\n\n" + by_fix(rows))
    return "\n\n".join(parts)


def headline(numbers: Row) -> dict[str, str]:
    """What stands first: how often the diagnosis is right, and what its fixes do."""
    shares = {k: v for k, v in numbers.items() if isinstance(v, str)}
    for kind in ("all fixes", "fixes by configuration"):
        shares |= {f"{kind}: {k}": numbers[kind][k] for k in ("KL at most half", "held-out reward", "loss averted")}
    return shares


def matrix(rows: Sequence[Row]) -> str:
    """Rows planted, columns reported first; runs with one cause and clean ones."""
    counts = Counter((planted_of(r)[0] if planted_of(r) else "clean", first(r)) for r in rows if len(planted_of(r)) < 2)
    planted = ["clean", *sorted({p for p, _ in counts} - {"clean"})]
    columns = [*planted, *sorted({q for _, q in counts} - set(planted))]
    cells = [[f"**{p}**", *(f"**{n}**" if (n := counts[p, q]) and q in names(p) else str(n or "") for q in columns)]
             for p in planted]  # fmt: skip
    return table([["planted ↓ first →", *columns], ["---"] + ["---:"] * len(columns), *cells])


def by_fix(rows: Sequence[Row]) -> str:
    """What each fix did, and how often it could not be applied."""
    body = []
    for fix in sorted({r["fix"] for r in rows if r["fix"]}):
        own = [r for r in rows if r["fix"] == fix]
        done = [r for r in own if r["fixed"] is not None]
        effect = fixes(done)
        body.append([f"`{fix}`", str(len(own)), str(len(done)), effect["KL at most half"], effect["held-out reward"]])
    return table([["fix", "proposed", "applied", "KL at most half", "held-out reward"], ["---"] * 5, *body])


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    content, before = (json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS, BEFORE))
    tables = render(content, before)
    above, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{above}{BEGIN}\n\n{tables}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    print(tables)


if __name__ == "__main__":
    main()
