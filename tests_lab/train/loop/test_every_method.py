"""Every part of the method table trains by a row's name alone: a few steps, stale mismatched engine.

A trained arm costs seconds, and most rows recombine parts of others. So the rows that train are as
few as hold every part there is: every kind of gate, weight, objective, penalty and anchor with its
units and ratios, and every aggregate, estimator and old policy. Every row is built, and checked
against what a recipe supplies.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Hashable, Iterator
from dataclasses import fields

import pytest

from offdrift.correction import FollowingGate
from offdrift.methods import METHODS, Method
from offdrift_lab.train.loop import loop
from tests_lab.train.conftest import short_arms, small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

RATIOS = ("k1", "k3", "chi2_token", "ess_frac", "ess_seq_frac", "abs_log_ratio_max")
UPDATES = 4


def parts_of(row: Method) -> Iterator[Hashable]:
    """What a row is made of, apart from the size of its numbers."""
    for part in row.parts:
        kind = type(part).__name__
        yield kind, None, None
        for f in fields(part):
            x = getattr(part, f.name)
            yield kind, f.name, x if isinstance(x, str | bool) else x is None
    for name in ("aggregate", "advantage", "old_policy", "normalizer", "gate_scope"):
        yield name, getattr(row, name)
    yield "gates", bool(row.correction.gates[1:])
    yield "weights", bool(row.correction.weights[1:])


def covering() -> list[str]:
    """As few rows as hold every part of the table: at each step the one with most parts still missing."""
    parts = {name: set(parts_of(row)) for name, row in METHODS.items()}
    missing, chosen = set().union(*parts.values()), ["none"]
    while missing := missing - set().union(*(parts[name] for name in chosen)):
        chosen.append(max(METHODS, key=lambda name: len(parts[name] & missing)))
    return [name for name in METHODS if name in chosen]


TRAINED = covering()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All rows as arms of one recipe: bfloat16 engine, up to two updates behind, small pieces."""
    folder = tmp_path_factory.mktemp("every-method")
    with pytest.MonkeyPatch.context() as patch:
        short_arms(patch)
        patch.setattr(gc, "collect", lambda generation=2: 0)  # which accelerate calls between arms
        patch.setattr(loop, "save_for_engine", lambda *args, **weights: None)
        recipe = small_recipe(
            batches=2,
            rollout={"prompts": 4, "samples": 4, "max_tokens": 5, "dtype": "bfloat16"},
            lag={"sync_every": 3, "queue": 1},
            optim={"lr": 1e-3, "minibatches": 2, "token_budget": 60},
            log={"eval_every": 9, "eval_prompts": 2, "checkpoint_every": 9, "samples_every": 9, "trackers": []},
            arms={name: {"method": name} for name in TRAINED},
        )
        table = loop.train(recipe, folder)
    assert [row["arm"] for row in table] == TRAINED
    return folder


def rows_of(folder, name: str) -> list[dict]:
    file = folder / "arms" / name / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_and_its_drift_shows(runs, name):
    rows = rows_of(runs, name)
    assert [r["update"] for r in rows] == list(range(1, UPDATES + 1))
    row = METHODS[name]
    for r in rows:
        assert math.isfinite(r["optim/loss"])
        assert math.isfinite(r["optim/grad_norm"])
        for metric in RATIOS:
            assert math.isfinite(r[f"full/{metric}"]), metric
            if row.needs_old:
                assert math.isfinite(r[f"mismatch/{metric}"]), metric
        if row.correction.gates:
            assert 0 <= r["gate/acceptance_seq"] <= 1
        if row.correction.weights:
            assert r["weight/mean"] >= 0
        if row.penalty is not None:
            assert math.isfinite(r["reference/kl"])
    assert max(r["full/abs_log_ratio_max"] for r in rows) > 1e-3, "the engine is another policy"
    if row.needs_old and row.old_policy == "sampling":
        assert {r["old/status"] for r in rows} == {"exact"}
        stale = max(r["staleness/abs_log_ratio_max"] for r in rows)
        assert stale > 1e-3, "what the method compares differs"
    assert max(r["version_lag/max"] for r in rows) >= 1, "the engine is stale"


@pytest.mark.parametrize("name", TRAINED)
def test_a_part_that_changed_nothing_is_reported(runs, name):
    """Every gate, weight and clip touched a token in some update, or the arm's notes name it."""
    row, rows = METHODS[name], rows_of(runs, name)
    notes = json.loads((runs / "arms" / name / "summary.json").read_text())["notes"]
    parts = [(gate, f"gate/{i}/drop_frac_token") for i, gate in enumerate(row.correction.gates)]
    parts += [(w, "weight/changed_frac") for w in row.correction.weights]
    parts += [(row.objective, "objective/clip_frac_active")] * ("objective/clip_frac_active" in rows[0])
    for part, share in parts:
        acted = any(r[share] for r in rows)
        # A gate that follows a target is named with the bound that it has at the end.
        named = "gate 0 never" if isinstance(part, FollowingGate) else part.formula
        assert acted or any(named in note for note in notes), (share, notes)


def test_methods_differ_in_what_they_do(runs):
    """All arms see the same batches; the gradients of their last update must not all agree."""
    last = {name: rows_of(runs, name)[-1]["optim/grad_norm"] for name in TRAINED}
    assert len({f"{x:.6g}" for x in last.values()}) > 0.6 * len(last)
    assert sum(x > 0 for x in last.values()) > 0.7 * len(last)


def test_metrics_of_the_first_batch_do_not_depend_on_the_method(runs):
    """Of those whose minibatches are cut alike: some methods keep the answers to a prompt in one."""
    reference = rows_of(runs, "none")[0]
    compared, alike = 0, [name for name in TRAINED if not METHODS[name].whole_prompts]
    for name in alike:
        got = rows_of(runs, name)[0]
        for metric in RATIOS:
            expected = pytest.approx(reference[f"full/{metric}"], rel=1e-6, abs=1e-12)
            assert got[f"full/{metric}"] == expected, (name, metric)
            compared += 1
    assert compared == len(alike) * len(RATIOS) > 0.9 * len(TRAINED) * len(RATIOS)
