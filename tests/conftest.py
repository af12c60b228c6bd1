"""Shared checks explain their failures, whichever test imports them first; shapes are checked anew in every test."""

import gc
import signal

import pytest

from tests import shapes

pytest.register_assert_rewrite("tests.engines.contract")


def pytest_configure() -> None:
    """Commands that tests interrupt must hear it, also where a suite in the background was told to ignore Ctrl-C."""
    gc.disable()  # until all is collected: what imports and cases make is kept, and walking it takes an eighth of the time
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the full collections that training asks for need not walk it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    test, bracket, case = item.nodeid.partition("[")
    shapes.begin(test, (test.partition("::")[0], case) if bracket else None)
