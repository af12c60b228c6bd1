"""How far the KL of two policies is from the truth, by several ways to compute it and by size of the KL.

    python benchmarks/accuracy.py [--rows 16] [--vocab 65536] [--json PATH]

KL(mu || pi) of every row against float64, from KLs of 1e-8 to 1 nat. All ways get the same scores, which bfloat16 can
hold, so that none is charged for rounding its input: `log_softmax` in float32 and in bfloat16, TRL's chunked divergence
(where there is no GPU, the fallback in torch that it brings), Liger's KL loss on float32 log-probs, and ours: on a CPU,
and the kernels for GPUs. What is not installed is left out. Liger's kernels and ours need a GPU, or Triton's interpreter
(TRITON_INTERPRET=1), which rounds like numpy: the same sums in the same order, exponentials of another library.

The score of a token of pi is that of mu with noise, rounded; for KLs below 1e-4 nat, which a last place of bfloat16 in
every score exceeds, the noise is in some of the scores only. That is how two engines differ that compute the same model.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine
from torch import Tensor

from offdrift.divergence import kernels
from offdrift.divergence.exact import definition
from offdrift.divergence.fused import exact_divergences

LEVELS = tuple(10.0**power for power in range(-8, 1))
SMALLEST_WHOLE = 1e-4
"""KL that noise of a bfloat16 number's last place in every score makes, about."""

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def log_softmax(dtype: torch.dtype) -> Way:
    """The definition, as one writes it, in this dtype."""

    def way(mu: Tensor, pi: Tensor, _: Tensor) -> Tensor:
        log_mu, log_pi = mu.to(dtype).log_softmax(-1), pi.to(dtype).log_softmax(-1)
        return (log_mu.exp() * (log_mu - log_pi)).sum(-1)

    return way


def trl_chunked() -> Way:
    """TRL's function of hidden states and heads: with the identity as hidden states, heads are scores."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    def way(mu: Tensor, pi: Tensor, _: Tensor) -> Tensor:
        rows = torch.eye(len(mu), device=mu.device)
        student, teacher = (rows, pi.T.contiguous(), None), (rows, mu.T.contiguous(), None)
        return ChunkedDivergenceFunction.apply(*student, *teacher, 0.0)[0]  # 0: KL(teacher || student)

    return way


def liger() -> Way:
    """Liger's KL loss, a row at a time."""
    from liger_kernel.transformers.kl_div import LigerKLDIVLoss

    loss = LigerKLDIVLoss(reduction="sum", log_target=True)
    loss.eps = _Scalar(loss.eps)

    def way(mu: Tensor, pi: Tensor, _: Tensor) -> Tensor:
        log_mu, log_pi = mu.log_softmax(-1), pi.log_softmax(-1)
        return torch.stack([loss(log_pi[i : i + 1], log_mu[i : i + 1]) for i in range(len(mu))])

    return way


class _Scalar(float):
    """A number that Triton's interpreter, too, can be asked to convert; the loss of log-probs does not use it."""

    def to(self, _: Any) -> "_Scalar":
        return self


def ours(*, compiled: bool) -> Way:
    """On a CPU: by the library of C++, which is what is taken where there is a compiler, or without."""

    def way(mu: Tensor, pi: Tensor, tokens: Tensor) -> Tensor:
        return exact_divergences(mu, pi, tokens=tokens, compiled=compiled).kl_rollout_current

    return way


def our_kernels(mu: Tensor, pi: Tensor, tokens: Tensor) -> Tensor:
    return kernels.with_normalizers(mu, pi, tokens, tv=False)[0].kl_rollout_current


def ways(device: torch.device) -> dict[str, Way]:
    """All that can run here."""
    found: dict[str, Way] = {
        "log_softmax, bfloat16": log_softmax(torch.bfloat16),
        "log_softmax, float32": log_softmax(torch.float32),
    }
    has_kernels = kernels.available(device, torch.float32)
    for name, make, here in (("TRL, chunked", trl_chunked, True), ("Liger, KL loss", liger, has_kernels)):
        try:
            if here:
                found[name] = make()
        except ImportError as error:
            print(f"{name} is left out: {error}")
    found["offdrift"] = ours(compiled=True)
    found["offdrift, no compiler"] = ours(compiled=False)
    if has_kernels:
        found["offdrift, GPU kernels"] = our_kernels
    return found


def policies(kl: float, rows: int, vocab: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of mu and pi that bfloat16 can hold, of about this KL, and tokens drawn from mu."""
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(rows, vocab, generator=generator)).bfloat16().float()
    size = (2 * max(kl, SMALLEST_WHOLE)) ** 0.5
    moved = (logits + size * torch.randn(rows, vocab, generator=generator)).bfloat16().float()
    whole = definition(logits[:2].double(), moved[:2].double(), torch.zeros(2, dtype=torch.int64))
    share = min(1.0, kl / float(whole.kl_rollout_current.mean()))
    chosen = torch.rand(rows, vocab, generator=generator) < share
    # A row of few entries may have none that moved: its KL would be 0, and an error relative to it nothing.
    same = ~(chosen & (moved != logits)).any(-1)
    chosen[same, (moved - logits).abs().argmax(-1)[same]] = True
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return logits.to(device), torch.where(chosen, moved, logits).to(device), tokens.to(device)


def measure(kl: float, args: argparse.Namespace, by: dict[str, Way]) -> dict[str, Any]:
    """Errors of every way at one size of the KL."""
    mu, pi, tokens = policies(kl, args.rows, args.vocab, args.device)
    parts = zip(mu.split(8), pi.split(8), tokens.split(8), strict=True)
    truth = torch.cat([definition(a.double(), b.double(), t).kl_rollout_current for a, b, t in parts])
    row: dict[str, Any] = {"kl": float(truth.median()), "ways": {}}
    for name, way in by.items():
        found = way(mu, pi, tokens).double()
        off = (found - truth).abs() / truth
        row["ways"][name] = {
            "median": float(off.median()),
            "worst": float(off.max()),
            "negative_rows": int((found < 0).sum()),
        }
    return row


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=65_536)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for errors")
    args = parser.parse_args(argv)
    if args.tiny:
        args.rows, args.vocab = 4, 1000
    by = ways(args.device)
    found: dict[str, Any] = {
        "machine": machine("triton", "trl", "liger-kernel"),
        "kernels": "Triton's interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else str(args.device),
        **{"rows": args.rows, "vocab": args.vocab, "levels": []},
    }
    print(f"KL(mu || pi), {args.rows} rows of {args.vocab:,}; median relative error (worst; rows below 0)")
    for kl in LEVELS:
        row = measure(kl, args, by)
        found["levels"].append(row)
        cells = [f"{n} {e['median']:.0e} ({e['worst']:.0e}; {e['negative_rows']})" for n, e in row["ways"].items()]
        print(f"KL {row['kl']:.1e}: " + ", ".join(cells), flush=True)
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
