"""Sweeps' folders without weights, and with the numbers that analyses read alone: to bring them from another machine.

    python benchmarks/pack.py runs/epochs runs/staleness-400 --to staleness.tar.xz
    tar -xf staleness.tar.xz        # on the other side: the same folders, for `offdrift sweep --report`, `offdrift lab`, ...

Of every run: run.json, summary.json, error.json, evaluations, and of every update the columns below.
"""

import argparse
import io
import json
import tarfile
from pathlib import Path

KEPT = ("run.json", "summary.json", "error.json", "sweep.json", "eval.jsonl")
COLUMNS = (
    "update", "batch", "reward/mean", "version_lag/mean", "version_lag/max", "full/ess_seq_frac", "full/log_ppl_gap", "full/k3",
    "full/chi2_seq", "divergence/kl_rollout_current_mean", "divergence/kl_rollout_current_max", "gate/acceptance_seq",
    "optim/grad_norm", "optim/lr_scale", "optim/empty", "response/length_mean", "current/entropy",
)  # fmt: skip
"""Of metrics.jsonl."""
DIGITS = 6


def small(text: str) -> str:
    """Rows of metrics.jsonl with these columns alone, to six digits."""
    rows = (json.loads(line) for line in text.splitlines() if line.endswith("}"))
    return "".join(json.dumps({k: rounded(row[k]) for k in COLUMNS if k in row}) + "\n" for row in rows)


def rounded(value: object) -> object:
    """A number to `DIGITS` significant digits; anything else as it is."""
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="of sweeps, relative to the working folder")
    parser.add_argument("--to", type=Path, required=True, help="the archive that is written")
    args = parser.parse_args()
    count = 0
    with tarfile.open(args.to, "w:xz") as archive:
        for path in sorted(file for folder in args.folders for file in folder.rglob("*.json*")):
            if path.name == "metrics.jsonl":
                content = small(path.read_text(encoding="utf-8")).encode()
            elif path.name in KEPT:
                content = path.read_bytes()
            else:
                continue
            entry = tarfile.TarInfo(path.as_posix())
            entry.size, entry.mtime = len(content), int(path.stat().st_mtime)
            archive.addfile(entry, io.BytesIO(content))
            count += path.name == "metrics.jsonl"
    print(f"{count} runs in {args.to}, {args.to.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
