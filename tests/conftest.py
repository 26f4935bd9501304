"""What every test shares: one thread, and the folder of real text and checkpoints where there is one."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder named by TAPERNORM_DATA, by default `../shared/data` beside the repository. Skips without one."""
    root = Path(__file__).resolve().parent.parent
    folder = Path(os.environ.get("TAPERNORM_DATA", root / ".." / "shared" / "data")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set TAPERNORM_DATA to a folder that holds it")
    return folder
