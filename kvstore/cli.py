"""The `kvstore` command. Errors are one line on standard error and a non-zero exit."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.exceptions import TyperException

from kvstore.config import DEFAULT_ADDRESS, Config, load_config
from kvstore.core.store import SESSIONS_MAX
from kvstore.errors import ConfigInvalid, KVStoreError
from kvstore.media.folder import SlabFolder, all_folders
from kvstore.service.client import connect
from kvstore.service.daemon import Daemon, serve
from kvstore.service.liveness import SessionsFile

app = typer.Typer(
    name="kvstore",
    help="KV-cache tiering and prefix caching for LLM inference engines.",
    add_completion=False,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.command("serve")
def serve_command(
    config: Annotated[Path | None, typer.Option(help="TOML file. Flags override it.")] = None,
    address: Annotated[str | None, typer.Option(help=f"ipc:///absolute/path. Default: {DEFAULT_ADDRESS}")] = None,
    memory_capacity: Annotated[
        str | None, typer.Option("--memory.capacity", help='Host memory for blocks, e.g. "64GiB". Required.')
    ] = None,
    memory_path: Annotated[
        str | None, typer.Option("--memory.path", help="Folder of the slab, on a tmpfs. Default: one in /dev/shm.")
    ] = None,
    memory_checksums: Annotated[
        str | None, typer.Option("--memory.checksums", help="true or false: sum blocks as they are written.")
    ] = None,
    memory_session_share: Annotated[
        float | None, typer.Option("--memory.session_share", help="Share of memory one process may hold. Default: 0.5")
    ] = None,
) -> None:
    """Run the daemon of this node until SIGTERM or Ctrl-C."""
    given: dict[str, Any] = {
        "address": address,
        "memory.capacity": memory_capacity,
        "memory.path": memory_path,
        "memory.checksums": None if memory_checksums is None else _boolean("memory.checksums", memory_checksums),
        "memory.session_share": memory_session_share,
    }
    settings = load_config(config, {name: value for name, value in given.items() if value is not None})
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    serve(settings, lambda daemon: _say_ready(settings, daemon))


@app.command()
def status(
    address: Annotated[str, typer.Option(help="Where the daemon listens.")] = DEFAULT_ADDRESS,
    as_json: AsJson = False,
) -> None:
    """Show what the daemon holds and how often it was hit."""
    with connect(address, deadline_ms=2000) as client:
        facts = client.status()["daemon"]
    if facts is None:
        raise KVStoreError("the daemon stopped answering")
    if as_json:
        print(json.dumps(facts))
    else:
        _print_status(facts)


@app.command()
def clean() -> None:
    """Remove slabs that dead daemons of this user left in /dev/shm."""
    for path in all_folders():
        print(f"{path}: {_clean_folder(path)}")


def main() -> None:
    """The console script."""
    try:
        app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except TyperException as exc:
        _fail(f"{exc.format_message()} (see kvstore --help)", 2)
    except KVStoreError as exc:
        _fail(str(exc), 1)
    except typer.Exit as exc:
        sys.exit(exc.exit_code)
    except typer.Abort:
        _fail("interrupted", 130)


def _fail(text: str, code: int) -> None:
    print(f"kvstore: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigInvalid(f"config: {name}: {text!r} is neither true nor false")
    return text.lower() == "true"


def _say_ready(settings: Config, daemon: Daemon) -> None:
    geometry = daemon.service.slab.geometry
    print(f"kvstore: listening on {settings.address}")
    print(
        f"kvstore: memory {_size(geometry.capacity_nbytes)} in {geometry.num_extents} extents of "
        f"{_size(geometry.extent_nbytes)}, checksums {'on' if settings.memory.checksums else 'off'}, "
        f"at most {_size(int(geometry.capacity_nbytes * settings.memory.session_share))} per session"
    )
    print(f"kvstore: slab {daemon.slab_path}", flush=True)


def _clean_folder(path: Path) -> str:
    try:
        folder = SlabFolder(path)
    except KVStoreError as exc:
        return f"left alone ({exc})"
    sessions = SessionsFile(folder.sessions_path, SESSIONS_MAX)
    held = sum(sessions.is_held(number) for number in range(SESSIONS_MAX))
    sessions.close()
    if held:
        folder.release()
        return f"left alone ({held} sessions are alive)"
    folder.remove()
    return "removed"


def _print_status(facts: dict[str, Any]) -> None:
    memory, stats = facts["memory"], facts["stats"]
    console = Console()
    uptime = _duration(facts["uptime_s"])
    console.print(f"[bold]{facts['address']}[/]  pid {facts['pid']}  up {uptime}", highlight=False)
    console.print(_table(["memory", "cached", "reserved", "free", "evicted blocks"], [_memory_row(memory)]))
    asked, hit = stats["tokens_asked"], stats["tokens_hit"]
    ratio = f"{100 * hit / asked:.1f} %" if asked else "-"
    counts = [f"{count:,}" for count in (stats["lookups"], stats["hits"], asked, hit)]
    columns = ["lookups", "hits", "tokens asked", "tokens hit", "hit ratio", "blocks stored"]
    console.print(_table(columns, [[*counts, ratio, f"{stats['blocks_stored']:,}"]]))
    sessions = [
        [str(each["id"]), str(each["leases"]), str(each["reservations"]), _size(each["held_nbytes"])]
        for each in facts["sessions"]
    ]
    console.print(_table(["session", "leases", "reservations", "holds"], sessions))
    specs = [[each["fingerprint"], each["model"], each["hash"]] for each in facts["specs"]]
    console.print(_table(["spec", "model", "block hash"], specs))


def _memory_row(memory: dict[str, Any]) -> list[str]:
    capacity, cached, reserved = memory["capacity_nbytes"], memory["cached_nbytes"], memory["reserved_nbytes"]
    sizes = [_size(nbytes) for nbytes in (capacity, cached, reserved, capacity - cached - reserved)]
    return [*sizes, f"{memory['blocks_evicted']:,}"]


def _table(columns: list[str], rows: list[list[str]]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


def _size(nbytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {int(seconds) % 60} s"
