"""The `kvstore` command. Errors are one line on standard error and a non-zero exit."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.exceptions import TyperException

from kvstore.config import DEFAULT_ADDRESS, Config, load_config
from kvstore.core.stats import Guard
from kvstore.core.store import SESSIONS_MAX
from kvstore.errors import ConfigInvalid, KVStoreError
from kvstore.media.check import Report, verify
from kvstore.media.disk import Disk
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
    memory_verify: Annotated[
        str | None, typer.Option("--memory.verify", help="true or false: clients sum what they read. Default: false")
    ] = None,
    memory_session_share: Annotated[
        float | None, typer.Option("--memory.session_share", help="Share of memory one process may hold. Default: 0.5")
    ] = None,
    memory_keep: Annotated[
        str | None, typer.Option("--memory.keep", help="true or false: leave the slab to the next daemon.")
    ] = None,
    disk_path: Annotated[
        list[str] | None, typer.Option("--disk.path", help="Folder on an SSD. Repeat it for several drives.")
    ] = None,
    disk_capacity: Annotated[
        str | None, typer.Option("--disk.capacity", help='SSD space for blocks over all folders, e.g. "512GiB".')
    ] = None,
    disk_write: Annotated[
        str | None, typer.Option("--disk.write", help="through or back: write at commit, or as a block leaves memory.")
    ] = None,
    disk_write_budget: Annotated[
        str | None, typer.Option("--disk.write_budget", help="Bytes a day, or unlimited. Default: disk.capacity.")
    ] = None,
) -> None:
    """Run the daemon of this node until SIGTERM or Ctrl-C."""
    given: dict[str, Any] = {
        "address": address,
        "memory.capacity": memory_capacity,
        "memory.path": memory_path,
        "memory.checksums": None if memory_checksums is None else _boolean("memory.checksums", memory_checksums),
        "memory.verify": None if memory_verify is None else _boolean("memory.verify", memory_verify),
        "memory.session_share": memory_session_share,
        "memory.keep": None if memory_keep is None else _boolean("memory.keep", memory_keep),
        "disk.path": disk_path or None,
        "disk.capacity": disk_capacity,
        "disk.write": disk_write,
        "disk.write_budget": disk_write_budget,
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
def check(
    config: Annotated[Path | None, typer.Option(help="TOML file of the daemon. Flags override it.")] = None,
    disk_path: Annotated[
        list[str] | None, typer.Option("--disk.path", help="Folder of the SSD tier. Repeat it as for serve.")
    ] = None,
    fix: Annotated[bool, typer.Option(help="Remove what is wrong, and what follows it, from the index.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every block of the SSD tier and compare it with its checksum, while no daemon runs on it."""
    paths = disk_path or (list(load_config(config).disk.path) if config is not None else [])
    if not paths:
        raise ConfigInvalid("config: disk.path is not set: say which SSD tier to check")
    report = _verify([Path(path).absolute() for path in paths], fix, show=not as_json)
    facts = report._asdict() | {"bad": {fault.value: count for fault, count in report.bad.items()}}
    print(json.dumps(facts) if as_json else _check_summary(report))
    if report.bad and not fix:
        raise typer.Exit(1)


@app.command()
def clean() -> None:
    """Remove slabs that dead daemons of this user left in /dev/shm."""
    for path in all_folders():
        print(f"{path}: {_clean_folder(path)}")


def main() -> None:
    """The console script."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except TyperException as exc:
        _fail(f"{exc.format_message()} (see kvstore --help)", 2)
    except KVStoreError as exc:
        _fail(str(exc), 1)
    except typer.Exit as exc:
        sys.exit(exc.exit_code)
    except typer.Abort:
        _fail("interrupted", 130)
    else:
        sys.exit(code)  # a typer.Exit comes back as a value; None is 0


def _fail(text: str, code: int) -> None:
    print(f"kvstore: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(code)


def _boolean(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigInvalid(f"config: {name}: {text!r} is neither true nor false")
    return text.lower() == "true"


def _say_ready(settings: Config, daemon: Daemon) -> None:
    disk = daemon.service.disk
    geometry = daemon.service.slab.geometry
    print(f"kvstore: listening on {settings.address}")
    print(
        f"kvstore: memory {_size(geometry.capacity_nbytes)} in {geometry.num_extents} extents of "
        f"{_size(geometry.extent_nbytes)}, checksums {'on' if settings.memory.checksums else 'off'}, "
        f"at most {_size(int(geometry.capacity_nbytes * settings.memory.session_share))} per session"
    )
    taken_over = daemon.service.blocks_taken_over
    print(f"kvstore: slab {daemon.slab_path}" + (f", {taken_over:,} blocks taken over" if taken_over else ""))
    if disk is not None:
        paths = ", ".join(settings.disk.path)
        how = "direct" if disk.is_direct else "buffered"
        print(f"kvstore: ssd {_size(disk.geometry.capacity_nbytes)} in {paths}, write-{settings.disk.write}, {how} I/O")
    sys.stdout.flush()


def _verify(paths: list[Path], fix: bool, *, show: bool) -> Report:
    """Changes state with `fix`. KVStoreError when there is no tier there, or a daemon has it."""
    for path in paths:
        if not (path / "slab").is_file():
            raise KVStoreError(f"disk.path={path}: there is no SSD tier")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as progress:
        disk = Disk.open(paths, None)
        try:
            disk.rows()  # finds damage deeper in the index, too
            if disk.needs_rebuild:
                task = progress.add_task("rebuilding the index", total=None)
                disk.rebuild(lambda done, total: progress.update(task, completed=done, total=total))
            task = progress.add_task("checking blocks", total=None)
            return verify(disk, lambda done, total: progress.update(task, completed=done, total=total), fix)
        finally:
            disk.close()


def _check_summary(report: Report) -> str:
    lines = [f"{report.num_good:,} of {report.num_blocks:,} blocks are good ({_size(report.nbytes)} read)"]
    lines += [f"{count:,} {fault.value}" for fault, count in report.bad.items()]
    if report.num_removed:
        lines.append(f"{report.num_removed:,} removed, {report.num_behind:,} of them only because of what they follow")
    elif report.bad:
        lines.append("kvstore check --fix removes them; the daemon would find each when it is read, too")
    return "\n".join(lines)


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
    stats = facts["stats"]
    console = Console()
    uptime = _duration(facts["uptime_s"])
    console.print(f"[bold]{facts['address']}[/]  pid {facts['pid']}  up {uptime}", highlight=False)
    tiers = [_memory_row(facts["memory"]), *_disk_rows(facts["disk"])]
    console.print(_table(["tier", "capacity", "cached", "on the way", "free", "evicted blocks"], tiers))
    asked, hit = stats["tokens_asked"], stats["tokens_hit"]
    ratio = f"{100 * hit / asked:.1f} %" if asked else "-"
    counts = [f"{count:,}" for count in (stats["lookups"], stats["hits"], asked, hit)]
    columns = ["lookups", "hits", "tokens asked", "tokens hit", "hit ratio", "blocks stored"]
    console.print(_table(columns, [[*counts, ratio, f"{stats['blocks_stored']:,}"]]))
    if facts["disk"] is not None:
        _print_disk(console, facts)
    if line := damage_line(stats["guards"]):
        console.print(f"[yellow]{line}[/]", highlight=False)
    sessions = [
        [str(each["id"]), str(each["leases"]), str(each["reservations"]), _size(each["held_nbytes"])]
        for each in facts["sessions"]
    ]
    console.print(_table(["session", "leases", "reservations", "holds"], sessions))
    if facts["groups"]:
        columns = ["rank group", "ranks", "parts", "make whole blocks", "wait for parts", "given up for a part"]
        groups = [
            [each["id"], *(str(each[name]) for name in ("ranks", "parts")), "yes" if each["complete"] else "no"]
            + [f"{each[name]:,}" for name in ("open", "unfilled")]
            for each in facts["groups"]
        ]
        console.print(_table(columns, groups))
    rates = {each["fingerprint"]: f"{each['tokens_per_s']:,} tokens/s" for each in facts["prefill"]}
    specs = [
        [each["fingerprint"], each["model"], each["hash"], rates.get(each["fingerprint"], "-")]
        for each in facts["specs"]
    ]
    console.print(_table(["spec", "model", "block hash", "prefill"], specs))


def damage_line(guards: Mapping[str, int]) -> str:
    """Query. What the operator should know of damage that was found; nothing where there was none."""
    damaged, others = guards.get(Guard.CHECKSUM, 0), guards.get(Guard.TOKENS, 0)
    if not damaged + others:
        return ""
    found = f"{damaged:,} damaged, {others:,} under another's name"
    return f"blocks found wrong and not served: {found}; test this machine's memory and drive"


def _memory_row(memory: dict[str, Any]) -> list[str]:
    capacity, cached, reserved = memory["capacity_nbytes"], memory["cached_nbytes"], memory["reserved_nbytes"]
    sizes = [_size(nbytes) for nbytes in (capacity, cached, reserved, capacity - cached - reserved)]
    return ["memory", *sizes, f"{memory['blocks_evicted']:,}"]


def _disk_rows(disk: dict[str, Any] | None) -> list[list[str]]:
    if disk is None:
        return []
    if not disk["ready"]:
        return [["ssd", _size(disk["capacity_nbytes"]), "its index is being read", "", "", ""]]
    capacity, cached, moving = disk["capacity_nbytes"], disk["cached_nbytes"], disk["queued_nbytes"]
    return [
        ["ssd", _size(capacity), _size(cached), _size(moving), _size(capacity - cached), f"{disk['blocks_evicted']:,}"]
    ]


def _print_disk(console: Console, facts: dict[str, Any]) -> None:
    """How the SSD does: what it reads and has written, and what load-or-recompute made of that."""
    disk, stats = facts["disk"], facts["stats"]
    if not disk["ready"]:
        return
    speed = f"{disk['read_gbps']:.2f} GB/s" if disk["read_gbps"] is not None else "-"
    dropped = sum(stats["writes_dropped"].values())
    row = [speed, _size(stats["bytes_loaded"]), f"{stats['tokens_loaded']:,}"]
    row += [f"{stats['loads_refused']:,} / {stats['loads_cut']:,}", f"{sum(stats['load_failures'].values()):,}"]
    console.print(_table(["ssd reads at", "loaded", "tokens loaded", "refused / cut", "failed blocks"], [row]))
    left = disk["write_budget_left_nbytes"]
    row = [disk["write"], _size(disk["bytes_written_ever"]), f"{disk['drive_writes']:.2f}"]
    row += ["no bound" if left is None else _size(left), f"{dropped:,}", "direct" if disk["direct_io"] else "buffered"]
    columns = ["ssd writes", "written ever", "drive writes", "budget left today", "blocks not written", "I/O"]
    console.print(_table(columns, [row]))


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
