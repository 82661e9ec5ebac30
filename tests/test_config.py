"""The configuration: what is unknown or wrong stops the start, and says where, what and why. Class CFG."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import (
    DEFAULT_ADDRESS,
    Config,
    DiskConfig,
    MemoryConfig,
    config_from,
    load_config,
    option_names,
    parse_nbytes,
)
from kvstore.errors import ConfigInvalid

VALUES = {
    "address": ("ipc:///tmp/other.sock", "ipc:///tmp/other.sock"),
    "memory.capacity": ("2GiB", 2 << 30),
    "memory.path": ("/dev/shm/other", "/dev/shm/other"),
    "memory.checksums": (False, False),
    "memory.verify": (True, True),
    "memory.session_share": (0.25, 0.25),
    "memory.keep": (False, False),
    "disk.path": (["/ssd", "/other"], ("/ssd", "/other")),
    "disk.capacity": ("64MiB", 64 << 20),
    "disk.write": ("back", "back"),
    "disk.write_budget": ("1GiB", 1 << 30),
}
NEEDED = {"disk.path": {"disk.capacity": "1GiB"}, "disk.capacity": {"disk.path": "/ssd"}}
DISK = {"disk.path": "/ssd", "disk.capacity": "1GiB"}


def value_of(config: Config, name: str) -> object:
    value: object = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_every_option_is_named_and_can_be_set(tmp_path: Path) -> None:
    """A new option fails here until it has a value to be set to."""
    assert sorted(option_names()) == sorted(VALUES)
    assert len(option_names()) <= 30
    for name, (given_value, expected) in VALUES.items():
        needed = NEEDED.get(name, {})
        config = load_config(None, {name: given_value, **needed})
        assert value_of(config, name) == expected != value_of(Config(), name)
        others = [other for other in VALUES if other != name and other not in needed]
        assert all(value_of(config, other) == value_of(Config(), other) for other in others)


def test_option_names_come_from_the_types() -> None:
    class Inner(msgspec.Struct, frozen=True):
        x: int = 0

    class Outer(msgspec.Struct):
        a: int = 0
        inner: Inner = Inner()

    assert option_names(Outer) == ["a", "inner.x"]


def test_defaults() -> None:
    config = load_config(None)
    assert config == Config() == config_from({})
    assert config.address == DEFAULT_ADDRESS
    assert config.memory.capacity == 0  # none: `serve` refuses to start
    assert (config.memory.checksums, config.memory.session_share, config.memory.keep) == (True, 0.5, True)
    assert not config.memory.verify
    assert config.disk == DiskConfig(path=(), capacity=0, write="through", write_budget=0)  # none


def test_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('address = "ipc:///a"\n[memory]\ncapacity = "1GiB"\nsession_share = 1\n')
    assert value_of(load_config(path), "memory.session_share") == 1.0
    config = load_config(path, {"memory.capacity": "3GiB", "memory.path": "/x"})
    assert (config.address, config.memory.capacity, config.memory.path) == ("ipc:///a", 3 << 30, "/x")


@pytest.mark.parametrize(
    ("values", "unknown", "nearest"),
    [
        ({"adress": "x"}, "adress", "address"),
        ({"memory": {"capcity": 1}}, "memory.capcity", "memory.capacity"),
        ({"memory": {"session-share": 1}}, "memory.session-share", "memory.session_share"),
        ({"capacity": "1GiB"}, "capacity", "memory.capacity or disk.capacity"),
        ({"disk": {"keep": True}}, "disk.keep", "memory.keep"),
        ({"memory": {"checksum": True}}, "memory.checksum", "memory.checksums"),
        ({"memory": {"kep": True}}, "memory.kep", "memory.keep"),
        ({"disk": {"paths": ["/x"]}}, "disk.paths", "disk.path"),
        ({"disk": {"write-budget": 1}}, "disk.write-budget", "disk.write_budget"),
        ({"disk": {"size": 1}}, "disk.size", None),
        ({"disks": {"path": "/x"}}, "disks", None),
        ({"memroy": {"capacity": 1}}, "memroy", None),
        ({"zzz": 1}, "zzz", None),
        ({"": 1}, "", None),
    ],
)
def test_unknown_key_names_the_nearest(values: dict[str, object], unknown: str, nearest: str | None) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        config_from(values)
    assert f"unknown key {unknown}" in str(caught.value)
    assert nearest is None or str(caught.value).endswith(f"did you mean {nearest}?")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("address", 7, "str"),
        ("memory.capacity", "64 gallons", "size"),
        ("memory.capacity", "-1GiB", "size"),
        ("memory.capacity", 1.5, "int"),
        ("memory.capacity", True, "int"),
        ("memory.capacity", None, "int"),
        ("memory.path", 7, "str"),
        ("memory.checksums", "yes", "bool"),
        ("memory.checksums", 1, "bool"),
        ("memory.verify", "yes", "bool"),
        ("memory.session_share", 0, "> 0"),
        ("memory.session_share", 1.01, "<= 1"),
        ("memory.session_share", float("nan"), "0"),
        ("memory.session_share", "half", "float"),
        ("memory.keep", "yes", "bool"),
        ("memory.keep", 0, "bool"),
        ("disk.path", 7, "array"),
        ("disk.path", None, "array"),
        ("disk.path", ["/x", 7], "str"),
        ("disk.path", {"a": 1}, "array"),
        ("disk.capacity", "64 gallons", "size"),
        ("disk.capacity", "unlimited", "size"),
        ("disk.capacity", 1.5, "int"),
        ("disk.capacity", True, "int"),
        ("disk.capacity", -1, ">= 0"),
        ("disk.write", "sideways", 'Expected "through" or "back"'),
        ("disk.write", "Through", 'Expected "through" or "back"'),
        ("disk.write", "", 'Expected "through" or "back"'),
        ("disk.write", True, "str"),
        ("disk.write_budget", "endless", "size"),
        ("disk.write_budget", "-1GiB", "size"),
        ("disk.write_budget", -1, ">= 0"),
        ("disk.write_budget", 1.5, "int"),
        ("disk.write_budget", False, "int"),
    ],
)
def test_bad_value_is_named_with_path_value_and_reason(name: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load_config(None, {name: value})
    text = str(caught.value)
    assert name in text
    assert repr(value) in text
    assert reason in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("path", "folders"),
    [
        ("/ssd", ("/ssd",)),
        (["/ssd"], ("/ssd",)),
        (["/ssd/b", "/ssd/a"], ("/ssd/b", "/ssd/a")),  # in the order given
        (("/ssd/", "/other/../a"), ("/ssd", "/a")),
        ("with space, comma", ("{cwd}/with space, comma",)),
        (["here", "./there"], ("{cwd}/here", "{cwd}/there")),
        (".", ("{cwd}",)),
    ],
)
def test_disk_path_is_one_folder_or_several(
    path: object, folders: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative one is of the folder that the daemon was started in."""
    monkeypatch.chdir(tmp_path)
    expected = tuple(folder.format(cwd=tmp_path) for folder in folders)
    assert load_config(None, {**DISK, "disk.path": path}).disk.path == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"path": "/ssd"}, "disk.capacity is not set"),
        ({"path": "/ssd", "capacity": 0}, "disk.capacity is not set"),
        ({"path": "/ssd", "capacity": "15MiB"}, "disk.capacity 15728640 bytes is below 16MiB"),
        ({"path": [f"/{drive}" for drive in "abcdef"], "capacity": "23MiB"}, "24117248 bytes is below 24MiB"),
        ({"capacity": "1GiB"}, "disk.path is not set"),
        ({"path": [], "capacity": "1GiB"}, "disk.path is not set"),
        ({"path": "", "capacity": "1GiB"}, "disk.path: '' is no folder"),
        ({"path": ["/ssd", ""], "capacity": "1GiB"}, "disk.path: '' is no folder"),
        ({"path": "/a\0b", "capacity": "1GiB"}, "is no folder"),
        ({"path": ["/ssd", "/other", "/ssd"], "capacity": "1GiB"}, "disk.path: '/ssd' is named twice"),
        ({"path": ["/a/b", "/a/c/../b/"], "capacity": "1GiB"}, "disk.path: '/a/b' is named twice"),
        ({"path": ["x", "./x"], "capacity": "1GiB"}, "disk.path: 'x' is named twice"),
    ],
)
def test_folders_and_capacity_of_the_disk_must_fit(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        config_from({"disk": values})
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_verify_without_checksums_is_one_clear_line() -> None:
    with pytest.raises(ConfigInvalid, match=r"^config: memory\.verify=true needs memory\.checksums=true: .*$"):
        load_config(None, {"memory.verify": True, "memory.checksums": False})
    with pytest.raises(ConfigInvalid, match=r"memory\.verify"):
        MemoryConfig(verify=True, checksums=False)


def test_a_disk_made_by_hand_is_checked_too() -> None:
    assert DiskConfig(path=("/ssd/",), capacity=16 << 20).path == ("/ssd",)
    with pytest.raises(ConfigInvalid, match="capacity is not set"):
        DiskConfig(path=("/ssd",))
    with pytest.raises(ConfigInvalid, match="named twice"):
        DiskConfig(path=("/ssd", "/ssd/"), capacity=16 << 20)


def test_no_folder_is_no_disk() -> None:
    assert config_from({"disk": {}}) == config_from({"disk": {"path": []}}) == Config()


@pytest.mark.parametrize(
    ("given_value", "nbytes"),
    [(None, 1 << 30), (0, 1 << 30), ("0", 1 << 30), ("2GiB", 2 << 30), (1000, 1000), ("unlimited", None)],
)
def test_write_budget_is_one_drive_write_a_day_unless_set(given_value: object, nbytes: int | None) -> None:
    overrides = DISK if given_value is None else {**DISK, "disk.write_budget": given_value}
    assert load_config(None, overrides).disk.write_budget_nbytes == nbytes


def test_disk_from_a_file_then_overrides(tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    path.write_text('[disk]\npath = ["/a", "/b"]\ncapacity = "1TiB"\nwrite = "back"\nwrite_budget = "unlimited"\n')
    disk = load_config(path).disk
    assert disk == DiskConfig(path=("/a", "/b"), capacity=1 << 40, write="back", write_budget=None)
    disk = load_config(path, {"disk.path": ["/c"], "disk.write": "through", "disk.write_budget": "0"}).disk
    assert disk == DiskConfig(path=("/c",), capacity=1 << 40)  # a list is replaced, not added to
    path.write_text('[disk]\npath = "/a"\n')
    assert load_config(path, {"disk.capacity": "1GiB"}).disk.path == ("/a",)


@pytest.mark.parametrize("value", ["2GiB", 3, [], None])
def test_section_is_no_value(value: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="memory is a section"):
        config_from({"memory": value})
    path = tmp_path / "kvstore.toml"
    path.write_text("memory = 3\n")
    for overrides in ({}, {"memory.capacity": "1GiB"}):
        with pytest.raises(ConfigInvalid, match="memory is a section, not the value 3"):
            load_config(path, overrides)


def test_value_is_no_section() -> None:
    with pytest.raises(ConfigInvalid, match="address"):
        config_from({"address": {"path": "x"}})


@pytest.mark.parametrize("content", [None, b"[memory", b"a = 1\na = 2", b"\xff\xfe", b"memory.capacity = 1GiB"])
def test_file_that_cannot_be_read_is_one_clear_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "kvstore.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigInvalid) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=str(tmp_path)):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1000000", 10**6),
        ("64B", 64),
        ("2KiB", 2048),
        ("2 kib", 2048),
        ("2KB", 2000),
        ("512 MiB", 512 << 20),
        ("64GiB", 64 << 30),
        ("1.5GiB", 3 << 29),
        ("0.1 kB", 100),
        (" 2TB ", 2 * 10**12),
        ("9007199254740993", 9007199254740993),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_sizes_with_units(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes
    assert config_from({"memory": {"capacity": text}}).memory.capacity == nbytes
    assert config_from({"disk": {"write_budget": text}}).disk.write_budget == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "+1", "1,5GiB", "1.GiB", ".5GiB", "1 Gi B", "1e9", "64Gib2", "inf", "0x10"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_nbytes(text)


@given(text=st.text(max_size=12) | st.from_regex(r"[0-9.]{1,6} ?[KMGTkmgt]?i?B?"))
def test_any_text_is_a_size_or_one_error(text: str) -> None:
    try:
        assert parse_nbytes(text) >= 0
    except ValueError as exc:
        assert "size" in str(exc)
