"""Tokens per second of an audit, from decoded columns and from Parquet, beside polars and duckdb.

    python benchmarks/audit.py [--tokens 16000000] [--repeats 5] [--times-larger 4] [--json PATH] [--only-memory]

One thread each; seconds are those that the process kept a core busy, so that a busy machine costs
only what it evicts from caches (`wall` in the JSON is the clock's). A plain log (`write_log`: rollout and old log-probs, advantages, rewards, steps; log-normal
lengths) is written once. Then:

- decoded columns: everything an audit counts (`Tally.of`), and what each part of that costs;
- from Parquet: reading and counting everything; reading and the core statistics alone; the same core
  statistics by polars and by duckdb (lists exploded, aggregated by step), with the same numbers; and by both the core
  statistics of each step and of each bucket by length, position, advantage and token class, which is the part of
  "everything" that they can count in one pass;
- peak resident memory of each of these in a process of its own, at two sizes of file.

Bar: at least 20 million tokens per second from decoded columns, all facets included. An engine that is
not installed is left out.
"""

from __future__ import annotations

import os

os.environ.setdefault("POLARS_MAX_THREADS", "1")  # read when polars is imported

import argparse
import importlib
import importlib.util
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from measure import machine

from offdrift.audit.facets import AXES, Facets, runs
from offdrift.audit.tally import Tally, Worst
from offdrift.numerics import compiled_passes
from offdrift.ratios import stopped_log_ratio
from offdrift.records.batch import Logged
from offdrift.records.readers import detect, pieces, read
from offdrift.records.recorder import write_log
from offdrift.stats import DriftStats, Histogram, signature, summarize
from offdrift.stats.histogram import LOG_RATIO

BAR = 20e6
"""Tokens per second and core, from decoded columns."""
CORE = (
    "k1",
    "k2",
    "k3",
    "abs_log_ratio_mean",
    "abs_log_ratio_max",
    "chi2_token",
    "tv_sampled",
    "ess_frac",
    "pearson",
    "prob_diff_mean",
    "prob_diff_max",
)
Numbers = dict[str, float]
ByStep = dict[int, Numbers]
Rates = dict[str, dict[str, float]]


def make_log(tokens: int, *, steps: int, seed: int = 0) -> Logged:
    """Log-normal lengths (mean about 1100), drift with a heavy tail, one advantage per sequence."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.empty(tokens // 200 + 2).log_normal_(6.5, 1.0, generator=g).long().clamp(min=1)
    ends = lengths.cumsum(0)
    lengths = lengths[: int(torch.searchsorted(ends, tokens)) + 1]
    lengths[-1] -= int(lengths.sum()) - tokens
    b = len(lengths)
    rollout = -8 * torch.rand(tokens, generator=g).pow_(4)
    noise = torch.randn(tokens, generator=g).mul_(0.02)
    noise[torch.rand(tokens, generator=g) < 0.001] *= 20
    return Logged(
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        step=torch.arange(b) * steps // b,
        row=torch.arange(b) + 1,
        response_lengths=lengths,
        logp_rollout=rollout,
        logp_old=noise.add_(rollout).clamp_(max=0.0),
        advantages=torch.repeat_interleave(torch.randn(b, generator=g), lengths),
        rewards=(torch.rand(b, generator=g) < 0.5).float(),
        group_ids=torch.arange(b) // 8,
    )


# -- the arms -------------------------------------------------------------------------------------


def decoded_parts(log: Logged) -> dict[str, Callable[[], object]]:
    """What a tally is made of, each on columns in memory; the parts of a batch of one step."""
    one = replace(log, step=torch.zeros_like(log.step))
    lp = one.logprobs()
    raw = stopped_log_ratio(lp, on="mismatch")
    own = Facets.of(one)[1]
    return {
        "everything": lambda: Tally.of(replace(one)),
        "everything, compiled": lambda: compiled_everything(replace(one)),
        "core statistics": lambda: DriftStats.of(one.logprobs()),
        "signature": lambda: signature(lp, advantages=one.advantages, per_sequence=own),
        "histogram": lambda: Histogram.of(raw, LOG_RATIO),
        "facets": lambda: Facets.of(replace(one)),
        "worst": lambda: Worst.of(one, "mismatch", own["mismatch"], file=""),
    }


def compiled_everything(log: Logged) -> Tally:
    """The same where compiled passes are asked for (`OFFDRIFT_COMPILE=1`); the plain way where there is no compiler."""
    with compiled_passes():
        return Tally.of(log)


def everything(path: Path) -> Numbers:
    """All that an audit counts."""
    found = detect([str(path)])
    parts = (Tally.over(read(p, found).batches, file=p.file) for p in pieces(found))
    return reduce(Tally.merge, parts).as_dict()["overall"]


def reading(path: Path) -> int:
    """Reading alone."""
    found = detect([str(path)])
    return sum(b.num_tokens for piece in pieces(found) for b in read(piece, found).batches)


def core(path: Path) -> ByStep:
    """The core statistics of each step."""
    found = detect([str(path)])
    steps: dict[int, DriftStats] = {}
    for piece in pieces(found):
        (batch,) = read(piece, found).batches
        for step, run in runs(batch, 1):
            stats = DriftStats.of(run.logprobs())
            steps[step] = steps[step].merge(stats) if step in steps else stats
    return {step: {name: summarize(s)[f"mismatch/{name}"] for name in CORE} for step, s in steps.items()}


SQL = {
    "n": "count(*)",
    "l": "sum(l)",
    "l2": "sum(l * l)",
    "abs": "sum(abs(l))",
    "max": "max(abs(l))",
    "w": "sum(exp(l))",
    "w2": "sum(exp(l) * exp(l))",
    "excess_abs": "sum(abs(exp(l) - 1))",
    "p": "sum(exp(r))",
    "p2": "sum(exp(r) * exp(r))",
    "q": "sum(exp(o))",
    "q2": "sum(exp(o) * exp(o))",
    "pq": "sum(exp(r) * exp(o))",
    "d_abs": "sum(abs(exp(o) - exp(r)))",
    "d_max": "max(abs(exp(o) - exp(r)))",
}


def by_duckdb(path: Path) -> ByStep:
    """The same by duckdb, in float64 as its functions are."""
    import duckdb

    with duckdb.connect() as db:
        db.execute("SET threads = 1")
        columns = ", ".join(f"{formula} AS {name}" for name, formula in SQL.items())
        query = f"""
            WITH tokens AS (SELECT step, unnest(logp_rollout)::DOUBLE AS r, unnest(logp_old)::DOUBLE AS o
                            FROM read_parquet(?)),
                 ratios AS (SELECT *, o - r AS l FROM tokens)
            SELECT step, {columns} FROM ratios GROUP BY step"""
        rows = db.execute(query, [str(path)]).fetchall()
    return {row[0]: figures(dict(zip(SQL, row[1:], strict=True))) for row in rows}


def by_polars(path: Path) -> ByStep:
    """The same by polars, streaming, in float64."""
    import polars as pl

    r, o = (pl.col(name).cast(pl.Float64) for name in ("logp_rollout", "logp_old"))
    tokens = pl.scan_parquet(path).select("step", "logp_rollout", "logp_old")
    tokens = tokens.explode("logp_rollout", "logp_old").select("step", r=r, o=o)
    rows = tokens.group_by("step").agg(**polars_sums()).collect(engine="streaming").to_dicts()
    return {row["step"]: figures(row) for row in rows}


BUCKETS = {
    "step": "step",
    "length": "CASE WHEN length <= 64 THEN 0 ELSE least(ceil(log2(length / 64.0)), 11) END",
    "position": "CASE WHEN t < 16 THEN 0 ELSE least(floor(log2(t)) - 3, 13) END",
    "advantage": "sign(a)",
    "token_class": "CASE WHEN t = length - 1 THEN 4 WHEN r > ln(0.99) THEN 0 WHEN r >= ln(0.5) THEN 1 "
    "WHEN r >= ln(0.05) THEN 2 ELSE 3 END",
}


def facets_by_duckdb(path: Path) -> dict[str, Numbers]:
    """The core statistics of each step, and of each bucket along four axes: one pass over their product, then added up.

    A part of what `everything` counts, which has histograms, neighbors, sequences and the worst tokens besides.
    """
    import duckdb

    with duckdb.connect() as db:
        db.execute("SET threads = 1")
        sums = ", ".join(f"{formula} AS {name}" for name, formula in SQL.items())
        buckets = ", ".join(f"({formula})::INT AS by_{name}" for name, formula in BUCKETS.items())
        keys = ", ".join(f"by_{name}" for name in BUCKETS)
        query = f"""
            WITH tokens AS (SELECT step, len(logp_rollout) AS length, unnest(range(len(logp_rollout))) AS t,
                                   unnest(logp_rollout)::DOUBLE AS r, unnest(logp_old)::DOUBLE AS o,
                                   unnest(advantages) AS a FROM read_parquet(?)),
                 ratios AS (SELECT r, o, o - r AS l, {buckets} FROM tokens)
            SELECT {keys}, {sums} FROM ratios GROUP BY ALL"""
        rows = db.execute(query, [str(path)]).fetchall()
    return rolled_up([dict(zip((*BUCKETS, *SQL), row, strict=True)) for row in rows])


def facets_by_polars(path: Path) -> dict[str, Numbers]:
    """The same by polars, streaming."""
    import polars as pl

    tokens = pl.scan_parquet(path).select("step", "logp_rollout", "logp_old", "advantages")
    tokens = tokens.with_columns(length=pl.col("logp_rollout").list.len().cast(pl.Int64))
    tokens = tokens.with_columns(t=pl.int_ranges(0, pl.col("length")))
    tokens = tokens.explode("logp_rollout", "logp_old", "advantages", "t")
    r, o = (pl.col(name).cast(pl.Float64) for name in ("logp_rollout", "logp_old"))
    t, length = pl.col("t"), pl.col("length")
    token_class = pl.when(t == length - 1).then(4).when(r > math.log(0.99)).then(0)
    token_class = token_class.when(r >= math.log(0.5)).then(1).when(r >= math.log(0.05)).then(2).otherwise(3)
    tokens = tokens.select(
        "step", r=r, o=o,
        length=pl.when(length <= 64).then(0).otherwise((length / 64).log(2).ceil().clip(upper_bound=11)).cast(pl.Int32),
        position=pl.when(t < 16).then(0).otherwise((t.log(2).floor() - 3).clip(upper_bound=13)).cast(pl.Int32),
        advantage=pl.col("advantages").sign().cast(pl.Int32), token_class=token_class,
    )  # fmt: skip
    rows = tokens.group_by(*BUCKETS).agg(**polars_sums()).collect(engine="streaming").to_dicts()
    return rolled_up(rows)


def rolled_up(rows: list[dict[str, float]]) -> dict[str, Numbers]:
    """Sums of a product of buckets, added up along each axis: figures by "AXIS/BUCKET"."""
    added: dict[str, Numbers] = {}
    for row in rows:
        for axis in BUCKETS:
            into = added.setdefault(f"{axis}/{row[axis]:.0f}", dict.fromkeys(SQL, 0.0))
            for name in SQL:
                into[name] = max(into[name], row[name]) if "max" in name else into[name] + row[name]
    return {key: figures(sums) for key, sums in added.items() if sums["n"] > 1}


def polars_sums() -> dict[str, object]:
    """`SQL` as expressions of columns r and o."""
    import polars as pl

    r, o = pl.col("r"), pl.col("o")
    l, p, q = o - r, r.exp(), o.exp()  # noqa: E741
    w = l.exp()
    return {
        "n": pl.len(), "l": l.sum(), "l2": (l * l).sum(), "abs": l.abs().sum(), "max": l.abs().max(),
        "w": w.sum(), "w2": (w * w).sum(), "excess_abs": (w - 1).abs().sum(),
        "p": p.sum(), "p2": (p * p).sum(), "q": q.sum(), "q2": (q * q).sum(), "pq": (p * q).sum(),
        "d_abs": (q - p).abs().sum(), "d_max": (q - p).abs().max(),
    }  # fmt: skip


def figures(s: Numbers) -> Numbers:
    """`CORE` from an engine's sums."""
    n, p, q = s["n"], s["p"] / s["n"], s["q"] / s["n"]
    var_p, var_q = s["p2"] / n - p * p, s["q2"] / n - q * q
    values = (
        -s["l"] / n, s["l2"] / n / 2, (s["w"] - n - s["l"]) / n, s["abs"] / n, s["max"],
        s["w2"] / n - 1, s["excess_abs"] / n / 2, s["w"] ** 2 / n / s["w2"],
        (s["pq"] / n - p * q) / math.sqrt(max(var_p * var_q, 1e-300)), s["d_abs"] / n, s["d_max"],
    )  # fmt: skip
    return dict(zip(CORE, values, strict=True))


ARMS: dict[str, Callable[[Path], object]] = {
    "reading alone": reading,
    "everything": everything,
    "core statistics": core,
    "core by polars": by_polars,
    "core by duckdb": by_duckdb,
    "core and facets by polars": facets_by_polars,
    "core and facets by duckdb": facets_by_duckdb,
}
NEEDS = {arm: arm.rpartition(" ")[2] for arm in ARMS if " by " in arm}


def available() -> dict[str, Callable[[Path], object]]:
    """The arms whose engine is installed."""
    absent = {arm for arm, package in NEEDS.items() if importlib.util.find_spec(package) is None}
    for arm in sorted(absent):
        print(f"{NEEDS[arm]} is not installed: {arm} is left out")
    return {arm: run for arm, run in ARMS.items() if arm not in absent}


# -- measuring ------------------------------------------------------------------------------------


def disagreement(path: Path) -> dict[str, float]:
    """The largest difference of any core number at any step from ours, relative to it or 1e-3."""
    ours, found = core(path), {}
    for arm, engine in available().items():
        if arm not in NEEDS:
            continue
        if "facets" in arm:
            found[arm] = facets_apart(path, engine(path))  # type: ignore[arg-type]
            assert found[arm] < 1e-3, f"{arm} finds other numbers: they differ by {found[arm]:.1e}"
            continue
        theirs: ByStep = engine(path)  # type: ignore[assignment]
        assert theirs.keys() == ours.keys(), arm
        found[arm] = max(
            abs(theirs[step][name] - value) / max(abs(value), 1e-3)
            for step, numbers in ours.items()
            for name, value in numbers.items()
        )
        assert found[arm] < 1e-3, f"{arm} finds other numbers: they differ by {found[arm]:.1e}"
    return found


def facets_apart(path: Path, theirs: dict[str, Numbers]) -> float:
    """The largest difference of a mean in any bucket of four axes from ours, relative to it or 1e-3."""
    found = detect([str(path)])
    parts = (Tally.over(read(p, found).batches, file=p.file) for p in pieces(found))
    ours, worst = reduce(Tally.merge, parts).facets.rows(), 0.0
    for axis in ("length", "position", "advantage", "token_class"):
        labels = list(AXES[axis].labels)
        for row in ours[axis]:
            bucket = labels.index(row["label"]) - (axis == "advantage")
            if row["tokens"] > 1:
                for name in ("k1", "k3", "abs_log_ratio_mean", "abs_log_ratio_max", "tv_sampled", "ess_frac"):
                    value = row[f"mismatch/{name}"]
                    worst = max(worst, abs(theirs[f"{axis}/{bucket}"][name] - value) / max(abs(value), 1e-3))
    return worst


def peak_mib(arm: str, path: Path) -> float:
    """Peak resident memory of one arm in a process of its own, MiB, beyond having imported all."""
    command = [sys.executable, __file__, "--peak", arm, "--file", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def tell_peak(arm: str, path: Path) -> None:
    """What the process that `peak_mib` starts does."""
    torch.set_num_threads(1)
    for package in NEEDS.values():
        if importlib.util.find_spec(package) is not None:
            importlib.import_module(package)
    before = resident_peak_kib()
    ARMS[arm](path)
    print((resident_peak_kib() - before) / 1024)


def resident_peak_kib() -> int:
    """Peak resident memory of this process; on Linux `ru_maxrss` would begin at its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def rates(arms: dict[str, Callable[[], object]], tokens: int, repeats: int) -> Rates:
    """Median seconds of each arm, all in turn, after one call of each that is not counted."""
    seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for turn in range(repeats + 1):
        for arm, run in arms.items():
            busy, wall = time.process_time(), time.perf_counter()
            run()
            if turn:
                seconds[arm].append((time.process_time() - busy, time.perf_counter() - wall))
    found = {}
    for arm, held in seconds.items():
        busy, wall = (statistics.median(x) for x in zip(*held, strict=True))
        found[arm] = {
            "ns_per_token": 1e9 * busy / tokens,
            "tokens_per_second": tokens / busy,
            "wall_ns_per_token": 1e9 * wall / tokens,
        }
    return found


def show(title: str, found: Rates) -> None:
    print(f"\n{title}\n{'':26}{'ns a token':>12}{'million tokens/s':>18}")
    for arm, figure in found.items():
        print(f"{arm:26}{figure['ns_per_token']:12.1f}{figure['tokens_per_second'] / 1e6:18.1f}")


def only_memory(args: argparse.Namespace) -> dict[str, object]:
    """Peaks of reading and of everything, at two sizes of file in turn."""
    own = {arm: run for arm, run in ARMS.items() if arm in ("reading alone", "everything")}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{times}.parquet" for times in (1, args.times_larger)]
        for file, times in zip(files, (1, args.times_larger), strict=True):
            write_log(make_log(times * args.tokens, steps=times * args.steps), file)
        sizes = [file.stat().st_size / 2**20 for file in files]
        peaks = {arm: [[peak_mib(arm, file) for file in files] for _ in range(args.repeats)] for arm in own}
    for arm, rows in peaks.items():
        small, large = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{arm:16}{small:6,.0f} MiB for {sizes[0]:,.0f} MiB of file, {large:6,.0f} for {sizes[1]:,.0f} (median)")
    result = {"load_average": os.getloadavg(), "tokens": args.tokens, "file_mib": sizes, "peak_mib": peaks}
    if args.json:
        args.json.write_text(json.dumps(result | {"machine": machine("pyarrow", "numpy")}, indent=2) + "\n")
    return result


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=16_000_000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--times-larger", type=int, default=4, help="of the second file for memory")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--only-memory", action="store_true", help="peaks of our own arms alone, each --repeats times")
    parser.add_argument("--peak", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak:
        tell_peak(args.peak, args.file)
        return {}
    torch.set_num_threads(1)
    facts = machine("polars", "duckdb", "pyarrow", "numpy")
    if args.only_memory:
        return {"machine": facts} | only_memory(args)
    print(f"{args.tokens:,} tokens, one thread\n{facts}")
    log = make_log(min(args.tokens, 4_000_000), steps=1)
    decoded = rates(decoded_parts(log), log.num_tokens, args.repeats)
    show(f"decoded columns, {log.num_tokens:,} tokens", decoded)
    reached = decoded["everything"]["tokens_per_second"]
    print(f"bar {BAR / 1e6:.0f} million tokens/s per core: {'met' if reached >= BAR else 'missed'}")

    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{size}.parquet" for size in (1, args.times_larger)]
        for file, times in zip(files, (1, args.times_larger), strict=True):
            write_log(make_log(times * args.tokens, steps=times * args.steps), file)
        arms = {arm: lambda run=run: run(files[0]) for arm, run in available().items()}
        parquet = rates(arms, args.tokens, args.repeats)
        show(f"from Parquet, {files[0].stat().st_size / 2**20:,.0f} MiB", parquet)
        differs = disagreement(files[0])
        print(
            "largest difference from our core statistics: "
            + (", ".join(f"{arm} {x:.1e}" for arm, x in differs.items()) or "nothing to compare with")
        )
        sizes = [file.stat().st_size / 2**20 for file in files]
        peaks = {arm: [peak_mib(arm, file) for file in files] for arm in available()}
    print(f"\npeak memory beyond imports, MiB\n{'':26}" + "".join(f"{s:>10,.0f} MiB" for s in sizes))
    for arm, found in peaks.items():
        print(f"{arm:26}" + "".join(f"{x:14,.0f}" for x in found))
    result = {
        "machine": facts,
        "load_average": os.getloadavg(),
        "tokens": args.tokens,
        "decoded": decoded,
        "bar_tokens_per_second": BAR,
        "parquet": parquet,
        "disagreement": differs,
        "file_mib": sizes,
        "peak_mib": peaks,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return result


if __name__ == "__main__":
    main()
