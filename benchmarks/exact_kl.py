"""Exact divergences from logits, and the KL as a loss: ours against what one writes without thinking.

    python benchmarks/exact_kl.py [--rows 512] [--vocab 151936] [--device cpu] [--width avx2] [--json PATH]

Three tables per dtype, all ways in turn in one run: the divergences (ours computes nine fields, naive
"kl, tv" only two), KL(pi || mu) forward and backward, and what each costs as a share of one lm-head
product over the same tokens. Seconds on a CPU are those of all threads together, so that what else runs on the
machine counts little. Peak memory is what the process held at once beyond the inputs; of a backward pass the
gradient itself is part of it.

`--width avx2` caps the vectors of torch, of what is compiled, and of oneDNN, as on a processor without
AVX-512.

Bar: compiled at least 10 times faster than naive "kl, tv" on a CPU with AVX-512, 6 times with AVX2; plain never
slower than it; no [tokens, vocab] temporary.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import interleaved_medians, machine, peak_mib
from torch import Tensor

from offdrift.divergence.exact import ExactDivergences
from offdrift.divergence.fused import exact_divergences, route
from offdrift.divergence.losses import kl_current_rollout

Pair = tuple[Tensor, Tensor]
Ways = dict[str, Callable[[], object]]
Table = dict[str, dict[str, float]]


def naive_kl_tv(logits_rollout: Tensor, logits: Tensor) -> Pair:
    """Four [tokens, vocab] tensors, and more in passing."""
    log_mu, log_pi = logits_rollout.float().log_softmax(-1), logits.float().log_softmax(-1)
    mu, pi = log_mu.exp(), log_pi.exp()
    return (mu * (log_mu - log_pi)).sum(-1), (mu - pi).abs().sum(-1) / 2


def naive_all(logits_rollout: Tensor, logits: Tensor, tokens: Tensor) -> ExactDivergences:
    """All fields, by their definitions; in the dtype of the logits or float32."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_mu, log_pi = logits_rollout.to(dtype).log_softmax(-1), logits.to(dtype).log_softmax(-1)
    mu, pi = log_mu.exp(), log_pi.exp()
    x = log_pi - log_mu
    return ExactDivergences(
        -(mu * x).sum(-1),
        (pi * x).sum(-1),
        (mu - pi).abs().sum(-1) / 2,
        (pi * pi / mu).sum(-1) - 1,
        -(mu * log_mu).sum(-1),
        -(pi * log_pi).sum(-1),
        (pi * pi).sum(-1),
        *(log_p.gather(1, tokens[:, None]).squeeze(1) for log_p in (log_mu, log_pi)),
    )


def naive_loss(logits_rollout: Tensor, logits: Tensor) -> Tensor:
    log_mu, log_pi = logits_rollout.float().log_softmax(-1), logits.float().log_softmax(-1)
    return (log_pi.exp() * (log_pi - log_mu)).sum(-1)


def policies(rows: int, vocab: int) -> Pair:
    """Two policies that drifted a little: sharp rows, KL of about 1e-3 nats."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    return logits, logits + 0.05 * torch.randn(rows, vocab, generator=generator)


def evidence_ways(pair: Pair, tokens: Tensor, ours: dict[str, bool | None]) -> Ways:
    ways: Ways = {"naive kl, tv": lambda: naive_kl_tv(*pair), "naive": lambda: naive_all(*pair, tokens)}
    for name, compiled in ours.items():
        ways[name] = lambda c=compiled: exact_divergences(*pair, tokens=tokens, compiled=c)
    return ways


def loss_ways(pair: Pair, ours: dict[str, bool | None]) -> Ways:
    """Forward and backward, from a gradient that nobody has yet."""
    mu, logits = pair[0], pair[1].detach().requires_grad_()
    upstream = torch.ones(len(logits), device=logits.device)

    def both(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
        return lambda: torch.autograd.grad(loss(), logits, upstream)[0]

    ways: Ways = {"naive": both(lambda: naive_loss(mu, logits))}
    for name, compiled in ours.items():
        ways[name] = both(lambda c=compiled: kl_current_rollout(mu, logits, compiled=c))
    return ways


def synchronized(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """On a GPU a call is over when its kernels are."""
    if device.type != "cuda":
        return run

    def wait() -> object:
        result = run()
        torch.cuda.synchronize(device)
        return result

    return wait


def clock_of(device: torch.device) -> Callable[[], float]:
    """CPU seconds of all threads of the process, or the time on the wall of a GPU."""
    return time.process_time if device.type == "cpu" else time.perf_counter


def peak(run: Callable[[], object], device: torch.device) -> float:
    """MiB beyond what was held before: of the process, or at the allocator of the GPU."""
    if device.type != "cuda":
        return peak_mib(run)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def compare(ways: Ways, device: torch.device, *, baseline: str, repeats: int) -> Table:
    """Seconds, times faster than the baseline, and memory of every way."""
    ways = {name: synchronized(run, device) for name, run in ways.items()}
    for run in reversed(ways.values()):  # compiles, before anything is timed
        run()
    seconds = interleaved_medians(ways, repeats=repeats, clock=clock_of(device))
    return {
        name: {
            "seconds": seconds[name],
            "times_faster": seconds[baseline] / seconds[name],
            "peak_mib": peak(run, device),
        }
        for name, run in ways.items()
    }


def errors(found: ExactDivergences, truth: ExactDivergences) -> dict[str, float]:
    """Largest distance from float64, of KLs and chi-squared relative, else absolute."""
    off: dict[str, float] = {}
    for name, ours, exact in zip(ExactDivergences._fields, found, truth, strict=True):
        relative = name.startswith(("kl", "chi2"))
        distance = (ours - exact).abs() / (exact if relative else 1)
        off[f"{name}_{'relative_' if relative else ''}error"] = float(distance.max())
    return off


def lm_head_seconds(rows: int, vocab: int, hidden: int, like: Tensor) -> float:
    """One lm-head product over the same tokens, in the same dtype."""
    states = torch.randn(rows, hidden, device=like.device).to(like.dtype)
    head = torch.randn(vocab, hidden, device=like.device).to(like.dtype)
    run = synchronized(lambda: torch.nn.functional.linear(states, head), like.device)
    return interleaved_medians({"head": run}, repeats=3, clock=clock_of(like.device))["head"]


def measure(pair: Pair, args: argparse.Namespace) -> dict[str, object]:
    """Both tables on one pair of inputs, and the lm-head product."""
    device = pair[0].device
    ours: dict[str, bool | None] = {"plain": False}
    if not args.plain_only:
        ours["compiled"] = True
    if route(device, pair[0].dtype) == "triton":
        ours["triton"] = None
    tokens = torch.arange(args.rows, device=device) % args.vocab
    ways = evidence_ways(pair, tokens, ours)
    evidence = compare(ways, device, baseline="naive kl, tv", repeats=args.repeats)
    first = slice(0, 8)
    few = (pair[0][first], pair[1][first])
    truth = naive_all(few[0].double(), few[1].double(), tokens[first])
    for name in ("naive", *ours):
        result = ways[name]()
        assert isinstance(result, ExactDivergences)
        evidence[name] |= errors(ExactDivergences(*(x[first] for x in result)), truth)
    loss = compare(loss_ways(pair, ours), device, baseline="naive", repeats=args.repeats)
    head = lm_head_seconds(args.rows, args.vocab, args.hidden, pair[0])
    for row in (*evidence.values(), *loss.values()):
        row["share_of_lm_head"] = row["seconds"] / head
    return {"lm_head_seconds": head, "evidence": evidence, "loss": loss}


def show(title: str, table: Table) -> None:
    print(f"\n{title}\n{'':14}{'seconds':>10}{'x':>7}{'lm head':>10}{'peak MiB':>11}{'KL error':>11}")
    for name, row in table.items():
        error = row.get("kl_rollout_current_relative_error")
        print(
            f"{name:14}{row['seconds']:10.4f}{row['times_faster']:7.1f}"
            f"{row['share_of_lm_head']:10.1%}{row['peak_mib']:11.3f}" + ("" if error is None else f"{error:11.1e}")
        )


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2048, help="width of the lm head's input")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plain-only", action="store_true", help="skip the compiled way")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--width", choices=["avx2", "avx512"], help="cap the processor's vectors")
    args = parser.parse_args(argv)
    if args.width not in (None, os.environ.get("ATEN_CPU_CAPABILITY")):  # read when torch starts
        capped = {"ATEN_CPU_CAPABILITY": args.width, "ONEDNN_MAX_CPU_ISA": args.width.upper()}
        words = [sys.executable, __file__, *(sys.argv[1:] if argv is None else argv)]
        os.execve(sys.executable, words, {**os.environ, **capped})
    torch.set_num_threads(args.threads)

    pair = policies(args.rows, args.vocab)
    facts: dict[str, object] = {**machine(), "device": str(args.device), "load": os.getloadavg()[0]}
    if args.device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(args.device)
    print(f"exact divergences, {args.rows} x {args.vocab:,} logits\n{facts}")
    sizes = {"rows": args.rows, "vocab": args.vocab, "hidden": args.hidden}
    found: dict[str, object] = {**sizes, "machine": facts}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        as_dtype = (pair[0].to(args.device, dtype), pair[1].to(args.device, dtype))
        found[name] = tables = measure(as_dtype, args)
        size = f"one input: {as_dtype[0].nbytes / 2**20:,.0f} MiB"
        show(f"{name} logits ({size}): divergences", tables["evidence"])  # type: ignore[arg-type]
        show(f"{name}: KL(pi || mu) and its gradient", tables["loss"])  # type: ignore[arg-type]
        print(f"one lm-head product: {tables['lm_head_seconds']:.3f} s")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
