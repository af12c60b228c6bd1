"""Figures 1 to 3 of the Trust Region Masking paper on a tiny model: thresholds, and what the three sweeps say.

    python benchmarks/figures.py --pilot dtype            # thresholds that accept 90 % of a pilot run's responses
    offdrift sweep recipes/figures-dtype.toml             # 8 seeds of 10 arms; likewise figures-lag, figures-moe
    offdrift sweep recipes/backwards-seeds.toml           # README's first picture, read along
    python benchmarks/figures.py --json benchmarks/results/figures.json

A pilot is the arm `token_is` of the sweep, at a seed that the sweep does not have; the thresholds stand in the sweep
files. The last command reads the sweeps' folders in runs/ and writes, for every sweep and arm, over the seeds that all
arms have finished: held-out reward (avg@4) at every evaluation, acceptance, the PPL gap (eq. 25) over time, and the
differences that each figure is about, paired by seed, with intervals by Holm's procedure over those of one figure.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import torch
from measure import machine

from offdrift.check.recommend import calibrated, settings
from offdrift.divergence.evidence import Divergence
from offdrift.logprobs import LogProbs
from offdrift.records.readers import detect, pieces, read
from offdrift.segments import Segments
from offdrift.stats import compare_all, over_seeds
from offdrift_lab.train.loop.loop import train
from offdrift_lab.train.settings.recipe import load_recipe
from offdrift_lab.train.sweep.sweep import Grid, dotted, load_sweep
from offdrift_lab.train.sweep.sweep_results import curve

KINDS = ("dtype", "lag", "moe", "long-lag", "long-moe")
ACCEPTANCE = 0.9
PILOT_SEED = 100
GAP, KEPT, KL = "full/log_ppl_gap", "gate/acceptance_seq", "divergence/kl_rollout_current_mean"
FIGURES = {
    "figure 1": (("ppo_clip", "token_is"),),
    "figure 2": (("trm_max", "ppo_clip"), ("trm_avg", "ppo_clip")),
    "figure 2, calibrated": (("max_90", "ppo_clip"), ("avg_90", "ppo_clip")),
    "figure 3": (("loose_both", "loose_max"), ("loose_both", "loose_avg")),
    "mask and TIS": (("mask_tis", "trm_max"), ("mask_tis", "token_is")),
    "masks and none": tuple((arm, "token_is") for arm in ("trm_max", "trm_avg", "loose_max", "max_90", "avg_90")),
}
"""What is compared with what; the comparisons of one line are decided together."""
LONG = FIGURES | {"figure 3 and none": tuple((arm, "token_is") for arm in ("loose_max", "loose_avg", "loose_both"))}
README = {"README": tuple((arm, "none") for arm in ("token_tis", "trm_max", "ppo_clip"))}
SWEEPS = {
    **{f"figures-{kind}": LONG if kind.startswith("long") else FIGURES for kind in KINDS},
    "backwards-seeds": README,
}
"""Sweeps, and what of them is compared."""
THIRD = 8
"""Updates over which curves are averaged."""


def grid_of(name: str) -> Grid:
    """A sweep as it stands in runs/."""
    return load_sweep(Path(f"recipes/{name}.toml"))


def pilot(kind: str, folder: Path) -> Path:
    """A run of token_is that keeps its tokens, at a seed of its own; the arm's folder."""
    fixed = {k: v for k, v in dotted(grid_of(f"figures-{kind}").sweep.fixed).items() if not k.startswith("arms.")}
    changes = [f"{key}={json.dumps(value)}" for key, value in fixed.items()]
    recipe = load_recipe(
        Path("recipes/figures.toml"), changes=[*changes, f"seed={PILOT_SEED}", "log.tokens=true"], arm="token_is"
    )
    train(recipe, folder, resume=(folder / "run.json").exists())
    return folder / "arms" / "token_is"


def thresholds(arm: Path) -> dict[str, float]:
    """Limits on the largest and the mean token KL of a response that accept `ACCEPTANCE` of a run's responses, nats."""
    detected = detect([str(arm / "log")])
    batches = [batch for piece in pieces(detected) for batch in read(piece, detected).batches]
    logprobs = LogProbs.pack(
        torch.cat([b.logp_rollout for b in batches]),
        torch.cat([b.logp for b in batches]),
        segments=Segments.from_lengths(torch.cat([b.cu_seqlens.diff() for b in batches]).tolist()),
    )
    kl = Divergence.exact("kl_rollout_current", torch.cat([b.divergences["kl_rollout_current"] for b in batches]))
    table = calibrated(logprobs, {"kl_rollout_current": kl}, acceptance=ACCEPTANCE)
    return {name: settings(table, name)["gate.high"] for name in ("trm_max", "trm_avg")}


def thirds(values: list[float]) -> list[float]:
    """Means over successive spans of `THIRD` updates."""
    return [mean(values[i : i + THIRD]) for i in range(0, len(values), THIRD)]


def told_apart(grid: Grid, figures: dict[str, tuple[tuple[str, str], ...]]) -> dict:
    """What a sweep's finished runs say, over the seeds that every arm has finished."""
    seeds = [s for s in grid.sweep.seeds if all(c.status == "finished" for c in grid.cells if c.seed == s)]
    cells = {(c.setting.arm, c.seed): c for c in grid.cells if c.seed in seeds}
    arms, reward, gap = {}, {}, {}
    for arm in dict.fromkeys(s.arm for s in grid.settings):
        own = [cells[arm, seed] for seed in seeds]
        held_out = [[v for _, v in curve(c, "held_out")] for c in own]
        gaps, kept, kls = ([[v for _, v in curve(c, metric)] for c in own] for metric in (GAP, KEPT, KL))
        reward[arm] = {seed: x[-1] for seed, x in zip(seeds, held_out)}
        gap[arm] = {seed: mean(x) for seed, x in zip(seeds, gaps)}
        arms[arm] = {
            "held_out": [asdict(over_seeds(list(at))) for at in zip(*held_out)],
            "ppl_gap": asdict(over_seeds([mean(x) for x in gaps])),
            "ppl_gap_over_time": [asdict(over_seeds(list(at))) for at in zip(*map(thirds, gaps))],
            "acceptance": asdict(over_seeds([mean(x) for x in kept])),
            "acceptance_over_time": [asdict(over_seeds(list(at))) for at in zip(*map(thirds, kept))],
            "kl_mean": asdict(over_seeds([mean(x) for x in kls])),
            "held_out_by_seed": reward[arm],
            "collapsed": sum(x[-1] < x[0] for x in held_out),
        }
    compared = []
    for figure, pairs in figures.items():
        pairs = tuple((a, b) for a, b in pairs if a in arms and b in arms)
        for what, numbers, larger in (("held-out", reward, "better"), ("PPL gap", gap, "worse")):
            decided = compare_all([(numbers[a], numbers[b]) for a, b in pairs], larger=larger, alpha=0.05)
            for (arm, base), c in zip(pairs, decided):
                row = {"figure": figure, "arm": arm, "less": base, "of": what}
                compared.append(row | asdict(c.difference) | {"p_holm": c.p_adjusted, "verdict": c.verdict})
    versions = json.loads((next(iter(cells.values())).folder / "run.json").read_text())["versions"] if cells else {}
    return {"seeds": seeds, "set": grid.sweep.fixed, "versions": versions, "arms": arms, "compared": compared}


def show(name: str, content: dict) -> None:
    """The tables of a sweep."""
    print(
        f"\n{name}: seeds {content['seeds']}\n\n| arm | held-out reward | ends below its start | PPL gap | KL | kept |"
    )
    for arm, row in content["arms"].items():
        first, m, gap, kept = row["held_out"][0]["mean"], row["held_out"][-1], row["ppl_gap"], row["acceptance"]
        cells = [f"{first:.3f} -> {m['mean']:.3f} ({m['low']:.3f} to {m['high']:.3f})", str(row["collapsed"])]
        over_time = ", ".join(f"{x['mean']:.3g}" for x in row["ppl_gap_over_time"])
        cells += [f"{gap['mean']:.3g} ({gap['low']:.3g} to {gap['high']:.3g}): {over_time}"]
        shares = ", ".join(f"{x['mean']:.0%}" for x in row["acceptance_over_time"])
        print("|", " | ".join([arm, *cells, f"{row['kl_mean']['mean']:.2g}", f"{kept['mean']:.1%}: {shares}"]), "|")
    print("\n| figure | difference | of | mean | p (Holm) | |")
    for c in content["compared"]:
        interval = f"{c['mean']:+.3g} ({c['low']:+.3g} to {c['high']:+.3g})"
        cells = [c["figure"], f"{c['arm']} less {c['less']}", c["of"], interval, f"{c['p_holm']:.3g}", c["verdict"]]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pilot", choices=KINDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pilot:
        folder = Path(f"runs/figures-pilot-{options.pilot}")
        print(json.dumps(thresholds(pilot(options.pilot, folder))))
    else:
        grids = {name: grid_of(name) for name in SWEEPS if Path("runs", name).exists()}
        document = {name: told_apart(grid, SWEEPS[name]) for name, grid in grids.items()}
        for name, content in document.items():
            if content["seeds"]:
                show(name, content)
        if options.json:
            options.json.write_text(json.dumps({"machine": machine(), "sweeps": document}, indent=1) + "\n")
