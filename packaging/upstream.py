"""Sources of frameworks that publish no wheel, at the commits that were read: `make test-upstream`.

    python packaging/upstream.py [--newest] FOLDER

Each goes into FOLDER/NAME, and nothing of it into the package or the repository. A folder that is there is left alone.
`--newest` takes the newest commit in place of the one that was read, for `make currency NEWEST=1`. One that git does not
get is named, and the others are taken; it ends with 1 then.
Where github.com is out of reach, git takes a mirror: `git config --global url.MIRROR.insteadOf https://github.com/`.
"""

from __future__ import annotations

import argparse
import shutil
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
    "areal": ("https://github.com/areal-project/AReaL", "cbff54d645d2cd8ee1f1c358a82f3f473588433d"),
    "open-instruct": ("https://github.com/allenai/open-instruct", "e6c3044aa6201c8bfa4573c1b03142af599e730d"),
}
"""Where each is, and the commit that docs/integrations/versions.toml names."""


def fetch(folder: Path, *, newest: bool = False) -> list[str]:
    """Check out every framework that is not there yet; return the names of those that git does not get."""
    missing = []
    for name, (url, commit) in COMMITS.items():
        place, unfinished = folder / name, folder / f".{name}"
        if place.is_dir():
            continue
        git = ("git", "-C", str(unfinished))
        shutil.rmtree(unfinished, ignore_errors=True)
        subprocess.run(["git", "init", "--quiet", unfinished], check=True)
        got = [*git, "fetch", "--quiet", "--depth", "1", url, "HEAD" if newest else commit]
        checkout = [*git, "checkout", "--quiet", "FETCH_HEAD"]
        if any(subprocess.run(step, check=False).returncode for step in (got, checkout)):
            missing.append(name)
            continue
        unfinished.rename(place)
    return missing


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--newest", action="store_true")
    options = parser.parse_args()
    missing = fetch(options.folder, newest=options.newest)
    sys.exit(f"git could not get {', '.join(missing)}" if missing else 0)
