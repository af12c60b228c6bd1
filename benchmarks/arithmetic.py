"""Claims that need only arithmetic (`offdrift_lab.exact.arithmetic`), as JSON: `python benchmarks/arithmetic.py`."""

import json

from offdrift_lab.exact.arithmetic import table

if __name__ == "__main__":
    print(json.dumps(table(), indent=1))
