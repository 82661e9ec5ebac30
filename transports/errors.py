"""What can go wrong between two processes. A shell turns these into misses or drops the peer."""


class TransportError(Exception):
    """Base of everything a transport raises."""


class LocalProtocolError(TransportError):
    """We tried to send what the protocol does not allow: our bug, loud."""


class RemoteProtocolError(TransportError):
    """The other side sent bytes that are not a message: drop that peer, keep serving the others."""


class AddressInvalid(TransportError):
    """An address that no transport here can use."""


class AddressInUse(TransportError):
    """Another living process already serves this address."""


class PeerLost(TransportError):
    """Nobody is connected at the other end."""
