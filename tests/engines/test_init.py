"""The factory, and what importing the engines must not drag in."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offdrift.engines import Engine, make_engine
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
