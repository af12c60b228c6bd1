"""What tests of certificates share."""

import jaxtyping
import pytest


@pytest.fixture
def without_shape_checks(monkeypatch: pytest.MonkeyPatch):
    """The checks cost many times the bounds themselves; every other test runs with them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
