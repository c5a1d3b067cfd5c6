"""Limits of containers, as version 1 and version 2 of Linux control groups write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed import cgroup, machine


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_no_limit_and_no_control_groups(tmp_path: Path) -> None:
    assert cgroup.cpu_limit(tmp_path) is None
    assert cgroup.memory_limit(tmp_path) is None
    _write(
        tmp_path,
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"},
    )
    assert cgroup.cpu_limit(tmp_path) is None
    assert cgroup.memory_limit(tmp_path) is None


def test_version_2_takes_the_tightest_group_on_the_way_up(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            f"{groups}/pod/cpu.max": "150000 100000\n",
            f"{groups}/pod/container/cpu.max": "max 100000\n",
            f"{groups}/pod/memory.max": "max\n",
            f"{groups}/pod/container/memory.max": "2147483648\n",
        },
    )
    assert cgroup.cpu_limit(tmp_path) == 1.5
    assert cgroup.memory_limit(tmp_path) == 2 << 30


def test_version_1_and_a_path_that_only_the_host_has(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    _write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n1:name=systemd:/\n0::/\n",
            f"{groups}/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
            f"{groups}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            f"{groups}/memory/memory.limit_in_bytes": f"{3 << 30}\n",
        },
    )
    assert cgroup.cpu_limit(tmp_path) == 3
    assert cgroup.memory_limit(tmp_path) == 3 << 30
    _write(
        tmp_path,
        {
            f"{groups}/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            f"{groups}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert cgroup.cpu_limit(tmp_path) is None
    assert cgroup.memory_limit(tmp_path) is None


def test_the_machine_is_what_the_container_has_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine.read_machine()
    monkeypatch.setattr(cgroup, "cpu_limit", lambda: 0.5)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: 1 << 30)
    limited = machine.read_machine()
    assert (limited.cores, limited.memory_bytes) == (1, 1 << 30)
    monkeypatch.setattr(cgroup, "cpu_limit", lambda: 10_000.0)
    monkeypatch.setattr(cgroup, "memory_limit", lambda: None)
    assert machine.read_machine().cores >= whole.cores
