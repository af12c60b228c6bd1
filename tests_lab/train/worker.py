"""A training run in a process of its own, for tests that kill it or start several.

python -m tests_lab.train.worker RUN_FOLDER [--resume] [--short] [--sums] [key=value ...]

--sums: every process prints, at the end of an arm, sums of its weights, of its last gradient and of its sizes of noise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from offdrift_lab.train.data.environments import ENVIRONMENTS
from offdrift_lab.train.data.tasks import TASKS
from offdrift_lab.train.features.align import Alignment
from offdrift_lab.train.features.perturb import LayerNoise
from offdrift_lab.train.loop import loop
from offdrift_lab.train.loop.loop import train
from tests_lab.train.conftest import Digits, Echo, short_arms, small_recipe


def main(folder: str, *words: str) -> None:
    TASKS["digits"], ENVIRONMENTS["echo"] = Digits(), Echo()
    changes = {k: json.loads(v) for k, v in (w.split("=", 1) for w in words if "=" in w)}

    if "--short" in words:
        short_arms(pytest.MonkeyPatch())

    finish = loop.finish

    def finish_and_sum(arm):
        align, noise = arm.feature(Alignment), arm.feature(LayerNoise).noise
        parts = (arm.model.parameters(), align.last.values(), [noise.log_sigma])
        sums = [sum(float(x.detach().double().abs().sum()) for x in part) for part in parts]
        print("sums", json.dumps([arm.name, *sums]), flush=True)
        return finish(arm)

    if "--sums" in words:
        loop.finish = finish_and_sum

    def watch(event) -> None:
        print(event.kind, event.arm, event.step, flush=True)

    train(small_recipe(**changes), Path(folder), resume="--resume" in words, watch=watch)


if __name__ == "__main__":
    main(*sys.argv[1:])
