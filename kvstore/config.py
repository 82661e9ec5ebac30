"""One typed configuration, from one TOML file; flags of `kvstore serve` override by dotted name."""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from kvstore.errors import ConfigInvalid

DEFAULT_ADDRESS = "ipc:///run/kvstore/kvstore.sock"
CAPACITY_NBYTES_MIN = 4 << 20
DISK_EXTENTS_MIN = 4  # of CAPACITY_NBYTES_MIN, the smallest there are: several slot sizes, and each folder, find room

_SIZES = ("memory.capacity", "disk.capacity", "disk.write_budget")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class MemoryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The RAM tier."""

    capacity: int = 0
    """Bytes of host memory for blocks, per node, for all specs together, e.g. "64GiB". No default: a cache without
    a bound takes the node down, so `serve` refuses to start without it."""
    path: str = ""
    """Folder of the slab, on a tmpfs. Default: a folder of the user's in /dev/shm, named by a hash of the address."""
    checksums: bool = True
    """Whether writers sum blocks as they copy (XXH3-64). Off saves about a fifth of store throughput."""
    verify: bool = False
    """Whether clients sum every block they read from this tier before it counts. RAM that flips a bit unseen is rare,
    and what leaves RAM is summed in any case, so the default is off; it needs `checksums`. A block that its writer
    has not summed is served until the daemon has, since there is nothing to compare with."""
    session_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Share of the tier that one session may hold in leases and reservations. Beyond it, its hits get shorter."""
    keep: bool = True
    """Whether the slab stays in shared memory when the daemon ends, so that the next one goes on with it. Off gives the
    memory back at once, and every restart begins cold."""

    def __post_init__(self) -> None:
        """ConfigInvalid where there would be nothing to verify, and where clients could not be told the folder."""
        if self.path and not self.path.isprintable():
            raise ConfigInvalid(f"config: memory.path={self.path!r} is no printable text")
        if self.verify and not self.checksums:
            raise ConfigInvalid("config: memory.verify=true needs memory.checksums=true: there is nothing to compare")


class DiskConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The SSD tier. Without `path` there is none."""

    path: tuple[str, ...] = ()
    """One folder or several, one per drive: blocks are striped over them, and one drive may fail. No default: prompts
    lie there in clear, so the operator says where. Made absolute."""
    capacity: Annotated[int, Meta(ge=0)] = 0
    """Bytes for blocks over all folders together, e.g. "512GiB". No default: a drive has other users too."""
    write: Literal["through", "back"] = "through"
    """When a block is written: at commit, so that a crash loses nothing, or as it leaves memory ("back"), which spares
    the drive those that never come to that."""
    write_budget: Annotated[int, Meta(ge=0)] | None = 0
    """Bytes written a day, e.g. "200GiB"; over it, only blocks used twice are written. Default 0: `capacity` a day, one
    drive write, which drives are built to bear for years. "unlimited" (None here): no bound."""

    def __post_init__(self) -> None:
        """ConfigInvalid unless folders and capacity fit each other. Here, so that no way to a Config avoids it."""
        if self.path:
            _check_disk_capacity(self.capacity, len(self.path))
            msgspec.structs.force_setattr(self, "path", _absolute(self.path))
        elif self.capacity:
            raise ConfigInvalid(f"config: disk.path is not set: say in which folder {self.capacity} bytes may lie")

    @property
    def write_budget_nbytes(self) -> int | None:
        """Query. `write_budget` with its default filled in. None: no bound."""
        return self.capacity if self.write_budget == 0 else self.write_budget


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything an operator may set."""

    address: str = DEFAULT_ADDRESS
    """Where clients connect: ipc:///absolute/path. The socket's folder is made with mode 0700."""
    memory: MemoryConfig = MemoryConfig()
    disk: DiskConfig = DiskConfig()


def parse_nbytes(text: str) -> int:
    """Query. "2GiB", "512 MiB", "1000000" -> bytes. ValueError on anything else."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not found or found[2].upper() not in _UNITS:
        raise ValueError(f'{text!r} is not a size such as "64GiB" or "512MiB"')
    return int(Fraction(found[1]) * _UNITS[found[2].upper()])


def config_from(values: Mapping[str, Any]) -> Config:
    """Query. A checked Config from nested plain values; ConfigInvalid names path, value and reason."""
    prepared = _plain(_known(values, Config, ""))
    try:
        return msgspec.convert(prepared, Config)
    except msgspec.ValidationError as exc:
        reason, _, path = str(exc).partition(" - at ")
        name = path.strip("`$.").partition("[")[0]  # of a list, all of it is shown
        if name == "disk.write" and reason.startswith("Invalid"):
            reason = 'Expected "through" or "back"'
        raise ConfigInvalid(f"config: {name}={_value_at(prepared, name)!r}: {reason}") from exc


def load_config(path: str | os.PathLike[str] | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Query. The TOML file at `path` (ConfigInvalid when it cannot be read), then `overrides` by dotted name."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise ConfigInvalid(f"config file {os.fspath(path)!r}: {exc}") from exc
    for name, value in (overrides or {}).items():
        section = values
        *outer, last = name.split(".")
        for part in outer:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigInvalid(f"config: {part} is a section, not the value {section!r}")
        section[last] = value
    return config_from(values)


def option_names(kind: type[Struct] = Config, prefix: str = "") -> list[str]:
    """Query. All options by dotted name."""
    names = []
    for field in msgspec.structs.fields(kind):
        inner = isinstance(field.type, type) and issubclass(field.type, Struct)
        names += option_names(field.type, f"{prefix}{field.name}.") if inner else [prefix + field.name]
    return names


def _known(values: Mapping[str, Any], kind: type[Struct], prefix: str) -> dict[str, Any]:
    """The values, once every key is known; an unknown one stops the start and names the nearest."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    known = {}
    for key, value in values.items():
        if key not in fields:
            same = [name for name in option_names() if name.rpartition(".")[2] == key]  # in another section
            near = same or difflib.get_close_matches(f"{prefix}{key}", option_names(), n=1, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ConfigInvalid(f"config: unknown key {prefix}{key}{hint}")
        inner = fields[key]
        if isinstance(inner, type) and issubclass(inner, Struct):
            if not isinstance(value, Mapping):
                raise ConfigInvalid(f"config: {prefix}{key} is a section, not the value {value!r}")
            value = _known(value, inner, f"{prefix}{key}.")
        known[key] = value
    return known


def _value_at(values: Mapping[str, Any], name: str) -> object:
    value: Any = values
    for part in name.split("."):
        value = value[part]
    return value


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Changes and returns `values`: no more units, no "unlimited", a list also of one folder."""
    disk = values.get("disk", {})
    if isinstance(disk.get("path"), str):
        disk["path"] = [disk["path"]]
    if disk.get("write_budget") == "unlimited":
        disk["write_budget"] = None
    for name in _SIZES:
        section, key = name.split(".")
        given = values.get(section, {}).get(key)
        if isinstance(given, str):
            values[section][key] = _nbytes_of(name, given)
    return values


def _nbytes_of(name: str, text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as exc:
        raise ConfigInvalid(f"config: {name}: {exc}") from exc


def _check_disk_capacity(capacity: int, num_paths: int) -> None:
    least = CAPACITY_NBYTES_MIN * max(DISK_EXTENTS_MIN, num_paths)
    if capacity < least:
        given = f"{capacity} bytes is below {least >> 20}MiB" if capacity else "is not set"
        raise ConfigInvalid(f"config: disk.capacity {given}: say how much of disk.path blocks may take, e.g. 512GiB")


def _absolute(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Distinct absolute folders: a client or a restart elsewhere must find the same ones."""
    absolute = tuple(os.path.abspath(path) for path in paths)
    for path, full in zip(paths, absolute, strict=True):
        if not path or "\0" in path:
            raise ConfigInvalid(f"config: disk.path: {path!r} is no folder")
        if absolute.count(full) > 1:
            raise ConfigInvalid(f"config: disk.path: {path!r} is named twice")
    return absolute
