"""Which stacks are within the survey's mismatch budget, and what do corrections gain there and elsewhere?

    offdrift sweep recipes/factorial.toml
    offdrift sweep recipes/factorial-fp8.toml
    python benchmarks/factorial.py [--runs runs] [--json PATH]

Of every stack (model, precision, grid) the three numbers that the budget limits (`offdrift_lab.evidence.budget`), at the
weights that the runs without correction start from and end with: 256 answers that the stack draws, scored in float32.
A stack is within the budget if all are. Beside them the smallest share of sequences that TRM-Max kept. Then the held-out reward of each correction less that of no correction, by
model, precision, grid and seed: means with Student intervals of 95 %, taking every such difference for an independent
draw. Uses the runs that are finished. Fractions of a CPU minute a seed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

import torch
from measure import machine

from offdrift.engines import make_engine
from offdrift.engines.routing import flip_rate, routers, routes_of
from offdrift.engines.score import divergences, score
from offdrift.judge import num_experts
from offdrift.models import load_model
from offdrift.records.provenance import Sampling
from offdrift.stats import over_seeds
from offdrift_lab.evidence.budget import Mismatch, largest_gain, over_budget
from offdrift_lab.train.data.episodes import rollout
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.sweep.sweep import Cell, load_sweep
from offdrift_lab.train.sweep.sweep_results import number_of

HERE = Path(__file__).parent
RECIPES, RESULTS = HERE.parent / "recipes", HERE / "results" / "factorial.json"
PROMPTS, ARMS = 256, ("token_tis", "trm_max")


@torch.no_grad()
def mismatch(weights: str, cell: Cell, seed: int) -> dict[str, float]:
    """What the budget limits, and the mean KL of a token, of the cell's stack at some weights."""
    own, options = cell.recipe, cell.recipe.rollout
    model, tokenizer = load_model(weights, seed=seed)
    task = find_task(own.task, own.reward)
    mixture = bool(routers(model))
    engine = make_engine(
        "transformers",
        model,
        dtype=options.dtype,
        quantization=options.quantization,
        batch_size=256,
        **({"record_routes": True} if mixture else {}),
    )
    sampling = Sampling(max_tokens=options.max_tokens, stop_token_ids=(tokenizer.eos_token_id,))
    asked = task.sample(PROMPTS, seed=500_000 + seed)
    drawn = rollout(engine, asked, task, tokenizer, sampling, samples=1, seed=seed, evidence="full")
    scores = score(model, drawn.with_(routes=None))
    exact = divergences(drawn, scores.logits)
    log_product = drawn.segments.sum((scores.logp - drawn.logp_rollout).double())
    row = {
        "tv_p95": float(exact["tv_rollout_current"].lo.double().quantile(0.95)),
        "chi2_seq": float((2 * log_product).exp().mean()) - 1,
        "kl_mean": float(exact["kl_rollout_current"].lo.double().mean()),
    }
    if mixture:
        assert drawn.routes is not None
        chosen = routes_of(model, drawn).experts
        row["router_delta"] = float(flip_rate(chosen, drawn.routes.experts, experts=num_experts(model)).mean())
    return row


def stack_of(cell: Cell) -> tuple[str, str, str]:
    return cell.recipe.model, cell.recipe.rollout.dtype, cell.recipe.rollout.quantization or "none"


def interval(values: list[float]) -> dict[str, float | int | None]:
    """Mean and Student interval."""
    mean = over_seeds(values)
    ends = {"mean": mean.mean, "low": mean.low, "high": mean.high}
    return {"n": len(values), **{name: x if math.isfinite(x) else None for name, x in ends.items()}}


def verdict(gain: dict) -> str:
    """Of the conjecture, from the gain within the budget."""
    if gain["low"] is None:
        return "untested: too few pairs within the budget for an interval"
    if gain["low"] >= largest_gain():
        return "falsified"
    return "holds" if gain["high"] < largest_gain() else "undecided"


Stack = tuple[str, str, str]


def measured_stacks(finished: list[Cell]) -> dict[Stack, list[dict]]:
    """The mismatch of every stack, at the weights that its runs without correction begin and end with."""
    stacks: dict[Stack, list[dict]] = defaultdict(list)
    for cell in finished:
        if cell.setting.arm == "none":
            for when, weights in (("start", cell.recipe.model), ("end", str(cell.files.path / "model"))):
                row = mismatch(weights, cell, cell.seed)
                stacks[stack_of(cell)].append({"seed": cell.seed, "weights": when, **row})
    return stacks


def accepted(finished: list[Cell], stack: Stack) -> float | None:
    """The smallest share of sequences that TRM-Max kept in an update of its runs on a stack."""
    runs = [cell for cell in finished if (stack_of(cell), cell.setting.arm) == (stack, "trm_max")]
    return min((row["gate/acceptance_seq"] for cell in runs for row in cell.files.rows("metrics")), default=None)


def row_of(stack: Stack, rows: list[dict], reward: dict[tuple[Stack, str, int], float]) -> dict:
    """A stack's mismatch, the worst of what was measured, whether it is over the budget, and its pairs of rewards."""
    tv, chi2 = (max(r[k] for r in rows) for k in ("tv_p95", "chi2_seq"))
    delta = max(r["router_delta"] for r in rows) if "router_delta" in rows[0] else None
    row = {"model": stack[0], "dtype": stack[1], "quantization": stack[2], "tv_p95": tv, "chi2_seq": chi2}
    row |= {"router_delta": delta, "kl_mean": math.fsum(r["kl_mean"] for r in rows) / len(rows)}
    row |= {"over": over_budget(Mismatch(tv, chi2, delta)), "measured": rows}
    base = {seed: x for (s, arm, seed), x in reward.items() if (s, arm) == (stack, "none")}
    for arm in ARMS:
        own = {seed: x for (s, a, seed), x in reward.items() if (s, a) == (stack, arm)}
        row[arm] = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
    return row | {"none": interval(list(base.values()))}


def conclusions(table: list[dict]) -> tuple[dict[str, dict], dict[str, str]]:
    """The gain of each correction on the repaired stacks, on others within the budget, and outside; and verdicts."""
    gains = defaultdict(list)
    for row in table:
        repaired = (row["dtype"], row["quantization"]) == ("float32", "none")
        for arm in ARMS:
            gains[arm, "repaired" if repaired else "outside" if row["over"] else "within"] += row[arm]
    pooled = {f"{arm}, {where}": interval(values) for (arm, where), values in gains.items() if values}
    return pooled, {arm: verdict(interval(gains[arm, "within"] + gains[arm, "repaired"])) for arm in ARMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the folders of the two sweeps are")
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    grids = [load_sweep(RECIPES / f"{name}.toml", args.runs / name) for name in ("factorial", "factorial-fp8")]
    finished = [cell for grid in grids for cell in grid.cells if cell.status == "finished"]
    if not finished:
        raise SystemExit(f"{args.runs} holds no finished run: offdrift sweep recipes/factorial.toml makes them")
    reward = {
        (stack_of(c), c.setting.arm, c.seed): x
        for c in finished
        if (x := number_of(c, grids[0].sweep.compare)) is not None
    }
    table = [
        row_of(stack, rows, reward) | {"acceptance": accepted(finished, stack)}
        for stack, rows in measured_stacks(finished).items()
    ]
    pooled, verdicts = conclusions(table)
    seeds = sorted({c.seed for c in finished})
    result = {"machine": machine("transformers"), "seeds": seeds, "runs": len(finished)}
    result["of"] = sum(len(grid.cells) for grid in grids)
    result |= {"stacks": table, "pooled": pooled, "verdicts": verdicts}
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    for row in table:
        arms = ", ".join(f"{a} {1e2 * math.fsum(row[a]) / len(row[a]):+.2f} %" for a in ARMS if row[a])
        delta = "" if row["router_delta"] is None else f", delta {row['router_delta']:.1e}"
        print(
            f"{row['model']:14} {row['dtype']:8} {row['quantization']:15} TV95 {row['tv_p95']:.1e}, chi2_seq "
            f"{row['chi2_seq']:.1e}{delta}, over: {', '.join(row['over']) or 'none'}; {arms}"
        )
    for name, gain in pooled.items():
        print(f"{name}: {json.dumps(gain)}")
    print(verdicts)


if __name__ == "__main__":
    main()
