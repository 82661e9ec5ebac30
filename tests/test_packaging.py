"""Class INS of the failure table: no torch in the daemon, nothing compiled by us, and the wheel is enough."""

import json
import os
import subprocess
import sys
import time
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.sources import LEVELS, ROOT, source_files

ENGINE_MODULES = ("torch", "transformers", "cupy", "vllm", "sglang", "jax", "tensorflow")
ENGINE_CONNECTORS = {
    "connectors.transformers",
    "connectors.vllm",
    "connectors.sglang",
}  # what needs its engine at import
WHEELHOUSE = Path(sys.prefix) / "wheelhouse"  # filled by `make setup`: the core dependencies, so no network is needed

# Runs in a child: each module of the packages, with every engine out of reach.
IMPORT_WITHOUT_ENGINES = """
import importlib, sys

engines, modules = sys.argv[1].split(","), sys.argv[2].split(",")

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in engines:
            raise ModuleNotFoundError(f"{name} is an engine's", name=name)

sys.meta_path.insert(0, Forbid())
for module in modules:
    importlib.import_module(module)
loaded = sorted({name.split(".")[0] for name in sys.modules}.intersection(engines))
assert not loaded, loaded
"""


def module_names() -> list[str]:
    """Query. Every module of the wheel that must import without an engine."""
    names = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in source_files(*LEVELS)]
    return [name for name in names if name not in ENGINE_CONNECTORS and not name.endswith("__main__")]


def run(command: Sequence[str | Path], **options: object) -> str:
    """Changes state. Run to a zero exit, or fail with everything that it said."""
    result = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=100, check=False, **options
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_every_module_imports_without_an_engine() -> None:
    """INS."""
    modules = module_names()
    assert set(LEVELS) <= set(modules)
    run([sys.executable, "-c", IMPORT_WITHOUT_ENGINES, ",".join(ENGINE_MODULES), ",".join(modules)], cwd=ROOT)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, ROOT])
    (path,) = folder.iterdir()
    return path


def test_wheel_holds_the_four_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {*LEVELS, info}
    assert {f"{package}/py.typed" for package in LEVELS} <= set(names)
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE", f"{info}/entry_points.txt"} <= set(names)
    assert wheel.name.endswith("-py3-none-any.whl")  # nothing compiled


@pytest.fixture(scope="module")
def fresh_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that holds the wheel, its core dependencies and no more."""
    assert WHEELHOUSE.is_dir(), f"{WHEELHOUSE} is missing: run make setup"
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", python]
    run([*pip, "install", "--no-index", "--no-compile", "--find-links", WHEELHOUSE, wheel])
    return python.parent


def outside() -> dict[str, str]:
    """The environment without what could let the checkout in."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def test_fresh_environment_imports_without_an_engine(fresh_bin: Path, tmp_path: Path) -> None:
    """INS. By absence this time: torch is not there to import."""
    python = fresh_bin / "python"
    code = "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) for m in sys.argv[1].split(',')))"
    run([python, "-I", "-c", code, ",".join(ENGINE_MODULES)], cwd=tmp_path, env=outside())
    code = "import importlib, sys; [importlib.import_module(m) for m in sys.argv[1].split(',')]"
    run([python, "-I", "-c", code, ",".join(module_names())], cwd=tmp_path, env=outside())


def test_fresh_environment_serves(fresh_bin: Path, tmp_path: Path) -> None:
    """INS. The console script of the wheel starts a daemon that answers, and stops when asked."""
    address = f"ipc://{tmp_path}/kvstore.sock"
    slab = ["--memory.path", tmp_path / "slab", "--memory.capacity", "64MiB"]
    command = [str(word) for word in (fresh_bin / "kvstore", "serve", "--address", address, *slab)]
    with subprocess.Popen(
        command, env=outside(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as daemon:
        try:
            status = wait_for_status(fresh_bin / "kvstore", address, daemon)
            serving = daemon.poll() is None
        finally:
            daemon.terminate()
            said, _ = daemon.communicate(timeout=20)
    assert serving and status.returncode == 0, f"{status.stderr}\n{said}"
    assert isinstance(json.loads(status.stdout), dict)
    assert daemon.returncode == 0, said


def wait_for_status(kvstore: Path, address: str, daemon: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Query. The first answer of `kvstore status`, or the last refusal after 30 s or the daemon's end."""
    deadline = time.monotonic() + 30
    while True:
        command = [str(kvstore), "status", "--json", "--address", address]
        status = subprocess.run(command, env=outside(), capture_output=True, text=True, timeout=30, check=False)
        if status.returncode == 0 or daemon.poll() is not None or time.monotonic() > deadline:
            return status
        time.sleep(0.1)


def test_core_dependencies_name_no_engine() -> None:
    """INS."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith(ENGINE_MODULES)]
    assert {"torch", "cuda12", "cuda13", "transformers", "vllm", "dev", "demo"} <= set(project["optional-dependencies"])
