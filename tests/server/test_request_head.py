from __future__ import annotations

import httptools
import pytest

from djl_trtllm.server.request_head import announces_body, refused, without_offer


@pytest.mark.parametrize(
    ("headers", "announced"),
    [
        ([], False),
        ([(b"host", b"a"), (b"content-length", b"0")], False),
        ([(b"content-length", b"7"), (b"host", b"a")], True),
        ([(b"transfer-encoding", b"chunked")], True),
    ],
)
def test_a_body_is_announced_by_its_length_or_its_encoding(headers: list[tuple[bytes, bytes]], announced: bool) -> None:
    assert announces_body(headers) is announced


def test_a_head_without_its_offer_is_otherwise_the_same() -> None:
    parser = httptools.HttpRequestParser(object())
    parser.feed_data(b"POST /a?b HTTP/1.1\r\nhost: c\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\n")
    headers = [(b"host", b"c"), (b"upgrade", b"h2c"), (b"content-length", b"1")]
    expected = b"POST /a?b HTTP/1.1\r\nhost: c\r\ncontent-length: 1\r\n\r\n"
    assert without_offer(parser, b"/a?b", headers) == expected


@pytest.mark.parametrize(
    ("method", "url", "reported"),
    [
        (b"GET", b"/a?b", ("GET", "/a")),
        (b"", b"", ("-", "-")),
        (b"GET", b"?b", ("-", "-")),
        (b"PUT", b"/\xe9", ("PUT", "/é")),
    ],
)
def test_a_refused_request_is_reported_with_what_there_is_of_its_head(
    method: bytes, url: bytes, reported: tuple[str, str]
) -> None:
    served = refused(method, url, [(b"x-trace", b"story-1")], "X-Trace")
    assert (served.id, served.method, served.path) == ("story-1", *reported)
    assert refused(method, url, [(b"x-other", b"story-1")], "X-Trace").id != "story-1"
