"""Runs of TRL's trainer in processes of their own; the last line printed is what it logged, as JSON.

python -m tests.adapters.trl_worker vllm FOLDER
python -m torch.distributed.run --nproc_per_node 2 -m tests.adapters.trl_worker spread FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

DRAWN = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1"}
SPREAD = ("normalized_tis", "loss"), ("token_tis", "loss"), ("decoupled_geo_rs_token_tis", "correct")  # fmt: skip


def drawn_by_vllm(folder: Path) -> None:
    """Ten steps with vLLM in this process; then what the engine says of the last weights."""
    os.environ.update(DRAWN)
    import torch

    from tests.adapters.trl_runs import steps, trainer

    config = {
        "max_steps": 10,
        "per_device_train_batch_size": 32,
        "learning_rate": 3e-3,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.05,
        "vllm_max_model_length": 64,
    }
    run = trainer(folder, method="decoupled_token_is", record=True, config=config)
    run.train()
    run.vllm_generation.sync_weights()
    prompt = run.processing_class.encode("1+2=")
    _, ids, said, _ = run.vllm_generation.generate([prompt] * 8, None, 1)
    gaps = []
    for tokens, logps in zip(ids, said, strict=True):
        with torch.no_grad():
            logits = run.model.eval()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]  # fmt: skip
        logp = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        gaps += (logp - torch.tensor(logps).squeeze(1)).abs().tolist()
    answer(run, steps=steps(run), gap=sum(gaps) / len(gaps), compared=len(gaps))


def spread_over_processes(folder: Path) -> None:
    """One step of each, with rollouts that depend on the prompt alone."""
    import torch

    from tests.adapters.trl_runs import Sampler, steps, trainer

    found = {}
    for method, mode in SPREAD:
        run = spread(trainer, Sampler, folder / method, method, mode, per_device_train_batch_size=8)
        with torch.no_grad():
            weights = [float(p.double().square().sum()) for p in run.model.parameters()]
        found[method] = {"steps": steps(run), "weights": weights}
    answer(run, **found)


def spread(trainer: Any, sampler: Any, folder: Path, method: str, mode: str, **config: Any) -> Any:
    settings = {} if method == "normalized_tis" else {"weight.cap": 1.2}
    settings |= {"gate.low": 0.95, "gate.high": 1.05} if "geo" in method else {}
    config = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, **config}
    run = trainer(folder, method=method, mode=mode, settings=settings, config=config, record=True, rollout_func=sampler(by_prompt=True))  # fmt: skip
    run.train()
    return run


def answer(run: Any, **found: Any) -> None:
    if run.accelerator.is_main_process:
        print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    {"vllm": drawn_by_vllm, "spread": spread_over_processes}[sys.argv[1]](Path(sys.argv[2]))
