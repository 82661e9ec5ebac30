"""`make fuzz`: the decoder and the dispatcher under bytes that coverage chooses (atheris, which is libFuzzer).

Each target runs in a process of its own, for so many seconds. What it finds is kept in `.fuzz/` and had again by
`python -m tests.fuzz_wire decode .fuzz/crash-...`. atheris, the extra `fuzz`, is installed here, once, since nothing
else needs it. Exit code: 0 nothing found, 1 something, 2 not run.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import ExitStack

from tests.sources import ROOT

DIGEST_NBYTES = 8  # of transports.messages, which is imported late, to be instrumented

FOLDER = ROOT / ".fuzz"
TARGETS = ("decode", "dispatch")
INPUT_NBYTES_MAX = 4096
ROUND_S = 20  # instrumented code keeps 100 KB a run of the dispatcher (without instruments: nothing), so begin anew


def main() -> int:
    """Changes state. The exit code: 0 only if all targets ran and found nothing."""
    parser = argparse.ArgumentParser(prog="make fuzz")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    seconds = parser.parse_args().seconds
    if not _has_atheris():
        print("fuzz: atheris has no wheel for this Python: the wire was not fuzzed by coverage", file=sys.stderr)
        return 2
    failed = [target for target in TARGETS if _run(target, seconds)]
    for target in failed:
        newest = max(FOLDER.glob("*-*"), key=lambda path: path.stat().st_mtime, default=FOLDER / "FILE")
        print(f"fuzz: {target} found something; again: {sys.executable} -m tests.fuzz_wire {target} {newest}")
    return bool(failed)


def _has_atheris() -> bool:
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "-qq",
        "install",
        "--only-binary=:all:",
        _wanted(),
    ]
    return _runs([sys.executable, "-c", "import atheris"]) or _runs(pip)


def _wanted() -> str:
    """Query. The requirement, from where it is declared."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = project["optional-dependencies"]["fuzz"]
    return str(wanted)


def _runs(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(target: str, seconds: int) -> int:
    corpus = FOLDER / target
    corpus.mkdir(parents=True, exist_ok=True)
    for name, frame in json.loads((ROOT / "tests/vectors/messages.json").read_text()).items():
        (corpus / f"golden-{name}").write_bytes(bytes.fromhex(frame)[:-DIGEST_NBYTES])  # the target adds one that fits
    print(f"fuzz: {target} for {seconds} s", flush=True)
    bounds = [
        f"-max_len={INPUT_NBYTES_MAX}",
        f"-artifact_prefix={FOLDER}/",
        "-timeout=20",
        "-rss_limit_mb=4096",
        "-len_control=0",
    ]
    command = [sys.executable, "-m", "tests.fuzz_wire", target, *bounds, "-print_final_stats=1"]
    for left in range(seconds, 0, -ROUND_S):
        ran = subprocess.run([*command, f"-max_total_time={min(left, ROUND_S)}", str(corpus)], cwd=ROOT, check=False)
        if ran.returncode:
            return ran.returncode
    return 0


def _fuzz(target: str, arguments: list[str]) -> None:
    """Does not come back."""
    import atheris

    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=["kvstore", "radix", "transports"]):
        from tests import wire_harness
        from transports.errors import RemoteProtocolError
        from transports.messages import decode, encode, sealed

    def decodes(data: bytes) -> None:
        for frame in (data, sealed(data)):
            try:
                message = decode(frame)
            except RemoteProtocolError:
                continue
            assert decode(encode(message)) == message

    with ExitStack() as held:
        run: Callable[[bytes], None] = decodes
        if target == "dispatch":
            node = wire_harness.Node(held)

            def run(data: bytes) -> None:
                wire_harness.misbehave(node, wire_harness.FromBytes(data), wire_harness.STEPS_MAX)
                while not node.is_settled():
                    pass

        atheris.Setup([sys.argv[0], *arguments], run)
        atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in TARGETS:
        _fuzz(sys.argv[1], sys.argv[2:])
    sys.exit(main())
