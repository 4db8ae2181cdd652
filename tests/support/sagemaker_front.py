"""SageMaker around moto: endpoints that moto's control plane has made are answered by real servers.

A client that has `SageMaker.variables()` in its environment speaks to moto, except for invocations. Those go to a
front that does what SageMaker's hosting does: it fetches the model's archive from S3, opens it in a directory, starts
the container's command (`djl-trtllm serve`) on it and passes requests on to `/invocations`.
"""

from __future__ import annotations

import contextlib
import json
import tarfile
import threading
from binascii import crc32
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from struct import pack
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import botocore.config
import httpx
from botocore.exceptions import ClientError

from tests.support.processes import PATIENCE
from tests.support.s3 import moto_server
from tests.support.server import Server, serving

REGION = "us-east-1"
ROLE_NAME = "SageMakerRole"
_OPERATIONS = {
    "invocations": "InvokeEndpoint",
    "invocations-response-stream": "InvokeEndpointWithResponseStream",
}


def event(payload: bytes, headers: Mapping[str, str]) -> bytes:
    """A message of AWS's event stream: lengths and their CRC, headers that are strings, payload, CRC of it all."""
    fields = b"".join(
        pack("!B", len(name)) + name.encode() + pack("!BH", 7, len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = pack("!II", 16 + len(fields) + len(payload), len(fields))
    message = prelude + pack("!I", crc32(prelude)) + fields + payload
    return message + pack("!I", crc32(message))


def payload_part(content: bytes) -> bytes:
    """The event with a piece of an answer."""
    headers = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}
    return event(content, headers)


@dataclass
class Hosted:
    """An endpoint's server, and the directory that is its /opt/ml/model."""

    server: Server
    model: Path
    image: str


@dataclass
class SageMaker:
    """An AWS account with a role, and what its endpoints run. `environ` is the image's own environment."""

    moto: str
    front: str
    scratch: Path
    environ: Mapping[str, str]
    running: contextlib.ExitStack
    role: str = ""
    credentials: dict[str, str] = field(default_factory=dict)
    hosted: dict[str, Hosted] = field(default_factory=dict)
    forwarded: list[dict[str, str]] = field(default_factory=list)
    credentials_given: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def variables(self) -> dict[str, str]:
        """The environment of a client that has taken on the role, as in a notebook."""
        return {
            "AWS_ENDPOINT_URL": self.moto,
            "AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME": self.front,
            "AWS_ACCESS_KEY_ID": self.credentials["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": self.credentials["SecretAccessKey"],
            "AWS_SESSION_TOKEN": self.credentials["SessionToken"],
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def client(self, service: str) -> Any:
        """A boto3 client of the role's."""
        return boto3.session.Session(
            self.credentials["AccessKeyId"],
            self.credentials["SecretAccessKey"],
            self.credentials["SessionToken"],
            region_name=REGION,
        ).client(service, endpoint_url=self.front if service == "sagemaker-runtime" else self.moto)

    def take_role(self) -> None:
        """Make the role, and take it on."""
        root = boto3.session.Session("test", "test", region_name=REGION)
        trust = {"Effect": "Allow", "Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
        made = root.client("iam", endpoint_url=self.moto).create_role(
            RoleName=ROLE_NAME,
            AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trust]}),
        )
        self.role = made["Role"]["Arn"]
        taken = root.client("sts", endpoint_url=self.moto).assume_role(RoleArn=self.role, RoleSessionName="SageMaker")
        self.credentials = {**taken["Credentials"], "Expiration": taken["Credentials"]["Expiration"].isoformat()}

    def endpoint(self, name: str) -> Hosted:
        """What answers for an endpoint; started when it is first asked for. Raises ClientError: no such endpoint."""
        with self._lock:
            control = self.client("sagemaker")
            described = control.describe_endpoint(EndpointName=name)
            if name not in self.hosted:
                self.hosted[name] = self._host(control, described)
            return self.hosted[name]

    def _host(self, control: Any, endpoint: dict[str, Any]) -> Hosted:
        config = control.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
        (variant,) = config["ProductionVariants"]
        container = control.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
        folder = self.scratch / endpoint["EndpointName"]
        model = folder / "opt" / "ml" / "model"
        model.mkdir(parents=True)
        address = urlsplit(container["ModelDataUrl"])
        archive = folder / "fetched.tar.gz"
        self.client("s3").download_file(address.netloc, address.path.lstrip("/"), str(archive))
        with tarfile.open(archive) as opened:
            opened.extractall(model, filter="data")
        for path in (model, *model.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)  # containers may read it only
        given = {
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.front}/credentials",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": self.moto,
        }
        settings = {**self.environ, **given, **container.get("Environment", {})}
        server = self.running.enter_context(serving(model, folder, **settings))
        return Hosted(server, model, container["Image"])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    aws: SageMaker

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        """The role's credentials, as containers get them."""
        given = self.aws.credentials
        self.aws.credentials_given += 1
        names = {"AccessKeyId", "SecretAccessKey", "Expiration"}
        self._reply(200, {name: given[name] for name in names} | {"Token": given["SessionToken"]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        _, endpoints, name, action = unquote(urlsplit(self.path).path).split("/")
        assert endpoints == "endpoints"
        try:
            hosted = self.aws.endpoint(name)
        except ClientError:
            self._reply(400, {"Message": f"Endpoint {name} not found."}, **{"x-amzn-errortype": "ValidationError"})
            return
        headers = self._forwarded(_OPERATIONS[action])
        self.aws.forwarded.append(headers)
        url = f"{hosted.server.url}/invocations"
        with (
            httpx.Client(trust_env=False, timeout=PATIENCE) as http,
            http.stream("POST", url, content=body, headers=headers) as answer,
        ):
            if answer.status_code >= 400:
                answer.read()
                told = {"OriginalStatusCode": answer.status_code, "OriginalMessage": answer.text}
                told["Message"] = f"Received error ({answer.status_code}) from primary with message {answer.text!r}"
                self._reply(424, told, **{"x-amzn-errortype": "ModelError"})
            elif action == "invocations":
                self._send(200, answer.read(), answer.headers["content-type"])
            else:
                self._stream(answer)

    def _forwarded(self, operation: str) -> dict[str, str]:
        """The headers that reach the container."""
        names = ("X-Amzn-SageMaker-Custom-Attributes", "X-Amzn-SageMaker-Inference-Id", "Content-Type", "Accept")
        headers = {name: self.headers[name] for name in names if self.headers[name]}
        if "X-Amzn-SageMaker-Accept" in self.headers:
            headers["Accept"] = self.headers["X-Amzn-SageMaker-Accept"]
        return headers | {"X-Amzn-SageMaker-Forwarded-Api": operation}

    def _stream(self, answer: httpx.Response) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/vnd.amazon.eventstream")
        self.send_header("X-Amzn-SageMaker-Content-Type", answer.headers["content-type"])
        self.send_header("x-Amzn-Invoked-Production-Variant", "AllTraffic")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in answer.iter_raw():
            self._chunk(payload_part(part))
        self._chunk(b"")

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))

    def _reply(self, status: int, content: dict[str, Any], **headers: str) -> None:
        self._send(status, json.dumps(content).encode(), "application/json", **headers)

    def _send(self, status: int, content: bytes, content_type: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        if status == 200:
            self.send_header("x-Amzn-Invoked-Production-Variant", "AllTraffic")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def sagemaker(scratch: Path, **environ: str) -> Iterator[SageMaker]:
    """An account. `environ` is what the image has in its environment; endpoints' servers end with the block."""
    front = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    front.daemon_threads = True
    thread = threading.Thread(target=front.serve_forever, args=(0.05,), daemon=True)
    try:
        with moto_server() as moto, contextlib.ExitStack() as running:
            aws = SageMaker(moto, f"http://127.0.0.1:{front.server_port}", scratch, environ, running)
            front.RequestHandlerClass = type("Handler", (_Handler,), {"aws": aws})
            aws.take_role()
            thread.start()
            yield aws
    finally:
        if thread.is_alive():
            front.shutdown()
            thread.join()
        front.server_close()


# -- boto3's client of SageMaker's runtime, with a server of a test in the place of an endpoint ------------------------


@contextmanager
def runtime_of(url: str) -> Iterator[Any]:
    """A client of the server at `url`, which asks once."""
    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=url,
        region_name="eu-west-1",
        aws_access_key_id="none",
        aws_secret_access_key="none",
        config=botocore.config.Config(retries={"max_attempts": 0}, proxies={}),
    )
    yield client
    client.close()
