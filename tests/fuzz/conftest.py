"""Readers are met as a user meets them."""

from collections.abc import Iterator

import jaxtyping
import pytest


@pytest.fixture(autouse=True)
def _as_a_user_calls_it() -> Iterator[None]:
    """Without the type checks of the test run, which would refuse before the library does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
