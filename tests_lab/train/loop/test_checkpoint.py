"""Checkpoints: whole or absent, the newest first, and damage reported with the way out."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator

from offdrift.errors import CheckpointError, RecordError
from offdrift_lab.train.loop.run_folder import Position, checkpoints, load_checkpoint, save_checkpoint

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
    assert load_checkpoint(accelerator, tmp_path) is None
    for i in range(4):
        move(model, optimizer)
        save_checkpoint(accelerator, tmp_path, Position(i, i + 1, source={"drawn": i}))
    at_save = model.weight.clone()
    move(model, optimizer)
    after_one_more = model.weight.clone()
    assert load_checkpoint(accelerator, tmp_path) == Position(3, 4, source={"drawn": 3})
    assert torch.equal(model.weight, at_save)
    move(model, optimizer)
    assert torch.equal(model.weight, after_one_more), "Adam's moments must come back, too"
    assert [p.name for p in checkpoints(tmp_path)] == ["batch-000002", "batch-000003"]


@pytest.mark.parametrize("damaged", ["model.safetensors", "optimizer.bin", "position.json", "source-000.json"])
def test_a_damaged_checkpoint_names_its_folder_and_the_way_out(prepared, tmp_path, damaged):
    accelerator = prepared[0]
    move(*prepared[1:])
    for i in (1, 2):
        save_checkpoint(accelerator, tmp_path, Position(i, i))
    file = tmp_path / "batch-000002" / damaged
    for content in (b"\x00garbage", file.read_bytes()[: file.stat().st_size // 2], None):
        file.unlink() if content is None else file.write_bytes(content)
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
