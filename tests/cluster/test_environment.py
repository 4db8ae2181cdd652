from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.cluster import environment
from djl_trtllm.cluster.environment import environment_of_machine
from djl_trtllm.cluster.ingress import NODES


@pytest.fixture(autouse=True)
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    monkeypatch.setattr(environment, "version", lambda name: "2.60.0")


def path_with(folder: Path, *programs: str) -> dict[str, str]:
    for program in programs:
        (folder / program).touch(0o755)
    return {"PATH": str(folder)}


def test_what_is_set_stays_and_the_rest_is_that_of_nodes(tmp_path: Path) -> None:
    given = {**path_with(tmp_path, "haproxy"), "RAY_SERVE_HAPROXY_MAXCONN": "7", "RAY_SERVE_HAPROXY_STATS_PORT": "1"}
    found = environment_of_machine(given, tmp_path)
    assert found.items() >= {**NODES, **given}.items()


@pytest.mark.parametrize(
    ("ray", "programs", "used"),
    [
        ("2.60.0", ("haproxy",), True),
        ("2.60.0", (), False),
        ("2.55.1", ("haproxy",), False),
        ("2.55.1", ("haproxy", "socat"), True),
    ],
)
def test_haproxy_is_used_where_the_programs_are_that_this_ray_needs(
    ray: str, programs: tuple[str, ...], used: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "version", lambda name: ray)
    found = environment_of_machine(path_with(tmp_path, *programs), tmp_path)
    assert (found.get("RAY_SERVE_ENABLE_HA_PROXY") == "1") is used


def test_haproxy_of_a_package_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path_with(tmp_path / "bin", "haproxy")
    monkeypatch.setattr(environment, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    found = environment_of_machine({"PATH": "/nowhere"}, tmp_path)
    assert found["PATH"] == f"/nowhere:{tmp_path}/bin"
    assert found["RAY_SERVE_ENABLE_HA_PROXY"] == "1"


def test_clusters_beside_each_other_have_files_and_ports_of_their_own(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    one = environment_of_machine({}, first)
    ports = ("RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT")
    with socket.create_server(("", int(one[ports[0]]))), socket.create_server(("", int(one[ports[1]]) + 1)):
        other = environment_of_machine({}, second)
    assert one[ports[0]] != other[ports[0]]
    assert int(other[ports[1]]) > int(one["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"])
    assert [value for value in one.values() if str(first) in value]
    assert not [value for value in other.values() if str(first) in value]
