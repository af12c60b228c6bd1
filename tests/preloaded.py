"""What `tests/forked.py` imports before it forks: all that a run of a tiny model imports."""

from importlib import import_module

for module in (
    "offdrift.cli",
    "offdrift_lab.train.loop.loop",
    "tests_lab.train.conftest",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
):
    import_module(module)
