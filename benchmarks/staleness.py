"""How runs of sweeps end, and how many of them rise before they fall: prosperity before collapse (arXiv:2510.01161).

    offdrift sweep recipes/epochs.toml --jobs 2
    python benchmarks/staleness.py runs/epochs runs/staleness-400 --json benchmarks/results/staleness_grids.json
    python benchmarks/staleness.py --keep FILE --json FILE         what is stored, measured again

Of each run the held-out reward at the start, at its highest evaluation, and at the end, the mean of the evaluations in the
last tenth of its updates, the last one at least. (Until 2026-11-29 the last two, which of a run that is evaluated three
times is half of it; `--keep FILE` makes a stored file anew by this definition.) Written down before any run was looked at:

    rises      an evaluation is above the start by three standard errors of their difference (of single responses,
               unpaired: two would be passed by chance in one of eight runs with ten evaluations)
    falls      the end is below 70 % of the start
    prospers   it rises and then falls
    overtakes  an evaluation is above that of PPO's clip at the same update, seed and values by three standard errors,
               and the end is below that of PPO's clip by three: what the paper describes

Then by arm and values: means over seeds with Student intervals of 95 %, and the change less the baseline's, paired by
seed, decided by Holm's procedure within a sweep. ESS is of sequences, the median over updates at 75 to 100 % of the
largest lag. Of epochs times minibatches also, by arm: the change with every doubling of epochs and of minibatches (least
squares in each seed's grid), how many runs fall by updates a batch, and, at equal updates a batch, more epochs less more
minibatches (the mean of all pairs of cells, by seed). Reads finished runs; seconds.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median

import numpy as np
from measure import machine

from offdrift.records.atomic import plain
from offdrift.show.json_access import number, read_lines
from offdrift.stats import compare_all, over_seeds

ERRORS, KEPT, LAST, STRETCH = 3.0, 0.7, 0.1, 0.75
CLIPS = ("ppo_clip", "ppo_bypass")
"""Arms that are PPO's clip on all of the lag."""
REUSE = ("optim.epochs", "optim.minibatches")
REUSE_WORDS = {
    "change": "end less start, mean of the cells of more than one update a batch",
    "epochs": "with every doubling of epochs",
    "minibatches": "with every doubling of minibatches",
    "epochs_less_minibatches": "more epochs less more minibatches at equal updates",
}


def standard_error(p: float, q: float, n: int) -> float:
    """Of the difference of two rates over n responses each."""
    return math.sqrt((p * (1 - p) + q * (1 - q)) / n)


def summary(folder: Path, row: dict) -> dict | None:
    """What a run of a sweep's folder did, without comparing it; None if it is not finished."""
    files = folder / row["folder"] / "arms" / row["arm"]
    rows, updates = read_lines(files / "eval.jsonl")[0], read_lines(files / "metrics.jsonl")[0]
    if row["status"] != "finished":
        return None
    held_out = {int(r["update"]): float(r["reward"]) for r in rows}
    responses = int(rows[0]["prompts"]) * int(rows[0]["samples"])
    lags = [x if (x := number(r.get("version_lag/max"))) is not None else 0.0 for r in updates]
    pairs = zip(lags, (number(r.get("full/ess_seq_frac")) for r in updates), strict=True)
    ess = [x for lag, x in pairs if lag >= STRETCH * max(lags) and x is not None]
    return {
        "arm": row["arm"],
        "values": row["values"],
        "seed": row["seed"],
        "updates": len(updates),
        "lag": max(lags),
        "ess": median(ess) if ess else None,
        **rewards_of(held_out, responses),
        "held_out": held_out,
        "responses": responses,
    }


def rewards_of(held_out: dict[int, float], responses: int) -> dict:
    """What a run's evaluations come to."""
    values = list(held_out.values())
    first, last = values[0], at_the_end(held_out)
    end = math.fsum(last) / len(last)
    return {
        "start": first,
        "highest": max(values[1:]),
        "end": end,
        "rises": any(v - first > ERRORS * standard_error(v, first, responses) for v in values[1:]),
        "falls": end < KEPT * first,
    }


def at_the_end(held_out: dict[int, float]) -> list[float]:
    """The evaluations in the last tenth of the updates."""
    return [value for at, value in held_out.items() if at >= (1 - LAST) * max(held_out)]


def overtakes(run: dict, clip: dict) -> bool:
    """Whether a run stands above PPO's clip somewhere and below it at the end, both beyond noise."""
    n = run["responses"]
    pairs = [(v, clip["held_out"][at]) for at, v in run["held_out"].items() if at in clip["held_out"]]
    above = any(a - b > ERRORS * standard_error(a, b, n) for a, b in pairs)
    many = n * len(at_the_end(run["held_out"]))
    return above and clip["end"] - run["end"] > ERRORS * standard_error(clip["end"], run["end"], many)


def of_sweep(folder: Path, stored: dict | None = None) -> dict:
    """The runs of a sweep that are finished, and its settings over seeds.

    Args:
        stored: what was written of the same sweep before, for runs that the folder does not have.
    """
    content = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))
    runs = [run for row in content["runs"] if (run := summary(folder, row)) is not None]
    here = {(named(run["arm"], run["values"]), run["seed"]) for run in runs}
    earlier = [
        run for sweep in (stored or {}).get("sweeps", ()) if sweep["name"] == content["name"] for run in sweep["runs"]
    ]
    earlier = [run for run in earlier if (named(run["arm"], run["values"]), run["seed"]) not in here]
    runs = [measured(run) for run in earlier] + runs
    names = {s["name"]: named(s["arm"], s["values"]) for s in content["settings"]}
    against = {names[s["name"]]: names[s["baseline"]] for s in content["settings"] if s["baseline"] in names}
    facts = {"name": content["name"], "changes": content["changes"], "versions": content["versions"]}
    if stored and earlier:
        facts["earlier"] = {"machine": stored["machine"], "runs": len(earlier)}
    return facts | {"of": len(content["runs"])} | over_settings(runs, against)


def measured(run: dict) -> dict:
    """A stored run, its rewards measured as they are today."""
    held_out = {int(at): x for at, x in run["held_out"].items()}
    return {**run, **rewards_of(held_out, run["responses"]), "held_out": held_out}


def again(sweep: dict) -> dict:
    """A stored sweep, measured as it would be today; against a baseline is what was against one."""
    compared = {row["setting"]: "less_baseline" in row for row in sweep["settings"]}
    base = [row for row in sweep["settings"] if not compared[row["setting"]]]
    against = {}
    for row in sweep["settings"]:
        if compared[row["setting"]]:
            near = [b for b in base if b["values"] == row["values"]] or [b for b in base if b["arm"] == row["arm"]]
            against[row["setting"]] = (near or base)[0]["setting"]
    kept = {key: sweep[key] for key in sweep if key not in ("settings", "runs", "reuse")}
    return kept | over_settings([measured(run) for run in sweep["runs"]], against)


def over_settings(runs: list[dict], against: dict[str, str]) -> dict:
    """Runs, and their settings over seeds, those of `against` compared with their baselines."""
    by_setting: dict[str, dict[int, dict]] = {}
    for run in runs:
        by_setting.setdefault(named(run["arm"], run["values"]), {})[run["seed"]] = run
    for run in runs:
        rows = [by_setting.get(named(clip, run["values"]), {}).get(run["seed"]) for clip in CLIPS]
        run["overtakes"] = [overtakes(run, clip) for clip in rows if clip is not None and clip is not run]
    against = {s: b for s, b in against.items() if s in by_setting and b in by_setting}
    change = {s: {seed: r["end"] - r["start"] for seed, r in rows.items()} for s, rows in by_setting.items()}
    decided = dict(zip(against, compare_all([(change[s], change[b]) for s, b in against.items()], larger="better")))
    settings = []
    for name, rows in by_setting.items():
        first = next(iter(rows.values()))
        row = {"setting": name, "arm": first["arm"], "values": first["values"], "seeds": sorted(rows)}
        row |= {k: asdict(over_seeds([r[k] for r in rows.values()])) for k in ("start", "end")}
        row |= {"change": asdict(over_seeds(list(change[name].values())))}
        row |= {"ess": sorted(r["ess"] for r in rows.values() if r["ess"] is not None)}
        row |= {k: sum(bool(r[k]) for r in rows.values()) for k in ("rises", "falls")}
        row["prospers"] = sum(r["rises"] and r["falls"] for r in rows.values())
        row["overtakes"] = sum(any(r["overtakes"]) for r in rows.values())
        if name in decided:
            c = decided[name]
            row["less_baseline"] = asdict(c.difference) | {"p_holm": c.p_adjusted, "verdict": c.verdict}
        settings.append(row)
    content = {"settings": settings, "runs": runs}
    return content | ({"reuse": of_reuse(runs)} if runs and set(runs[0]["values"]) == set(REUSE) else {})


def of_reuse(runs: list[dict]) -> list[dict]:
    """Of each arm on a grid of epochs and minibatches; the seeds are those that have the whole grid."""
    arms: dict[str, dict[int, dict[tuple[int, int], dict]]] = {}
    for run in runs:
        cell = run["values"]["optim.epochs"], run["values"]["optim.minibatches"]
        arms.setdefault(run["arm"], {}).setdefault(run["seed"], {})[cell] = run
    whole = max(len(grid) for seeds in arms.values() for grid in seeds.values())
    rows = []
    for arm, seeds in arms.items():
        slopes, pairs, ends = [], [], []
        for grid in (grid for grid in seeds.values() if len(grid) == whole):
            change = {cell: run["end"] - run["start"] for cell, run in grid.items()}
            x = np.array([[1.0, math.log2(e), math.log2(m)] for e, m in change])
            slopes.append(np.linalg.lstsq(x, np.array(list(change.values())), rcond=None)[0])
            equal = [(a, b) for a in change for b in change if a[0] * a[1] == b[0] * b[1] and a[0] > b[0]]
            pairs.append(mean(change[a] - change[b] for a, b in equal))
            ends.append(mean(change[cell] for cell in change if cell[0] * cell[1] > 1))
        row = {
            "arm": arm,
            "falls": {},
            "seeds": len(ends),
            "change_by_seed": ends,
            "epochs_less_minibatches_by_seed": pairs,
        }
        for grid in seeds.values():
            for (e, m), run in grid.items():
                count = row["falls"].setdefault(str(e * m), [0, 0])
                count[0] += run["falls"]
                count[1] += 1
        numbers = {"change": ends, "epochs": [w[1] for w in slopes], "minibatches": [w[2] for w in slopes]}
        numbers["epochs_less_minibatches"] = pairs
        rows.append(row | {name: asdict(over_seeds(list(map(float, x)))) for name, x in numbers.items()})
    return rows


def named(arm: str, values: dict) -> str:
    """A setting in words."""
    words = ", ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in values.items())
    return f"{arm} ({words})" if words else arm


def show(content: dict) -> None:
    """The table of a sweep."""
    print(f"\n{' '.join([content['name'], *content['changes']])}: {len(content['runs'])} of {content['of']} runs\n")
    print("| setting | seeds | end less start | less the baseline | ESS | rise | fall | both | overtake |")
    for row in content["settings"]:
        change, less = row["change"], row.get("less_baseline")
        cells = [
            row["setting"],
            str(len(row["seeds"])),
            f"{change['mean']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})",
        ]
        cells += [f"{less['mean']:+.3f} ({less['low']:+.3f} to {less['high']:+.3f}) {less['verdict']}" if less else ""]
        cells += [f"{row['ess'][0]:.2g} to {row['ess'][-1]:.2g}" if row["ess"] else ""]
        print("|", " | ".join([*cells, *(str(row[k]) for k in ("rises", "falls", "prospers", "overtakes"))]), "|")
    for row in content.get("reuse", ()):
        falls = ", ".join(f"{a} of {b} at {updates}" for updates, (a, b) in sorted(row["falls"].items(), key=by_number))
        print(f"\n{row['arm']}, {row['seeds']} seeds: runs that fall by updates a batch: {falls}")
        for name, words in REUSE_WORDS.items():
            print(f"    {words}: {row[name]['mean']:+.3f} ({row[name]['low']:+.3f} to {row[name]['high']:+.3f})")


def by_number(item: tuple[str, list[int]]) -> int:
    return int(item[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="of sweeps")
    parser.add_argument("--json", type=Path, help="the file that is written")
    parser.add_argument(
        "--add", type=Path, help="a file of earlier runs of these sweeps: those that no folder has count too"
    )
    parser.add_argument("--keep", type=Path, help="a stored file, whose sweeps that no folder has are measured again")
    args = parser.parse_args()
    stored = json.loads(args.add.read_text(encoding="utf-8")) if args.add else None
    sweeps = [of_sweep(folder, stored) for folder in args.folders]
    before = json.loads(args.keep.read_text(encoding="utf-8")) if args.keep else {"sweeps": []}
    here = {(sweep["name"], *sweep["changes"]) for sweep in sweeps}
    kept = [again(sweep) for sweep in before["sweeps"] if (sweep["name"], *sweep["changes"]) not in here]
    if sweeps:  # made here; the others say where they were
        kept = [{"machine": before["machine"], **sweep} for sweep in kept]
    sweeps += kept
    for content in sweeps:
        show(content)
    if args.json:
        where = machine("transformers") if args.folders else before["machine"]
        text = json.dumps(plain({"machine": where, "sweeps": sweeps}))
        # Six digits, as in packed runs, and no indentation: the file has every evaluation of every run.
        args.json.write_text(json.dumps(json.loads(text, parse_float=lambda x: float(f"{float(x):.6g}"))) + "\n")


if __name__ == "__main__":
    main()
