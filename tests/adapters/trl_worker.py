"""Runs of TRL's trainer in processes of their own.

python -m tests.adapters.trl_worker FOLDER runs it with vLLM; the last line printed is what it logged.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.engines.models import CACHE_MIB

DRAWN = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1"}
SPREAD = ("normalized_tis", "loss"), ("token_tis", "loss"), ("decoupled_geo_rs_token_tis", "correct")


def small_cache() -> None:
    """TRL's vLLM takes little memory for keys and values, which its environment variable counts in whole GiB."""
    from trl.generation import vllm_generation

    engine = vllm_generation.LLM

    def small(*args: Any, **options: Any) -> Any:
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would replace the option
        return engine(*args, **options, kv_cache_memory_bytes=CACHE_MIB * 2**20)

    vllm_generation.LLM = small


def drawn_by_vllm(folder: Path) -> None:
    """Ten steps with vLLM in this process; then what the engine says of the last weights."""
    os.environ.update(DRAWN)
    small_cache()
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
            logits = run.model.eval()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        gaps += (logp - torch.tensor(logps).squeeze(1)).abs().tolist()
    print("\n" + json.dumps({"steps": steps(run), "gap": sum(gaps) / len(gaps), "compared": len(gaps)}), flush=True)


def one_of_two(rank: int, port: int, folder: Path, answers: Any) -> None:
    """One of two processes that take one step of each method, with rollouts that depend on the prompt alone."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({name: str(x) for name, x in ranks.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from tests.adapters.trl_runs import Sampler, steps, trainer

    results = {}
    for method, mode in SPREAD:
        run = spread(trainer, Sampler, folder / method, method, mode, per_device_train_batch_size=8)
        weights = [float(p.detach().double().square().sum()) for p in run.model.parameters()]
        results[method] = {"steps": steps(run), "weights": weights}
    answers.put((rank, results))


def spread(trainer: Any, sampler: Any, folder: Path, method: str, mode: str, **config: Any) -> Any:
    settings = {} if method == "normalized_tis" else {"weight.cap": 1.2}
    settings |= {"gate.low": 0.95, "gate.high": 1.05} if "geo" in method else {}
    config = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, **config}
    options = {"settings": settings, "config": config, "record": True, "rollout_func": sampler(by_prompt=True)}
    run = trainer(folder, method=method, mode=mode, **options)
    run.train()
    return run


if __name__ == "__main__":
    drawn_by_vllm(Path(sys.argv[1]))
