"""Folders that transformers opens, and what is said of all others."""

from pathlib import Path

import pytest

from offdrift.check.checkpoint_folder import checkpoint_folder, step_of
from offdrift.errors import RecordError


def whole(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_a_whole_checkpoint_is_taken(tmp_path):
    assert checkpoint_folder(whole(tmp_path / "step_3")) == tmp_path / "step_3"


def test_a_checkpoint_inside_is_named(tmp_path):
    inside = whole(tmp_path / "global_step_3" / "actor" / "huggingface")
    with pytest.raises(RecordError, match=str(inside)):
        checkpoint_folder(tmp_path / "global_step_3")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("model_world_size_2_rank_0.pt",), "verl.model_merger merge --backend fsdp --local_dir FOLDER"),
        (("huggingface/config.json", "model_world_size_2_rank_0.pt"), "--backend fsdp"),
        (("actor/model_world_size_2_rank_0.pt",), "--local_dir FOLDER/actor"),
        (("dist_ckpt/__0_0.distcp",), "--backend megatron"),
        (("adapter_config.json", "adapter_model.safetensors"), "merge_and_unload"),
        (("zero_to_fp32.py",), "FOLDER/zero_to_fp32.py"),
        (("latest_checkpointed_iteration.txt",), "convert_torch_dist_to_hf.py"),
        (("common.pt", "__0_0.distcp"), "convert_torch_dist_to_hf.py"),
        (("__0_0.distcp", ".metadata"), "convert_dcp_to_hf.py"),
        (("config.json",), "no weights"),
        (("model.safetensors",), "no config.json"),
        ((), "no config.json"),
    ],
)
def test_shards_and_gaps_are_named_with_the_way_out(tmp_path, files, said):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(RecordError) as refused:
        checkpoint_folder(tmp_path)
    assert said in str(refused.value).replace(str(tmp_path), "FOLDER")


def test_a_file_or_nothing_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").touch()
    for path in (tmp_path / "model.safetensors", tmp_path / "none"):
        with pytest.raises(RecordError, match="not a folder"):
            checkpoint_folder(path)


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("weights/step_40", 40),
        ("ckpt/global_step_200/actor/huggingface", 200),
        ("out/checkpoint-7", 7),
        ("slime/iter_0000012", 12),
        ("areal/epoch1epochstep2globalstep23", 23),
        ("models/Qwen3-0.6B", None),
        ("models/v", None),
    ],
)
def test_the_step_is_read_from_the_name(path, step):
    assert step_of(Path(path)) == step
