"""Of the cases of a slow claim each run takes a share, consecutive runs take them all, and other tests always run."""

import pytest

from tests.sampling import sampled

pytest_plugins = ("pytester",)
SOURCE = """
import pytest

@pytest.mark.sampled({most})
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range({cases}))
def test_many(a, b): pass

@pytest.mark.parametrize("a", range(3))
def test_few(a): pass

@pytest.mark.sampled(1)
def test_single(): pass
"""


@pytest.fixture
def items(pytester, request):
    most, cases = request.param
    return pytester.getitems(SOURCE.format(most=most, cases=cases))


def names(items) -> list[str]:
    return [item.name for item in items]


@pytest.mark.parametrize(("items", "share"), [((4, 4), 3), ((5, 7), 5), ((1, 2), 6), ((30, 2), 1)], indirect=["items"])
def test_consecutive_runs_take_every_case_once_and_the_rest_always_runs(items, share):
    many = [name for name in names(items) if "many" in name]
    taken = [names(sampled(items, str(turn))[0]) for turn in range(7, 7 + share)]
    assert sorted(name for run in taken for name in run if "many" in name) == sorted(many)
    sizes = [len(run) for run in taken]
    assert max(sizes) - min(sizes) <= 1
    for run in taken:
        assert {"test_few[0]", "test_few[1]", "test_few[2]", "test_single"} <= set(run)
        assert run == [name for name in names(items) if name in run]


@pytest.mark.parametrize("items", [(4, 4)], indirect=True)
def test_what_is_left_out_is_the_rest_and_without_sample_nothing_is(items):
    run, left_out = sampled(items, "12")
    assert sorted(names(run) + names(left_out)) == sorted(names(items))
    assert len(left_out) == 8
    for turn in (None, ""):
        assert sampled(items, turn) == (items, [])
