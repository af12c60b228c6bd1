"""Every snippet can be pasted: it parses in its language, and its keys exist where they are read."""

import ast
import dataclasses
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from offdrift.cli import application
from offdrift.judge import load_rules

FIXES = load_rules().fixes
ENVIRONMENT = {"METHOD", "SETTINGS", "RECORD", "ON_IDLE"}
"""What `offdrift.adapters.base.environ` reads."""
SNIPPETS = [(fix, where, text) for fix, f in FIXES.items() for where, text in f.snippets.items()]
LANGUAGES = {"verl", "nemo-rl", "trl", "prime-rl", "offdrift", "slime", "skyrl", "vllm", "python", "shell"}


def of(*frameworks):
    chosen = [s for s in SNIPPETS if s[1] in frameworks]
    return pytest.mark.parametrize(("fix", "where", "text"), chosen, ids=[f"{s[0]}-{s[1]}" for s in chosen])  # fmt: skip


def test_every_framework_is_served():
    assert {where for _, where, _ in SNIPPETS} == LANGUAGES
    assert len(SNIPPETS) > 100
    corrections = [f for f in FIXES.values() if f.method not in (None, "disabled", "vcpo")]
    assert len(corrections) >= 6
    assert all({"verl", "trl", "offdrift", "slime"} <= set(f.snippets) for f in corrections)


def leaves(tree, path=()):
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    else:
        yield ".".join(path), tree


@of("verl")
def test_verl_keys_are_verls(fix, where, text):
    """Against the configuration files that the installed verl starts from."""
    root = Path(pytest.importorskip("verl").__file__).parent
    config = root / "trainer" / "config"
    ppo = yaml.safe_load((config / "_generated_ppo_trainer.yaml").read_text())
    megatron = yaml.safe_load((config / "_generated_ppo_megatron_trainer.yaml").read_text())
    async_folder = root / "experimental" / "fully_async_policy" / "config"
    lagging = yaml.safe_load((async_folder / "fully_async_ppo_trainer.yaml").read_text())
    known = set().union(*(dict(leaves(tree)) for tree in (ppo, megatron, lagging)))
    asked = dict(leaves(yaml.safe_load(text)))
    assert asked
    variables = {f"ray_kwargs.ray_init.runtime_env.env_vars.OFFDRIFT_{name}" for name in ENVIRONMENT}
    assert set(asked) <= known | variables


@of("verl")
def test_verl_correction_is_accepted_by_verl_and_is_the_method(fix, where, text):
    """Numbers of the correction are those of verl's preset of the same name, where there is one."""
    algorithm = pytest.importorskip("verl.trainer.config.algorithm")
    asked = yaml.safe_load(text).get("algorithm", {}).get("rollout_correction")
    if asked is None:
        return
    config = algorithm.RolloutCorrectionConfig(**{"rollout_is": None, **asked})
    given = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    presets = {
        "mask_the_band": config.decoupled_token_icepop(threshold_lower=0.5, threshold=5.0),
        "replay_routing": config.decoupled_token_icepop(threshold_lower=0.5, threshold=5.0),
        "reject_geometric": config.decoupled_geo_rs(rs_threshold="0.99_1.01"),
        "reject_then_weight": config.decoupled_geo_rs_token_tis(is_threshold=2.0, rs_threshold="0.99_1.01"),
        "reject_stale": config.decoupled_geo_rs_seq_tis(is_threshold=2.0, rs_threshold="0.99_1.01"),
        "reduce_lag": config.decoupled_token_is(threshold=2.0),
        "halve_lr": config.bypass_pg_geo_rs(),
        "fewer_workers": config.bypass_ppo_clip(),
        "make_it_live": config.decoupled_token_is(threshold=2.0),
    }  # fmt: skip
    preset = presets.get(fix, algorithm.RolloutCorrectionConfig.disabled())
    expected = {f.name: getattr(preset, f.name) for f in dataclasses.fields(preset)}
    if expected["rollout_is"] is None:  # a threshold of nothing
        given.pop("rollout_is_threshold"), expected.pop("rollout_is_threshold")
    assert given == expected


@of("trl")
def test_trl_arguments_are_trls(fix, where, text):
    fields = {f.name for f in dataclasses.fields(pytest.importorskip("trl").GRPOConfig)}
    (statement,) = ast.parse(text).body
    call = statement.value
    if call.func.id == "OffdriftGRPOTrainer":
        from offdrift.adapters.trl import OffdriftMixin, refuse_method
        from offdrift.methods import method

        ours = {k.arg: k.value for k in call.keywords}
        assert set(ours) - {"reward_funcs", "args"} <= set(inspect.signature(OffdriftMixin.__init__).parameters)
        refuse_method(method(ours["method"].value), "correct", records=ours["record"].value)
        call = ours["args"]
    assert call.func.id == "GRPOConfig"
    assert not call.args
    asked = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
    assert asked
    assert set(asked) <= fields
    mode = asked.get("vllm_importance_sampling_mode", "token_mask")
    assert mode in {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask"}


@of("offdrift")
def test_recipe_takes_it(fix, where, text, request):
    """Pasted into a recipe of the repository, in place of what it changes."""
    pytest.importorskip("pydantic")
    from offdrift_lab.train.settings.recipe import Recipe

    asked = tomllib.loads(text)
    name = "async" if "pipeline" in asked else "tiny"
    recipe = tomllib.loads((Path(__file__).parents[2] / "recipes" / f"{name}.toml").read_text())
    if "method" in asked:
        recipe.pop("arms", None), recipe.pop("method", None), recipe.pop("override", None)
        assert asked["method"] == FIXES[fix].method
    for key, value in asked.items():
        recipe[key] = {**recipe.get(key, {}), **value} if isinstance(value, dict) and key != "override" else value  # fmt: skip
    built = Recipe.model_validate(recipe)
    assert all(arm.build() for arm in built.arms.values())


# What each framework reads, from its own sources at the commits that fixes.toml names.
PRIME_RL = {
    "inference.vllm.logprobs_mode", "inference.vllm.dtype", "orchestrator.train.sampling.temperature",
    "orchestrator.max_off_policy_steps", "trainer.enable_router_replay",
    "trainer.model.optimization_dtype", "trainer.optim.lr", "trainer.optim.max_norm",
    "trainer.loss.type", *(f"trainer.loss.{key}" for key in ("eps", "ratio_low", "ratio_high", "import_path")),
    *(f"trainer.loss.kwargs.{key}" for key in ("method", "record")),
}  # fmt: skip
PRIME_RL_LOSSES = {
    "ipo": {"eps", "adv_tau", "max_importance_ratio", "score_centering"},
    "icepop": {"ratio_low", "ratio_high", "adv_tau"},
    "ppo": {"ratio_low", "ratio_high", "max_importance_ratio", "adv_tau"},
    "cispo": {"ratio_low", "ratio_high", "adv_tau"},
    "custom": {"import_path", "kwargs"},
}
"""Its losses by `trainer.loss.type`, and what each reads: its configuration's source after pull requests #3418, #3526, #3586."""
NEMO_RL = {
    "policy.generation.vllm_cfg.logprobs_mode", "policy.generation.temperature", "policy.generation.top_p",
    "policy.generation.top_k", "policy.router_replay.enabled", "policy.precision", "policy.max_grad_norm",
    "policy.optimizer.kwargs.lr", "grpo.async_grpo.max_trajectory_age_steps",
    "loss_fn.use_importance_sampling_correction", "loss_fn.truncated_importance_sampling_type",
    "loss_fn.truncated_importance_sampling_ratio", "loss_fn.truncated_importance_sampling_ratio_min",
}  # fmt: skip
SKYRL = {
    "generator.sampling_params.temperature", "generator.sampling_params.top_p",
    "generator.sampling_params.top_k", "generator.sampling_params.min_p",
    "generator.inference_engine.enable_return_routed_experts", "generator.inference_engine.model_dtype",
    "trainer.bf16", "trainer.dump_data_batch", "trainer.update_epochs_per_batch",
    "trainer.fully_async.max_staleness_steps", "trainer.hf_save_interval", "trainer.policy.optimizer_config.lr",
    "trainer.policy.optimizer_config.max_grad_norm",
    "trainer.policy.megatron_config.moe_enable_routing_replay",
    *(f"trainer.algorithm.off_policy_correction.{key}" for key in (
        "tis_ratio_type", "token_tis_ratio_clip_high", "sequence_mask_metric", "geo_mask_low",
        "geo_mask_high", "token_mask_is_threshold_low", "token_mask_is_threshold_high",
    )),
}  # fmt: skip
SLIME = {
    "--rollout-temperature", "--rollout-top-p", "--rollout-top-k", "--check-weight-update-equal", "--save-hf", "--save-interval",
    "--use-rollout-routing-replay", "--keep-old-actor", "--fp16", "--sglang-dtype",
    "--sglang-enable-deterministic-inference", "--lr", "--get-mismatch-metrics", "--use-tis",
    "--tis-clip", "--tis-clip-low", "--custom-tis-function-path", "--custom-config-path",
    "--update-weights-interval", "--num-steps-per-rollout", "--clip-grad", "--save-debug-train-data",
}  # fmt: skip


READ = {
    "prime-rl": (PRIME_RL, lambda text: dict(leaves(tomllib.loads(text)))),
    "nemo-rl": (NEMO_RL, lambda text: dict(leaves(yaml.safe_load(text)))),
    "skyrl": (SKYRL, lambda text: dict(re.fullmatch(r"([^=]+)=([^=]+)", line).groups() for line in text.splitlines())),
    "slime": (SLIME, lambda text: [w for w in shlex.split(text, comments=True) if w.startswith("--")]),
}


@of(*READ)
def test_keys_are_those_that_the_framework_reads(fix, where, text):
    known, keys_of = READ[where]
    asked = set(keys_of(text))
    assert asked
    assert asked <= known


@of("prime-rl")
def test_losses_of_prime_rl_are_those_that_it_has_with_their_own_numbers(fix, where, text):
    loss = tomllib.loads(text).get("trainer", {}).get("loss")
    if loss is None:
        return
    assert set(loss) - {"type"} <= PRIME_RL_LOSSES[loss["type"]]
    assert len(loss) > 1
    if loss["type"] == "custom":
        from offdrift.adapters.contrib import prime_rl
        from offdrift.adapters.hooks import HookConfig, check_served

        assert loss["import_path"] == f"{prime_rl.__name__}.{prime_rl.loss.__name__}"
        assert set(loss["kwargs"]) <= set(inspect.signature(prime_rl.loss).parameters)
        check_served(HookConfig.of("prime-rl", **loss["kwargs"]), has={"logp_ref"})


def test_corrections_that_change_prime_rls_loss_are_few_and_all_seen():
    losses = [tomllib.loads(text).get("trainer", {}).get("loss") for _, where, text in SNIPPETS if where == "prime-rl"]
    kinds = [loss["type"] for loss in losses if loss is not None]
    assert sorted(kinds) == ["custom"] * 2 + ["icepop"] + ["ipo"] * 3


def test_settings_that_prime_rl_has_no_longer_are_in_no_snippet():
    """Its default of before September 2026, and its token exports (pull requests #3418 and #3444)."""
    gone = ("dppo_mask", "ipo_threshold", "kl_tau", "enable_token_export")
    for fix, where, text in SNIPPETS:
        asked = set(leaves_of(text)) if where == "prime-rl" else set()
        assert not [key for key in asked if key.rpartition(".")[2].startswith(gone)], fix


def leaves_of(text):
    return dict(leaves(tomllib.loads(text)))


@of("python")
def test_python_compiles(fix, where, text):
    compile(text, fix, "exec")


def commands():
    """Every call of our command that a fix or a rule prints, in its snippets, their comments and its sentences."""
    rules = load_rules()
    texts = [(name, text) for name, _, text in SNIPPETS] + [(name, fix.do) for name, fix in rules.fixes.items()]
    texts += [
        (name, getattr(r, f)) for name, r in rules.rules.items() for f in ("decides", "refuted_by", "explanation")
    ]
    return sorted(
        {(name, match) for name, text in texts for match in re.findall(r"\boffdrift [a-z]+\b[^`)\n;]*", text)}
    )


@pytest.mark.parametrize(("fix", "text"), commands())
def test_every_command_that_is_printed_is_one_that_the_command_line_takes(fix, text):
    from offdrift.check.bench import EngineSpec
    from offdrift.check.live import server_spec

    _, name, *words = shlex.split(text, comments=True)
    assert name in {"check", "audit", "watch"}
    given = typer.main.get_command(application(name)).commands[name].make_context(name, words).params
    if given.get("checkpoint"):
        assert server_spec(given["rollout"]).kind
    for engine in ("rollout", "train"):
        if given.get(engine):
            assert EngineSpec.parse(given[engine]).kind


def test_commands_are_found_in_every_place():
    assert {name for _, text in commands() for name in re.findall(r"offdrift (\w+)", text)} == {
        "check",
        "audit",
        "watch",
    }
    assert len(commands()) > 20


@of("shell")
def test_shell_is_nothing_but_our_command(fix, where, text):
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert all(line.startswith("offdrift ") for line in lines)
    assert not re.search(r"[;&|`$<>]", text)
