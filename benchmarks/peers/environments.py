"""One environment for each rival, under `.venv-peers`: made once, kept while its recipe stays the same."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.process import ROOT

FOLDER = ROOT / ".venv-peers"
STEP_S_MAX = 1800.0


class SetUpFailed(Exception):
    """A rival cannot be run here."""


@dataclass(frozen=True)
class Recipe:
    """What an environment is made of. `steps` are installed one after the other, each with its versions pinned.

    `libraries`: shared libraries that the wheels expect of the system, by the Debian packages that have them. Where the
    system lacks them they are unpacked into the environment, so that nothing is changed outside it.
    """

    steps: tuple[tuple[str, ...], ...]
    libraries: tuple[str, ...] = ()
    needs: str = ""  # one of the shared libraries


RECIPES: Mapping[str, Recipe] = {
    # torch alone and pinned first: a range asked for by another package may bring CUDA's gigabytes
    "lmcache": Recipe((("torch==2.13.0",), ("lmcache==0.5.6",))),
    "mooncake": Recipe(
        (("numpy==2.4.6", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),),
        libraries=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
        needs="libibverbs.so.1",
    ),
}


def python_of(name: str) -> Path:
    """Query. The environment's Python; SetUpFailed when the environment is not there, or of another recipe."""
    if not name:
        return Path(sys.executable)
    if not _is_ready(name):
        raise SetUpFailed("not set up here; run: make bench-peers")
    return _python(name)


def variables_of(name: str) -> dict[str, str]:
    """Query. What its processes need in their environment to find unpacked libraries."""
    folders = [str(path) for path in sorted((FOLDER / name / "system").rglob("*-linux-gnu"))] if name else []
    before = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": ":".join([*folders, *([before] if before else [])])} if folders else {}


def set_up(name: str) -> None:
    """Changes state. Make the environment unless it is there. SetUpFailed with the first step that did not work."""
    if not name or _is_ready(name):
        return
    print(f"setting up {name} in {FOLDER.name}/{name}, once", file=sys.stderr)
    recipe = RECIPES[name]
    shutil.rmtree(FOLDER / name, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(FOLDER / name)])  # Debian leaves ensurepip out
    for step in recipe.steps:
        _run([sys.executable, "-m", "pip", "--python", str(_python(name)), "install", "--quiet", *step])
    if recipe.needs and recipe.needs not in _run(["ldconfig", "-p"]):
        _unpack(recipe.libraries, FOLDER / name / "system")
    _stamp(name).write_text(_recipe_text(name))


def _unpack(packages: Sequence[str], target: Path) -> None:
    downloads = target / "packages"
    downloads.mkdir(parents=True)
    _run(["apt-get", "download", *packages], downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run(["dpkg-deb", "--extract", str(package), str(target)])


def _is_ready(name: str) -> bool:
    with contextlib.suppress(OSError):
        return _stamp(name).read_text() == _recipe_text(name) and _python(name).exists()
    return False


def _recipe_text(name: str) -> str:
    return json.dumps({"python": sys.version, **asdict(RECIPES[name])})


def _stamp(name: str) -> Path:
    return FOLDER / name / ".stamp-installed"


def _python(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def _run(command: Sequence[str], folder: Path = ROOT) -> str:
    """Changes state. Its output. SetUpFailed; an interrupt ends the command and what it started, too."""
    try:
        process = subprocess.Popen(
            command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as exc:
        raise SetUpFailed(f"{command[0]}: {exc.strerror}") from exc
    try:
        output, _ = process.communicate(timeout=STEP_S_MAX)
    except subprocess.TimeoutExpired as exc:
        raise SetUpFailed(f"{_short(command)}: not done within {STEP_S_MAX:g} s") from exc
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        lines = output.strip().splitlines() or ["it said nothing"]
        raise SetUpFailed(f"{_short(command)}: {lines[-1]}")
    return output


def _short(command: Sequence[str]) -> str:
    return " ".join([Path(command[0]).name, *command[1:3], "..."])
