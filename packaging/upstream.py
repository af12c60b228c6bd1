"""Sources of frameworks that publish no wheel, at the commits that were read: `make test-upstream`.

    python packaging/upstream.py FOLDER

Each goes into FOLDER/NAME, and nothing of it into the package or the repository. A folder that is there is left alone.
Where github.com is out of reach, git takes a mirror: `git config --global url.MIRROR.insteadOf https://github.com/`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COMMITS = {
    "slime": ("https://github.com/THUDM/slime", "624b824a898ab0ec1fcb4d373004c7f3852bf515"),
    "prime-rl": ("https://github.com/PrimeIntellect-ai/prime-rl", "559b44772e471d1538537b8805cc77f3824a5e64"),
    "miles": ("https://github.com/radixark/miles", "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"),
    "nemo-rl": ("https://github.com/NVIDIA-NeMo/RL", "7ea279abfbeb698b092856d0dab61e7cf39bc909"),
    "rllm": ("https://github.com/rllm-org/rllm", "9beb6e0f676a46d38858991fd79ac5f8e0b16d4c"),
    "torchtitan": ("https://github.com/pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a"),
    "vime": ("https://github.com/vllm-project/vime", "2b83ea209634051243693e8186f45f449acb4cd1"),
    "roll": ("https://github.com/alibaba/ROLL", "8eb27cc2dc34c4d1310b169d9b86d339004d811a"),
}
"""Where each is, and the commit that docs/integrations/versions.toml names."""


def fetch(folder: Path) -> None:
    """Check out every framework that is not there yet.

    Raises: `subprocess.CalledProcessError` where git does not get it.
    """
    for name, (url, commit) in COMMITS.items():
        place = folder / name
        if place.is_dir():
            continue
        unfinished = folder / f".{name}"
        subprocess.run(["git", "init", "--quiet", unfinished], check=True)
        got = ["git", "-C", str(unfinished), "fetch", "--quiet", "--depth", "1", url, commit]
        subprocess.run(got, check=True)
        subprocess.run(["git", "-C", str(unfinished), "checkout", "--quiet", "FETCH_HEAD"], check=True)
        unfinished.rename(place)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
