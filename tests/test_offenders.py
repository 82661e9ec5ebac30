"""Peers that send rubbish: forgiven a few times, then not read any more; and the bound on who is remembered."""

from kvstore.service.offenders import LINE_MS, MALFORMED_MAX, PEERS_MAX, Offenders


def test_a_few_bad_frames_are_forgiven_and_many_in_a_row_are_not() -> None:
    """SEC."""
    offenders = Offenders()
    for count in range(1, MALFORMED_MAX):
        assert offenders.offends(b"rude") == count
        assert not offenders.is_dropped(b"rude")
    assert offenders.offends(b"rude") == MALFORMED_MAX
    assert offenders.is_dropped(b"rude")
    assert not offenders.is_dropped(b"other")


def test_a_good_message_makes_good_for_the_line() -> None:
    """SEC, COR: a client on a bad line goes on, however long it lives."""
    offenders = Offenders()
    for _ in range(10 * MALFORMED_MAX):
        offenders.offends(b"noisy")
        offenders.speaks(b"noisy")
    assert not offenders.is_dropped(b"noisy")


def test_those_who_are_remembered_are_bounded() -> None:
    """SEC, DSK: the longest silent are forgotten."""
    offenders = Offenders()
    for _ in range(MALFORMED_MAX):
        offenders.offends(b"first")
    for number in range(PEERS_MAX):
        assert offenders.offends(number.to_bytes(4, "little")) == 1
    assert not offenders.is_dropped(b"first")
    assert len(offenders._counts) == PEERS_MAX


def test_a_line_of_a_kind_is_due_once_in_a_while() -> None:
    """SEC, OBS: whoever causes it, however often."""
    offenders = Offenders()
    assert offenders.may_be_told("dropped a message", 0.0)
    assert not any(offenders.may_be_told("dropped a message", LINE_MS * part / 100) for part in range(100))
    assert offenders.may_be_told("reply dropped", 1.0)
    assert offenders.may_be_told("dropped a message", LINE_MS)
    assert not offenders.may_be_told("dropped a message", LINE_MS)
