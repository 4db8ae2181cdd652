from __future__ import annotations

import shlex

import pytest

from djl_trtllm.server.banner import address, banner
from djl_trtllm.version import __version__

URL = "http://localhost:8080"


def test_it_has_the_address_the_pages_and_a_request_that_a_shell_takes() -> None:
    lines = banner(URL, ["story"], [("page", "/monitor")], key=False).splitlines()
    assert lines[0] == f"djl-trtllm {__version__} serves story"
    assert [line.split() for line in lines[1:3]] == [["address", URL], ["page", f"{URL}/monitor"]]
    name, *words = shlex.split(lines[3])
    assert (name, words[:3]) == ("try", ["curl", "-N", f"{URL}/invocations"])
    assert words[-1].startswith('{"inputs": ')


def test_of_several_models_the_request_names_one_and_with_keys_it_has_one() -> None:
    last = banner(URL, ["a b", "c"], [], key=True).splitlines()[-1]
    assert f"'{URL}/predictions/a b'" in last
    assert '-H "Authorization: Bearer $KEY"' in last


def test_a_name_cannot_control_the_terminal() -> None:
    assert "\x1b" not in banner(URL, ["\x1b[2J"], [], key=False)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://localhost:80"),
        ("::", "http://localhost:80"),
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
    ],
)
def test_the_address_is_one_that_a_client_here_can_use(host: str, url: str) -> None:
    assert address("http", host, 80) == url
