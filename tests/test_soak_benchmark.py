"""The soak: its counts survive a kill, it blames on the service only what is the service's, a short storm is safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import soak, soak_client
from benchmarks.soak_client import SPECS
from benchmarks.soak_records import (
    CALL,
    WAKE,
    Count,
    Counts,
    Times,
    counts_in,
    lateness_ms,
    percentile_ms,
    reached_deadline,
    times_in,
    trend,
)
from tests.daemons import ROOT, wait_until

MS = 1_000_000
FOREVER_NS = 10**18


def calls(*each_ms: tuple[float, float, float]) -> Times:
    """(began, ended, due) each."""
    return np.array([tuple(int(MS * at) for at in call) for call in each_ms], CALL)


def wakes(*each_ms: tuple[float, float]) -> Times:
    """(due, woke) each."""
    return np.array([tuple(int(MS * at) for at in wake) for wake in each_ms], WAKE)


# lateness


@pytest.mark.parametrize(
    ("call", "woken", "late_ms"),
    [
        ((0, 3, 200), [], 0.0),
        ((0, 200, 200), [], 0.0),
        ((0, 230, 200), [], 30.0),
        ((0, 230, 200), [(201, 230)], 1.0),  # nobody could have run
        ((0, 230, 200), [(196, 230)], 0.0),  # likewise, from before it was due: never below nothing
        ((0, 230, 200), [(201, 203), (208, 221), (226, 228)], 17.0),  # the longest counts, not their sum
        ((0, 230, 200), [(100, 190), (300, 400)], 30.0),  # other moments are no excuse
        ((0, 900, 200), [(10, 899)], 0.0),  # stopped by SIGSTOP while it waited
        ((100, 100.5, 100), [], 0.5),  # one that may not wait at all
    ],
)
def test_a_call_is_late_beyond_what_the_control_thread_shows(
    call: tuple[float, float, float], woken: list[tuple[float, float]], late_ms: float
) -> None:
    assert lateness_ms(calls(call), wakes(*woken), FOREVER_NS) == pytest.approx([late_ms])


def test_a_call_that_ended_after_the_last_sign_of_life_is_not_judged() -> None:
    found = calls((0, 150, 100), (150, 400, 200), (400, 401, 600))
    assert lateness_ms(found, wakes(), 350 * MS) == pytest.approx([50.0])
    assert reached_deadline(found, 350 * MS).tolist() == [True]


def test_only_calls_that_may_wait_reach_their_deadline() -> None:
    found = calls((0, 9, 5), (0, 9, 0), (0, 3, 5), (10, 16, 15))
    assert reached_deadline(found, FOREVER_NS).tolist() == [True, False, False, True]


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert percentile_ms(np.array([0.0] * 998 + [7.0, 50.0]), 99.9) == 50.0
    assert percentile_ms(np.array([0.0] * 1998 + [7.0, 50.0]), 99.9) == 7.0
    assert percentile_ms(np.zeros(0), 99.9) == 0.0


# memory


def test_a_trend_is_the_same_whatever_the_level_of_each_life() -> None:
    lives = [[(at + first, level + 250.0 * at) for at in range(10)] for first, level in ((0, 0.0), (1e6, 7e7))]
    found = trend([*lives, [(5.0, 1.0), (6.0, 9e9)]])  # two samples are no life
    assert found.slope == pytest.approx(250.0)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert (found.num_samples, found.seconds) == (20, 18.0)


def test_noise_has_a_slope_within_its_error() -> None:
    values = np.random.default_rng(1).normal(0, 1000, (5, 200))
    found = trend([list(enumerate(life.tolist())) for life in values])
    assert abs(found.slope) <= 3 * found.error
    assert found.error == pytest.approx(1000 / (5 * (200**3 / 12)) ** 0.5, rel=0.2)


def test_without_samples_nothing_is_known_of_a_trend() -> None:
    assert trend([]).error == float("inf")
    assert soak._rss_figures(trend([]))["rss_noise_bytes_per_s"] is None


# what clients write down


def test_what_was_counted_survives_sigkill(tmp_path: Path) -> None:
    plan = soak_client.Plan("ipc:///nowhere", tmp_path / "0-0", 1, 1, 200.0)
    child = os.fork()
    if child == 0:
        notes = soak_client.Notes(plan)
        notes.counts.add(Count.WRONG_BYTES, 3)
        notes.counts.add(Count.WRONG_BYTES, 4)
        notes.timed(lambda: None)
        notes.timed(lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    counts, found = counts_in(plan.file("counts")), times_in(plan.file("calls"), CALL)
    assert counts[Count.WRONG_BYTES] == 7
    assert counts[Count.BEGAN_NS] > 0, "a call was running"
    assert (found["due_ns"] - found["began_ns"]).tolist() == [200 * MS]


def test_files_that_are_missing_or_cut_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    assert set(counts_in(tmp_path / "counts").values()) == {0}
    assert len(times_in(tmp_path / "calls", CALL)) == 0
    Counts(tmp_path / "counts").set(Count.HITS, 5)  # the second field: a short file
    assert Counter(counts_in(tmp_path / "counts")) == Counter({Count.HITS: 5})
    (tmp_path / "calls").write_bytes(calls((1, 2, 3), (4, 5, 6)).tobytes()[:-1])
    assert times_in(tmp_path / "calls", CALL)["ended_ns"].tolist() == [2 * MS]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.model)
def test_every_byte_follows_from_spec_and_tokens(spec: Any) -> None:
    tokens = soak_client.prompt(1, 2, 3, 4)
    block = soak_client.kv_of(spec, tokens, 32, spec.block_tokens)
    assert block.shape == spec.array_shape(spec.block_tokens)
    assert soak_client.wrong_bytes(block, spec, tokens, 32) == 0
    assert soak_client.wrong_bytes(block[:, :, :, :5], spec, tokens, 32) == 0
    flipped = block.copy()
    flipped.view(np.uint8)[1, 1, 1, 3, 7] ^= 1
    assert soak_client.wrong_bytes(flipped, spec, tokens, 32) == 1
    others = [soak_client.kv_of(other, tokens, 32, other.block_tokens) for other in SPECS if other is not spec]
    changed = tokens.copy()
    changed[0] += 1
    others += [soak_client.kv_of(spec, tokens, 33, spec.block_tokens), soak_client.kv_of(spec, changed, 32, 16)]
    for other in others:  # chance alone makes one byte of 256 right
        share = soak_client.wrong_bytes(other, spec, tokens, 32) / other.nbytes
        assert share == pytest.approx(1.0, abs=0.05)


# fates


def test_fates_follow_from_the_seed_alone() -> None:
    for number in range(50):
        assert soak.daemon_fate(3, number, 9.0) == soak.daemon_fate(3, number, 9.0) != soak.daemon_fate(4, number, 9.0)
        assert soak.client_fate(3, 1, number) == soak.client_fate(3, 1, number) != soak.client_fate(3, 2, number)
    lives = [soak.daemon_fate(3, number, 9.0) for number in range(50)]
    assert {fate.orderly for fate in lives} == {fate.stop_s > 0 for fate in lives} == {True, False}
    assert [fate.life_s == 9.0 for fate in lives[: soak.LONG_EVERY + 1]] == [
        True,
        *[False] * (soak.LONG_EVERY - 1),
        True,
    ]


def sleeper(fate: soak.Fate, code: str = "pass") -> tuple[subprocess.Popen[bytes], soak.Victim]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import signal, time; {code}; print(flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process, soak.Victim(process.pid, process.poll, fate, leave_s_max=0.1)


def ending_of(victim: soak.Victim, now_s: float) -> soak.Ending:
    endings: list[soak.Ending] = []
    wait_until(lambda: endings or ((found := victim.step(now_s)) is not None and not endings.append(found)))
    return endings[0]


def test_a_stopped_process_is_killed_all_the_same() -> None:
    process, victim = sleeper(soak.Fate(2.0, False, 0.5, 9.0, 0.0, 0.0))
    assert victim.step(victim.born_s + 0.4) is None
    assert not victim.is_stopped
    assert victim.step(victim.born_s + 0.6) is None
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    assert victim.step(victim.born_s + 2.1) is None
    ending = ending_of(victim, victim.born_s + 2.2)
    assert ending == soak.Ending(-signal.SIGKILL, told=True, killed=True, hung=False)
    assert not ending.is_crash


def test_a_process_goes_on_after_its_stop_and_ends_in_order() -> None:
    _, victim = sleeper(soak.Fate(2.0, True, 0.5, 1.0, 0.0, 0.0), "signal.signal(15, lambda *_: exit(0))")
    for age_s in (0.6, 1.6, 2.1):
        assert victim.step(victim.born_s + age_s) is None
    assert (victim.num_stops, victim.is_stopped, victim.awake_since_s) == (1, False, victim.born_s + 1.6)
    assert ending_of(victim, victim.born_s + 2.1) == soak.Ending(0, told=True, killed=False, hung=False)


def test_who_does_not_end_when_told_to_hangs_and_who_ends_untold_has_crashed() -> None:
    _, deaf = sleeper(soak.Fate(1.0, True, 0.0, 0.0, 0.0, 0.0), "signal.signal(15, signal.SIG_IGN)")
    assert deaf.step(deaf.born_s + 1.1) is None
    ending = ending_of(deaf, deaf.born_s + 1.3)
    assert ending.hung
    assert not ending.killed
    process, fallen = sleeper(soak.Fate(1.0, True, 0.0, 0.0, 0.0, 0.0))
    process.terminate()
    assert ending_of(fallen, fallen.born_s).is_crash


# the end of it


def facts() -> dict[str, Any]:
    memory = {"extent_nbytes": 4 << 20, "extents_ready": 4, "extents_unassigned": 2, "reserved_nbytes": 0}
    memory |= {"slots": {str(1 << 20): {"free": 1, "cached": 3, "reserved": 4}}}
    disk = {"ready": True, "capacity_nbytes": 16 << 20, "extents": 4, "extents_unassigned": 2, "extents_lost": 0}
    disk |= {"slots": {str(2 << 20): {"free": 1, "cached": 1, "reserved": 0}}}
    return {"memory": memory, "disk": disk, "sessions": []}


def test_slots_that_do_not_add_up_are_seen_in_both_tiers() -> None:
    assert soak.unaccounted_nbytes(facts()) == 0  # an extent of the disk's still waits for space
    for tier, size in (("memory", 1 << 20), ("disk", 2 << 20)):
        more, fewer = facts(), facts()
        more[tier]["slots"][str(size)]["cached"] += 1
        assert soak.unaccounted_nbytes(more) == size
        fewer[tier]["slots"][str(size)]["free"] -= 2
        assert soak.unaccounted_nbytes(fewer) > 0
    twice = facts()
    twice["disk"]["extents_unassigned"] = 4
    assert soak.unaccounted_nbytes(twice) == 4 << 20


def test_what_the_dead_hold_is_counted_but_not_ourselves() -> None:
    found = facts()
    found["sessions"] = [
        {"id": 1, "held_nbytes": 100, "leases": 2, "reservations": 1},
        {"id": 2, "held_nbytes": 5, "leases": 5, "reservations": 5},
    ]
    assert soak.held_nbytes(found, 2) == 104


@pytest.mark.parametrize(
    ("length", "spent_s", "kills", "over", "share"),
    [
        (soak.Length(60), 59.9, 500, False, 59.9 / 60),
        (soak.Length(60), 60.0, 0, True, 1.0),
        (soak.Length(60, 300), 61.0, 299, False, 299 / 300),
        (soak.Length(60, 300), 61.0, 300, True, 1.0),
        (soak.Length(60, 300), 300 * soak.S_PER_KILL_MAX, 3, True, 0.01),
    ],
)
def test_a_run_ends_after_its_seconds_or_its_kills(
    length: soak.Length, spent_s: float, kills: int, over: bool, share: float
) -> None:
    assert length.is_over(spent_s, kills) == over
    assert length.share_done(spent_s, kills) == pytest.approx(share)


# real processes

IMPATIENT = "from kvstore.core import store; store.QUARANTINE_MS = 1000.0; from kvstore.cli import main; main()"


def test_a_short_storm_costs_no_byte_and_no_answer(tmp_path: Path) -> None:
    """COR, LEK, RST, HNG: SIGKILL and SIGSTOP of real daemons and clients at random points under traffic."""
    base = tmp_path / "bench"
    results = soak.measure(soak.Length(5.0), 1, 3, base, (sys.executable, "-c", IMPATIENT))
    zero = ("wrong_bytes", "wrong_answers", "leaked_bytes", "bad_blocks", "unanswered", "crashes")
    assert {name: results[name] for name in zero} == dict.fromkeys(zero, 0), results
    assert min(results[name] for name in ("kills_daemon", "kills_client", "hits", "bytes_read")) > 0, results
    assert not base.exists()


def test_an_interrupted_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    """Which includes what conftest looks for: processes, and shared memory."""
    base = tmp_path / "bench"
    command = [sys.executable, "-m", "benchmarks.soak", "--seconds", "60", "--json", "--folder", str(base)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: len(_started_by(process.pid)) >= 2 + soak.CLIENTS)  # and the two of multiprocessing
        started = _started_by(process.pid)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=15)
    assert process.returncode != 0
    assert not said
    assert not base.exists()
    psutil.wait_procs(started, timeout=5)
    assert not [each for each in started if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def _started_by(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
