"""Exact divergences from hidden states: ours against two whole lm-head products and a reduction.

    python benchmarks/hidden_kl.py [--tokens 128] [--vocab 151936] [--device cuda] [--json PATH]

Ideal: 2 products where scores are kept between the two sweeps, 4 where they are not; the column
"products" says what the whole costs, in units of one lm-head product of the same arithmetic.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from measure import interleaved_medians, machine, peak_mib
from torch import Tensor
from torch.nn.functional import linear

from offdrift.divergence.hidden import Head, hidden_divergences

Pair = tuple[Tensor, Tensor]
Case = tuple[Tensor, Head, Tensor, Head]

ARITHMETIC = {
    "bfloat16 logits": (torch.bfloat16, torch.bfloat16),
    "bfloat16 weights, float32 logits": (torch.bfloat16, None),
}
"""Dtype of states and weights, and what the logits are rounded to."""


def policies(tokens: int, vocab: int, size: int, dtype: torch.dtype, round_to: torch.dtype | None, device: str) -> Case:
    """Two policies one update apart: logits of standard deviation 3, KL of about 1e-3 nats."""
    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, scale: float) -> Tensor:
        return scale * torch.randn(rows, size, generator=generator)

    states, weight = normal(tokens, 1.0), normal(vocab, 3 / size**0.5)
    moved = (states + normal(tokens, 0.01), weight + normal(vocab, 0.03 / size**0.5))
    before, after = ((h.to(device, dtype), w.to(device, dtype)) for h, w in ((states, weight), moved))
    return (before[0], Head(before[1], round_to=round_to), after[0], Head(after[1], round_to=round_to))


def whole_logits(states: Tensor, head: Head) -> Tensor:
    """All logits at once: one lm-head product."""
    if head.round_to is None:
        return linear(states.float(), head.weight.float())
    return linear(states, head.weight)


def naive(case: Case) -> Pair:
    """What one writes without thinking: KL and TV alone, ten [tokens, vocab] tensors in passing."""
    log_mu = whole_logits(case[0], case[1]).float().log_softmax(-1)
    log_pi = whole_logits(case[2], case[3]).float().log_softmax(-1)
    mu, pi = log_mu.exp(), log_pi.exp()
    return (mu * (log_mu - log_pi)).sum(-1), (mu - pi).abs().sum(-1) / 2


def ours(case: Case, **how: object) -> Pair:
    found = hidden_divergences(*case, **how)  # all nine fields are computed
    return found.kl_rollout_current, found.tv


def arms(case: Case, *, compiled: bool) -> dict[str, Callable[[], Pair | Tensor]]:
    route = {"compiled": None if case[0].is_cuda else compiled}
    ways: dict[str, Callable[[], Pair | Tensor]] = {
        "one product": lambda: whole_logits(case[0], case[1]),
        "naive": lambda: naive(case),
        "ours": lambda: ours(case, **route),
        "ours, keep_mib=0": lambda: ours(case, **route, keep_mib=0),
    }
    if compiled and not case[0].is_cuda:
        ways["ours, not compiled"] = lambda: ours(case, compiled=False)
    return ways


def errors(result: Pair, case: Case, rows: int = 4) -> dict[str, float]:
    """Largest distance from float64 on the first tokens, for KL relative, for TV absolute."""

    def truth(states: Tensor, head: Head) -> Tensor:
        if head.round_to is not None:
            return linear(states[:rows], head.weight).double().log_softmax(-1)
        blocks = (linear(states[:rows].double(), w.double()) for w in head.weight.split(8192))
        return torch.cat(list(blocks), dim=1).log_softmax(-1)

    log_mu, log_pi = truth(case[0], case[1]), truth(case[2], case[3])
    kl = (log_mu.exp() * (log_mu - log_pi)).sum(-1)
    tv = (log_mu.exp() - log_pi.exp()).abs().sum(-1) / 2
    return {
        "kl": float(kl.mean()),
        "kl_relative_error": float(((result[0][:rows] - kl) / kl).abs().max()),
        "tv_error": float((result[1][:rows] - tv).abs().max()),
    }


def compare(case: Case, *, repeats: int, compiled: bool) -> dict[str, dict[str, float]]:
    """Every way on one case: seconds, in units of one product, memory, error."""
    cuda = case[0].is_cuda
    ways = arms(case, compiled=compiled)
    results = {name: run() for name, run in ways.items()}  # warm-up, compiles
    seconds = interleaved_medians(
        {name: finished(run) for name, run in ways.items()} if cuda else ways, repeats=repeats
    )
    table: dict[str, dict[str, float]] = {}
    for name, run in ways.items():
        result = results[name]
        table[name] = {
            "seconds": seconds[name],
            "products": seconds[name] / seconds["one product"],
            "times_faster": seconds["naive"] / seconds[name],
            "peak_mib": cuda_peak_mib(run) if cuda else peak_mib(run),
            **({} if isinstance(result, Tensor) else errors(result, case)),
        }
    return table


def finished(run: Callable[[], object]) -> Callable[[], None]:
    """The call and everything it launched."""

    def wait() -> None:
        run()
        torch.cuda.synchronize()

    return wait


def cuda_peak_mib(run: Callable[[], object]) -> float:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n{'':20}{'seconds':>10}{'products':>10}{'x naive':>9}{'peak MiB':>11}", end="")
    print(f"{'KL rel. err':>13}{'TV err':>10}")
    for name, row in table.items():
        print(f"{name:20}{row['seconds']:10.4f}{row['products']:10.2f}", end="")
        print(f"{row['times_faster']:9.2f}{row['peak_mib']:11.1f}", end="")
        print(f"{row['kl_relative_error']:13.1e}{row['tv_error']:10.1e}" if "kl" in row else "")


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048], help="hidden sizes")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="a few seconds, uncompiled: does it run?")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.tiny:
        args.tokens, args.vocab, args.sizes, args.repeats = 64, 12_000, [16], 1

    facts: dict[str, str | int] = machine()
    if args.device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    print(f"divergences from hidden states, {args.tokens} tokens, vocabulary {args.vocab:,}\n{facts}")
    found: dict[str, object] = {"tokens": args.tokens, "vocab": args.vocab, "machine": facts}
    for size in args.sizes:
        for name, (dtype, round_to) in ARITHMETIC.items():
            case = policies(args.tokens, args.vocab, size, dtype, round_to, args.device)
            table = compare(case, repeats=args.repeats, compiled=not args.tiny)
            found[f"d={size}, {name}"] = table
            show(f"d = {size:,}, {name}", table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
