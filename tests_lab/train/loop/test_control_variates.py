"""Control variates in the trainer's own evidence: exact sums, taken where they pay, and certificates that are seldom false."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from offdrift.certificate import Looks, TrustRegion
from offdrift.certificate.batch import COLUMNS
from offdrift.certificate.certify import certify
from offdrift.certificate.control import CONTROL_FROM, PREFIX_CAP, RATIO_CAP, SUM_CAP
from offdrift.engines.hf import TransformersEngine
from offdrift.methods import METHODS
from offdrift.models import tiny_qwen3_config
from offdrift.records import Sampling
from offdrift_lab.train.loop.arm import Arm
from offdrift_lab.train.loop.batch import Batch
from tests_lab.train.conftest import small_recipe
from tests_lab.train.steps import stepped

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VOCAB, PROMPT, ALPHA = 6, [1, 2], 0.2


@torch.no_grad()
def law(model) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the first token, and of the second after each first."""
    first = model(torch.tensor([PROMPT])).logits[0, -1].double().log_softmax(-1)
    second = model(torch.tensor([[*PROMPT, y] for y in range(VOCAB)])).logits[:, -1].double().log_softmax(-1)
    return first, second


@pytest.fixture(scope="module")
def world():
    """Two tokens of six: a policy, another that draws, rewards of all 36 answers, and the gain, enumerated."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    config = tiny_qwen3_config()
    config.vocab_size, config.num_hidden_layers, config.initializer_range = VOCAB, 1, 0.3
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    model = Qwen3ForCausalLM(config).eval()
    drawn_by = copy.deepcopy(model)
    with torch.no_grad():
        for p in drawn_by.parameters():
            p += 0.5 * p.std(correction=0) * torch.randn_like(p)
    rewards = (torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)) > 0.5).double()
    mu, pi = [(first[:, None] + second) for first, second in map(law, (drawn_by, model))]
    return model, drawn_by, rewards, float(((pi.exp() - mu.exp()) * rewards).sum())


def evidence(world, prompts: int, seed: int, **options):
    """What a step on so many answers keeps for its certificate; and their tokens."""
    model, drawn_by, rewards, _ = world
    engine = TransformersEngine(drawn_by, dtype="float32")
    rollouts = engine.generate([PROMPT] * prompts, Sampling(max_tokens=2), seed=seed, evidence="full")
    answers = rollouts.tokens.view(prompts, 2)
    rollouts = rollouts.with_(rewards=rewards[answers[:, 0], answers[:, 1]].float(), group_ids=torch.arange(prompts))
    batch = Batch(rollouts=rollouts, advantages=torch.zeros(2 * prompts))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    region = TrustRegion(horizon=2, delta=math.inf)
    settings = {"token_budget": 64, "region": region, **options}
    return stepped(Accelerator(cpu=True), model, optimizer, batch, METHODS["none"], **settings).evidence, answers


def test_sums_are_those_of_both_policies_distributions(world):
    kept, answers = evidence(world, 24, 0, control_variates=True)
    (mu, mu2), (pi, pi2) = law(world[1]), law(world[0])

    def mean(p, q) -> float:
        return float(torch.minimum(q.exp(), RATIO_CAP * p.exp()).sum())

    expected = []
    for a, b in answers.tolist():
        w, w2 = float((pi[a] - mu[a]).exp()), float((pi2[a, b] - mu2[a, b]).exp())
        m, m2 = mean(mu, pi), mean(mu2[a], pi2[a])
        first, before = min(w, RATIO_CAP) - m, min(w, PREFIX_CAP)
        counts = first + before * (RATIO_CAP - m2) <= SUM_CAP
        expected.append(first + counts * before * (min(w2, RATIO_CAP) - m2))
    # Pieces are cut by length, and here keep the order of the batch.
    torch.testing.assert_close(kept.column("control"), torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)
    assert kept.column("control").std() > 0.1
    without, _ = evidence(world, 24, 0)
    assert without.column("control").isnan().all()


def test_certificates_of_steps_are_seldom_false(world):
    gain, false = world[3], {0.0: 0, 2.0: 0}
    for seed in range(40):
        kept, _ = evidence(world, CONTROL_FROM, seed, control_variates=True)
        for shift in false:
            columns = kept.columns.clone()
            columns[:, COLUMNS.index("control")] -= shift  # sums whose mean is not 0
            looks = Looks(at=1, of=1, series="this run")
            proof = certify(replace(kept, columns=columns), alpha=ALPHA, looks=looks, prompts="drawn")
            false[shift] += proof.gain_low > gain
    assert false[0.0] <= ALPHA * 40
    assert false[2.0] > 20


@pytest.mark.parametrize(
    ("prompts", "lag", "minibatches", "expected"),
    [
        (CONTROL_FROM, 2, 1, True),
        (CONTROL_FROM - 1, 2, 1, False),
        (CONTROL_FROM, 2, 2, False),
        (2 * CONTROL_FROM, 2, 2, True),
        (CONTROL_FROM, 1, 1, False),
    ],
)
def test_an_arm_takes_them_where_they_pay(prompts, lag, minibatches, expected):
    recipe = small_recipe(rollout__prompts=prompts, lag__sync_every=lag, optim__minibatches=minibatches)
    arm = SimpleNamespace(run=SimpleNamespace(recipe=recipe), always_fresh=lag == 1)
    assert Arm.control_variates.fget(arm) is expected
