"""Checkpoints that are built once per session, and engines once per file."""

import pytest
import torch

from tests.engines.models import CACHE_MIB, need_vllm, tiny


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small lose eight times their time to waking a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Folder of a saved tiny model, by kind."""
    folders = {}
    for kind in ("dense", "moe"):
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        tiny(kind).save_pretrained(folders[kind])
    return folders


@pytest.fixture(scope="module")
def vllm_engine(checkpoints):
    """A vLLM engine by checkpoint kind and options; one per combination and file, closed with it: 2 GB hold all."""
    need_vllm()
    from offdrift.engines.vllm.engine import VLLMEngine

    built = {}

    def engine(kind: str, **options) -> VLLMEngine:
        key = (kind, *sorted(options.items()))
        if key not in built:
            built[key] = VLLMEngine(checkpoints[kind], max_model_len=256, kv_cache_mib=CACHE_MIB, **options)
        return built[key]

    yield engine
    for each in built.values():
        each.close()
