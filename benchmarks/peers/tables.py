"""What people read: a table for each block size, and one for look-ups and damage."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.peers.process import Peer

SIDES = ("store", "retrieve")


def show(console: Console, peers: Sequence[Peer], results: dict[str, Any]) -> None:
    """Changes state: prints."""
    for at in [f"kib{kib}" for kib in results["block_kibs"]]:
        console.print(_copy_table(at, peers, results))
    console.print(_other_table(peers, results))


def _copy_table(at: str, peers: Sequence[Peer], results: dict[str, Any]) -> Table:
    title = f"{results['batch']} blocks of {at.removeprefix('kib')} KiB, GB/s"
    table = _table(title, ["system", "store", "ours / it", "retrieve", "ours / it", "bytes right"])
    for peer in peers:
        own, ratio = results["systems"][peer.name], results["ours_against"].get(peer.name, {}).get(at, {})
        pairs = [(_cell(own.get(at, {}), f"{side}_gbps"), _cell(ratio, f"{side}_ratio")) for side in SIDES]
        table.add_row(peer.name, *pairs[0], *pairs[1], _state(own))
    return table


def _other_table(peers: Sequence[Peer], results: dict[str, Any]) -> Table:
    title = "look-up of a long prefix, and what a damaged block comes back as"
    latency = f"{results['look_up_blocks']:,} blocks, ms"
    table = _table(title, ["system", latency, "it / ours", "payload", "header", "what it is"])
    for peer in peers:
        own, ratio = results["systems"][peer.name], results["ours_against"].get(peer.name, {}).get("long", {})
        times = [_cell(own.get("long", {}), "look_up_ms"), _cell(ratio, "look_up_ratio")]
        damaged = [own["damaged"].get(kind, "-") for kind in ("payload", "header")]
        table.add_row(peer.name, *times, *damaged, own["failure"] or peer.title)
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    return table


def _cell(values: dict[str, Any], name: str) -> str:
    if name not in values:
        return "-"
    low, high = values[f"{name}_range"]
    return f"{values[name]:.2f} [{low:.2f} - {high:.2f}]"


def _state(own: dict[str, Any]) -> str:
    if not own["bytes_verified"]:
        return "-" if own["failure"] else "NO"
    return "yes, then failed" if own["failure"] else "yes"
