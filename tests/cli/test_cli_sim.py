"""`hyper-mpmd sim` and `hyper-mpmd devices`: for people and for scripts, what-if, devices of one's own."""

from __future__ import annotations

import json

import pytest

import hyper_mpmd as hm
from hyper_mpmd.scheduler.device import device_names, get_device
from hyper_mpmd.scheduler.device_file import with_settings
from hyper_mpmd.scheduler.device_sources import SOURCES, UNITS
from hyper_mpmd.scheduler.policies import POLICIES


def simulated(call, *options):
    result = call("sim", "moe-ffn", *options, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("policy", ["O0", "O1"])
def test_sim_tells_the_makespan_its_bound_and_who_waits(call, small, policy):
    record = simulated(call, *small, "--ep", 4, "--routing", "zipf:1.0", "--policy", policy, "--dtype", "bfloat16")
    assert record["device"] == "ascend-a3"
    assert record["makespan_ns"] >= record["bound_ns"] == max(record["bounds"].values())
    assert 0 < record["of_peak"] < record["of_bound"] <= 1
    assert set(record["cores"]) == {"AIC", "AIV"}
    assert set(record["ops"]) == {"permute", "dispatch", "up", "act", "down", "combine", "unpermute"}
    assert record["ops"]["up"]["start"] >= record["ops"]["permute"]["start"]
    if policy == "O0":
        # Seven launches of 8 us each: nothing that small is done before the host is.
        assert record["makespan_ns"] > 7 * 8_000
    result = call("sim", "moe-ffn", *small, "--ep", 4, "--policy", policy)
    assert result.exit_code == 0
    for word in ("makespan", "bound", "exposed comm", "AIC", "AIV", "dispatch", "combine", "peak"):
        assert word in result.stdout


def test_both_backends_tell_the_same(call, small):
    native, twin = (simulated(call, *small, "--ep", 2, "--backend", backend) for backend in ("native", "python"))
    for name in native:
        if name not in ("planning_s", "simulation_s"):
            assert native[name] == twin[name], name


def test_what_if_plans_and_simulates_the_changed_device(call):
    big = ("--tokens", 2048, "--hidden", 2048, "--intermediate", 256, "--experts", 8, "--ep", 4, "--dtype", "bfloat16")
    as_is = simulated(call, *big)
    faster = simulated(call, *big, "--set", "link=4x")
    fewer = simulated(call, *big, "--set", "aic=6", "--set", "event=2x")
    assert faster["device"] == "ascend-a3 with link=4x"
    assert faster["bounds"]["link"] < as_is["bounds"]["link"] / 3
    assert faster["makespan_ns"] < as_is["makespan_ns"]
    assert fewer["bounds"]["compute"] > 3 * as_is["bounds"]["compute"]


def test_settings_change_what_belongs_together():
    device = with_settings(get_device("ascend-a3"), ["remote=2x", "cube=0.5x", "l2=0", "event_ns=5"])
    assert device.near == ((2, 440), (16, 1860), (4096, 5000))
    assert device.remote_ns == 1860
    assert device.cube_flops_per_us == (2_841_600, 5_683_200)
    assert (device.l2_bytes, device.event_ns) == (0, 5)
    cpu = with_settings(get_device("cpu"), ["aic=3"])
    assert (cpu.aic, cpu.aiv) == (3, 3)
    assert with_settings(cpu, []) == cpu


@pytest.mark.parametrize("change", ["link", "link=", "link=fast", "warp=2x", "name=3", "unified=1", "aic=0", "hbm=-1"])
def test_changes_that_make_no_sense_are_refused(call, small, change):
    result = call("sim", "moe-ffn", *small, "--set", change)
    assert result.exit_code == 1
    assert "DeviceFormatError" in result.stderr
    assert change.split("=")[0] in result.stderr


def test_saved_plans_are_simulated_as_they_are(call, small, tmp_path):
    call("plan", "moe-ffn", *small, "--ep", 2, "--device", "ascend-a2", "--save", tmp_path / "w.json")
    files = sorted(tmp_path.glob("w*.json"))
    record = json.loads(call("sim", *files, "--json").stdout)
    assert record["device"] == "ascend-a2"
    assert record["makespan_ns"] > 0
    assert call("sim", files[1], "--json").exit_code == 1
    refused = call("sim", *files, "--set", "link=2x")
    assert refused.exit_code == 2
    assert "--set" in refused.stderr


def test_every_policy_is_listed_and_can_be_simulated(call, small):
    listed = json.loads(call("policies", "--json").stdout)
    assert list(listed) == list(POLICIES)
    shown = call("policies").stdout
    for name in listed:
        assert name in shown
        assert simulated(call, *small, "--policy", name)["policy"] == name


def test_devices_lists_all_and_every_figure_of_one_with_its_source(call):
    listed = json.loads(call("devices", "--json").stdout)
    assert [device["name"] for device in listed] == list(device_names())
    table = call("devices").stdout
    for name in device_names():
        assert name in table
        assert name in call("devices", name).stdout
        figures = json.loads(call("devices", name, "--json").stdout)["figures"]
        assert all(figure["unit"] and figure["source"] for figure in figures.values())
        assert "given by the user" not in {figure["source"] for figure in figures.values()}
    assert set(SOURCES) == set(device_names())
    assert set(UNITS) == set(hm.Device.model_fields) - {"name", "unified"}
    unknown = call("devices", "tpu")
    assert unknown.exit_code == 1
    assert "UnknownDeviceError" in unknown.stderr


def test_a_device_of_ones_own_comes_from_toml(call, small, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('base = "ascend-a3"\naic = 20\naiv = 40\nlink_total_bytes_per_us = 274_400\n')
    shown = json.loads(call("devices", file, "--json").stdout)
    assert shown["name"] == "mine"
    assert shown["figures"]["aic"] == {"value": 20, "unit": "cores", "source": "given by the user"}
    assert simulated(call, *small, "--device", file)["device"] == "mine"
    for text, what in (("aic = ", "not TOML"), ('base = "x"', "no device"), ("aic = 0", "aic"), ("aaic = 3", "aaic")):
        file.write_text(text if "base" in text or text == "aic = " else f'base = "cpu"\n{text}')
        refused = call("devices", file)
        assert refused.exit_code == 1
        assert what in refused.stderr
    assert "No such file" in call("devices", tmp_path / "none.toml").stderr
