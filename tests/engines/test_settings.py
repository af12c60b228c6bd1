"""Settings that servers say of themselves, and the names by which two of them differ."""

import pytest

from offdrift.engines.server.settings import SETTINGS, differing, settings_of

VLLM = {
    "scheduler_config": {"max_num_batched_tokens": 2048},
    "cache_config": {"cache_dtype": "auto"},
    "speculative_config": None,
    "parallel_config": {"tensor_parallel_size": 1, "enable_expert_parallel": False},
    "model_config": {"enforce_eager": True, "dtype": "torch.float32", "quantization": None},
}


def test_what_a_server_says_is_read_by_the_names_of_the_factors():
    told = settings_of("vllm", VLLM)
    assert told["kv_cache_dtype"] == "auto"
    assert told["tensor_parallel"] == "1"
    assert told["speculative_decoding"] == "None"
    assert "attention_backend" not in told, "it did not say"
    assert settings_of("vllm", VLLM | {"speculative_config": {"method": "ngram"}})["speculative_decoding"] == "ngram"
    assert settings_of("sglang", {"tp_size": 2, "kv_cache_dtype": "auto"}) == {
        "tensor_parallel": "2",
        "kv_cache_dtype": "auto",
    }
    assert settings_of("vllm", {}) == {}


def test_two_servers_differ_by_what_both_say():
    other = VLLM | {"cache_config": {"cache_dtype": "fp8"}, "parallel_config": {}}
    assert differing(settings_of("vllm", VLLM), settings_of("vllm", other)) == {"kv_cache_dtype": ("auto", "fp8")}


def test_every_named_factor_has_an_option_of_both_servers():
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.vllm and setting.sglang for setting in SETTINGS)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_options_of_vllm_are_those_that_it_has():
    from tests.engines.models import need_vllm

    need_vllm()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = EngineArgs.add_cli_args(FlexibleArgumentParser())._option_string_actions
    assert {setting.vllm.split()[0] for setting in SETTINGS if setting.vllm.startswith("--")} <= set(known)
