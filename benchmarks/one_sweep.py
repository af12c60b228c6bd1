"""Exact divergences of whole rows on a GPU in one sweep: how near to a mere copy, and how far from the truth.

    python benchmarks/one_sweep.py [--parts accuracy,time,variants] [--json PATH]
    python benchmarks/one_sweep.py --profile [--json PATH]      # one launch of the best variant, for `ncu`

Against a device copy of the same bytes (the logits of both policies, counted once) and against two sweeps, the way
before, all in one run: eight numbers, nine with TV, and a KL as a loss with its gradient. `variants` times launch shapes
at a vocabulary of 151,936. Bars: eight at 85 % of the copy, with TV at 65 %; relative error of the KL at most 1e-4 at a
KL of 5e-7 and 1e-5 at 1e-4. `TRITON_INTERPRET=1 --tiny` runs it without a GPU, for errors.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gpu_kl
import torch
from gpu import medians
from measure import machine
from torch import Tensor

from offdrift.divergence import kernels
from offdrift.divergence.exact import ExactDivergences, definition

VOCABULARIES = (151_936, 32_000, 128_256, 262_144)
DTYPES = (torch.bfloat16, torch.float32)
SHAPES = [
    kernels.Sweep(warps, unroll, wide, words, registers)
    for wide in (True, False)
    for warps, unroll, words in ((4, 4, 2), (4, 6, 2), (4, 8, 2), (8, 4, 2), (4, 2, 4))
    for registers in (None, 64)
] + [kernels.Sweep(4, 8, False, 2, 56), kernels.Sweep(4, 4, False, 2, 72)]
KLS = (1e-8, 5e-7, 1e-4, 1e-2, 1.0, 10.0)
ROW_BYTES = 2**31
"""Of logits of one policy, far beyond any cache."""


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="accuracy,time,variants")
    parser.add_argument("--profile", action="store_true", help="only launch the best variant, once")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=12, help="that compile beforehand")
    parser.add_argument("--tiny", action="store_true", help="small sizes, in Triton's interpreter")
    parser.add_argument("--json", type=Path, default=Path("one_sweep.json"))
    args = parser.parse_args(argv)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not (interpreted and args.tiny):
        sys.exit("no GPU here: nothing to time. TRITON_INTERPRET=1 with --tiny runs it for errors")
    device = torch.device("cpu" if interpreted else "cuda")
    found: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.profile:
        profile(found, device)
        return found
    found |= {"device": "interpreter" if interpreted else torch.cuda.get_device_name(device)}
    found |= {"machine": machine("triton")}
    print(found, flush=True)
    start = time.perf_counter()
    if not interpreted and args.processes > 1:
        with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
            list(pool.map(_compile, SHAPES))
        print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    for part in args.parts.split(","):
        for name, case in PARTS[part](args, device):
            found.setdefault(part, {})[name] = case
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{part} done after {time.perf_counter() - start:.0f} s", flush=True)
    return found


def _compile(shape: kernels.Sweep) -> None:
    """One launch shape in a process of its own, into Triton's cache."""
    with_shape(shape, lambda: [_compile_for(dtype) for dtype in DTYPES])()


def _compile_for(dtype: torch.dtype) -> None:
    mu, pi, tokens = gpu_kl.policies(2, 32_000, dtype, torch.device("cuda"))
    for tv in (False, True):
        kernels.with_normalizers(mu, pi, tokens, tv=tv)


def with_shape(shape: kernels.Sweep | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """The same call with this launch shape."""

    def arm() -> Any:
        kept = kernels.SWEEP
        if shape is not None:
            kernels.SWEEP = shape
        try:
            return run()
        finally:
            kernels.SWEEP = kept

    return arm


def two_sweeps(mu: Tensor, pi: Tensor, tokens: Tensor) -> ExactDivergences:
    """Every row as if one sweep had not been enough, without that sweep."""
    out = torch.empty(13, len(mu), device=mu.device)
    kernels.sweep_again(torch.ones(len(mu), dtype=torch.int32, device=mu.device), (mu, pi), tokens, 1.0, out)
    return ExactDivergences(*out[:9])


def timed(args: argparse.Namespace, device: torch.device) -> Any:
    """Eight numbers of policies that are close and that are not, nine, a loss with its gradient, and two sweeps."""
    for vocab in (300,) if args.tiny else VOCABULARIES:
        for dtype in DTYPES:
            rows = 2 if args.tiny else ROW_BYTES // (vocab * dtype.itemsize) // 16 * 16
            mu, pi, tokens = gpu_kl.policies(rows, vocab, dtype, device)
            target = torch.empty_like(mu)
            far = pi.clone()
            far[:, ::1000] += 1  # beyond the polynomial's range in every row
            arms = {
                "copy": lambda: target.copy_(mu),  # noqa: B023  (timed inside this turn of the loop)
                "eight": lambda: kernels.with_normalizers(mu, pi, tokens, tv=False),  # noqa: B023
                "nine": lambda: kernels.with_normalizers(mu, pi, tokens),  # noqa: B023
                "eight, far": lambda: kernels.with_normalizers(mu, far, tokens, tv=False),  # noqa: B023
                "two sweeps": lambda: two_sweeps(mu, pi, tokens),  # noqa: B023
                "loss and gradient": lambda: gpu_kl.our_step(mu, pi),  # noqa: B023
            }
            table = medians(arms, device, repeats=args.repeats)
            yield title(rows, vocab, dtype), shares(table)


def variants(args: argparse.Namespace, device: torch.device) -> Any:
    """Launch shapes of one vocabulary."""
    for dtype in DTYPES:
        vocab = 300 if args.tiny else 151_936
        rows = 2 if args.tiny else ROW_BYTES // (vocab * dtype.itemsize) // 16 * 16
        mu, pi, tokens = gpu_kl.policies(rows, vocab, dtype, device)
        target = torch.empty_like(mu)
        arms = {"copy": lambda: target.copy_(mu)}  # noqa: B023
        for tv in (False, True):
            for shape in SHAPES:
                run = lambda tv=tv: kernels.with_normalizers(mu, pi, tokens, tv=tv)  # noqa: B023, E731
                arms[f"{'nine' if tv else 'eight'} {tuple(shape)}"] = with_shape(shape, run)
        yield title(rows, vocab, dtype), shares(medians(arms, device, repeats=args.repeats))


def title(rows: int, vocab: int, dtype: torch.dtype) -> str:
    return f"{rows} x {vocab:,}, {str(dtype).removeprefix('torch.')}"


def shares(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    for name, row in table.items():
        row["share_of_copy"] = 1 / row["times_first"] * (2.5 if name.startswith("loss") else 1)
        print(f"  {name:28}{row['seconds'] * 1e3:10.3f} ms{row['share_of_copy']:8.3f}", flush=True)
    return table


def accuracy(args: argparse.Namespace, device: torch.device) -> Any:
    """Relative errors of 64 rows against float64: median and worst of every number, by size of the KL and kind of row."""
    n, vocab = (4, 300) if args.tiny else (64, 151_936)
    for peaked in (False, True):
        for kl in KLS:
            for dtype in DTYPES:
                mu, pi, tokens = rows_at(kl, peaked, n, vocab, dtype, device)
                ours = kernels.with_normalizers(mu, pi, tokens)[0]
                truth = definition(mu.double(), pi.double(), tokens)
                errors = {}
                for name, a, b in zip(truth._fields, ours, truth, strict=True):
                    off = ((a - b) / b).abs()
                    errors[name] = {"median": float(off.median()), "worst": float(off.max())}
                name = f"{'peaked' if peaked else 'flat'}, KL {kl:g}, {str(dtype).removeprefix('torch.')}"
                median = float(truth.kl_rollout_current.median())
                print(
                    f"  {name}: KL {median:.1e}",
                    {k: f"{x['median']:.0e} / {x['worst']:.0e}" for k, x in errors.items()},
                )
                yield name, {"kl_median": median, "errors": errors}


def rows_at(
    kl: float, peaked: bool, n: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose KL is about so much, and tokens drawn from mu; peaked rows have a top token of any probability.

    The noise is made before rounding, so that small KLs need float32 scores: bfloat16 rows get 1 entry in 2^k moved.
    """
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda: torch.randn(n, vocab, generator=generator, device=device)  # noqa: E731
    logits = 3 * draw()
    if peaked:
        top = torch.randint(vocab, (n, 1), generator=generator, device=device)
        height = 35 * torch.rand(n, 1, generator=generator, device=device)
        logits.scatter_add_(1, top, height)
    logits = logits.to(dtype).float()
    if dtype is torch.bfloat16:
        # An ulp of 2^-8 of the score moves x by up to 2^-5: in so many entries that the KL comes out as asked.
        share = min(1.0, kl / 1e-5)
        moved = logits * (1 + 2.0**-8 * max(1.0, (kl / 1e-5) ** 0.5) * draw())
        pi = torch.where(torch.rand(n, vocab, generator=generator, device=device) < share, moved, logits)
    else:
        pi = logits + math.sqrt(2 * kl) * draw()
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return logits.to(dtype), pi.to(dtype), tokens


def profile(found: dict[str, Any], device: torch.device) -> None:
    """The best variant of eight numbers from bfloat16 rows, once after a launch that compiles."""
    tables = [table for name, table in found.get("variants", {}).items() if "bfloat16" in name]
    shape = None
    if tables:
        eight = {name: row["seconds"] for name, row in tables[0].items() if name.startswith("eight")}
        best = min(eight, key=lambda name: eight[name])
        shape = next(s for s in SHAPES if best.endswith(str(tuple(s))))
        print("profiled:", best)
    mu, pi, tokens = gpu_kl.policies(4096, 151_936, torch.bfloat16, device)
    for _ in range(2):
        with_shape(shape, lambda: kernels.with_normalizers(mu, pi, tokens, tv=False))()
    torch.cuda.synchronize()


PARTS: dict[str, Callable[..., Any]] = {"accuracy": accuracy, "time": timed, "variants": variants}

if __name__ == "__main__":
    main()
