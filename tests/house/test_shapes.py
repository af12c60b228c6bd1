"""The check that test-all puts around every function: on in each test's first calls, off in the others."""

from dataclasses import dataclass

import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped
from torch import Tensor, zeros

import offdrift as od
from offdrift.aggregate import aggregate
from offdrift.methods import METHODS
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


def checked(test: str, case: str) -> bool:
    """Whether a call of one function, in this test with this case, is checked."""
    shapes.begin(("a file", test), ("a file", case))
    try:
        one(zeros(2), wrong=True)
    except TypeCheckError:
        return True
    return False


@jaxtyped(typechecker=shapes.first_calls)
def one(x: Float[Tensor, " n"], wrong: bool) -> Float[Tensor, " n"]:
    return x[:1] if wrong else x


def test_every_test_and_every_case_is_checked_and_their_product_is_not(monkeypatch) -> None:
    monkeypatch.setattr(shapes, "everywhere", shapes.defaultdict(shapes.Counter))
    kept = list(shapes.now)
    tests, cases = ("first", "second", "third", "fourth"), [f"case {i}" for i in range(30)]
    calls = {(test, case): checked(test, case) for test in tests for case in cases}
    for test in tests:
        assert any(calls[test, case] for case in cases), "a fault of one test is seen"
    for case in cases:
        assert any(calls[test, case] for test in tests), "a fault of one case is seen"
    assert sum(calls.values()) == shapes.CALLS * (len(cases) + len(tests) - 2)
    shapes.now[:] = kept


def test_a_function_that_is_made_anew_in_every_call_has_the_checks_of_one() -> None:
    compiled = len(shapes.checkers)

    def made():
        @jaxtyped(typechecker=shapes.first_calls)
        def inner(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
            return x[:1]

        return inner

    outcomes = []
    for _ in range(6):
        try:
            outcomes.append(len(made()(zeros(2))))
        except TypeCheckError:
            outcomes.append("refused")
    assert outcomes == ["refused"] * shapes.CALLS + [1] * (6 - shapes.CALLS)
    assert len(shapes.checkers) == compiled + 2


Row = Float[Tensor, " n"]


@dataclass
class Held:
    x: Float[Tensor, " n"]


@dataclass
class Plain:
    x: int


def by_alias(x: "Row") -> int: ...
def by_result(x: int) -> "list[Float[Tensor, ' n']]": ...
def without(x: "int", y: "dict[str, Tensor]") -> "str": ...


@pytest.mark.parametrize(
    ("thing", "checked"),
    [(by_alias, True), (by_result, True), (staticmethod(by_alias), True), (property(by_result), True), (Held, True),
     (without, False), (property(without), False), (Plain, False)],
)  # fmt: skip
def test_what_has_an_array_is_checked_and_what_has_none_runs_as_it_is(thing, checked) -> None:
    assert shapes.has_arrays(thing) == checked


def test_the_library_is_checked_where_it_has_arrays(request) -> None:
    if "offdrift" not in (request.config.getoption("jaxtyping_packages") or ""):
        pytest.skip("shapes are not checked in this run")
    assert hasattr(od.policy_loss, "__wrapped__")
    shapes.begin()
    with pytest.raises(TypeCheckError):
        aggregate(zeros(2, 2), od.Segments.from_lengths([2]), how="token_mean", normalizer=1.0)
    assert not hasattr(METHODS["grpo"].describe, "__wrapped__")
