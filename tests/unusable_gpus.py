"""A machine with GPUs that torch, built with CUDA, cannot use: its driver is too old."""

import importlib.metadata
import warnings
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from memguard.runtime import environment

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU "
    "driver by downloading and installing a new version from the URL: "
    "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to "
    "install a PyTorch version that has been compiled with your version of the CUDA driver."
)
"""What torch says of such a driver."""
DRIVER = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)
"""
"""The driver's file in /proc."""
LINE = (
    f"torch {torch.__version__} for CUDA 13.0 cannot use the 8 visible GPUs with NVIDIA driver "
    "535.104.05: The NVIDIA driver on your system is too old (found version 12020). Update the "
    "driver or install a torch for it, or set CUDA_VISIBLE_DEVICES= to use the CPU"
)
"""What memguard says of it."""


def pretend_old_driver(
    monkeypatch: pytest.MonkeyPatch, folder: Path, reason: str = TOO_OLD
) -> None:
    """Make this process see 8 GPUs, and torch act as it does where it cannot use them.

    Args:
        monkeypatch: undoes it.
        folder: where the files of devices and driver are written.
        reason: torch's error.
    """
    warned: list[str] = []

    def refuse(*_: object) -> NoReturn:
        raise RuntimeError(reason)

    def warn_once() -> bool:
        if not warned:
            warned.append(reason)
            warnings.warn(f"CUDA initialization: {reason}", stacklevel=2)
        return False

    find_version = importlib.metadata.version
    for number in range(8):
        (folder / f"nvidia{number}").touch()
    (folder / "driver").write_text(DRIVER)
    monkeypatch.setattr(environment, "_DEVICES", folder)
    monkeypatch.setattr(environment, "_DRIVER", folder / "driver", raising=False)
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "2.13.0+cu130" if name == "torch" else find_version(name),
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", warn_once)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    # The driver's library counts the GPUs, which does not need CUDA.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
