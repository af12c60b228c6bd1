"""Parts made of functions: they act as the library's parts of the same formula, and names are taken once."""

import types

import pytest
import torch

import offdrift as od
from offdrift.advantages import ADVANTAGES
from offdrift.correction import Gate, Weight
from offdrift.errors import EvidenceError, MethodError, ShapeError
from offdrift.laws.batches import draw, packed, run
from offdrift.methods import METHODS
from offdrift.methods.describe import facts, settings
from offdrift.objectives import TokenLoss


def defined(text: str, name: str) -> object:
    """A part as a file of the user's defines it, in a module of its own."""
    module = types.ModuleType("defined_by_a_test")
    code = compile(f"import torch, offdrift as od\n{text}", f"/nowhere/{abs(hash(text))}.py", "exec")
    exec(code, module.__dict__)
    return getattr(module, name)


@pytest.fixture(autouse=True)
def _table_of_advantages_as_it_was():
    """Other tests say what is in it."""
    before = dict(ADVANTAGES)
    yield
    ADVANTAGES.clear()
    ADVANTAGES.update(before)


@od.statistic
def sample_root(log_ratio):
    return log_ratio.abs().sqrt()


@od.statistic(signed=True)
def sample_move(logp_first, log_ratio):
    return (logp_first + log_ratio).exp() - logp_first.exp()


@od.weight(on="mismatch")
def sample_tis(ratio, *, most: float = 2.0):
    """Truncated importance sampling."""
    return ratio.clamp(max=most)


@od.objective(on="staleness")
def sample_surrogate(ratio, advantages, *, eps: float = 0.2):
    plain, limited = -advantages * ratio, -advantages * ratio.clamp(1 - eps, 1 + eps)
    return TokenLoss(torch.maximum(plain, limited), (limited > plain).detach())


def test_a_gate_reads_a_statistic_by_its_name():
    batch = packed(draw(0))
    got = Gate(statistic="sample_root", on="full", unit="seq_max", high=0.3).keep(batch.lp)
    wanted = Gate(statistic="abs_log_ratio", on="full", unit="seq_max", high=0.09).keep(batch.lp)
    assert torch.equal(got, wanted)
    assert 0 < int(got.sum()) < len(got)
    outward = {"on": "full", "unit": "seq_mean", "low": -0.05, "high": 0.05, "advantage": "outward"}
    ours, library = (Gate(statistic=s, **outward) for s in ("sample_move", "binary_tv"))  # type: ignore[arg-type]
    assert torch.equal(ours.keep(batch.lp, batch.advantages), library.keep(batch.lp, batch.advantages))
    with pytest.raises(MethodError, match="it has no sign"):
        Gate(statistic="sample_root", **outward)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["token", "sequence", "geometric"])
def test_a_weight_is_the_librarys_of_the_same_formula(unit):
    for seed in range(4):
        batch = packed(draw(seed))
        got = sample_tis(unit=unit)(batch.lp)
        wanted = Weight(on="mismatch", unit=unit, cap=2.0)(batch.lp)
        torch.testing.assert_close(got.weight, wanted.weight, rtol=1e-12, atol=0)
        assert torch.equal(got.limited, wanted.limited)
        assert not got.weight.requires_grad


def test_an_objective_is_the_librarys_of_the_same_formula():
    row = METHODS["ppo_clip"]
    ours = od.Method(objective=sample_surrogate(), aggregate=row.aggregate)
    for seed in range(4):
        got, wanted = run(ours, packed(draw(seed))), run(row, packed(draw(seed)))
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-12, atol=0)
        numbers = [x.result.stats.to_host()["objective/clipped"] for x in (got, wanted)]
        assert numbers[0] == numbers[1] > 0


def test_settings_are_fields_that_override_and_the_table_know():
    row = od.Method(objective=sample_surrogate(), correction=od.Correction() & sample_tis(), aggregate="token_mean")
    changed = od.override(row, {"objective.eps": 0.4, "weight.most": 3, "weight.unit": "sequence"})
    assert settings(changed).items() >= {"objective.eps": 0.4, "weight.most": 3.0, "weight.unit": "sequence"}.items()
    assert changed.describe() == (
        "L = sample_surrogate(ratio(staleness)), eps=0.4; weight sample_tis(sequence ratio(mismatch)), most=3.0; token_mean"
    )
    with pytest.raises(MethodError, match=r"weight\.most = 'x': must be a number"):
        od.override(row, {"weight.most": "x"})
    with pytest.raises(MethodError, match="unit='tokn' is not one of"):
        sample_tis(unit="tokn")
    known = facts("mine.py:row", row)
    assert (known["unit"], known["ratio"], known["stop_gradient"]) == (["token"], ["mismatch", "staleness"], "no")


def test_a_ratio_is_counted_once():
    with pytest.raises(MethodError, match="would count it twice"):
        od.Method(objective=sample_surrogate(), correction=od.Correction() & sample_tis(on="full"))
    with pytest.raises(MethodError, match="two weights count one ratio twice"):
        od.Correction() & sample_tis() & Weight(on="mismatch", cap=2.0)


def test_an_advantage_is_one_everywhere():
    @od.advantage(siblings=False, stands_for="R^2")
    def sample_square(credit):
        """The reward's square."""
        return credit.segments.spread(credit.rewards**2)

    row = od.Method(objective=od.Reinforce(), advantage="sample_square")
    got = od.advantages(torch.tensor([3.0, 0.5]), od.Segments.from_lengths([1, 2]), how=str(row.advantage))
    assert got.tolist() == [9.0, 0.25, 0.25]
    assert (ADVANTAGES["sample_square"].summary, ADVANTAGES["sample_square"].stands_for) == (
        "The reward's square.",
        "R^2",
    )
    assert facts("mine.py:row", row)["trained_return"]["return"] == "E[R^2]"


@pytest.mark.parametrize(
    ("kind", "name", "arguments"),
    [
        ("statistic", "k2", "log_ratio"),
        ("statistic", "version_lag", "log_ratio"),
        ("weight", "Weight", "ratio"),
        ("objective", "Clipped", "ratio"),
        ("advantage", "grpo", "credit"),
    ],
)
def test_a_name_of_the_library_is_refused(kind, name, arguments):
    with pytest.raises(MethodError, match=f"{kind} '{name}': the library has one of that name; choose another"):
        defined(f"@od.{kind}\ndef {name}({arguments}): return 0", name)


@pytest.mark.parametrize(("kind", "arguments"), [("statistic", "log_ratio"), ("advantage", "c")])
def test_a_name_is_taken_once_and_what_runs_again_replaces_itself(kind, arguments):
    name = f"sample_once_{kind}"
    text = f"@od.{kind}\ndef {name}({arguments}): return 1"
    defined(text, name)
    defined(text, name)
    with pytest.raises(MethodError, match=f"{kind} '{name}': /nowhere/.*py has defined one of that name"):
        defined(text + " + 1", name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@od.statistic\ndef f(x): return x", "statistic 'f' has the arguments x; expected log_ratio, or"),
        ("@od.weight\ndef f(ratio, cap): return ratio", "weight 'f' has the argument 'cap'; expected ratio, log_ratio"),
        ("@od.weight\ndef f(ratio, *, on=1): return ratio", "weight 'f' has the argument 'on'"),
        ("@od.objective(on=None)\ndef f(ratio): return ratio\nf()", "f reads ratio, and on=None says"),
        ("@od.advantage(sibling=False)\ndef f(c): return c", "advantage 'f': .*unexpected keyword argument 'sibling'"),
    ],
)
def test_what_is_no_part_is_refused(text, message):
    with pytest.raises(MethodError, match=message):
        defined(text, "f")


def test_answers_have_a_number_per_token_and_missing_inputs_are_named():
    wrong = defined("@od.weight\ndef sample_scalar(ratio): return ratio.mean()", "sample_scalar")
    with pytest.raises(ShapeError, match=r"sample_scalar returned shape \(\); expected a number per token, \("):
        wrong()(packed(draw(0)).lp)  # type: ignore[operator]
    reads = defined("@od.weight\ndef sample_reads(ratio, entropy): return ratio * entropy", "sample_reads")()  # type: ignore[operator]
    assert od.Method(objective=od.Reinforce(), correction=od.Correction() & reads).needs == {"entropy"}
    with pytest.raises(EvidenceError, match="entropy"):
        reads(packed(draw(0)).lp)
