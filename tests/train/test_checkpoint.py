"""Checkpoints: whole or absent, the newest first, and damage reported with the way out."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from offdrift.errors import CheckpointError, RecordError
from offdrift.train.run_folder import Position, checkpoints, load_checkpoint, save_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def prepared():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    yield accelerator, model, optimizer
    accelerator.free_memory()


def move(model, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_model_and_optimizer_come_back_and_old_ones_go(prepared, tmp_path):
    accelerator, model, optimizer = prepared
    for i in range(4):
        move(model, optimizer)
        save_checkpoint(accelerator, tmp_path, Position(i, i + 1, (i, i + 1)))
    at_save = model.weight.clone()
    move(model, optimizer)
    after_one_more = model.weight.clone()
    assert load_checkpoint(accelerator, tmp_path) == Position(3, 4, (3, 4))
    assert torch.equal(model.weight, at_save)
    move(model, optimizer)
    assert torch.equal(model.weight, after_one_more), "Adam's moments must come back, too"
    assert [p.name for p in checkpoints(tmp_path)] == ["batch-000002", "batch-000003"]


def test_nothing_saved_is_nothing_to_load(prepared, tmp_path):
    assert load_checkpoint(prepared[0], tmp_path / "none") is None


@pytest.mark.parametrize("damage", ["model.safetensors", "optimizer.bin", "position.json"])
@pytest.mark.parametrize("how", ["garbage", "missing", "truncated"])
def test_a_damaged_checkpoint_names_its_folder_and_the_way_out(prepared, tmp_path, damage, how):
    accelerator = prepared[0]
    move(*prepared[1:])
    for i in (1, 2):
        save_checkpoint(accelerator, tmp_path, Position(i, i))
    file = tmp_path / "batch-000002" / damage
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(b"\x00garbage" if how == "garbage" else data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"batch-000002 cannot be read .*continues from batch-000001"):
        load_checkpoint(accelerator, tmp_path)


def test_a_checkpoint_that_runs_code_is_not_loaded(prepared, tmp_path):
    """Optimizer states are read with weights_only: a pickle that calls something is refused."""
    import pickle

    class Attack:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    accelerator = prepared[0]
    save_checkpoint(accelerator, tmp_path, Position(1, 1))
    (tmp_path / "batch-000001" / "optimizer.bin").write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError):
        load_checkpoint(accelerator, tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_a_full_disk_leaves_the_previous_checkpoint(prepared, tmp_path, monkeypatch):
    accelerator = prepared[0]
    save_checkpoint(accelerator, tmp_path, Position(1, 1))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Accelerator, "save_state", full)
    with pytest.raises(RecordError, match=r"No space left.*previous checkpoint"):
        save_checkpoint(accelerator, tmp_path, Position(2, 2))
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["batch-000001"]
