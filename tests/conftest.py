"""Shared checks explain their failures, whichever test imports them first; shapes are checked anew in every test."""

import pytest

from tests import shapes

pytest.register_assert_rewrite("tests.engines.contract")


def pytest_runtest_setup() -> None:
    shapes.tests += 1
