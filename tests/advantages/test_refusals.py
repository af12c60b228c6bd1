"""Inputs that cannot mean anything are refused by name, with a way out."""

from __future__ import annotations

import pytest
import torch

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.errors import BadValueError, EvidenceError, MethodError, ShapeError
from offdrift.segments import Segments
from tests.advantages.batches import random_batch
from tests.oracles.fixtures import double

S = Segments.from_lengths([2, 1, 2], group_ids=torch.tensor([4, 4, 4]))
R = double([1.0, 0.0, 0.5])
NEEDS = [(how, name) for how, row in ADVANTAGES.items() for name in row.needs]


@pytest.mark.parametrize(("how", "name"), NEEDS)
def test_a_missing_input_is_named_with_its_estimator_and_the_way_out(how, name):
    batch = random_batch(0, [1, 1, 1, 1])
    inputs = batch.inputs(how)
    del inputs[name]
    with pytest.raises(EvidenceError, match=f"'{how}' needs {name}, .* or choose "):
        advantages(batch.pack(batch.padded["rewards"]), batch.segments, how=how, **inputs)


def test_some_estimators_need_something():
    assert len(NEEDS) == 7


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "logp_old, sum_pi_squared was"),
        ({"logp_old": torch.zeros(5).double()}, "and sum_pi_squared was"),
        ({"sum_pi_squared": torch.zeros(5).double()}, "and logp_old was"),
    ],
)
def test_opob_says_what_it_could_use(given, missing):
    with pytest.raises(EvidenceError, match=f"opob.*{missing}.*give grad_norm_squared="):
        advantages(R, S, how="opob", **given)


def test_a_baseline_over_the_kept_needs_to_know_them():
    with pytest.raises(EvidenceError, match="baseline_over='kept' needs keep"):
        advantages(R, S, baseline_over="kept")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_names_its_sequence(bad):
    with pytest.raises(BadValueError, match="reward of sequence 2 is"):
        advantages(double([0.0, 1.0, bad]), S)


def test_a_token_reward_that_is_no_number_names_its_token():
    with pytest.raises(BadValueError, match="reward of sequence 2 is nan at token 1;"):
        advantages(double([0.0, 0.0, 1.0, 0.0, float("nan")]), S)


@pytest.mark.parametrize("name", ["values", "logp_old", "sum_pi_squared", "weight"])
def test_a_bad_number_on_a_token_names_it(name):
    with pytest.raises(BadValueError, match=f"{name} of sequence 2 is inf at token 0;"):
        advantages(R, S, **{name: double([0.0, 0.0, 0.0, float("inf"), 0.0])})


@pytest.mark.parametrize("name", ["greedy_rewards", "grad_norm_squared"])
def test_a_bad_number_of_a_sequence_names_it(name):
    with pytest.raises(BadValueError, match=f"{name} of sequence 1 is nan;"):
        advantages(R, S, **{name: double([0.0, float("nan"), 0.0])})


def test_a_bad_component_names_its_sequence():
    with pytest.raises(BadValueError, match="components of sequence 1 is nan;"):
        advantages(R, S, how="gdpo", components=double([[0, 0], [0, float("nan")], [0, 0]]))


def test_component_weights_are_finite_and_one_per_column():
    with pytest.raises(BadValueError, match="component_weights="):
        advantages(R, S, component_weights=double([1.0, float("nan")]))
    with pytest.raises(BadValueError, match="component_weights="):
        advantages(R, S, components=double([[1, 0]] * 3), component_weights=double([1, float("inf")]))  # fmt: skip


@pytest.mark.parametrize("count", [2, 4, 6])
def test_one_reward_per_sequence_or_token(count):
    with pytest.raises(ShapeError, match=rf"shape \({count},\) for 3 sequences of 5 tokens"):
        advantages(torch.zeros(count), S)


@pytest.mark.parametrize("name", ["values", "logp_old", "sum_pi_squared", "weight"])
def test_one_number_per_token(name):
    with pytest.raises(ShapeError, match=rf"{name} has shape \(3,\); expected 5 .* per token"):
        advantages(R, S, **{name: torch.zeros(3)})


@pytest.mark.parametrize("name", ["greedy_rewards", "grad_norm_squared"])
def test_one_number_per_sequence(name):
    with pytest.raises(ShapeError, match=rf"{name} has shape \(5,\); expected 3 .* per sequence"):
        advantages(R, S, **{name: torch.zeros(5)})


@pytest.mark.parametrize(
    ("position", "where"),
    [
        ([0, 1, 0, 3, 3], "sequence 2 is 3 at token 1"),
        ([0, 1, 0, 4, 3], "sequence 2 is 3 at token 1"),
        ([0, 1, -1, 0, 1], "sequence 1 is -1 at token 0"),
    ],
)
def test_columns_grow_along_a_sequence(position, where):
    with pytest.raises(BadValueError, match=f"position of {where}"):
        advantages(R, S, position=torch.tensor(position))


def test_best_of_one_names_its_group():
    s = Segments.from_lengths([1, 1, 1], group_ids=torch.tensor([4, 9, 4]))
    with pytest.raises(BadValueError, match=r"group 9 has one sequence \(sequence 1\)"):
        advantages(R, s, how="grpo_passk")
    with pytest.raises(BadValueError, match="group 0 has one sequence"):
        advantages(R, Segments.from_lengths([1, 1, 1]), how="grpo_passk", group_ids=None)


def test_opob_weighs_whole_sequences():
    inputs = {"grad_norm_squared": double([1.0, 1.0, 1.0])}
    with pytest.raises(BadValueError, match="weight of sequence 2 runs from 1 to 3; opob"):
        advantages(R, S, how="opob", weight=double([2, 2, 1, 1, 3]), **inputs)


@pytest.mark.parametrize("name", ["gamma", "lam"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_discounts_lie_between_zero_and_one(name, value):
    with pytest.raises(MethodError, match=f"{name}={value} must lie in"):
        advantages(R, S, **{name: value})
