"""Reads logs in a process that may take little memory, and says what came of each.

    python -m tests.records.hostile LIMIT_MIB MEMORY_MIB PATH...

One JSON object per path: sequences, bad rows, or the error, and by how much the peak of memory grew. Anything but our error is a traceback.
"""

import json
import resource
import sys
from pathlib import Path

from offdrift.errors import RecordError
from offdrift.records.readers import detect, pieces, read
from tests.records.samples import LOGS


def outcome(path: str, limit: int) -> dict[str, object]:
    try:
        found = detect([path], limit=limit)
        reads = [read(piece, found) for piece in pieces(found)]
    except RecordError as e:
        return {"error": str(e)}
    return {
        "sequences": sum(b.num_sequences for r in reads for b in r.batches),
        "bad": [(b.file, b.row, b.reason) for r in reads for b in r.bad],
        "skipped": [(b.file, b.row, b.reason) for b in found.skipped],
        "pieces": len(reads),
    }


def grown(path: str, limit: int) -> dict[str, object]:
    """What comes of a path, and by how many MiB reading it raised the peak of resident memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = outcome(path, limit)
    return {**told, "grown": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10}


def main() -> None:
    limit, memory = (int(x) << 20 for x in sys.argv[1:3])
    for name in ("slime/train_data", "skyrl", "nemo_rl", "miles/dashboard_columns"):
        assert "sequences" in outcome(str(LOGS / name), limit)  # everything is loaded
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for path in sys.argv[3:]:
        print(json.dumps(grown(path, limit)), flush=True)


if __name__ == "__main__":
    main()
