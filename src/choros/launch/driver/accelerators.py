"""Counts this host's accelerators without loading a framework."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["count_accelerators"]

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_AMD = Path("/sys/class/kfd/kfd/topology/nodes")


def count_accelerators(nvidia: Path = _NVIDIA, amd: Path = _AMD) -> int:
    """Returns the number of NVIDIA or AMD accelerators, 0 if there are none."""
    return _nvidia(nvidia) or _amd(amd)


def _nvidia(directory: Path) -> int:
    if directory.is_dir():
        return sum(1 for _ in directory.iterdir())
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        answer = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in answer.stdout.splitlines())


def _amd(directory: Path) -> int:
    """Counts the nodes of AMD's compute topology that have SIMD units; the others are CPUs."""
    count = 0
    for properties in directory.glob("*/properties"):
        try:
            fields = dict(line.split()[:2] for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue
        count += int(fields.get("simd_count", "0")) > 0
    return count
