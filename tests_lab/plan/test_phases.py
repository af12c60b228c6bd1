"""Phases of a plan: distributions have the mean they state, a split keeps the devices, and every bad value is named."""

import math
from pathlib import Path

import numpy as np
import pytest

from offdrift.errors import RecipeError
from offdrift_lab.plan.phases import EXAMPLE, Lengths, Phases, log_median, phases_of, read_phases

DRAWS = 200_000


@pytest.mark.parametrize("correlation", [0.0, 0.7])
@pytest.mark.parametrize(
    ("mean", "sigma", "cap"),
    [(1500, 0.6, 4096), (100, 1.5, 120), (300, 0.0, 400), (2000, 1.0, 2001), (64, 2.0, 1024), (500, 0.7, 500)],
)
def test_the_mean_is_that_after_the_cap(mean, sigma, cap, correlation):
    lengths = Lengths(mean=mean, sigma=sigma, cap=cap, correlation=correlation)
    drawn = lengths.draw(np.random.default_rng(0), DRAWS // 4, 4)
    assert drawn.shape == (DRAWS // 4, 4)
    assert drawn.min() >= 1
    assert drawn.max() <= cap
    # Means of groups are independent; half a token is what rounding may move.
    error = drawn.mean(axis=1).std() / math.sqrt(len(drawn))
    assert drawn.mean() == pytest.approx(mean, abs=5 * error + 0.5)
    if sigma == 0:
        assert set(drawn.ravel()) == {mean}


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_siblings_have_correlated_logarithms(correlation):
    lengths = Lengths(mean=5000, sigma=0.5, cap=10**9, correlation=correlation)
    logs = np.log(lengths.draw(np.random.default_rng(1), DRAWS, 2))
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(correlation, abs=5 / math.sqrt(DRAWS))
    assert logs.std() == pytest.approx(0.5, rel=0.01)


def test_the_median_without_a_cap_is_known():
    """E[exp(m + s Z)] = exp(m + s^2 / 2)."""
    for mean, sigma in ((100.0, 0.5), (3.0, 2.0), (1e4, 1.0)):
        assert log_median(mean, sigma, 1e12) == pytest.approx(math.log(mean) - sigma**2 / 2, abs=1e-6)


def test_a_histogram_draws_what_it_holds():
    lengths = Lengths(kind="histogram", values=(10, 20, 9000), weights=(1, 3, 0))
    drawn = lengths.draw(np.random.default_rng(0), DRAWS, 1)
    assert set(drawn.ravel()) == {10, 20}
    assert (drawn == 20).mean() == pytest.approx(0.75, abs=5 * math.sqrt(0.1875 / DRAWS))
    even = Lengths(kind="histogram", values=(10, 20)).draw(np.random.default_rng(0), DRAWS, 1)
    assert (even == 20).mean() == pytest.approx(0.5, abs=5 * math.sqrt(0.25 / DRAWS))


def test_a_split_keeps_the_devices_and_scales_the_trainer():
    phases = Phases(
        rollout={"workers": 4, "devices": 2}, trainer={"devices": 8, "group": 3.0, "update": 1.0, "scaling": 0.5}
    )
    assert phases.devices == 16
    for workers in range(1, 8):
        own = phases.split(workers)
        assert own.devices == 16
        assert own.rollout.workers == workers
        assert own.trainer.devices == 16 - 2 * workers
        assert own.trainer.group == pytest.approx(3.0 * math.sqrt(8 / own.trainer.devices))
        assert own.trainer.update == 1.0
    assert phases.split(4) == phases
    for workers in (0, 8):
        with pytest.raises(RecipeError, match=rf"rollout.workers = {workers} .* 1 to 7 workers are possible"):
            phases.split(workers)


def test_one_pool_has_all_devices():
    phases = Phases(
        rollout={"workers": 4, "devices": 2}, trainer={"devices": 8, "group": 3.0}, colocated={"switch": 7.0}
    )
    pool = phases.as_colocated
    assert (pool.rollout.workers, pool.trainer.devices, pool.trainer.group, pool.sync.push) == (8, 16, 1.5, 7.0)
    stated = phases.model_copy(update={"colocated": type(phases.colocated)(group=0.25, update=9.0)}).as_colocated
    assert (stated.trainer.group, stated.trainer.update) == (0.25, 9.0)


def test_a_file_says_what_it_says(tmp_path):
    file = tmp_path / "cluster.toml"
    file.write_text("[rollout]\nworkers = 3\n[lengths]\nkind = 'histogram'\nvalues = [5, 7]\n")
    phases = read_phases(file)
    assert (phases.name, phases.rollout.workers, phases.lengths.values) == ("cluster", 3, (5, 7))
    assert phases.rollout.slots == EXAMPLE.rollout.slots
    assert phases_of(phases.model_dump(), where="x") == phases


def test_the_example_is_a_plan_and_the_page_names_every_field():
    root = Path(__file__).parents[2]
    phases = read_phases(root / "examples" / "cluster.toml")
    assert (phases.name, phases.devices) == ("7B on 4 nodes of 8 devices", 32)
    page = (root / "docs" / "plan.md").read_text("utf-8")
    fields = [f"{part}.{key}" for part, value in EXAMPLE for key in getattr(type(value), "model_fields", {})]
    assert len(fields) > 30
    assert [field for field in fields if f"| `{field}` |" not in page] == []


BAD = {
    "rollout.workers = 0": {"rollout": {"workers": 0}},
    "rollout.t0 = rollout.t1 = 0": {"rollout": {"t0": 0, "t1": 0}},
    "rollout.t0 = nan": {"rollout": {"t0": math.nan}},
    "rollout.prefill = -1": {"rollout": {"prefill": -1}},
    "unknown key 'rollout.worker'; rollout has workers, devices, slots": {"rollout": {"worker": 1}},
    "unknown key 'gpus'; a plan has name, rollout, lengths": {"gpus": 8},
    "rollout = 8: a table such as [rollout]": {"rollout": 8},
    "lengths.kind = 'normal': input should be 'lognormal', 'constant' or 'histogram'": {"lengths": {"kind": "normal"}},
    'lengths.kind = "histogram" needs lengths.values': {"lengths": {"kind": "histogram"}},
    'belong to kind = "histogram", not to "constant"': {"lengths": {"kind": "constant", "values": [3]}},
    "lengths.weights has 1 numbers for 2 lengths.values": {
        "lengths": {"kind": "histogram", "values": [3, 4], "weights": [1]}
    },
    "lengths.weights has 2 numbers for 2 lengths.values; give one each, not all 0": {
        "lengths": {"kind": "histogram", "values": [3, 4], "weights": [0, 0]}
    },
    "lengths.mean = 5000 is above lengths.cap = 4096; raise the cap": {"lengths": {"mean": 5000}},
    "lengths.correlation = 1.5": {"lengths": {"correlation": 1.5}},
    "trainer.group = 'fast'": {"trainer": {"group": "fast"}},
    "batch.store = 4 is below batch.groups = 32": {"batch": {"store": 4}},
    "run.updates = 0": {"run": {"updates": 0}},
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_value_is_named_with_a_way_out(words):
    with pytest.raises(RecipeError) as error:
        phases_of(BAD[words], where="cluster.toml")
    assert str(error.value).startswith("cluster.toml: ")
    assert words in str(error.value)
    assert str(error.value).endswith("docs/plan.md has every field")


def test_every_problem_is_named_at_once():
    with pytest.raises(RecipeError) as error:
        phases_of({"rollout": {"workers": 0, "slots": 0}, "batch": {"groups": -1}}, where="x")
    assert [k for k in ("rollout.workers", "rollout.slots", "batch.groups") if k not in str(error.value)] == []


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "bad.toml").write_text("[rollout\n")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name, words in {"absent.toml": "cannot read", "bad.toml": "is no TOML", "bytes.toml": "cannot read"}.items():
        with pytest.raises(RecipeError, match=words) as error:
            read_phases(tmp_path / name)
        assert name in str(error.value)
