"""Everything of ours that a caller may see. Only `connect`, `open` and `attach` raise these; all else is a miss."""


class KVStoreError(Exception):
    """Base of all errors below. `code` travels in Failed replies; the set is closed."""

    code = "error"


class ConfigInvalid(KVStoreError):
    """A configuration that cannot be used: names the option, the value and the reason."""

    code = "config-invalid"


class SpecMismatch(KVStoreError):
    """An invalid KVSpec, or one that differs from its group's: names the first field that is wrong."""

    code = "spec-mismatch"


class TierUnavailable(KVStoreError):
    """A tier's medium cannot be used: too little memory, a folder that cannot be written."""

    code = "tier-unavailable"


class DaemonUnavailable(KVStoreError):
    """Nobody answers at the address, or it answers with another protocol version."""

    code = "daemon-unavailable"


class SessionLost(KVStoreError):
    """The daemon does not know this session: it was restarted, or it saw the process die."""

    code = "session-lost"


BY_CODE = {kind.code: kind for kind in (ConfigInvalid, SpecMismatch, TierUnavailable, DaemonUnavailable, SessionLost)}


def from_code(code: str, text: str) -> KVStoreError:
    """Query. The exception a Failed reply stands for."""
    return BY_CODE.get(code, KVStoreError)(text)
