"""Exact KL and TV from logits: ours against log-softmax twice and reduce, side by side.

    python benchmarks/exact_kl.py [--rows 512] [--vocab 151936] [--threads N] [--json PATH]

Bar: at least 5 times faster than the naive way on a CPU, and no [tokens, vocab] temporary.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import interleaved_medians, machine, peak_mib
from torch import Tensor

from offdrift.divergence import exact_divergences

Pair = tuple[Tensor, Tensor]


def naive(logits_rollout: Tensor, logits: Tensor) -> Pair:
    """What one writes without thinking: four [tokens, vocab] tensors and more in passing."""
    log_mu, log_pi = logits_rollout.float().log_softmax(-1), logits.float().log_softmax(-1)
    mu, pi = log_mu.exp(), log_pi.exp()
    return (mu * (log_mu - log_pi)).sum(-1), (mu - pi).abs().sum(-1) / 2


def policies(rows: int, vocab: int) -> Pair:
    """Two policies that drifted a little: sharp rows, KL of about 1e-3 nats."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    return logits, logits + 0.05 * torch.randn(rows, vocab, generator=generator)


def arms(pair: Pair, *, compiled: bool) -> dict[str, Callable[[], Pair]]:
    ways: dict[str, Callable[[], Pair]] = {
        "naive": lambda: naive(*pair),
        "plain": lambda: exact_divergences(*pair, compiled=False),
    }
    if compiled:
        ways["compiled"] = lambda: exact_divergences(*pair, compiled=True)
    return ways


def errors(results: Pair, pair: Pair) -> dict[str, float]:
    """Largest distance from float64 on the first rows, for KL relative, for TV absolute."""
    first = slice(0, 8)
    kl, tv = naive_float64(pair[0][first], pair[1][first])
    return {
        "kl_relative_error": float(((results[0][first] - kl) / kl).abs().max()),
        "tv_error": float((results[1][first] - tv).abs().max()),
    }


def naive_float64(logits_rollout: Tensor, logits: Tensor) -> Pair:
    log_mu, log_pi = logits_rollout.double().log_softmax(-1), logits.double().log_softmax(-1)
    mu, pi = log_mu.exp(), log_pi.exp()
    return (mu * (log_mu - log_pi)).sum(-1), (mu - pi).abs().sum(-1) / 2


def compare(pair: Pair, *, repeats: int, compiled: bool) -> dict[str, dict[str, float]]:
    """Every way on one pair of inputs: seconds, times faster than naive, memory, error."""
    ways = arms(pair, compiled=compiled)
    start = time.perf_counter()
    results = {name: run() for name, run in reversed(ways.items())}  # warm-up, compiles first
    first_s = time.perf_counter() - start
    seconds = interleaved_medians(ways, repeats=repeats)
    table = {
        name: {
            "seconds": seconds[name],
            "times_faster": seconds["naive"] / seconds[name],
            "peak_mib": peak_mib(run),
            **errors(results[name], pair),
        }
        for name, run in ways.items()
    }
    return {**table, "warm-up": {"seconds": first_s}}


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    print(
        f"\n{title}\n{'':10}{'seconds':>10}{'x naive':>9}{'peak MiB':>11}{'KL rel. err':>13}{'TV err':>10}"
    )
    for name, row in table.items():
        if name == "warm-up":
            print(f"first call of each, compiling included: {row['seconds']:.1f} s")
            continue
        print(
            f"{name:10}{row['seconds']:10.4f}{row['times_faster']:9.1f}{row['peak_mib']:11.3f}"
            f"{row['kl_relative_error']:13.1e}{row['tv_error']:10.1e}"
        )


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plain-only", action="store_true", help="skip the compiled way")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    pair = policies(args.rows, args.vocab)
    facts = machine()
    print(f"exact KL and TV, {args.rows} x {args.vocab:,} logits\n{facts}")
    found: dict[str, object] = {"rows": args.rows, "vocab": args.vocab, "machine": facts}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        as_dtype = (pair[0].to(dtype), pair[1].to(dtype))
        table = compare(as_dtype, repeats=args.repeats, compiled=not args.plain_only)
        found[name] = table
        show(f"{name} logits (one input: {as_dtype[0].nbytes / 2**20:,.0f} MiB)", table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
