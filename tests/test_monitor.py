"""Recordings are replayed through the real monitor; a live process is watched for the threads."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from readings_for_tests import Replay

from bench.gpu.device import Depth, Host, Reading, Unreadable
from bench.gpu.monitor import MONITORED, Monitor, integrate

READINGS = Path(__file__).parent / "readings"
GB = 10**9


PHASES = ("setup", "warmup", "epoch", "evaluation")
TWICE = (*PHASES, "epoch", "evaluation")


def go_through(monitor, phases):
    for phase in phases:
        monitor.watch(1) if phase == "setup" else monitor.enter(phase)
    return monitor


def replay(name, edit=lambda row: row, phases=PHASES, **close):
    """Play a recording through the phases, each row changed by ``edit`` first."""
    head, *rows = (READINGS / f"{name}.jsonl").read_text().splitlines()
    rows = [json.dumps(edit(json.loads(row))) for row in rows]
    seen = go_through(Monitor(Replay([head, *rows])), phases).close(**close)
    assert set(seen.values) | set(seen.missing) == set(MONITORED)
    assert not set(seen.values) & set(seen.missing)
    assert all(value is not None for value in seen.values.values())
    return seen


def between(start, end, **change):
    """An edit of the readings from one time to another, in s."""
    return lambda row: row | change if start * 1e9 <= row["time_ns"] <= end * 1e9 else row


def epoch_edit(change):
    """An edit of the readings within the epoch and at its ends, from their time in ns."""
    return lambda row: row | change(row["time_ns"]) if 10e9 <= row["time_ns"] <= 20e9 else row


def neighbour(**about):
    return [{"pid": 7, "bytes": 5, **about}]


def test_a_healthy_epoch():
    seen = replay("healthy", reserved_bytes=5 * GB, warmup_reserved_bytes=7 * GB)
    assert seen.values == {
        "baseline_device_bytes": 300_000_000,
        "warmup_device_bytes": 8_000_000_000,
        "setup_process_bytes": 900_000_000,
        "warmup_process_bytes": 7_900_000_000,
        "peak_device_bytes": 6_000_000_000,
        "peak_process_bytes": 5_900_000_000,
        "energy_j": 2500.0,
        "energy_source": "counter",
        "mean_power_w": 250.0,
        "power_limit_w": 280.0,
        "sm_clock_mhz": 1770,
        "sm_clock_first_mhz": 1770,
        "sm_clock_last_mhz": 1762.5,
        "memory_clock_mhz": 7000,
        "temperature_c": 74,
        "temperature_first_c": 70,
        "temperature_last_c": 71.5,
        **{f"throttle_{when}": "" for when in ("before", "during", "after")},
        "neighbours": "",
        **{f"neighbours_{what}": 0 for what in ("computing", "drawing", "late")},
    }
    assert (seen.missing, seen.notes, seen.verdict) == ({}, [], "")


def test_of_a_command_the_whole_run_counts_and_the_energy_of_what_was_measured():
    lines = (READINGS / "healthy.jsonl").read_text().splitlines()
    steps = go_through(Monitor(Replay(lines), whole=True), PHASES).close(measured_s=4.0)
    assert (steps.values["mean_power_w"], steps.values["energy_j"]) == (250, 1000)
    untold = go_through(Monitor(Replay(lines), whole=True), ("setup", "warmup", "evaluation"))
    seen = untold.close(measured_s=None)
    assert seen.values["peak_device_bytes"] == seen.values["warmup_device_bytes"]


@pytest.mark.parametrize("lowered", [(10, 10), (20, 20)])
def test_a_power_limit_that_changes_is_the_lowest_of_the_epoch(lowered):
    seen = replay("healthy", between(*lowered, power_limit_w=200.0))
    assert seen.values["power_limit_w"] == 200


def test_a_spike_between_samples_is_bounded_by_the_allocator_and_said():
    seen = replay("healthy", reserved_bytes=9 * GB, warmup_reserved_bytes=7 * GB)
    assert seen.values["peak_device_bytes"] == seen.values["peak_process_bytes"] == 9 * GB
    assert seen.values["warmup_device_bytes"] == 8 * GB
    assert len(seen.notes) == 2
    assert "readings saw 6000000000 B, so a spike" in seen.notes[0]
    assert not seen.verdict
    spilled = replay("healthy", reserved_bytes=23_900_000_000)
    assert spilled.values["peak_device_bytes"] == 6 * GB
    assert "spilled to host memory" in spilled.notes[0]


def test_a_card_of_no_known_memory_did_not_spill():
    head, *rows = (READINGS / "healthy.jsonl").read_text().splitlines()
    for total in (0, None):
        lines = [json.dumps(json.loads(head) | {"total_bytes": total}), *rows]
        seen = go_through(Monitor(Replay(lines)), PHASES).close(23_900_000_000)
        assert seen.values["peak_device_bytes"] == 23_900_000_000
        assert "spilled" not in str(seen.notes)


@pytest.mark.parametrize(
    ("name", "edit", "doubt"),
    [
        ("still-counter", between(0, 0), "the energy counter did not move in 10 s"),
        ("healthy", between(20, 20, energy_j=5.0), "the energy counter went backwards"),
        ("old-driver", between(0, 0), "NVML: Not Supported"),
    ],
)
def test_a_counter_that_tells_nothing_gives_way_to_power(name, edit, doubt):
    seen = replay(name, edit)
    assert (seen.values["energy_source"], seen.values["energy_j"]) == ("integrated", 2500)
    assert seen.values["mean_power_w"] == 250
    assert seen.notes == [f"energy integrated from 5 power readings: {doubt}"]


@pytest.mark.parametrize("power", [None, 0.0])
def test_a_still_counter_without_power_is_no_energy(power):
    seen = replay("still-counter", lambda row: row | {"power_w": power})
    assert seen.missing["energy_j"] == "the energy counter did not move in 10 s"
    assert seen.missing.keys() == {"energy_j", "energy_source", "mean_power_w"}


def test_process_memory_none_is_empty_with_its_reason():
    seen = replay("no-process-memory", reserved_bytes=5 * GB)
    reason = "the driver does not tell a process's memory"
    phases = ("setup", "warmup", "peak")
    assert seen.missing == {f"{phase}_process_bytes": reason for phase in phases}
    assert seen.values["peak_device_bytes"] == 6 * GB


def test_a_neighbour_halfway_makes_it_invalid_unless_sharing_is_allowed():
    seen = replay("neighbour")
    assert seen.values["neighbours"] == "pid 4242 (python): 2100000000 B"
    assert seen.verdict == "the card was shared: pid 4242 (python): 2100000000 B"
    shared = replay("neighbour", allow_shared=True)
    assert shared.values == seen.values
    assert (shared.verdict, shared.notes) == ("", [seen.verdict])


def test_a_neighbour_that_stays_is_named_once_with_the_most_it_held():
    def edit(row):
        size = {12.5e9: 5, 15e9: 9, 17.5e9: 7, 20e9: 7, 21e9: 7}.get(row["time_ns"])
        return row | {"others": [{"pid": 7, "bytes": size}]} if size else row

    seen = replay("healthy", edit, allow_shared=True)
    assert seen.values["neighbours"] == "pid 7: 9 B"
    assert seen.notes == ["the card was shared: pid 7: 9 B"]


def test_what_of_a_neighbour_speaks_against_an_epoch():
    """One that came before spoils the memory."""
    seen = replay("healthy", between(0, 0, others=neighbour(bytes=None)))
    assert (seen.verdict, seen.notes) == ("the card was shared: pid 7: memory unknown", [])
    seen = replay("healthy", between(20.1, 99, others=neighbour()))
    assert seen.values["neighbours"] == "pid 7: 5 B"
    note = "another process started after the epoch: pid 7: 5 B"
    assert (seen.verdict, seen.notes) == ("", [note])
    seen = replay("healthy", between(0, 99, others=neighbour(name="Xorg", display=True)))
    note = "the card also drives a display: pid 7 (Xorg): 5 B"
    assert (seen.verdict, seen.notes) == ("", [note])


@pytest.mark.parametrize(
    ("since_s", "display", "column"),
    [
        (0, False, "neighbours_computing"),
        (20.1, False, "neighbours_late"),
        (0, True, "neighbours_drawing"),
        (20.1, True, "neighbours_drawing"),
    ],
)
def test_a_neighbour_is_counted_once_by_what_it_does_and_since_when(since_s, display, column):
    """The epoch ends after 20 s."""
    seen = replay("healthy", between(since_s, 99, others=neighbour(display=display)))
    counts = {name: seen.values[name] for name in MONITORED if name.startswith("neighbours_")}
    assert counts == {name: int(name == column) for name in counts}


def test_thermal_throttling_in_the_middle():
    seen = replay("throttled")
    assert seen.values["throttle_during"] == "hardware slowdown; hardware thermal slowdown"
    assert seen.values["throttle_before"] == seen.values["throttle_after"] == ""
    assert seen.values["temperature_c"] == 93
    assert seen.verdict == (
        "throttled during the epoch: hardware slowdown (1 of 5 readings), "
        "hardware thermal slowdown (1 of 5 readings)"
    )


@pytest.mark.parametrize(
    ("reason", "note", "invalid"),
    [
        ("software thermal slowdown", "", True),
        ("hardware power brake", "", True),
        ("software power cap", "power-capped during the epoch", False),
        ("applications clocks", "clocks were limited by a setting", False),
        ("sync boost", "clocks were limited by a setting", False),
        ("voltage reliability", "", False),
        ("reason 0x800", "throttled for a reason this version does not know", False),
    ],
)
def test_what_each_throttle_reason_means(reason, note, invalid):
    seen = replay("healthy", between(10.1, 19.9, throttle=[reason]))
    assert seen.values["throttle_during"] == reason
    assert bool(seen.verdict) is invalid
    assert seen.notes == ([f"{note}: {reason} (3 of 5 readings)"] if note else [])


def test_throttling_before_the_epoch_does_not_count():
    seen = replay("healthy", between(0, 9.9, throttle=["hardware thermal slowdown"]))
    assert seen.values["throttle_before"] == "hardware thermal slowdown"
    assert seen.values["throttle_during"] == seen.verdict == ""


def test_memory_at_a_boundary_counts_for_the_phase_that_ends():
    seen = replay("healthy", between(10, 10, device_bytes=9 * GB))
    assert seen.values["warmup_device_bytes"] == 8_700_000_000
    assert seen.values["peak_device_bytes"] == 6 * GB


def test_a_card_emptier_than_its_baseline_has_no_peak():
    seen = replay("healthy", between(0, 0, device_bytes=9 * GB))
    assert seen.missing.keys() == {"warmup_device_bytes", "peak_device_bytes"}
    assert "another process ended" in seen.missing["peak_device_bytes"]


def test_no_baseline_no_peak():
    seen = replay("healthy", between(0, 0.9, device_bytes=None))
    assert seen.missing["peak_device_bytes"] == "no baseline: not read during baseline"


@pytest.mark.parametrize("phases", [("setup",), ("setup", "warmup"), ()])
def test_a_case_that_ends_before_its_epoch(phases):
    seen = replay("healthy", phases=phases)
    assert seen.missing["energy_j"] == seen.missing["peak_device_bytes"] == "epoch was not reached"
    assert seen.missing["throttle_after"] == "evaluation was not reached"
    assert ("warmup_device_bytes" in seen.values) is ("warmup" in phases)


def test_an_epoch_that_did_not_end_has_a_peak_and_no_energy():
    seen = replay("healthy", phases=PHASES[:-1])
    assert seen.missing["energy_j"] == "epoch did not end"
    assert seen.values["peak_device_bytes"] == 6 * GB
    assert replay("two-epochs", phases=TWICE[:-1]).missing["energy_j"] == "epoch did not end"
    broken_off = Monitor(Replay((READINGS / "healthy.jsonl").read_text().splitlines()[:4]))
    assert go_through(broken_off, PHASES).close().missing["energy_j"] == "epoch did not end"


def test_several_epochs_are_one_without_the_evaluations_between():
    seen = replay("two-epochs", phases=TWICE)
    assert seen.values["energy_j"] == 2500 + 2000
    assert seen.values["energy_source"] == "counter"
    assert seen.values["mean_power_w"] == 4500 / 20
    assert seen.values["peak_device_bytes"] == 7 * GB
    assert seen.values["temperature_c"] == 76
    assert seen.values["throttle_during"] == ""
    assert seen.values["throttle_after"] == "hardware thermal slowdown"
    assert seen.verdict == ""


def test_quarters_of_several_epochs_are_of_the_time_within_them():
    """The first 5 s lie in the first epoch, the last 5 s in the second."""
    seen = replay("two-epochs", phases=TWICE)
    assert seen.values["sm_clock_first_mhz"] == 1770  # of 1770, 1900 and 1770
    assert seen.values["sm_clock_last_mhz"] == 1700  # of 1770, 1700 and 1700
    assert seen.values["temperature_last_c"] == 75


@pytest.mark.parametrize(
    ("moment", "reads", "doubt"),
    [
        (60, None, "the counter was not read at both ends"),
        (70, 5.0, "the energy counter went backwards"),
    ],
)
def test_a_counter_that_fails_in_one_epoch_gives_way_to_power_in_all(moment, reads, doubt):
    seen = replay("two-epochs", between(moment, moment, energy_j=reads), TWICE)
    assert (seen.values["energy_source"], seen.values["energy_j"]) == ("integrated", 250 * 20)
    assert seen.notes == [f"energy integrated from 8 power readings: {doubt}"]


def test_a_card_that_warms_up_within_the_epoch_shows_in_its_quarters():
    """Of 10 s, by time: a quarter has as many readings as the sampler got to make in it."""
    clocks = {10e9: 1900, 12.5e9: 1880, 15e9: 1840, 17.5e9: 1800, 20e9: 1790}
    edit = epoch_edit(lambda ns: {"sm_clock_mhz": clocks[ns], "temperature_c": ns / 2e8})
    seen = replay("healthy", edit)
    assert seen.values["sm_clock_first_mhz"] == 1890
    assert seen.values["sm_clock_last_mhz"] == 1795
    assert seen.values["temperature_first_c"] == 56.25
    assert seen.values["temperature_last_c"] == 93.75


def test_an_unseen_card_gives_its_reason_for_every_column():
    seen = go_through(Monitor(Unreadable("no driver")), PHASES).close(reserved_bytes=GB)
    assert seen.values == {}
    assert set(seen.missing.values()) == {"no driver"}
    assert (seen.notes, seen.verdict) == ([], "")


class Live:
    """A device of which each reading is larger than the last, that keeps how it was read."""

    total_bytes = None
    notes = ()

    def __init__(self, fault=None, size=lambda n: n):
        self.depths = []
        self.size = size
        self.fault = fault
        self.enough = threading.Event()

    def watch(self, pid): ...

    def read(self, depth):
        self.depths.append(depth)
        if len(self.depths) > 30:
            self.enough.set()
            if self.fault and depth < Depth.EDGE:
                raise self.fault
        return (Reading(len(self.depths), device_bytes=self.size(len(self.depths))),)

    def why(self, quantity):
        return ""

    def close(self):
        self.depths.append("closed")


def test_the_sampler_reads_fast_and_slow_and_edges_and_is_joined():
    device = Live()
    monitor = Monitor(device, fast_s=0.001, slow_s=0.005)
    monitor.enter("epoch")
    assert device.enough.wait(60)
    seen = monitor.close()
    monitor.stop()
    assert "monitor" not in {thread.name for thread in threading.enumerate()}
    assert device.depths.count("closed") == 1
    assert device.depths[-1] == "closed"
    assert device.depths.count(Depth.EDGE) == 3
    sampled = [depth for depth in device.depths if depth in (Depth.FAST, Depth.SLOW)]
    assert sampled[:10] == [Depth.FAST] * 4 + [Depth.SLOW] + [Depth.FAST] * 4 + [Depth.SLOW]
    # the peak is the last reading of all, the baseline the first
    assert seen.values["peak_device_bytes"] == len(device.depths) - 1 - 1


def test_a_spike_seen_by_a_fast_reading_is_the_peak():
    device = Live(size=lambda n: 1000 if n == 20 else 10)
    monitor = Monitor(device, fast_s=0.001, slow_s=1000)
    monitor.enter("epoch")
    assert device.enough.wait(60)
    assert device.depths[19] == Depth.FAST
    assert monitor.close().values["peak_device_bytes"] == 990


def test_a_fault_in_the_sampler_is_noted():
    device = Live(RuntimeError("lost"))
    monitor = Monitor(device, fast_s=0.001)
    assert device.enough.wait(60)
    assert "RuntimeError('lost')" in monitor.close().notes[0]


def test_a_monitor_stops_when_its_block_fails():
    device = Live()
    with pytest.raises(KeyError), Monitor(device, fast_s=0.001):
        raise KeyError
    assert device.depths[-1] == "closed"


def test_a_process_of_the_host_is_watched():
    grow = "import sys; block = bytearray(b'x') * 64_000_000; print(flush=True); sys.stdin.read()"
    monitor = Monitor(Host())
    with subprocess.Popen(
        [sys.executable, "-c", grow], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        monitor.watch(worker.pid)
        monitor.enter("warmup")
        monitor.enter("epoch")
        worker.stdout.readline()
        monitor.enter("evaluation")
        worker.communicate()
    seen = monitor.close()
    assert 64_000_000 < seen.values["peak_process_bytes"] < GB
    assert seen.missing["energy_j"] == "the case ran on a CPU"
    assert seen.missing["peak_device_bytes"] == "the case ran on a CPU"
    assert not seen.verdict


powers = st.lists(st.floats(0, 1000), min_size=1, max_size=20)
gaps = st.lists(st.floats(0.001, 10), min_size=20, max_size=20)


@given(powers, gaps, st.floats(0, 5), st.floats(0, 5))
def test_integrated_energy_lies_between_the_extremes(watts, gaps, before, after):
    times = [before + sum(gaps[:i]) for i in range(len(watts))]
    end = times[-1] + after
    energy = integrate(list(zip(times, watts, strict=True)), 0, end)
    assert min(watts) * end - 1e-6 <= energy <= max(watts) * end + 1e-6


@given(st.floats(0, 100), st.floats(-10, 10), gaps)
def test_a_ramp_is_integrated_exactly(start, slope, gaps):
    times = [sum(gaps[:i]) for i in range(len(gaps))]
    energy = integrate([(t, start + slope * t) for t in times], 0, times[-1])
    end = times[-1]
    assert energy == pytest.approx(start * end + slope * end**2 / 2, rel=1e-9, abs=1e-6)
