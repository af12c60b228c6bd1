"""A researcher with an idea for a loss: does it keep the laws, does it train, and is it better than none over seeds?

python new_method.py        # in an empty folder, with offdrift[train] installed
"""

import json
from pathlib import Path

import torch
from shell import installed_package, offdrift

import offdrift as od

MINE = '''
import offdrift as od


@od.objective(on="staleness")
def fading(ratio, advantages, *, width: float = 1.0):
    """PPO's surrogate, fading out on both sides."""
    return -advantages * ratio / (1 + width * (ratio - 1) ** 2)


def mine(high: float = 0.1):
    gate = od.Gate(statistic="k2", on="mismatch", unit="token", high=high)
    return od.Method(objective=fading(), correction=od.Correction() & gate, aggregate="token_mean")
'''
WRONG = MINE.replace("-advantages * ratio /", "-advantages * ratio.detach() * ratio /")
RECIPE = """
name = "idea"
model = "tiny-qwen3"
task = "backwards"
batches = 2
warm_start = { steps = 0 }
rollout = { prompts = 2, samples = 2, max_tokens = 4, evidence = "full" }
log = { eval_every = 2, eval_prompts = 4, trackers = [] }
[arms.none]
method = "none"
[arms.mine]
method = "mine.py:mine"
"""
SWEEP = 'name = "idea-seeds"\nrecipe = "idea.toml"\nseeds = 2\nbaseline = "none"\n[compare]\nmetric = "held_out"\n'


def write_it() -> None:
    Path("mine.py").write_text(MINE)
    Path("wrong.py").write_text(WRONG)
    Path("idea.toml").write_text(RECIPE)
    Path("seeds.toml").write_text(SWEEP)


def hold_it_to_the_laws() -> None:
    """The idea passes, and a version with a mistake in its gradient does not."""
    kept = offdrift("methods", "mine.py:mine", "--check")
    assert "laws hold" in kept.stdout, kept.stdout
    broken = offdrift("methods", "wrong.py:mine", "--check", status=3)
    assert "derivative" in broken.stdout, broken.stdout


def use_it_in_a_loop() -> None:
    """A rejected token gets no gradient; the others do."""
    engine = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]])
    logp = torch.tensor([[-1.1, -1.2], [-0.5, -2.9]], requires_grad=True)
    lp = od.LogProbs.pack(engine, logp, logp_old=logp.detach(), mask=torch.ones(2, 2))
    advantages = od.advantages(torch.tensor([1.0, 0.0]), lp.segments, group_ids=torch.tensor([0, 0]))
    od.policy_loss(lp, od.method("mine.py:mine"), advantages).loss.backward()
    assert logp.grad is not None
    assert logp.grad[0, 1] == 0, "its k2 is 0.32, above the gate's 0.1"
    assert (logp.grad != 0).sum() == 3


def compare_it_over_seeds() -> None:
    """Four runs of the sweep, and an answer that does not pretend to be one."""
    plan = offdrift("sweep", "seeds.toml", "--dry-run")
    assert "4 runs" in plan.stdout + plan.stderr
    found = json.loads(offdrift("sweep", "seeds.toml", "--json", "-q").stdout)
    arms = {setting["arm"]: setting for setting in found["settings"]}
    assert {name: arm["finished"] for name, arm in arms.items()} == {"none": 2, "mine": 2}
    assert arms["mine"]["verdict"] == "undecided", "two seeds of an untrained model decide nothing"
    assert (Path("runs/idea-seeds") / "sweep.html").is_file()
    offdrift("report", "runs/idea-seeds")


if __name__ == "__main__":
    installed_package()
    write_it()
    hold_it_to_the_laws()
    use_it_in_a_loop()
    compare_it_over_seeds()
    print("idea checked, trained and compared")
