"""Run in a process of its own: verl's real trainers, as far as they go without a cluster.

Usage: verl_trainers.py v0|v1 FOLDER; prints one JSON object.
"""

import json
import sys
from contextlib import contextmanager

import numpy as np
import torch
from omegaconf import OmegaConf

SETTINGS = {
    "algorithm": {
        "use_kl_in_reward": False, "adv_estimator": "offdrift/dr_grpo/kept", "gamma": 1.0, "lam": 1.0,
        "rollout_correction": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
    },
    "actor_rollout_ref": {"rollout": {"n": 3}, "actor": {"policy_loss": {"loss_mode": "vanilla"}}},
}  # fmt: skip
LENGTHS = [3, 5, 2, 4, 1, 5]
REWARDS = [1.0, 0.0, 4.0, 0.0, 1.0, 1.0]
UIDS = ["a", "a", "a", "b", "b", "b"]


def tokens() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs of both engines; the third sequence's differ by 2 nats, which the gate rejects."""
    g = torch.Generator().manual_seed(0)
    rollout = [-torch.rand(n, generator=g) - 0.1 for n in LENGTHS]
    old = [x - 1e-4 * (1 + torch.arange(len(x))) for x in rollout]
    old[2] = rollout[2] - 2.0
    return rollout, old


def scores() -> list[torch.Tensor]:
    return [torch.cat([torch.zeros(n - 1), torch.tensor([r])]) for n, r in zip(LENGTHS, REWARDS, strict=True)]


def padded(xs: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(xs, batch_first=True)


def v0(folder: str) -> dict:
    """The advantage step of verl's v0-style trainer."""
    from verl import DataProto
    from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer as Trainer
    from verl.trainer.ppo import ray_trainer, rollout_corr_helper

    from offdrift.adapters import verl

    verl.install("geo_mask", record=folder)
    assert Trainer._fit_compute_advantage.__globals__["compute_advantage"] is ray_trainer.compute_advantage
    assert hasattr(rollout_corr_helper.compute_rollout_correction_and_add_to_batch, "__wrapped__")
    rollout, old = tokens()
    trainer = object.__new__(Trainer)
    trainer.config, trainer.metrics, trainer.timing_raw = OmegaConf.create(SETTINGS), {}, {}
    trainer.reward_tensor, trainer.reward_extra_infos_dict = padded(scores()), {}
    data = DataProto.from_dict(
        tensors={
            "responses": padded([torch.arange(n) for n in LENGTHS]),
            "response_mask": padded([torch.ones(n, dtype=torch.int64) for n in LENGTHS]),
            "rollout_log_probs": padded(rollout),
            "old_log_probs": padded(old),
        },
        non_tensors={"uid": np.array(UIDS, dtype=object)},
        meta_info={"global_steps": 7},
    )
    data = trainer._fit_compute_advantage(data)
    verl.uninstall()
    return told(data.batch, trainer.metrics)


def v1(folder: str) -> dict:
    """The advantage step of verl's v1 trainer, with its transfer queue on a local Ray."""
    import ray
    import transfer_queue as tq
    from tensordict import TensorDict
    from tensordict.tensorclass import NonTensorStack
    from verl.trainer.ppo.v1 import trainer_base

    from offdrift.adapters import verl

    verl.install("geo_mask", record=folder)
    rollout, old = tokens()
    keys = [f"{uid}_{i}_0" for i, uid in enumerate(UIDS)]
    tags = [{"min_global_steps": 5 + i % 2, "max_global_steps": 6} for i in range(len(UIDS))]
    with queue(ray, tq):
        fields = {
            "responses": [torch.arange(n) for n in LENGTHS],
            "response_mask": [torch.ones(n, dtype=torch.int64) for n in LENGTHS],
            "rollout_log_probs": rollout,
            "old_log_probs": old,
            "rm_scores": scores(),
        }
        held = {k: torch.nested.as_nested_tensor(x, layout=torch.jagged) for k, x in fields.items()}
        held["uid"] = NonTensorStack(*UIDS)
        tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(held, batch_size=len(keys)), tags=tags)
        trainer_class = type("Trainer", (trainer_base.PPOTrainer,), {"__abstractmethods__": frozenset()})
        trainer_class.__abstractmethods__ = frozenset()
        trainer = object.__new__(trainer_class)
        trainer.config, trainer.global_steps, metrics = OmegaConf.create(SETTINGS), 7, {}
        meta = tq.KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        trainer._compute_advantage(meta, metrics)
        wanted = ["advantages", "rollout_is_weights", "response_mask"]
        found = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=wanted)
        batch = found.to_padded_tensor()
    verl.uninstall()
    return told(batch, metrics)


@contextmanager
def queue(ray, tq):
    environment = {"env_vars": {"TRANSFER_QUEUE_ENABLE": "1"}}
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", runtime_env=environment)
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    try:
        yield
    finally:
        tq.close()
        ray.shutdown()


def told(batch, metrics: dict) -> dict:
    names = ("advantages", "rollout_is_weights", "response_mask")
    ours = {k: v for k, v in metrics.items() if k.startswith("offdrift/")}
    return {**{k: batch[k].tolist() for k in names}, "metrics": ours}


if __name__ == "__main__":
    print(json.dumps({"v0": v0, "v1": v1}[sys.argv[1]](sys.argv[2])))
