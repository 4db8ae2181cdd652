"""A small S3 for tests and benchmarks: latency, a bound for each connection, and faults where a test wants them.

It answers ListObjectsV2 in pages, HeadObject and GetObject (ranges, If-Match), DeleteObjects, PutObject and
DeleteObject with conditions, and ListMultipartUploads and AbortMultipartUpload.
What needs all of S3's semantics uses moto.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import logging
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

import pytest
from awscrt import checksums as crt

from tests.support.processes import wait_until
from tests.support.server import free_port

_SLICE = 256 * 1024
_PAGE = 1000
BUCKET = "models"


@dataclass
class Object:
    """An object in a file. `checksum` is the CRC-64/NVME header; None for objects from before S3 made them."""

    path: Path
    etag: str
    checksum: str | None
    modified: float

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass
class Request:
    """What a fault sees: the method, the key, the range (of the object's bytes) and the number of such requests."""

    method: str
    key: str
    start: int
    end: int
    count: int


class Fault(Exception):
    """Raised by a `Store.fault`: answer with this status and code instead."""

    def __init__(self, status: int, code: str, **headers: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code
        self.headers = headers


@dataclass
class Store:
    """Objects of the one bucket. `fault` may raise Fault, or return after how many bytes to cut the connection.

    `seconds` is the store's clock, which a test may move. `uploads` has the keys of incomplete uploads by their ids.
    """

    folder: Path
    latency: float = 0.0
    bytes_per_second: float = 0.0
    fault: Callable[[Request], int | None] | None = None
    objects: dict[str, Object] = field(default_factory=dict)
    uploads: dict[str, str] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    seconds: float = 1_640_995_200.0

    def put(self, key: str, content: bytes | Path, *, checksum: bool = True) -> None:
        """Add or replace an object."""
        if isinstance(content, bytes):
            # A file for each version: what is being sent stays as it is.
            path = self.folder / hashlib.sha256(key.encode() + content).hexdigest()[:24]
            fresh = path.with_suffix(".new")
            fresh.write_bytes(content)
            fresh.replace(path)
        else:
            path = content
        data = path.read_bytes()
        crc = base64.b64encode(int(crt.crc64nvme(data)).to_bytes(8, "big")).decode() if checksum else None
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        self.objects[key] = Object(path, etag, crc, self.seconds)

    def clear(self) -> None:
        """Forget objects, requests and faults."""
        self.objects.clear()
        self.uploads.clear()
        self.requests.clear()
        self.fault = None
        self.latency = self.bytes_per_second = 0.0

    def gets(self) -> list[Request]:
        """The GET requests so far."""
        return [request for request in self.requests if request.method == "GET"]


class _Handler(BaseHTTPRequestHandler):
    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(int(self.store.seconds if timestamp is None else timestamp))

    def _answer(self) -> None:
        time.sleep(self.store.latency)
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            if bucket != BUCKET:
                raise Fault(404, "NoSuchBucket")
            if self.command == "DELETE" and "uploadId" in (query := parse_qs(url.query)):
                self._abort(key, query["uploadId"][0])
            elif self.command in ("PUT", "DELETE"):
                self._write(key, body)
            elif self.command == "POST":
                self._delete_all(body)
            elif not key and "uploads" in (asked := parse_qs(url.query, keep_blank_values=True)):
                self._list_uploads(asked.get("prefix", [""])[0])
            elif not key:
                self._list(parse_qs(url.query, keep_blank_values=True))
            else:
                self._object(key, parse_qs(url.query))
        except Fault as fault:
            answer = b"" if self.command == "HEAD" else f"<Error><Code>{fault.code}</Code></Error>".encode()
            self._head(fault.status, len(answer), fault.headers)
            self.wfile.write(answer)

    def _write(self, key: str, body: bytes) -> None:
        self._check(self.command, key, 0, len(body))
        with self.store.lock:
            found = self.store.objects.get(key)
            if found is not None and self.headers.get("If-None-Match") == "*":
                raise Fault(412, "PreconditionFailed")
            if "If-Match" in self.headers:
                if found is None:
                    raise Fault(404, "NoSuchKey")
                if self.headers["If-Match"] != found.etag:
                    raise Fault(412, "PreconditionFailed")
            if self.command == "DELETE":
                self.store.objects.pop(key, None)
                self._head(204, 0, {})
                return
            self.store.put(key, body)
            self._head(200, 0, {"ETag": self.store.objects[key].etag})

    def _list_uploads(self, prefix: str) -> None:
        entries = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></Upload>"
            for upload, key in self.store.uploads.items()
            if key.startswith(prefix)
        )
        self._check("UPLOADS", "", 0, 0)
        self._respond(f"<ListMultipartUploadsResult>{entries}</ListMultipartUploadsResult>")

    def _abort(self, key: str, upload: str) -> None:
        self._check("ABORT", key, 0, 0)
        if self.store.uploads.pop(upload, None) is None:
            raise Fault(404, "NoSuchUpload")
        self._head(204, 0, {})

    def _list(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        self._check("LIST", prefix, 0, 0)
        begin = int(query.get("continuation-token", ["0"])[0])
        found = sorted(item for item in list(self.store.objects.items()) if item[0].startswith(prefix))
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_time(value.modified)}</LastModified><Size>{value.size}</Size><ETag>{escape(value.etag)}</ETag></Contents>"
            for key, value in found[begin : begin + _PAGE]
        )
        end = begin + _PAGE
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < len(found) else ""
        truncated = "true" if more else "false"
        self._respond(f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{more}{entries}</ListBucketResult>")

    def _delete_all(self, body: bytes) -> None:
        keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
        self._check("POST", "", 0, len(keys))
        if not 1 <= len(keys) <= _PAGE:
            raise Fault(400, "MalformedXML")
        with self.store.lock:
            for key in keys:
                self.store.objects.pop(key, None)
        self._respond("<DeleteResult></DeleteResult>")

    def _respond(self, document: str) -> None:
        body = document.encode()
        self._head(200, len(body), {"Content-Type": "application/xml"})
        self.wfile.write(body)

    def _object(self, key: str, query: dict[str, list[str]]) -> None:
        found = self.store.objects.get(key)
        if found is None:
            raise Fault(404, "NoSuchKey")
        start, end = 0, found.size
        asked = self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, found.size) if last else found.size
            if start >= found.size:
                raise Fault(416, "InvalidRange")
        cut = self._check(self.command, key, start, end)
        if self.headers.get("If-Match", found.etag) != found.etag:
            raise Fault(412, "PreconditionFailed")
        headers = {"ETag": found.etag, "Accept-Ranges": "bytes", "Last-Modified": self.date_time_string(found.modified)}
        if found.checksum and self.headers.get("x-amz-checksum-mode") == "ENABLED" and not asked:
            headers |= {"x-amz-checksum-crc64nvme": found.checksum, "x-amz-checksum-type": "FULL_OBJECT"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.size}"
        self._head(206 if asked else 200, end - start, headers)
        if self.command == "GET":
            self._send(found.path, start, end if cut is None else start + cut)
            if cut is not None:
                self.close_connection = True

    def _check(self, method: str, key: str, start: int, end: int) -> int | None:
        with self.store.lock:
            count = sum(1 for request in self.store.requests if (request.method, request.key) == (method, key))
            request = Request(method, key, start, end, count)
            self.store.requests.append(request)
            return self.store.fault(request) if self.store.fault is not None else None

    def _send(self, path: Path, start: int, end: int) -> None:
        began = time.monotonic()
        rate = self.store.bytes_per_second
        with path.open("rb") as file:
            at = start
            while at < end:
                sent = os.sendfile(self.connection.fileno(), file.fileno(), at, min(_SLICE, end - at))
                if not sent:
                    self.close_connection = True  # the file has become shorter
                    return
                at += sent
                if rate:
                    time.sleep(max(0.0, began + (at - start) / rate - time.monotonic()))

    def _head(self, status: int, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has gone


@contextlib.contextmanager
def s3_server(store: Store) -> Iterator[str]:
    """Serve a store; its endpoint URL."""
    with _serving(type("Handler", (_Handler,), {"store": store})) as url:
        yield url


@contextlib.contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def variables(endpoint: str, secret: str = "test") -> dict[str, str]:
    """Environment variables for clients of the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


# -- moto's AWS in this process: S3 with conditional writes, and SageMaker's control plane -----------------------------

MOTO_BUCKET = "fleet-bucket"


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """An AWS with one bucket; its endpoint URL."""
    # Seconds of imports, which collecting the tests does without.
    import boto3
    import httpx
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # Its state is the process's, and outlives the server.
        httpx.post(f"{url}/moto-api/reset", trust_env=False, timeout=60).raise_for_status()
        client(url).create_bucket(Bucket=MOTO_BUCKET)
        yield url
    finally:
        boto3.DEFAULT_SESSION = None
        server.stop()


def client(url: str, service: str = "s3", secret: str = "test") -> Any:
    """A boto3 client of it."""
    import boto3

    return boto3.session.Session("test", secret, region_name="us-east-1").client(service, endpoint_url=url)


def keys(url: str, prefix: str = "", secret: str = "test") -> list[str]:
    """The keys in the bucket."""
    return [
        entry["Key"]
        for entry in client(url, secret=secret).list_objects_v2(Bucket=MOTO_BUCKET, Prefix=prefix).get("Contents", ())
    ]


def age(suffix: str, seconds: float) -> None:
    """Let the only object whose key ends so have been written `seconds` earlier."""
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[MOTO_BUCKET]
    (aged,) = (key for name, key in bucket.keys.items() if name.endswith(suffix))
    aged.last_modified -= datetime.timedelta(seconds=seconds)


# -- MinIO, and answers that get lost ----------------------------------------------------------------------------------

MINIO, MINIO_SECRET = shutil.which("minio"), "test-secret"


@contextlib.contextmanager
def minio_server(folder: Path) -> Iterator[str]:
    """A MinIO with one bucket, whose files are in the folder; its endpoint URL."""
    assert MINIO is not None
    port = free_port()
    environ = {**os.environ, "MINIO_ROOT_USER": "test", "MINIO_ROOT_PASSWORD": MINIO_SECRET, "MINIO_UPDATE": "off"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [MINIO, "server", "--quiet", "--address", f"127.0.0.1:{port}", str(folder / "data")],
            env=environ,
            stdout=log,
            stderr=log,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _is_ready(port), 60.0, "MinIO")
        client(url, secret=MINIO_SECRET).create_bucket(Bucket=MOTO_BUCKET)
        yield url
    finally:
        process.kill()
        process.wait()


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError), contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", "/minio/health/ready")
        return connection.getresponse().status == 200
    return False


@contextlib.contextmanager
def losing(endpoint: str, lost: Callable[[str, str], bool]) -> Iterator[str]:
    """A proxy before a store, which does what it is asked; nobody hears its answer where `lost(method, path)`.

    `lost` is asked about the first attempt of a call, and not when botocore repeats it.
    """
    port = urlsplit(endpoint).port

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def relay(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with contextlib.closing(HTTPConnection("127.0.0.1", port, timeout=60)) as store:
                store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() != "expect":
                        store.putheader(name, value)
                store.endheaders(body)
                answer = store.getresponse()
                content = answer.read()
            first = self.headers.get("amz-sdk-request", "attempt=1").startswith("attempt=1")
            if first and lost(self.command, self.path):
                self.close_connection = True
                return
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", str(len(content)) if length is None else length)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay

    with _serving(Handler) as url:
        yield url


# -- A store in S3 for the tests of a folder: its conftest.py imports these --------------------------------------------


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, str]]:
    """A store for all tests, because each endpoint costs a client of its own."""
    store = Store(tmp_path_factory.mktemp("store"))
    with s3_server(store) as endpoint:
        yield store, endpoint


@pytest.fixture
def store(s3: tuple[Store, str], monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, of which this process is a client."""
    store, endpoint = s3
    store.clear()
    for name, value in variables(endpoint).items():
        monkeypatch.setenv(name, value)
    return store


@contextlib.contextmanager
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """botocore repeats at once."""
    from botocore.retries.standard import ExponentialBackoff

    with monkeypatch.context() as patch:
        patch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.0)
        yield
