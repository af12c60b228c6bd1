"""Runs inside vLLM's worker processes: `--worker-extension-cls offdrift.engines.vllm.worker.Worker`."""

from __future__ import annotations

from typing import Any


class Worker:
    """Additional abilities of a worker of vLLM, which mixes them into its own class."""

    model_runner: Any
    reload_weights: Any

    def offdrift_load(self, folder: str) -> None:
        """Take the weights in a folder, all of them, also on CPUs (see `engines.vllm`).

        Args:
            folder: with safetensors files, names as in the checkpoint.
        """
        from offdrift.engines.vllm.engine import repack

        self.reload_weights(weights_path=folder)
        repack(self.model_runner)
