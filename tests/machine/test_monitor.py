"""Recordings are replayed through the real monitor; a live process is watched for the threads."""

import json
import re
import threading
from functools import partial
from pathlib import Path

import pytest

from bench.machine.gpus import Depth, Reading, Unreadable
from bench.machine.monitor import MONITORED, Monitor, Monitors
from tests.readings_for_tests import Replay

READINGS = Path(__file__).parents[1] / "readings"
GB = 10**9


PHASES = ("setup", "warmup", "epoch", "evaluation")
TWICE = (*PHASES, "epoch", "evaluation")


def go_through(monitor, phases, worker=1):
    for phase in phases:
        monitor.watch(worker) if phase == "setup" else monitor.enter(phase)
    return monitor


def replay(name="healthy", edit=lambda row: row, phases=PHASES, about=(), **close):
    """Play a recording through the phases, with ``about`` the card, and each row changed first."""
    head, *rows = map(json.loads, (READINGS / f"{name}.jsonl").read_text().splitlines())
    lines = [json.dumps(row) for row in (head | dict(about), *map(edit, rows))]
    seen = go_through(Monitor(Replay(lines)), phases).close(**close)
    assert set(seen.values) | set(seen.missing) == set(MONITORED)
    assert not set(seen.values) & set(seen.missing)
    assert all(value is not None for value in seen.values.values())
    return seen


def always(**change):
    return lambda row: row | change


def between(start, end, **change):
    """An edit of the readings from one time to another, in s."""
    return lambda row: row | change if start * 1e9 <= row["time_ns"] <= end * 1e9 else row


def neighbour(**about):
    return [{"pid": 7, "bytes": 5, **about}]


def test_a_healthy_epoch():
    seen = replay(reserved_bytes=5 * GB, warmup_reserved_bytes=7 * GB)
    assert seen.values == {
        "baseline_device_bytes": 300_000_000,
        "warmup_device_bytes": 8_000_000_000,
        "warmup_process_bytes": 7_900_000_000,
        "peak_device_bytes": 6_000_000_000,
        "peak_process_bytes": 5_900_000_000,
        "energy_j": 2500.0,
        "mean_power_w": 250.0,
        "power_limit_w": 280.0,
        "sm_clock_mhz": 1770,
        "sm_clock_first_mhz": 1770,
        "sm_clock_last_mhz": 1762.5,
        "memory_clock_mhz": 7000,
        "temperature_c": 74,
        "throttle_during": "",
        "neighbours": "",
        "neighbours_computing": 0,
    }
    assert (seen.missing, seen.notes, seen.verdict) == ({}, [], "")


def test_of_a_command_the_whole_run_counts_and_the_energy_of_what_was_measured():
    lines = (READINGS / "healthy.jsonl").read_text().splitlines()
    steps = go_through(Monitor(Replay(lines), whole=True), PHASES).close(measured_s=4.0)
    assert (steps.values["mean_power_w"], steps.values["energy_j"]) == (250, 1000)
    untold = go_through(Monitor(Replay(lines), whole=True), ("setup", "warmup", "evaluation"))
    seen = untold.close(measured_s=None)
    assert seen.values["peak_device_bytes"] == seen.values["warmup_device_bytes"]


def test_a_spike_between_samples_is_bounded_by_the_allocator():
    seen = replay(reserved_bytes=9 * GB, warmup_reserved_bytes=7 * GB)
    assert seen.values["peak_device_bytes"] == seen.values["peak_process_bytes"] == 9 * GB
    assert seen.values["warmup_device_bytes"] == 8 * GB
    seen = replay(reserved_bytes=5 * GB, warmup_reserved_bytes=9 * GB)
    assert seen.values["warmup_device_bytes"] == seen.values["warmup_process_bytes"] == 9 * GB
    assert seen.values["peak_device_bytes"] == 6 * GB


STILL = "the energy counter was not read, stood still or went back"


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("healthy", always(energy_j=77.0)),
        ("healthy", between(20, 20, energy_j=5.0)),
        ("two-epochs", between(60, 60, energy_j=None)),
        ("two-epochs", between(70, 70, energy_j=29_000.0)),  # back by less than an epoch took
    ],
)
def test_a_counter_that_fails_in_an_epoch_tells_nothing(name, edit):
    seen = replay(name, edit, TWICE if name == "two-epochs" else PHASES)
    assert seen.missing == dict.fromkeys(("energy_j", "mean_power_w"), STILL)


def test_process_memory_none_is_empty_with_its_reason():
    reason = "the driver does not tell a process's memory"
    about = {"why": {"process_bytes": reason}}
    seen = replay(edit=always(process_bytes=None), about=about, reserved_bytes=5 * GB)
    phases = ("warmup", "peak")
    assert seen.missing == {f"{phase}_process_bytes": reason for phase in phases}
    assert seen.values["peak_device_bytes"] == 6 * GB


def test_a_neighbour_halfway_makes_it_invalid_unless_sharing_is_allowed():
    halfway = between(15, 15, others=neighbour(name="python"))
    seen = replay(edit=halfway)
    assert seen.values["neighbours"] == "pid 7 (python): 5 B"
    assert seen.verdict == "the card was shared: pid 7 (python): 5 B"
    shared = replay(edit=halfway, allow_shared=True)
    assert shared.values == seen.values
    assert (shared.verdict, shared.notes) == ("", [seen.verdict])


@pytest.mark.parametrize(
    ("seconds", "others", "neighbours", "computing"),
    [
        ((0, 0), neighbour(), "pid 7: 5 B", True),
        ((0, 99), neighbour(bytes=None), "pid 7: memory unknown", True),
        ((20.1, 99), neighbour(), "", False),  # the epoch ends after 20 s
    ],
)
def test_what_a_neighbour_means_by_what_it_does_and_since_when(
    seconds, others, neighbours, computing
):
    seen = replay(edit=between(*seconds, others=others))
    assert (seen.values["neighbours"], seen.values["neighbours_computing"]) == (
        neighbours,
        computing,
    )
    assert (seen.verdict, seen.notes) == (f"the card was shared: {neighbours}" * computing, [])


@pytest.mark.parametrize(
    ("reason", "invalid"),
    [("hardware thermal slowdown", True), ("software power cap", False), ("reason 0x800", False)],
)
def test_what_each_throttle_reason_means(reason, invalid):
    seen = replay(edit=between(10.1, 19.9, throttle=[reason]))
    share = f"{reason} (3 of 5 readings)"
    assert seen.values["throttle_during"] == reason
    assert seen.verdict == (f"throttled during the epoch: {share}" if invalid else "")


def test_a_passing_reading_is_noted_and_a_lasting_reason_is_not():
    """As on a laptop, whose fan starts late."""
    reason, cap = "software thermal slowdown", "software power cap"
    for reasons in ([reason], [cap, reason]):
        seen = replay(edit=between(15, 15, throttle=reasons))
        assert seen.values["throttle_during"] == ("; ".join(reasons[:-1]))
        assert (seen.verdict, seen.notes) == ("", [f"passing: {reason} (1 of 5 readings)"])
    assert replay(edit=between(12, 16, throttle=[reason])).verdict.endswith("(2 of 5 readings)")


@pytest.mark.parametrize(("met", "passing"), [(3, True), (4, False)])
def test_of_many_readings_one_in_twenty_passes(met, passing):
    class Warm(Unreadable):
        def read(self, depth):
            at = next(moments)
            reasons = ("hardware thermal slowdown",) if 10 <= at < 10 + met else ()
            return (Reading(at * 10**9, throttle=reasons),)

    moments = iter(range(99))
    monitor = go_through(Monitor(Warm(""), fast_s=1e9), PHASES[:3])
    for _ in range(78):
        monitor._read(Depth.SLOW)  # with those at both ends 80
    monitor.enter("evaluation")
    seen = monitor.close()
    share = f"hardware thermal slowdown ({met} of 80 readings)"
    assert seen.notes == [f"passing: {share}"] * passing
    assert seen.verdict == f"throttled during the epoch: {share}" * (not passing)


def test_a_neighbour_has_the_most_memory_that_it_was_seen_with():
    def edit(row):
        sizes = [9, 5, None]
        return row | {"others": neighbour(bytes=sizes[min(row["time_ns"] // 10**10, 2)])}

    assert replay(edit=edit).values["neighbours"] == "pid 7: 9 B"


class Old(Unreadable):
    """A card without a counter of energy, that is read once a second; without those of ``lost``."""

    def __init__(self, lost=()):
        super().__init__("NVML: Not Supported")
        self.moments, self.lost = iter(range(99)), lost

    def read(self, depth):
        at = next(self.moments)
        power_w = 100.0 if at < 4 else 200.0
        return () if at in self.lost else (Reading(at * 10**9, power_w=power_w),)

    def go_through_epoch(self, readings):
        monitor = Monitor(self, fast_s=1e9)  # the readings are made here
        go_through(monitor, ("setup", "warmup", "epoch"))
        for _ in range(readings):
            monitor._read(Depth.SLOW)
        monitor.enter("evaluation")
        return monitor.close()


def test_without_a_counter_energy_is_power_over_time():
    """Of a GTX 1080 or a slice that tells its power: of the epoch alone, and the row says so."""
    seen = Old().go_through_epoch(12)
    # from 3 s, half a second at the mean of both, to 16 s
    assert seen.values["energy_j"] == 150 + 12 * 200
    assert seen.values["mean_power_w"] == pytest.approx(2550 / 13)
    assert any("no counter of energy" in note for note in seen.notes)
    # ten times between readings are enough, and nine too few
    assert Old().go_through_epoch(9).values["energy_j"] == 150 + 9 * 200
    assert "energy_j" in Old().go_through_epoch(8).missing
    short = replay(edit=always(energy_j=None), about={"why": {"energy_j": "none"}})
    assert short.missing == dict.fromkeys(("energy_j", "mean_power_w"), "none"), "four readings"


def test_an_epoch_too_short_for_the_counter_adds_nothing():
    still = between(60, 70, energy_j=30_000.0)
    assert replay("two-epochs", still, TWICE).values["energy_j"] == 2500


def test_what_else_is_missing_stays_missing():
    seen = replay(edit=always(energy_j=None, temperature_c=None))
    assert {"energy_j", "mean_power_w", "temperature_c"} == seen.missing.keys()
    assert {*Old(lost=range(99)).go_through_epoch(3).missing} == {*MONITORED}


def test_an_epoch_whose_begin_was_not_read_has_no_energy():
    assert Old(lost=[3]).go_through_epoch(12).missing["energy_j"] == "epoch did not end"


def test_memory_at_a_boundary_counts_for_the_phase_that_ends():
    seen = replay(edit=between(10, 10, device_bytes=9 * GB))
    assert seen.values["warmup_device_bytes"] == 8_700_000_000
    assert seen.values["peak_device_bytes"] == 6 * GB


@pytest.mark.parametrize("device_bytes", [9 * GB, None])
def test_a_card_emptier_than_its_baseline_or_without_one_has_no_peak(device_bytes):
    seen = replay(edit=between(0, 0.9, device_bytes=device_bytes))
    why = "what the card held before the worker is not known, or was more than later"
    assert seen.missing["warmup_device_bytes"] == seen.missing["peak_device_bytes"] == why


def test_the_baseline_is_what_was_read_first_and_may_be_nothing_or_all():
    class Filling(Unreadable):
        def read(self, depth):
            return (Reading(next(moments), device_bytes=next(sizes)),)

    moments, sizes = iter(range(99)), iter([10, 50, 60, 70, 80, 90])
    monitor = Monitor(Filling("none"), fast_s=1e9)
    monitor._read(Depth.SLOW)
    seen = go_through(monitor, PHASES[:3]).close()
    assert seen.values["baseline_device_bytes"] == 10
    assert seen.values["peak_device_bytes"] == 90 - 10
    empty = replay(edit=between(0, 0.9, device_bytes=0))
    assert empty.values["peak_device_bytes"] == 6_300_000_000
    assert replay(edit=always(device_bytes=5)).values["peak_device_bytes"] == 0


@pytest.mark.parametrize("phases", [("setup",), ("setup", "warmup"), ()])
def test_a_case_that_ends_before_its_epoch(phases):
    seen = replay(phases=phases)
    assert seen.missing["energy_j"] == seen.missing["peak_device_bytes"] == "epoch was not reached"
    assert ("warmup_device_bytes" in seen.values) is ("warmup" in phases)


def test_an_epoch_that_did_not_end_has_a_peak_and_no_energy():
    seen = replay(phases=PHASES[:-1])
    assert seen.missing["energy_j"] == "epoch did not end"
    assert seen.values["peak_device_bytes"] == 6 * GB
    assert replay("two-epochs", phases=TWICE[:-1]).missing["energy_j"] == "epoch did not end"


def test_several_epochs_are_one_without_the_evaluations_between():
    seen = replay("two-epochs", phases=TWICE)
    assert seen.values["energy_j"] == 2500 + 2000
    assert seen.values["mean_power_w"] == 4500 / 20
    assert seen.values["peak_device_bytes"] == 7 * GB
    assert seen.values["temperature_c"] == 76
    assert seen.values["throttle_during"] == ""
    assert seen.verdict == ""
    # the first 5 s lie in the first epoch, the last 5 s in the second
    assert seen.values["sm_clock_first_mhz"] == 1770  # of 1770, 1900 and 1770
    assert seen.values["sm_clock_last_mhz"] == 1700  # of 1770, 1700 and 1700


def test_an_unseen_card_gives_its_reason_for_every_column():
    seen = go_through(Monitor(Unreadable("no driver")), PHASES).close(reserved_bytes=GB)
    assert seen.values == {}
    assert set(seen.missing.values()) == {"no driver"}
    assert (seen.notes, seen.verdict) == ([], "")


class Live(Unreadable):
    """A device that keeps how it was read, with a spike of memory in the 20th reading."""

    def __init__(self):
        super().__init__("")
        self.depths = []
        self.enough = threading.Event()

    def read(self, depth):
        self.depths.append(depth)
        if len(self.depths) > 30:
            self.enough.set()
        return (Reading(len(self.depths), device_bytes=1000 if len(self.depths) == 20 else 10),)

    def close(self):
        self.depths.append("closed")


@pytest.mark.parametrize(("periods", "every"), [({"fast_s": 0.001, "slow_s": 0.005}, 5), ({}, 13)])
def test_the_sampler_reads_fast_and_slow_and_edges_and_is_joined(periods, every):
    """By default all of a card is read every 13 times 15 ms."""
    device = Live()
    monitor = Monitor(device, **periods)
    monitor.enter("epoch")
    assert device.enough.wait(60)
    assert "monitor" in {thread.name for thread in threading.enumerate() if thread.daemon}
    seen = monitor.close()
    monitor.stop()
    assert "monitor" not in {thread.name for thread in threading.enumerate()}
    assert device.depths.count("closed") == 1
    assert device.depths[-1] == "closed"
    assert device.depths.count(Depth.EDGE) == 3
    sampled = [depth for depth in device.depths if depth in (Depth.FAST, Depth.SLOW)]
    assert sampled[: 2 * every] == ([Depth.FAST] * (every - 1) + [Depth.SLOW]) * 2
    assert device.depths[19] == Depth.FAST
    assert seen.values["peak_device_bytes"] == 990


@pytest.mark.parametrize(
    ("used", "named", "power", "clock", "note"),
    [
        ([False, True], [], 250, 1500, "seen on GPU 1"),  # not the first, which is idle
        ([True, True], [], 500, 1500, "seen on GPU 0, 1"),
        ([False, False], [], None, None, ""),
        ([False, False], [1], 250, 1500, "its script told of GPU 1"),  # as under WSL
        ([True, False], [1], 250, 1770, "seen on GPU 0"),
    ],
)
def test_of_a_command_those_cards_count_on_which_it_was_seen(used, named, power, clock, note):
    lines = (READINGS / "healthy.jsonl").read_text().splitlines()
    slower = [re.sub(r'"sm_clock_mhz": \d+', '"sm_clock_mhz": 1500', line) for line in lines]
    cards = [Replay(lines), Replay(slower)]
    watched = list[int]()
    for card, seen in zip(cards, used, strict=True):
        card.is_used, card.watch = partial(bool, seen), watched.append
    monitor = Monitors(cards, whole=True)
    assert all(card.whole is True for card in cards)
    monitor.named = named
    seen = go_through(monitor, PHASES, [1]).close(None, None, False, 4.0)
    assert watched == [1, 1]
    assert seen.cards == ([i for i in (0, 1) if used[i]] or named)
    assert set(seen.values) | set(seen.missing) == set(MONITORED)
    readings = (seen.values.get("mean_power_w"), seen.values.get("sm_clock_mhz"))
    assert (readings, note in "; ".join(seen.notes)) == ((power, clock), True)
    if power is None:
        assert set(seen.missing.values()) == {"no process of the command was seen on a GPU"}


def test_cards_that_train_one_network_all_count_each_by_its_own_process():
    """The sum of power, the slower clock, and the first one's memory; on a CPU there is no card but
    a process of each rank."""
    lines = (READINGS / "healthy.jsonl").read_text().splitlines()
    other = [re.sub(r'"sm_clock_mhz": \d+', '"sm_clock_mhz": 1500', line) for line in lines]
    cards, watched = [Replay(lines), Replay(other)], list[int]()
    for card in cards:
        card.watch, card.is_used = watched.append, lambda: False
    seen = go_through(Monitors(cards, whole=False), PHASES, [11, 12]).close(5 * GB, 7 * GB)
    assert (watched, seen.notes, seen.verdict) == ([11, 12], [], "")
    alone = replay(reserved_bytes=5 * GB, warmup_reserved_bytes=7 * GB).values
    twice = {name: 2 * alone[name] for name in ("energy_j", "mean_power_w", "power_limit_w")}
    slower = dict.fromkeys(("sm_clock_mhz", "sm_clock_first_mhz", "sm_clock_last_mhz"), 1500)
    assert seen.values == alone | twice | slower
    host = Replay(lines)
    host.watch = watched.append
    with Monitors([host], whole=False) as monitor:
        monitor.watch([21, 22])
    assert watched[2:] == [21]


def test_what_one_of_two_cards_lacks_or_met_is_lacked_and_met_by_both():
    lines = (READINGS / "healthy.jsonl").read_text().splitlines()
    head, *rows = map(json.loads, lines)

    def card(why, **change):
        one = Replay(map(json.dumps, (head | {"why": why}, *(row | change for row in rows))))
        one.is_used = lambda: True
        return one

    hot = ["hardware thermal slowdown"]
    first = card({"temperature_c": "no sensor"}, temperature_c=None, throttle=hot)
    second = card({"energy_j": "no counter"}, energy_j=None)
    seen = go_through(Monitors([first, second], whole=True), PHASES, [1]).close()
    assert seen.missing["temperature_c"] == "no sensor"
    assert seen.missing["energy_j"] == "no counter"
    assert set(seen.values) == {*MONITORED} - seen.missing.keys()
    assert seen.verdict == "throttled during the epoch: hardware thermal slowdown (5 of 5 readings)"
    alone = go_through(Monitors([card({})], whole=True), PHASES, [1]).close()
    assert (alone.cards, alone.notes, alone.verdict) == ([0], [], "")
