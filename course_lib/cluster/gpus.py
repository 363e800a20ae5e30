"""GPUs, their driver, and whether this torch can use them."""

import shutil
from pathlib import Path
from typing import Any

from course_lib.cluster import child
from course_lib.cluster.finding import Finding, note, ok, problem

RECORDED = "lessons 13 and 14 use recorded output"
_QUERY = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def gpus(found: dict[str, Any], smi: str | None = None, devices: Path = Path("/dev")) -> list[Finding]:
    """`found` comes from the probe, `smi` is the path of nvidia-smi (looked up when not given)."""
    driver = driver_version(smi or shutil.which("nvidia-smi"))
    seen = found["gpus"]
    if not seen:
        return [_without(found, driver, devices)]
    kinds = sorted({gpu["name"] for gpu in seen})
    memory = min(gpu["bytes"] for gpu in seen) / 2**30
    version = f"driver {driver}" if isinstance(driver, str) else "driver unknown"
    findings = [ok("GPU", f"{len(seen)} x {', '.join(kinds)}, {memory:.0f} GiB each, {version}.")]
    if isinstance(driver, child.Answer):
        cure = "add the folder of nvidia-smi to PATH; the lessons on utilisation use it."
        findings.append(note("nvidia-smi", f"it does not answer ({driver.last_line}).", cure))
    if len(kinds) > 1:
        text = "they differ: the slowest sets the pace of all."
        findings.append(note("GPU", text, "choose equal ones with CUDA_VISIBLE_DEVICES."))
    if "nccl" not in found:
        text = "this torch has no nccl backend, so GPUs would talk through gloo, far slower."
        findings.append(problem("NCCL", text, "install a torch for Linux with CUDA (pip install torch)."))
    else:
        findings.append(ok("NCCL", f"{found['nccl']}."))
    return findings


def driver_version(smi: str | None) -> str | child.Answer | None:
    """The driver's version; None without nvidia-smi; the Answer when it fails or hangs."""
    if smi is None:
        return None
    try:
        answer = child.ask([smi, *_QUERY[1:]], limit=15)
    except OSError as error:
        return child.Answer(1, "", str(error))
    lines = answer.out.split()
    return lines[0] if answer.code == 0 and lines else answer


def _without(found: dict[str, Any], driver: str | child.Answer | None, devices: Path) -> Finding:
    """No GPU that torch can use: is there none, or is something in the way?"""
    if isinstance(driver, str):
        if not found["built_for"]:
            cure = "install a torch with CUDA: pip install torch, without an index of CPU wheels."
            return problem("GPU", f"there is one (driver {driver}), but this torch is for the CPU only.", cure)
        text = f"there is one, but torch for CUDA {found['built_for']} cannot use driver {driver}."
        cure = "update the driver (nvidia-smi shows its CUDA version), and look at CUDA_VISIBLE_DEVICES."
        return problem("GPU", text, cure)
    if isinstance(driver, child.Answer):
        how = "does not answer" if driver.code is None else f"fails ({driver.last_line})"
        return problem("GPU", f"nvidia-smi {how}.", "reload the driver or restart the machine.")
    if any(devices.glob("nvidia[0-9]*")):
        cure = "in a container: start it with --gpus all and the NVIDIA container toolkit."
        return problem("GPU", "there is a device, but neither nvidia-smi nor torch sees it.", cure)
    return ok("GPU", f"none: ranks run on the CPU with gloo, and {RECORDED}.")
