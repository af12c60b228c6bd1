"""Claims that need only arithmetic (`offdrift_lab.exact.arithmetic`), as JSON: `python benchmarks/arithmetic.py`."""

import json
from pathlib import Path

from offdrift_lab.exact.arithmetic import table

RESULTS = Path(__file__).parent / "results" / "arithmetic.json"

if __name__ == "__main__":
    text = json.dumps(table(), indent=1)
    RESULTS.write_text(text + "\n", encoding="utf-8")
    print(text)
