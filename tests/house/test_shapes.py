"""The check that test-all puts around every function: on in each test's first calls, off in the others."""

import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor, zeros

from tests import shapes


@pytest.mark.parametrize("again", [False, True])
def test_the_first_calls_of_every_test_are_checked(again: bool) -> None:
    @jaxtyped(typechecker=shapes.first_calls)
    def first(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x[:1]

    for _ in range(shapes.CALLS):
        with pytest.raises(TypeCheckError, match="return value"):
            first(zeros(2))
    assert len(first(zeros(2))) == 1
    if again:
        shapes.begin()
        with pytest.raises(TypeCheckError, match="parameter 'x'"):
            first(zeros(2, 2))
