"""The factory, what importing the engines must not drag in, and a host that is what it was before."""

import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from offdrift.engines import Engine, make_engine
from offdrift.engines.isolation import preserve_host_state
from offdrift.errors import EngineError
from tests.engines.models import tiny


def test_importing_the_engines_imports_no_backend():
    code = (
        "import sys, offdrift.engines, offdrift.engines.generate, offdrift.engines.verify_sync, "
        "offdrift.engines.vllm.engine; "
        "print(sorted({'transformers', 'vllm'} & {m for m in sys.modules}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_the_factory_passes_options_on():
    engine = make_engine("transformers", tiny("dense"), dtype="bfloat16", name="rollout")
    assert isinstance(engine, Engine)
    assert (engine.name, engine.dtype, engine.vocab_size) == ("rollout", "bfloat16", 64)


@pytest.mark.parametrize(
    ("kind", "words"), [("sglang", "'sglang'; there are"), ("vllm", "got Qwen3ForCausalLM; save the model")]
)
def test_what_cannot_be_made_is_refused_by_name(kind, words):
    with pytest.raises(EngineError, match=words):
        make_engine(kind, tiny("dense"))


@pytest.mark.parametrize(
    ("kind", "module"), [("transformers", "offdrift.engines.hf"), ("openai", "offdrift.engines.server.engine")]
)
def test_a_missing_backend_says_how_to_install_it(kind, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EngineError, match=r"pip install offdrift\[train\]"):
        make_engine(kind, "path")


def test_what_a_backend_does_to_its_host_is_undone():
    random.seed(2)
    before = random.getstate(), torch.get_rng_state(), str(np.random.get_state())
    threads = torch.get_num_threads()
    with preserve_host_state():
        _ = random.random(), torch.rand(1), np.random.rand()
        torch.set_num_threads(threads + 1)
        torch.set_num_threads = lambda n: None
    after = random.getstate(), torch.get_rng_state(), str(np.random.get_state())
    assert torch.set_num_threads is torch._C.set_num_threads
    assert torch.get_num_threads() == threads
    assert (before[0], before[2]) == (after[0], after[2])
    assert torch.equal(before[1], after[1])


def test_deprecations_inside_a_backend_are_not_the_hosts(recwarn):
    with preserve_host_state():
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        warnings.warn("soon", FutureWarning, stacklevel=1)
    assert len(recwarn) == 0
    with pytest.warns(FutureWarning, match="soon"):
        warnings.warn("soon", FutureWarning, stacklevel=1)
