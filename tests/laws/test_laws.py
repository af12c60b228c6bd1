"""`offdrift.laws`: every row of the table passes, each law catches what it is for, and shows it on few tokens."""

import re

import pytest

from offdrift.laws.batches import draw
from offdrift.laws.laws import DETACHED, EXEMPT, LAWS, Failure, columns, smaller
from offdrift.methods import METHODS
from offdrift.methods.load import load_method

IMPLIED = {"tic_filter": "within ratios of 0.8 and 1.2 no probability moves by more than 0.2: its second gate is idle"}
"""Rows of which a part can never act, as they were published."""


@pytest.mark.parametrize("name", METHODS)
def test_every_row_of_the_table_passes(name):
    broken = {law: found.words for law, x in LAWS.items() if (found := x.failure(METHODS[name])) is not None}
    assert set(broken) == ({"liveness"} if name in IMPLIED else set()), broken


def test_few_rows_are_exempt_and_each_says_why():
    asked = {law: [n for n, row in METHODS.items() if not x.exempt(row)] for law, x in LAWS.items()}
    assert {law for law, names in asked.items() if len(names) == len(METHODS)} == {*LAWS} - {"derivative", "ratios"}
    assert len(METHODS) - len(asked["ratios"]) == 1
    assert len(asked["derivative"]) > 0.7 * len(METHODS)
    reasons = {x.exempt(METHODS[n]) for law, x in LAWS.items() for n in METHODS if n not in asked[law]}
    assert reasons == {DETACHED, *EXEMPT.values()}


# -- planted mistakes, each in a file as a user would write it -------------------------------------------

HEAD = "import torch\nimport offdrift as od\n"
PLANTED = {
    "a detach in the wrong place": (
        "derivative",
        """
@od.objective(on="staleness")
def surrogate(ratio, advantages):
    return -advantages * ratio.detach() * ratio
def mine():
    return od.Method(objective=surrogate(), aggregate="token_mean")
""",
        r"gradient( of token \d+)?: -?[\d.]+, expected -?[\d.]+, the derivative of the loss",
    ),
    "everything detached": (
        "derivative",
        """
@od.objective(on=None)
def constant(advantages, logp):
    return -advantages * (0 * logp + logp.detach())
def mine():
    return od.Method(objective=constant(), aggregate="token_mean")
""",
        "gradient: 0, expected",
    ),
    "a weight with a gradient": (
        "weights",
        """
from dataclasses import dataclass
from offdrift.correction.weight import Weighted
from offdrift.ratios import log_ratio
@dataclass(frozen=True)
class Leaky:
    on = "staleness"
    advantage = "any"
    formula = "leaky"
    def __call__(self, logprobs, advantages=None, batch_info=None):
        w = log_ratio(logprobs, on="staleness").clamp(-5, 5).exp()
        return Weighted(w, w.detach() > 1e9)
def mine():
    return od.Method(objective=od.Reinforce(), correction=od.Correction() & Leaky(), aggregate="token_mean")
""",
        r"\[leaky\] carries a gradient",
    ),
    "a mean over the micro-batch": (
        "pieces",
        """
@od.weight(on="mismatch")
def normalized(ratio):
    return ratio / ratio.mean()
def mine():
    return od.Method(objective=od.Clipped(), correction=od.Correction() & normalized(), aggregate="token_mean")
""",
        r"sum of the pieces' losses: -?[\d.e-]+, expected -?[\d.e-]+",
    ),
    "a place in the batch": (
        "order",
        """
@od.weight(on="mismatch")
def first_come(ratio):
    return ratio * torch.linspace(1, 2, len(ratio), dtype=ratio.dtype)
def mine():
    return od.Method(objective=od.Clipped(), correction=od.Correction() & first_come(), aggregate="token_mean")
""",
        "in another order",
    ),
    "a gate that never rejects": (
        "liveness",
        """
def mine():
    dead = od.Gate(statistic="k2", on="full", unit="token", high=1e9)
    return od.Method(objective=od.ImportanceSampled(), correction=od.Correction() & dead, aggregate="token_mean")
""",
        r"leave out \[keep if token k2\(full\) <= 1e\+09\]: no loss and no gradient changes on \d+ batches",
    ),
    "a setting that nothing reads": (
        "liveness",
        """
@od.weight(on="mismatch")
def capped(ratio, *, most: float = 2.0, least: float = 0.5):
    return ratio.clamp(max=most)
def mine():
    return od.Method(objective=od.Clipped(), correction=od.Correction() & capped(), aggregate="token_mean")
""",
        r"change weight\.least = 0\.5: no loss",
    ),
    "exp without a guard": (
        "extremes",
        """
@od.objective(on="staleness")
def unguarded(log_ratio, advantages):
    return -advantages * log_ratio.exp()
def mine():
    return od.Method(objective=unguarded(), aggregate="token_mean")
""",
        r"at log-ratios of 10,000 nats, in float32, the (loss|gradient) is not finite",
    ),
    "a weight below zero": (
        "weights",
        """
@od.weight(on="mismatch")
def signed(ratio):
    return 2 - ratio
def mine():
    return od.Method(objective=od.Clipped(), correction=od.Correction() & signed(), aggregate="token_mean")
""",
        r"is -[\d.e+]+ at token \d+; a weight is at least 0",
    ),
    "a ratio that is not declared": (
        "ratios",
        """
from offdrift.ratios import log_ratio
from offdrift.objectives import TokenLoss
from dataclasses import dataclass
@dataclass(frozen=True)
class Hidden:
    on = "staleness"
    formula = "hidden"
    def __call__(self, logprobs, advantages, batch_info=None):
        return TokenLoss(-advantages * log_ratio(logprobs, on="full").clamp(-20, 20).exp())
def mine():
    weight = od.Weight(on="mismatch", cap=2.0)
    return od.Method(objective=Hidden(), correction=od.Correction() & weight, aggregate="token_mean")
""",
        r"when only the rollout policy moves, which on='staleness' says that it does not read",
    ),
    "digits lost": (
        "rounding",
        """
@od.objective(on="staleness")
def coarse(log_ratio, advantages):
    return -advantages * ((log_ratio + 1e5) - 1e5).clamp(-20, 20).exp()
def mine():
    return od.Method(objective=coarse(), aggregate="token_mean")
""",
        "gradient in float32",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_mistake_breaks_its_law(what, tmp_path):
    law, text, words = PLANTED[what]
    (tmp_path / "mine.py").write_text(HEAD + text)
    row = load_method(f"{tmp_path}/mine.py:mine")
    found = LAWS[law].failure(row)
    assert isinstance(found, Failure), {n: x.failure(row) for n, x in LAWS.items()}
    assert re.search(words, found.words), found.words
    if LAWS[law].breaks_on_all is None:
        assert found.batch is not None
        assert len(found.batch.turns) <= 2, "the smallest case that shows it has few sequences"


def test_a_good_method_of_ones_own_passes(tmp_path):
    (tmp_path / "mine.py").write_text(
        HEAD
        + """
@od.statistic
def root_of_drift(log_ratio):
    return log_ratio.abs().sqrt()
@od.weight(on="mismatch")
def halfway(ratio, *, power: float = 0.5):
    return ratio**power
@od.objective(on="staleness")
def damped(ratio, advantages, *, width: float = 1.0):
    return -advantages * ratio / (1 + width * (ratio - 1) ** 2)
def mine():
    gate = od.Gate(statistic="root_of_drift", on="full", unit="seq_max", high=0.8)
    return od.Method(objective=damped(), correction=od.Correction() & halfway() & gate, aggregate="token_mean")
"""
    )
    row = load_method(f"{tmp_path}/mine.py:mine")
    assert {law: x.failure(row) for law, x in LAWS.items()} == dict.fromkeys(LAWS)


def test_a_failing_batch_is_made_small():
    batch = draw(0)
    small = smaller(batch, lambda b: bool((b.tokens["pi"] < -10).any()))
    assert len(small.turns) == 1
    assert (small.tokens["pi"] < -10).any()
    shown = columns(small)
    assert list(shown) == ["logp_rollout", "logp_old", "logp", "advantages", "prompts"]
    assert shown["logp"] == [small.tokens["pi"].tolist()]
