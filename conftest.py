"""Of every test: checks explain their failures, shapes are checked anew, and what is drawn follows from its name."""

import gc
import os
import random
import signal
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from tests import sampling, shapes

pytest.register_assert_rewrite("tests.engines.contract")
shapes.leave_scalars()  # before the conftest of a folder imports the library
LONG = 60
"""Seconds of a file that begins: at the end, one worker would run it while others wait."""
MANY = 300
"""Modules: vLLM brings 2,500, and walking what it made takes a fifth of a second, once in every arm that is trained."""


def pytest_configure(config: pytest.Config) -> None:
    """Commands that tests interrupt must hear it, also where a suite in the background was told to ignore Ctrl-C."""
    if "COSTS" in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(sampling.Costs(Path(os.environ["COSTS"])))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection() -> None:
    """Until all is collected: what imports and cases make is kept, and walking it takes an eighth of the time."""
    gc.disable()


class Frozen:
    """What the collector leaves alone: all that was there when a file began after others had imported much."""

    file: Path | None = None
    modules = 0
    """How many were imported when it was frozen."""


def freeze() -> None:
    """Keep what was imported and collected to the end: the full collections that training asks for need not walk it."""
    gc.collect()
    gc.freeze()
    Frozen.modules = len(sys.modules)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    costs = sampling.read_costs()
    items[:], left_out = sampling.taking_turns(items, os.environ.get("SAMPLE"), costs)
    config.hook.pytest_deselected(items=left_out)
    of_files = sampling.of_files(items, costs)
    items.sort(key=lambda item: of_files[sampling.file_of(item.nodeid)] < LONG)


def pytest_collection_finish() -> None:
    freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def seed_all(seed: int) -> None:
    """A test that draws draws the same on every machine, whichever tests ran before it."""
    random.seed(seed)
    np.random.seed(seed)  # the generator that others share
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Between two files nothing is there that a fixture will want to be rid of.
    if item.path != Frozen.file and len(sys.modules) > Frozen.modules + MANY:
        freeze()
    Frozen.file = item.path
    seed_all(zlib.crc32(item.nodeid.encode()))
    test, bracket, case = item.nodeid.partition("[")
    shapes.begin(test, (test.partition("::")[0], case) if bracket else None)
