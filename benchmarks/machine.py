"""What the rows say about the machine: device, versions, commit."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def facts(device: torch.device) -> dict[str, Any]:
    """The fields of a `Row` that are the same in a whole run."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "commit": commit(),
    }


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model and its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = f"{os.cpu_count()} cores"
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {cores}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{platform.processor() or platform.machine()}, {cores}"


@functools.cache
def commit() -> str:
    """The short hash of the checkout, `+` behind it where tracked files have changed; empty outside of git."""
    found = _git("rev-parse", "--short", "HEAD")
    return found + "+" if found and _git("status", "--porcelain", "--untracked-files=no") else found


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
