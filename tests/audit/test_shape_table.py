"""Two kinds of responses, and at which end they part: named only where the other end could have shown it."""

import numpy as np
import pytest
import torch

from offdrift.audit.shape_table import shape_table
from offdrift.audit.shapes import Shapes
from tests.audit.logs import log_of

VOCAB = 16


def log(*, size, only, length=24, sequences=200, seed=0):
    """Tokens from random distributions; in every fourth response the trainer's logits differ by noise of a size at
    the places that `only` takes."""
    g = np.random.default_rng(seed)
    logits = 1.5 * g.standard_normal((sequences, length, VOCAB))
    far = (np.arange(sequences) % 4 == 1)[:, None] & only(np.arange(length) / length)[None]
    noise = np.where(far, size, 0.02)[..., None] * g.standard_normal(logits.shape)
    mu, old = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (logits, logits + noise))
    token = (np.exp(mu).cumsum(-1) > g.random((sequences, length, 1))).argmax(-1)
    taken = [
        torch.tensor(np.take_along_axis(x, token[..., None], -1).reshape(-1), dtype=torch.float32) for x in (mu, old)
    ]
    return log_of([length] * sequences, torch.arange(sequences) // 25, logp_rollout=taken[0], logp_old=taken[1])


@pytest.mark.parametrize(
    ("only", "kind"),
    [(lambda at: at >= 0, "kinds"), (lambda at: at > 0.5, "some"), (lambda at: at < 0.4, "beginning")],
    ids=["all over", "from a place on", "at the beginning"],
)
@pytest.mark.parametrize("length", [16, 24, 64])
def test_where_some_responses_part(only, kind, length):
    found = shape_table(Shapes.of(log(size=0.8, only=only, length=length)))["found"]
    told = [f for f in found if f["kind"] in ("kinds", "some", "beginning") and "share_of" in f]
    assert [f["kind"] for f in told] in ([kind], []), told
    assert told or length == 16
    assert all(f["share_of"] == pytest.approx(0.25, abs=0.06) for f in told)


def seen(push, noise, *, honest=True, seed=1, sequences=400, length=40):
    """Tokens drawn again and again from few; the trainer's logits of those that were drawn before are pushed, and all
    are noisy. A record that is not honest is of yet another distribution."""
    g = np.random.default_rng(seed)
    before, x, y, rows = np.zeros((sequences, VOCAB), bool), [], [], np.arange(sequences)
    tokens = []
    for _ in range(length):
        mu = 1.5 * g.standard_normal((sequences, VOCAB))
        old = mu + push * before + noise * g.standard_normal(mu.shape)
        record = mu if honest else mu + 0.8 * g.standard_normal(mu.shape)
        mu, old, record = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (mu, old, record))
        token = (np.exp(mu).cumsum(-1) > g.random((sequences, 1))).argmax(-1)
        x.append(record[rows, token])
        y.append(old[rows, token])
        tokens.append(token)
        before[rows, token] = True
    flat = [torch.tensor(np.stack(v, 1).reshape(-1)) for v in (x, y, tokens)]
    return log_of([length] * sequences, logp_rollout=flat[0].float(), logp_old=flat[1].float(), tokens=flat[2])


def kinds(batch):
    return [f["kind"] for f in shape_table(Shapes.of(batch))["found"]]


def test_a_penalty_moves_mass_to_repeated_tokens_or_from_them():
    assert kinds(seen(0.5, 0.0))[:1] == ["seen"]
    assert kinds(seen(-0.5, 0.0))[:1] == ["seen_more"]
    assert not {"seen", "seen_more"} & set(kinds(seen(0.0, 0.8)))


def test_a_record_of_another_distribution_is_no_penalty():
    assert not {"seen", "seen_more"} & set(kinds(seen(0.0, 0.3, honest=False)))


def apart(lengths, steps, size, *, seed=3, tail=None):
    """Responses whose trainer's logits differ by noise of a size, per response; or at one token of some, by as much."""
    g, x, y = np.random.default_rng(seed), [], []
    for length, noise in zip(lengths, size, strict=True):
        logits = 1.5 * g.standard_normal((length, VOCAB))
        other = logits + noise * g.standard_normal(logits.shape)
        mu, old = (z - np.log(np.exp(z).sum(-1, keepdims=True)) for z in (logits, other))
        token = (np.exp(mu).cumsum(-1) > g.random((length, 1))).argmax(-1)
        x.append(mu[np.arange(length), token])
        y.append(old[np.arange(length), token])
        if tail is not None and g.random() < tail:
            y[-1][g.integers(2, length)] -= 4 + 4 * g.random()
    taken = [torch.tensor(np.concatenate(v)).float() for v in (x, y)]
    return log_of(lengths, torch.tensor(steps), logp_rollout=taken[0], logp_old=taken[1])


def test_drift_that_grows_over_the_steps_is_no_property_of_long_responses():
    """Where responses grow too, long ones are of late steps; and of the few that reach a place some steps have none."""
    step = np.repeat(np.arange(16), 24)
    g = np.random.default_rng(0)
    for grows in (8, 0):
        lengths = np.maximum(4, (30 + grows * step) * np.exp(0.4 * g.standard_normal(len(step)))).astype(int).tolist()
        assert kinds(apart(lengths, step, 0.02 + 0.06 * step)) == []
    longer = np.array(lengths) > 64  # of every step
    assert "long" in kinds(apart(lengths, step, np.where(longer, 0.8, 0.02)))


@pytest.mark.parametrize("seed", [5, 6, 10, 14])
def test_few_tokens_beyond_a_place_do_not_show_that_a_heavy_tail_ends_there(seed):
    """One bad token in a fifth of the responses, anywhere; at most a few responses reach the last places."""
    g = np.random.default_rng(seed)
    lengths = np.maximum(4, 70 * np.exp(0.4 * g.standard_normal(384))).astype(int).tolist()
    assert kinds(apart(lengths, [1] * 384, [0.02] * 384, seed=seed, tail=0.2)) == []
