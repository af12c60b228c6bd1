"""What real tensor parallelism of a vLLM server on a CPU changes: mismatch, determinism, and the tokens themselves.

    python benchmarks/tensor_parallel.py [--dtypes float32 bfloat16] [--sizes 1 2] [--json PATH]

The tiny dense model, after some steps of the recipes' warm start, is served by vLLM in this many processes, on loopback.
The same prompts are drawn from each server with the same seeds; the trainer scores every token with the same weights in
float32. Needs `make install-vllm`; a server takes about half a minute to start.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import machine

from offdrift.check.equality import repeated
from offdrift.engines.score import score
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.models import load_model, save_for_engine
from offdrift.records.provenance import Sampling
from offdrift_lab.train.data.prompts import prompt_ids
from offdrift_lab.train.data.tasks import find_task
from offdrift_lab.train.data.warmstart import warm_start

LAUNCH = """
import runpy
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
FLAGS = (
    "--enforce-eager --max-model-len 128 --max-num-seqs 64 --max-logprobs -1 --logprobs-mode processed_logprobs "
    "--generation-config vllm --kv-cache-memory-bytes 268435456"
)
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def served(folder: str, dtype: str, size: int, log: Path):
    """A server of so many processes; ended with its session."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = log.with_suffix(".py")  # processes are spawned from a file
    script.write_text(LAUNCH)
    words = [sys.executable, str(script), "--model", folder, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--dtype", dtype, "--tensor-parallel-size", str(size), *FLAGS.split()]
    with log.open("w") as out:
        server = subprocess.Popen(words, env=os.environ | ENVIRONMENT, stdout=out, stderr=out, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while True:
            if server.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"no server with {size} processes: {log.read_text()[-2000:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(20)


def main() -> None:
    """Serve, draw, compare, print a row per server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sizes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--steps", type=int, default=900, help="of the warm start")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model("tiny-qwen3", seed=0)
    task = find_task("arithmetic")
    warm_start(model, tokenizer, task, steps=options.steps, batch_size=32, lr=1e-3, seed=0)
    problems = task.sample(options.prompts, seed=0, split="eval")
    prompts = [prompt_ids(p, tokenizer) for p in problems for _ in range(options.samples)]
    sampling = Sampling(14, stop_token_ids=(tokenizer.eos_token_id,))
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / "model")
        save_for_engine(model, tokenizer, folder)
        for dtype in options.dtypes:
            alone = None
            for size in options.sizes:
                with served(folder, dtype, size, Path(temporary) / f"{dtype}-{size}.log") as url:
                    engine = OpenAIEngine(url, vocab_size=model.config.vocab_size)
                    drawn = engine.generate(prompts, sampling, seed=0, evidence="full")
                    again = engine.generate(prompts, sampling, seed=0)
                    few = engine.generate(prompts[:2], sampling, seed=0)
                    engine.close()
                with torch.no_grad():
                    own = score(model, drawn)
                logp = drawn.evidence.logp.double()
                trainer = own.logits.log_softmax(-1).double()
                kl = (logp.exp() * (logp - trainer).where(logp > -torch.inf, 0.0)).sum(-1)
                alone = drawn if alone is None else alone
                rows.append(
                    {
                        "dtype": dtype,
                        "tensor_parallel_size": size,
                        "tokens": len(drawn.tokens),
                        "kl_mean": float(kl.mean()),
                        "kl_max": float(kl.max()),
                        "abs_log_ratio_max": float((own.logp - drawn.logp_rollout).abs().max()),
                        "repeat": repeated(drawn, again),
                        "batch_of_2": repeated(drawn.select(torch.arange(2)), few),
                        "beside_first_size": repeated(alone, drawn),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    if options.json:
        content = {"machine": machine(), "steps": options.steps, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
