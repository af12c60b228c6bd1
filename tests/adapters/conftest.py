"""What tests of adapters share: every metric is logged, and the fixture `process`, a process of its own."""

import os

import pytest

from tests.adapters.hooked import process

__all__ = ["every_metric", "process"]


@pytest.fixture(scope="package", autouse=True)
def every_metric():
    """Have adapters log all that they measure, also in processes that tests start; `test_selection` is about less."""
    before = os.environ.get("OFFDRIFT_METRICS")
    os.environ["OFFDRIFT_METRICS"] = "all"
    yield
    os.environ.pop("OFFDRIFT_METRICS")
    if before is not None:
        os.environ["OFFDRIFT_METRICS"] = before
