"""verl's `rollout_correction` block, read; and the configurations of docs/integrations/verl.md."""

import inspect
import pickle
import re
import warnings
from pathlib import Path

import pytest
import yaml

from offdrift.adapters.verl.config import DEFAULTS, read_rollout_correction
from offdrift.adapters.verl.losses import runnable
from offdrift.correction import Correction
from offdrift.errors import RecipeError
from offdrift.methods import METHODS, method, override
from offdrift.methods.table import PRESET_ROWS
from offdrift.objectives import Clipped
from offdrift.setting import parse_settings
from tests.adapters.verl_run import config, pushed, real_verl
from tests.parity.peers import random_batch

PAGE = Path("docs/integrations/verl.md").read_text()
BLOCKS = dict(re.findall(r"<!-- (\w+) -->\n```yaml\n(.*?)```", PAGE, re.DOTALL))


def test_keys_and_defaults_are_verls():
    verl = real_verl()
    fields = {f for f in verl.RolloutCorrectionConfig() if f != "_target_"}
    assert fields == set(DEFAULTS)
    assert dict(composed().algorithm.rollout_correction) == DEFAULTS


@pytest.mark.parametrize("name", PRESET_ROWS)
def test_presets_read_from_verls_dataclass_and_from_omegaconf_are_the_rows(name):
    verl = real_verl()
    preset = getattr(verl.RolloutCorrectionConfig, name)()
    plain = {k: preset[k] for k in preset if k != "_target_"}
    for given in (preset, verl.OmegaConf.create(plain), plain):
        found = read_rollout_correction(given)
        assert found.bypass == name.startswith("bypass")
        assert found.method.correction.weights == PRESET_ROWS[name].correction.weights
        gates = zip(found.method.correction.gates, PRESET_ROWS[name].correction.gates, strict=True)
        for mine, row in gates:
            assert (mine.statistic, mine.unit, mine.on) == (row.statistic, row.unit, row.on)
            if row.statistic == "ratio":  # verl's band is on the inverse ratio
                assert (mine.low, mine.high) == (1 / row.high, 1 / row.low)
            else:
                assert mine.high == row.high
        if found.bypass:
            assert found.method.objective == PRESET_ROWS[name].objective
    assert len(inspect.signature(verl.RolloutCorrectionConfig).parameters) >= 7


def test_the_table_has_a_line_for_every_key():
    block = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True}
    block |= {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_2.0,0.1"}
    lines = str(read_rollout_correction(block)).splitlines()
    assert [line.split()[0] for line in lines] == list(DEFAULTS)
    text = "\n".join(lines)
    for said in (
        "mask below 0.5, mask above 5, mean 1 over the step",
        "keep if 0.5 <= token ratio(mismatch) <= 2; keep if seq_max k2(mismatch) <= 0.1 (bands as verl applies them",
        "band of the weight",
        "mean 1 over the batch",
        "decoupled",
    ):
        assert said in text


def test_weights_in_bypassed_ppo_are_said_to_be_nothing():
    found = read_rollout_correction({"rollout_is": "token", "bypass_mode": True})
    assert found.method.correction == Correction()
    assert isinstance(found.method.objective, Clipped)
    assert "nothing: the ratio is in the objective already" in str(found)


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"rollout_is_treshold": 2.0}, "did you mean 'rollout_is_threshold'"),
        ({"anything": 1}, "has no key 'anything'"),
        ({"rollout_is": "geometric"}, "rollout_is='geometric'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold=True"),
        ({"rollout_is": "token", "rollout_is_threshold": "5_0.5"}, "lower end first"),
        ({"rollout_is": "token", "rollout_is_threshold": "1_2_3"}, "no band"),
        ({"rollout_is": "token", "rollout_is_threshold": -1}, "no positive cap"),
        ({"rollout_is": "token", "rollout_is_threshold": "0_2"}, "no band"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "seq_max_k1"),
        ({"rollout_rs": "token_kl", "rollout_rs_threshold": 2}, "token_kl"),
        ({"rollout_rs": "nonsense", "rollout_rs_threshold": 2}, "nonsense"),
        ({"rollout_rs": "token_k2"}, "threshold='None'"),
        ({"rollout_rs": "token_k2,token_k3,seq_max_k2", "rollout_rs_threshold": "1,2"}, "2 thresholds for 3 modes"),
        ({"bypass_mode": True, "loss_type": "ppo"}, "loss_type='ppo'"),
    ],
)  # fmt: skip
def test_what_verl_would_refuse_is_refused(block, says):
    with pytest.raises(RecipeError, match=re.escape(says)):
        read_rollout_correction(block)


def composed(*merged: str):
    """verl's own configuration, as it ships it composed, with more YAML over it."""
    verl = real_verl()
    import verl as package

    folder = Path(package.__file__).parent / "trainer" / "config"
    base = verl.OmegaConf.load(folder / "_generated_ppo_trainer.yaml")
    return verl.OmegaConf.merge(base, *(verl.OmegaConf.create(yaml.safe_load(x)) for x in merged))


def leaves(tree, prefix=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_ours(key: str) -> bool:
    """Keys that verl's file lacks: what tells the actor of the mode, and environment variables."""
    return key.endswith("policy_loss.rollout_correction") or ".env_vars." in key


@pytest.mark.parametrize("name", ["decoupled", "bypass"])
def test_configurations_of_the_page_are_verls(name):
    """Merged over verl's own, converted to its dataclasses, and run through its loss."""
    verl, text = real_verl(), BLOCKS[name]
    base, merged, keys = composed(), composed(text), 0
    for key, value in leaves(yaml.safe_load(text)):
        above, _, last = key.rpartition(".")
        holder = verl.OmegaConf.select(base, above)
        assert is_ours(key) == (holder is None or last not in list(holder.keys())), key
        if not is_ours(key):
            assert verl.OmegaConf.select(merged, key) == value
        keys += 1
    assert keys >= 8
    policy_loss = merged.actor_rollout_ref.actor.policy_loss
    chosen = policy_loss.loss_mode.removeprefix("offdrift/")
    assert runnable()[chosen] == name
    block = read_rollout_correction(merged.algorithm.rollout_correction)
    assert block.bypass == (name == "bypass")
    env = dict(merged.ray_kwargs.ray_init.runtime_env.env_vars)
    assert all(k.startswith("OFFDRIFT_") for k in env)
    assert override(method(chosen), parse_settings(env.get("OFFDRIFT_SETTINGS", "")))
    assert env.get("OFFDRIFT_METHOD", chosen) == chosen
    estimator = merged.algorithm.adv_estimator
    assert estimator in verl.core_algos.ADV_ESTIMATOR_REGISTRY
    cfg = config(policy_loss.loss_mode, merged.actor_rollout_ref.actor.loss_agg_mode)
    object.__setattr__(cfg, "policy_loss", policy_loss)
    batch = random_batch(0, far=False)
    batch = batch.bypass if name == "bypass" else batch
    weights = None if name == "bypass" else batch.mask.double()
    counts = {"tokens": batch.tokens, "sequences": batch.sequences}
    assert pushed(cfg, batch, weights=weights, **counts)[1].count_nonzero() > 5


def spelled(value) -> str:
    """A value in hydra's grammar."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"'{text}'" if "=" in text else text


def by_hydra(overrides: list[str]):
    """Overrides of the command line, composed with verl's own hydra configuration."""
    hydra = pytest.importorskip("hydra")
    import verl as package

    folder = str(Path(package.__file__).parent / "trainer" / "config")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with hydra.initialize_config_dir(config_dir=folder, version_base=None):
            return hydra.compose("ppo_trainer", overrides=overrides)


@pytest.mark.parametrize("name", ["decoupled", "bypass"])
def test_configurations_of_the_page_are_composed_by_hydra(name):
    """Then as a worker gets its part: pickled, to dataclasses."""
    cfg = by_hydra([f"++{key}={spelled(value)}" for key, value in leaves(yaml.safe_load(BLOCKS[name]))])
    from verl.utils.config import omega_conf_to_dataclass

    worker = pickle.loads(pickle.dumps(cfg.actor_rollout_ref))
    actor = omega_conf_to_dataclass(worker.actor)
    assert actor.policy_loss.loss_mode.startswith("offdrift/")
    block = actor.policy_loss.get("rollout_correction", {})
    assert bool(block.get("bypass_mode", False)) == (name == "bypass")


def test_the_command_at_the_top_of_the_page_is_composed_by_hydra():
    """Its overrides, over verl's own configuration: the same choices as the first block's."""
    command = PAGE[PAGE.index("python3 -m verl.trainer.main_ppo") :].partition("```")[0]
    overrides = [word.strip(" \\") for word in command.splitlines()[1:] if word]
    assert len(overrides) == 4
    cfg = by_hydra(overrides)
    block, whole = yaml.safe_load(BLOCKS["decoupled"]), real_verl().OmegaConf
    shared = [key for key, value in leaves(block) if whole.select(cfg, key) == value]
    assert len(shared) >= 8
    assert "actor_rollout_ref.actor.policy_loss.loss_mode" in shared
    assert "ray_kwargs.ray_init.runtime_env.env_vars.OFFDRIFT_METHOD" in shared
    assert not any(
        whole.select(cfg, f"algorithm.rollout_correction.{k}") for k in ("rollout_is", "rollout_rs", "bypass_mode")
    )


def test_numbers_and_tables_of_the_page_are_true():
    lost = len(METHODS) - len(runnable())
    assert f"registered {len(METHODS)} policy losses offdrift/<method> with verl ({lost} of them" in PAGE
    table = str(
        read_rollout_correction({"rollout_is": "token", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": 0.05})
    )
    assert table in PAGE
    names = re.findall(r"`([a-z0-9_]+)`", PAGE[PAGE.index("## What is not possible") :])
    rows = [n for n in names if n in METHODS]
    assert {"opsm", "roll_flash", "vespo", "kl_cov", "m2po", "normalized_tis", "trm_max", "trm_max_k2"} == set(rows)
