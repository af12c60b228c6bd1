"""Exact divergences on a GPU: how near to the speed of a mere copy, and against whom.

    python benchmarks/gpu_kl.py [--rows 4096] [--vocab 151936] [--warps 8 16 32] [--json PATH]
    python benchmarks/gpu_kl.py --count [--arch 90]     # no GPU: what the compiler made of the kernels
    TRITON_INTERPRET=1 python benchmarks/gpu_kl.py --tiny   # no GPU: for errors, not for time

Bar: from logits, at least 80% of the bandwidth that a device copy reaches in the same run. Bytes are
those of the logits, read once (and of the gradient, written once), whatever is read again.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import interleaved_medians, machine
from torch import Tensor

from offdrift.divergence import kernels
from offdrift.divergence.exact import definition

Arms = dict[str, Callable[[], object]]
Table = dict[str, dict[str, float]]


def naive(logits_rollout: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    """What one writes without thinking: KL and TV through six [tokens, vocab] tensors."""
    log_mu, log_pi = logits_rollout.float().log_softmax(-1), logits.float().log_softmax(-1)
    mu, pi = log_mu.exp(), log_pi.exp()
    return (mu * (log_mu - log_pi)).sum(-1), (mu - pi).abs().sum(-1) / 2


def naive_step(logits_rollout: Tensor, logits: Tensor) -> Tensor:
    """Forward and backward of the KL alone."""
    logits = logits.detach().requires_grad_()
    log_mu, log_pi = logits_rollout.float().log_softmax(-1), logits.float().log_softmax(-1)
    (log_mu.exp() * (log_mu - log_pi)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def our_step(logits_rollout: Tensor, logits: Tensor) -> Tensor:
    """Forward of everything, backward of the KL."""
    found, normalizers = kernels.with_normalizers(logits_rollout, logits)
    kl = found.kl_rollout_current
    return kernels.gradient("kl_rollout_current", torch.ones_like(kl), kl, logits_rollout, logits, normalizers)


def policies(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Two policies that drifted a little, and drawn tokens."""
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda: torch.randn(rows, vocab, generator=generator, device=device)  # noqa: E731
    logits = 3 * draw()
    moved = logits + 0.05 * draw()
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device=device)
    return logits.to(dtype), moved.to(dtype), tokens


def measured(arms: Arms, device: torch.device, *, repeats: int) -> Table:
    """Seconds, until the device has finished, and peak MiB beyond what was held before."""

    def finished(run: Callable[[], object]) -> Callable[[], object]:
        def until_idle() -> object:
            result = run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return result

        return until_idle

    arms = {name: finished(run) for name, run in arms.items()}
    table: Table = {}
    for name, run in arms.items():
        run()  # compiles
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            run()
            peak = torch.cuda.max_memory_allocated(device) - before
            table[name] = {"peak_mib": peak / 2**20}
    for name, seconds in interleaved_medians(arms, repeats=repeats).items():
        table[name] = {"seconds": seconds, **table.get(name, {})}
    for row in table.values():
        row["times_faster_than_naive"] = table["naive"]["seconds"] / row["seconds"]
    return table


def with_bandwidth(table: Table, moved_bytes: dict[str, int]) -> Table:
    """GB/s of every arm, and its share of what the copy reached."""
    for name, row in table.items():
        row["gb_per_s"] = moved_bytes.get(name, moved_bytes["ours"]) / row["seconds"] / 1e9
    for row in table.values():
        row["share_of_copy"] = row["gb_per_s"] / table["copy"]["gb_per_s"]
    return table


def our_arms(run: Callable[[], object], warps: list[int]) -> Arms:
    """Ours as it is, and with other numbers of warps per program."""

    def with_warps(count: int) -> Callable[[], object]:
        def arm() -> object:
            kept, kernels.WARPS = kernels.WARPS, dict.fromkeys(kernels.WARPS, count)
            try:
                return run()
            finally:
                kernels.WARPS = kept

        return arm

    return {"ours": run} | {f"ours, {count} warps": with_warps(count) for count in warps}


def from_logits(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> dict[str, Table]:
    mu, pi, tokens = policies(args.rows, args.vocab, dtype, device)
    to = torch.empty_like(mu)
    exact: Arms = {"copy": lambda: to.copy_(mu), "naive": lambda: naive(mu, pi)}
    step: Arms = {"copy": lambda: to.copy_(mu), "naive": lambda: naive_step(mu, pi)}
    if device.type == "cuda":
        compiled, compiled_step = torch.compile(naive), torch.compile(naive_step)
        exact["torch.compile"] = lambda: compiled(mu, pi)
        step["torch.compile"] = lambda: compiled_step(mu, pi)
    exact |= our_arms(lambda: kernels.with_normalizers(mu, pi, tokens)[0], args.warps)
    step |= our_arms(lambda: our_step(mu, pi), args.warps)
    size = mu.nbytes
    forward = measured(exact, device, repeats=args.repeats)
    backward = measured(step, device, repeats=args.repeats)
    return {
        "exact": with_bandwidth(forward, {"ours": 2 * size, "copy": 2 * size}),
        "backward": with_bandwidth(backward, {"ours": 5 * size, "copy": 2 * size}),
    }


def from_hidden(args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> Table:
    """Replay from hidden states, against the two products with the output head that it contains."""
    from offdrift.divergence.hidden import Head, hidden_divergences

    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    states = draw(args.rows, args.hidden).to(dtype)
    moved = (states + 0.02 * draw(args.rows, args.hidden)).to(dtype)
    weight = (draw(args.vocab, args.hidden) / args.hidden**0.5).to(dtype)
    head = Head(weight, round_to=dtype)

    def products() -> None:
        for rows in weight.split(8192):
            torch.nn.functional.linear(states, rows)
            torch.nn.functional.linear(moved, rows)

    arms: Arms = {
        "products": products,
        "naive": lambda: naive(states @ weight.T, moved @ weight.T),
        "ours": lambda: hidden_divergences(states, head, moved, head),
    }
    table = measured(arms, device, repeats=args.repeats)
    for row in table.values():
        row["times_the_products"] = row["seconds"] / table["products"]["seconds"]
    return table


def errors(device: torch.device, vocab: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative distance from float64, of every field, on a few rows."""
    mu, pi, tokens = policies(8, vocab, dtype, device)
    ours, truth = (kernels.with_normalizers(mu, pi, tokens)[0], definition(mu.double(), pi.double(), tokens))
    pairs = zip(truth._fields, ours, truth, strict=True)
    return {name: float(((a - b) / b).abs().max()) for name, a, b in pairs if a is not None and b is not None}


def show(title: str, table: Table) -> None:
    columns = list(dict.fromkeys(key for row in table.values() for key in row))
    print(f"\n{title}\n{'':22}" + "".join(f"{column:>25}" for column in columns))
    for name, row in table.items():
        cells = (f"{row[column]:25.4g}" if column in row else " " * 25 for column in columns)
        print(f"{name:22}" + "".join(cells))


def parsed(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--warps", type=int, nargs="*", default=[4, 8, 32], help="also try these")
    parser.add_argument("--tiny", action="store_true", help="in Triton's interpreter, for errors")
    parser.add_argument("--count", action="store_true", help="compile only, and count instructions")
    parser.add_argument("--arch", type=int, default=90, help="what --count compiles for")
    parser.add_argument("--dtypes", nargs="*", default=["bf16", "fp32"], help="the same")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    if args.tiny:
        args.rows, args.vocab, args.hidden, args.repeats, args.warps = 2, 300, 16, 1, [1]
    return args


def timed(args: argparse.Namespace) -> dict[str, Any]:
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not (args.tiny and interpreted):
        sys.exit(
            "no GPU here: nothing to time. --count compiles the kernels and counts; "
            "TRITON_INTERPRET=1 with --tiny runs them for errors"
        )
    device = torch.device("cpu" if interpreted else "cuda")
    name = "Triton's interpreter" if interpreted else torch.cuda.get_device_name(device)
    if interpreted:
        print("no GPU used: these are times of Triton's interpreter, and say nothing about a GPU")
    found: dict[str, Any] = {"device": name, "machine": machine("triton"), "rows": args.rows}
    print(f"{name}, {args.rows} x {args.vocab:,} scores\n{found['machine']}")
    for dtype in (torch.bfloat16, torch.float32):
        short = str(dtype).removeprefix("torch.")
        tables = from_logits(args, dtype, device)
        for part, table in tables.items():
            show(f"{part}, {short}", table)
        worst = errors(device, args.vocab, dtype)
        print("largest relative error:", {name: f"{x:.1e}" for name, x in worst.items()})
        found[short] = {**tables, "relative_errors": worst}
    found |= {part: found["bfloat16"][part] for part in ("exact", "backward")}
    found["hidden"] = from_hidden(args, torch.bfloat16, device)
    show("hidden states, bfloat16", found["hidden"])
    return found


def main(argv: list[str] | None = None) -> dict[str, Any]:
    args = parsed(argv)
    if args.count:
        from gpu_count import compiled

        found: dict[str, Any] = {"arch": args.arch, "compiled": compiled(args.arch, args.dtypes)}
        for name, facts in found["compiled"].items():
            print(f"{name:40}{facts}")
    else:
        found = timed(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
