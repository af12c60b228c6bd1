"""Shared checks explain their failures, whichever test imports them first."""

import pytest

pytest.register_assert_rewrite("tests.engines.contract")
