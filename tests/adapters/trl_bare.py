"""Our trainer on a trainer of TRL that was never constructed; see `tests.parity.trl_trainer`."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from offdrift.adapters.base import Adapter
from offdrift.adapters.trl import OffdriftMixin
from offdrift.methods import Method
from tests.parity.peers import Batch
from tests.parity.trl_trainer import FIELDS, Trainer, load_trl

CONFIG = SimpleNamespace(vocab_size=50)
MODEL = SimpleNamespace(**vars(FIELDS["model"]), config=SimpleNamespace(get_text_config=lambda: CONFIG))
LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]


def theirs(batch: Batch, **fields: Any) -> Trainer:
    """TRL itself."""
    return Trainer(load_trl().grpo, batch, **fields)


def ours(batch: Batch, method: Method, mode: str = "correct", *, base: type | None = None, **fields: Any) -> Trainer:
    """The same with the mixin; old log-probs are computed as TRL does for two iterations."""

    class Bare(base or load_trl().grpo):
        def _get_per_token_logps_and_entropies(self, model: Any, ids: Tensor, *_: Any, **__: Any) -> Any:
            logps, entropies, _ = made.forward(model)
            rows = ids[:, 1] if len(ids) < len(logps) else slice(None)  # see `inputs_of`
            return logps[rows], entropies[rows], None

    accelerator = SimpleNamespace(**vars(FIELDS["accelerator"]), unwrap_model=lambda model: model, sync_gradients=True)
    defaults = {
        "num_iterations": 2,
        "use_vllm": True,
        "model": MODEL,
        "accelerator": accelerator,
        "rollout_func": None,
        "state": SimpleNamespace(global_step=0),
        "_step": 0,
        "eos_token_ids": [2],
        "vllm_mode": "server",
    }
    made = Trainer(type("Mine", (OffdriftMixin, Bare), {}), batch, **{**defaults, **fields})
    del made.trainer._get_per_token_logps_and_entropies
    made.trainer._attach(Adapter(method, framework="trl"), mode, "error")
    return made


def inputs_of(trainer: Trainer, **changes: Any) -> dict[str, Any]:
    """The inputs of the loss put together by hand; each token is the number of its sequence."""
    given, batch = trainer.given(), trainer.batch
    given["completion_ids"] = torch.arange(batch.sequences)[:, None].expand_as(batch.mask)
    inputs = {**given, "sampling_per_token_logps": batch.rollout, **changes}
    trainer.trainer._buffered_inputs = [inputs]
    return inputs


def generated(trainer: Trainer) -> dict[str, Any]:
    """What TRL makes of a generation."""
    inputs = trainer.generated()
    trainer.trainer._buffered_inputs = [inputs]
    return inputs


def pushed(trainer: Trainer, *pieces: dict[str, Any], logps: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Summed loss and gradient over the micro-batches of one step, with `[b, t]` log-probs."""
    inner, leaf = trainer.trainer, trainer.batch.logp if logps is None else logps
    leaf = leaf.clone().requires_grad_()
    inner.current_gradient_accumulation_steps = len(pieces)
    inner.args.gradient_accumulation_steps = inner.args.steps_per_generation = len(pieces)
    inner._buffered_inputs = list(pieces)
    total = torch.zeros((), dtype=leaf.dtype)
    for i, piece in enumerate(pieces):
        inner._step = i
        total = total + inner._compute_loss(leaf, piece)
    inner._open = False
    (gradient,) = torch.autograd.grad(total, leaf)
    return total.detach(), gradient
