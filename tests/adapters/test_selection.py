"""About twelve metrics are logged, or those that are named; a name that is none is an error."""

import pytest

from offdrift.adapters.base import Adapter
from offdrift.adapters.hooks import HookConfig, hook_of
from offdrift.adapters.selection import MAIN, parse_choice, select
from offdrift.errors import MethodError
from offdrift.stats.metrics import METRICS
from tests.adapters.test_adapter import packed

NAME = "decoupled_geo_rs_token_tis"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    monkeypatch.delenv("OFFDRIFT_METRICS", raising=False)


def step(**options) -> tuple[Adapter, dict[str, float]]:
    adapter = Adapter(NAME, framework="plain", on_idle="warn", **options)
    adapter.loss(*packed(0, 6), normalizer=6.0)
    return adapter, adapter.end_step(1, also={"optim/loss": 1.0})


def test_a_step_logs_about_twelve_of_all_that_is_measured():
    adapter, main = step()
    everything = step(metrics="all")[1]
    assert len(everything) > 100
    assert 9 <= len(main) <= 13
    assert main.items() <= everything.items()
    assert {f"offdrift/{name}": x for name, x in adapter.numbers.items()} == everything
    kls = {"offdrift/mismatch/k3", "offdrift/staleness/k3", "offdrift/full/k3"}
    assert kls | {"offdrift/full/ess_frac", "offdrift/findings_stop"} <= main.keys()


def test_names_and_stars_choose():
    assert list(step(metrics=["full/k3", "optim/loss"])[1]) == ["offdrift/full/k3", "offdrift/optim/loss"]
    gates = step(metrics="gate/*, offdrift/findings_*")[1]
    assert len(gates) > 4
    assert all(name.startswith(("offdrift/gate/", "offdrift/findings_")) for name in gates)


def test_where_a_pair_is_missing_another_stands_for_it():
    numbers = {"mismatch/ess_frac": 0.5, "mismatch/k3": 0.1, "full/ess_frac": 0.25}
    assert select(numbers, "main") == {"mismatch/k3": 0.1, "full/ess_frac": 0.25}
    del numbers["full/ess_frac"]
    assert select(numbers, "main") == {"mismatch/ess_frac": 0.5, "mismatch/k3": 0.1}


def test_every_main_metric_is_one():
    names = [name for row in MAIN for name in row]
    assert len(set(names)) == len(names)
    assert [name for name in names if name not in METRICS and not name.startswith(("findings_", "unscored"))] == []
    for name in names:
        assert parse_choice([name]) == name


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (["full/k4"], "did you mean 'full/k3'"),
        ("full/k3,nonsense", "'nonsense'"),
        ([], "names no metric"),
        ("", "names no metric"),
        (["main", "full/k3"], "'main'"),
    ],
)
def test_what_names_no_metric_is_refused_with_what_is_near(metrics, words):
    with pytest.raises(MethodError, match=words):
        Adapter(NAME, framework="plain", metrics=metrics)


def test_hooks_read_the_environment_and_send_the_choice_to_other_processes(monkeypatch):
    assert HookConfig.of("x", NAME).metrics == "main"
    assert HookConfig.of("x", NAME, metrics=["full/k3", "gate/*"]).metrics == "full/k3,gate/*"
    monkeypatch.setenv("OFFDRIFT_METRICS", "full/*, mismatch/k3")
    assert HookConfig.of("x", NAME).metrics == "full/*,mismatch/k3"
    assert HookConfig.of("x", NAME, metrics="all").metrics == "all"
    hook = hook_of(HookConfig.of("x", NAME, on_idle="warn"))
    lp, advantages = packed(0, 6)
    hook.loss(lp, advantages, tokens=float(len(advantages)))
    hook.end_step()
    assert {"offdrift/full/k1", "offdrift/full/k3", "offdrift/mismatch/k3"} < hook.metrics.keys()
    assert "offdrift/mismatch/k1" not in hook.metrics
    monkeypatch.setenv("OFFDRIFT_METRICS", "ful/k3")
    with pytest.raises(MethodError, match="full/k3"):
        HookConfig.of("x", NAME)
