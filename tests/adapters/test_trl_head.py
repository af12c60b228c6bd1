"""Exact divergences from TRL's fused head: those of the whole logits, in the trainer's steps, and never at its cost."""

import copy
from contextlib import nullcontext

import pytest
import torch

from offdrift.adapters.trl.head import add_divergences
from offdrift.divergence.exact import definition
from offdrift.errors import FrameworkError
from tests.adapters.trl_runs import Sampler, steps, tiny_model, trainer

kinds = ("UserWarning", "FutureWarning", "DeprecationWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in kinds]
T = 0.8


def fused(seed: int = 0, by: float = 0.0):
    """A tiny model with TRL's head, moved by some noise."""
    from trl.trainer.utils import add_fused_lm_head

    model = tiny_model()
    moved(model, by, seed)
    add_fused_lm_head(model, temperature=T)
    return model


def moved(model, by: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn(p.shape, generator=g))


def batch_of(rows: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 20, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0  # padding at the left
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :4] = -100  # the prompt
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def expected(model, reference, batch):
    """The same from the logits of both."""
    inputs = {k: x for k, x in batch.items() if k != "labels"}
    scored = batch["labels"][:, 1:] != -100
    with torch.no_grad():
        both = [m(**inputs).logits[:, :-1][scored] / T for m in (reference, model)]
    return definition(*both, batch["labels"][:, 1:][scored])


def test_they_are_those_of_the_whole_logits():
    model, reference, batch, found = fused(1, 0.02), fused(), batch_of(), []
    add_divergences(model, reference, found.append, temperature=T)
    outputs = model(**batch, fused_lm_head=True)
    (told,) = found
    assert len(told.tv) == int(outputs.label_mask.sum()) == 15
    for name, a, b in zip(told._fields, told, expected(model, reference, batch), strict=True):
        assert not a.requires_grad, name
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-6)
    assert float(told.kl_current_rollout.min()) > 1e-3
    torch.testing.assert_close(told.logp, outputs.log_probs[outputs.label_mask].detach(), rtol=0, atol=2e-6)


def test_outputs_and_gradients_of_the_model_stay_what_they_were():
    plain, told, batch = fused(1, 0.02), fused(1, 0.02), batch_of()
    add_divergences(told, fused(), lambda _: None, temperature=T)
    for model in (plain, told):
        model(**batch, fused_lm_head=True).log_probs.sum().backward()
    for a, b in zip(plain.parameters(), told.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    inputs = {k: x for k, x in batch.items() if k != "labels"}
    assert torch.equal(plain(**inputs).logits, told(**inputs).logits)


def test_the_weights_are_those_of_the_moment_and_passes_without_gradients_are_free():
    model, reference, batch, found = fused(), fused(), batch_of(), []
    add_divergences(model, reference, found.append, temperature=T)
    with torch.no_grad():
        model(**batch, fused_lm_head=True)
    assert found == []
    model(**batch, fused_lm_head=True)
    assert float(found[0].kl_current_rollout.abs().max()) == 0.0
    moved(model, 0.02, 3)  # an optimizer's step, of the tied head as well
    model(**batch, fused_lm_head=True)
    torch.testing.assert_close(found[1].tv, expected(model, reference, batch).tv, rtol=2e-5, atol=1e-6)


def test_a_model_may_be_its_own_reference_within_a_context():
    model, batch, found = fused(), batch_of(), []
    base = fused()
    layer = model.base_model.layers[0].mlp
    adapted = torch.nn.Parameter(torch.full((64,), 0.5))
    layer.register_forward_hook(lambda _, __, output: output + adapted * on[0])
    on = [1.0]

    class AdaptersOff(nullcontext):
        def __enter__(self):
            on[0] = 0.0

        def __exit__(self, *_):
            on[0] = 1.0

    add_divergences(model, model, found.append, temperature=T, within=AdaptersOff)
    model(**batch, fused_lm_head=True).log_probs.sum().backward()
    torch.testing.assert_close(found[0].tv, expected(model, base, batch).tv, rtol=2e-5, atol=1e-6)
    assert float(found[0].tv.min()) > 1e-3
    assert float(adapted.grad.abs().max()) > 0


@pytest.mark.parametrize(("bare", "name"), [(0, "model"), (1, "reference")])
def test_a_model_without_the_fused_head_is_refused_by_name(bare, name):
    pair = [fused(), fused()]
    pair[bare] = tiny_model()
    with pytest.raises(FrameworkError, match=rf"{name} \(Qwen3ForCausalLM\) has no fused head"):
        add_divergences(*pair, lambda _: None)


def test_a_head_that_is_not_whole_is_refused():
    model, reference, batch = fused(), fused(), batch_of()
    add_divergences(model, reference, lambda _: None)
    reference.lm_head = torch.nn.Linear(64, 7, bias=False)
    batch["labels"].clamp_(max=6)
    with pytest.raises(FrameworkError, match="whole"):
        model(**batch, fused_lm_head=True)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_run_logs_the_exact_distance_from_its_reference(tmp_path, accumulated):
    config = {"beta": 0.01, "learning_rate": 1e-2, "per_device_train_batch_size": 8 // accumulated}
    config |= {"gradient_accumulation_steps": accumulated, "max_steps": 3}
    run = trainer(
        tmp_path, method="decoupled_token_is", rollout_func=Sampler(0.05), config=config, exact_reference=True
    )
    seen, add = [], run._reference.add
    passes = []

    def noted(found):
        seen.append(found)
        add(found)

    model = run.model
    inner = model.forward

    def forward(*arguments, **named):
        if named.get("fused_lm_head") and torch.is_grad_enabled():
            passes.append(
                (
                    copy.deepcopy(model.state_dict()),
                    {k: named[k].clone() for k in ("input_ids", "attention_mask", "labels")},
                )
            )
        return inner(*arguments, **named)

    model.forward = forward
    run._reference.add = noted
    run.train()
    rows = steps(run)
    assert rows[0]["offdrift/reference/kl_exact"] == pytest.approx(0.0, abs=1e-9)  # the reference itself
    assert rows[2]["offdrift/reference/kl_exact"] > rows[1]["offdrift/reference/kl_exact"] > 1e-5
    # TRL's own estimate of the same, by k3 of the drawn tokens.
    assert rows[2]["offdrift/reference/kl_exact"] == pytest.approx(rows[2]["kl"], rel=0.6)
    weights, last = passes[-1]
    again, reference = fused(), fused()
    again.load_state_dict(weights)
    scored = last["labels"][:, 1:] != -100
    with torch.no_grad():
        inputs = {k: last[k] for k in ("input_ids", "attention_mask")}
        both = [m(**inputs).logits[:, :-1][scored] for m in (reference, again)]
    kl = definition(*both, last["labels"][:, 1:][scored]).kl_current_rollout
    assert rows[2]["offdrift/reference/kl_exact_max"] >= float(kl.max()) - 1e-6
    if accumulated == 1:
        assert rows[2]["offdrift/reference/kl_exact"] == pytest.approx(float(kl.mean()), rel=1e-4)


def test_of_a_peft_model_the_reference_is_the_model_without_its_adapters(tmp_path):
    from peft import LoraConfig

    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    config = {"learning_rate": 5e-2, "max_steps": 3}
    named = {"method": "decoupled_token_is", "rollout_func": Sampler(0.05), "peft_config": peft, "config": config}
    run = trainer(tmp_path, exact_reference=True, **named)
    run.train()
    told = [row["offdrift/reference/kl_exact"] for row in steps(run)]
    assert told[0] == pytest.approx(0.0, abs=1e-9)
    assert told[2] > 1e-5


def test_without_a_reference_it_is_refused_before_the_run(tmp_path):
    with pytest.raises(FrameworkError, match="beta above 0"):
        trainer(tmp_path, method="decoupled_token_is", rollout_func=Sampler(), exact_reference=True)
