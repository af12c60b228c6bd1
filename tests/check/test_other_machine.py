"""Another machine's claim: its digest, its file, and the first request and token that differ."""

import copy
import json

import pytest

from offdrift.check.bench import EngineSpec
from offdrift.check.check import check
from offdrift.check.other_machine import first_difference, other_claim
from offdrift.errors import BadValueError
from offdrift.records.provenance import Sampling
from tests.check.benches import bench_of

EQUAL = EngineSpec("transformers", "float32", {"batch_invariant": True})


def claimed(digest: str | None = None) -> dict:
    with bench_of(count=4, sampling=Sampling(max_tokens=6)) as bench:
        return check(bench, EQUAL, EQUAL, noise=False, claim="equal", digest=digest)


@pytest.fixture(scope="module")
def here() -> dict:
    return claimed()


def stored(tmp_path, found: dict) -> str:
    path = tmp_path / "check.json"
    path.write_text(json.dumps(found))
    return str(path)


def test_two_machines_with_the_same_numbers_have_one_digest(here, tmp_path):
    again = claimed(stored(tmp_path, here))
    assert (again["claim"]["same_digest"], again["passed"]) == (True, True)
    assert "first_of_machines" not in again["claim"]


def test_the_first_bit_that_differs_is_named(here, tmp_path):
    """As a machine with other vector instructions has it."""
    there = copy.deepcopy(here)
    numbers = there["claim"]["numbers"]
    numbers["logp"][2][4] += 1e-6
    numbers["logp"][3][0] += 1e-3
    there["claim"]["digest_rollout"] = "0" * 64
    again = claimed(stored(tmp_path, there))
    first = again["claim"]["first_of_machines"]
    assert (first["request"], first["token"]) == (2, 4)
    assert first["here"] == here["claim"]["numbers"]["logp"][2][4] != first["there"]
    assert (again["verdict"]["level"], again["passed"]) == ("act", False)
    assert "request 2, token 4" in again["verdict"]["text"]


ONE = {"prompts": [[1], [2]], "tokens": [[4, 5], [6]], "logp": [[-0.5, -1.0], [-2.0]]}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"tokens": [[4, 7], [6]]}, {"request": 0, "token": 1, "here": 5, "there": 7}),
        ({"prompts": [[1], [3]]}, {"request": 1}),
        ({"tokens": [[4, 5], [6, 8]], "logp": [[-0.5, -1.0], [-2.0, -1.0]]}, {"request": 1, "token": 1}),
        ({"prompts": [[1]], "tokens": [[4, 5]], "logp": [[-0.5, -1.0]]}, {}),
    ],
    ids=["token", "prompt", "length", "requests"],
)
def test_what_differs_is_told_from_what_follows_it(change, where):
    found = first_difference(ONE, ONE | change)
    assert {name: value for name, value in found.items() if name != "text"} == where
    assert first_difference(ONE, ONE) is None
    assert first_difference(ONE, None) is None


@pytest.mark.parametrize("content", ["", "{}", '{"claim": {}}', '{"claim": {"digest_rollout": "12"}}', "[1]"])
def test_a_file_without_a_claim_is_refused(tmp_path, content):
    path = tmp_path / "check.json"
    path.write_text(content)
    with pytest.raises(BadValueError, match="digest"):
        other_claim(str(path))
    with pytest.raises(BadValueError, match="nor a file"):
        other_claim(str(tmp_path / "none.json"))
