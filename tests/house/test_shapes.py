"""The check that test-all puts around every function: on in each test's first calls, off in the others."""

import pytest
from beartype.roar import BeartypeCallHintParamViolation

from tests import shapes


def test_the_first_calls_of_every_test_are_checked() -> None:
    @shapes.first_calls
    def half(x: int) -> float:
        return x / 2

    def refuses() -> None:
        with pytest.raises(BeartypeCallHintParamViolation):
            half(1.0)  # type: ignore[arg-type]

    for _ in range(shapes.CALLS):
        refuses()
    assert half(1.0) == 0.5
    shapes.tests += 1
    refuses()
