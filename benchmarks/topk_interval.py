"""Intervals of KL and TV from top-k log-probs: time, memory, and how tight they are.

    python benchmarks/topk_interval.py [--rows 64] [--vocab 151936] [--k 20] [--threads N] [--json PATH]

One log-sum-exp of the logits and the exact divergences stand beside them; the policies are synthetic,
a sharp row and the same with noise on every logit, so tightness here is about that kind of drift.
"""

import argparse
import json
from pathlib import Path

import torch
from measure import interleaved_medians, machine, peak_mib

from offdrift.divergence.fused import exact_divergences
from offdrift.divergence.interval import topk_divergences


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)

    generator = torch.Generator().manual_seed(0)
    logits_rollout = 3 * torch.randn(args.rows, args.vocab, generator=generator)
    logits = logits_rollout + 0.05 * torch.randn(args.rows, args.vocab, generator=generator)
    log_mu = logits_rollout.log_softmax(-1)
    tokens = torch.multinomial(log_mu.exp(), 1, generator=generator).squeeze(1)
    top = log_mu.topk(args.k)
    record = (top.indices, top.values, tokens, log_mu.gather(1, tokens[:, None]).squeeze(1))

    arms = {
        "logsumexp": lambda: logits.logsumexp(-1),
        "exact": lambda: exact_divergences(logits_rollout, logits, compiled=False),
        "interval": lambda: topk_divergences(*record, logits),
        "capped": lambda: topk_divergences(*record, logits, tail_log_ratio_cap=0.5),
    }
    seconds = interleaved_medians(arms, repeats=args.repeats)
    exact = exact_divergences(logits_rollout, logits, compiled=False).kl_rollout_current.mean()
    (kl, _), (under_cap, _) = arms["interval"](), arms["capped"]()
    found: dict[str, object] = {"rows": args.rows, "vocab": args.vocab, "k": args.k}
    found |= {"machine": machine(), "kl_mean": float(exact)}
    found["kl_mean_over_exact"] = {
        "lo": float(kl.lo.mean() / exact),
        "hi": float(kl.hi.mean() / exact),
        "hi under a cap of 0.5": float(under_cap.hi.mean() / exact),
        "refuted": float(under_cap.refuted.double().mean()),
    }
    print(f"{args.rows} x {args.vocab:,} logits, k = {args.k}\n{found['machine']}")
    for name, run in arms.items():
        row = {"ms_per_row": 1e3 * seconds[name] / args.rows, "peak_mib": peak_mib(run)}
        found[name] = row
        print(f"{name:10}{row['ms_per_row']:9.3f} ms/row {row['peak_mib']:9.1f} MiB")
    print(found["kl_mean_over_exact"])
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return found


if __name__ == "__main__":
    main()
