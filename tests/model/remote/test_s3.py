from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from tests.support.s3_server import Store


@pytest.mark.parametrize(
    ("text", "bucket", "key"),
    [
        ("s3://models/team/story", "models", "team/story"),
        ("s3://models/team/story/", "models", "team/story"),
        ("s3://models//story", "models", "story"),
        ("s3://models", "models", ""),
        ("s3://models/", "models", ""),
        ("s3://models/X/storyX", "models", "X/storyX"),
    ],
)
def test_an_address_is_a_bucket_and_a_key(text: str, bucket: str, key: str) -> None:
    assert S3Address.parse(text) == S3Address(bucket, key)
    assert str(S3Address.parse(text)) == f"s3://{bucket}/{key}"
    assert is_s3(text)


@pytest.mark.parametrize("text", ["s3://", "s3:///key", "/opt/ml/model", "models/story", "hf://acme/story", ""])
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(DownloadError, match=f"{text} is not an S3 address: expected s3://BUCKET/PREFIX"):
        S3Address.parse(text)


def test_names_lie_below_an_address() -> None:
    assert S3Address("models", "team").below("x/y") == "team/x/y"
    assert S3Address("models", "").below("x") == "x"


# -- what is raised ------------------------------------------------------------------------------------------------


def said(error: Exception) -> str:
    with pytest.raises(DownloadError) as caught, s3.download_errors("s3://models/it"):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def answer(code: str, status: int = 400, message: str = "", /, **headers: str) -> ClientError:
    metadata: Any = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}, "GetObject")


DENIED = (
    "access is denied: the role or user needs s3:GetObject and s3:ListBucket there, and to write s3:PutObject and "
    "s3:DeleteObject (without s3:ListBucket a missing object looks the same)"
)
EXPIRED = "the credentials have expired: renew them (`aws sso login`, a new session token), or use a role"


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("NoSuchBucket", "there is no such bucket: check its name, and AWS_ENDPOINT_URL if the store is not AWS"),
        ("NoSuchKey", "there is no such object"),
        ("404", "there is no such object"),
        ("AccessDenied", DENIED),
        ("403", DENIED),
        ("ExpiredToken", EXPIRED),
        ("ExpiredTokenException", EXPIRED),
        ("TokenRefreshRequired", EXPIRED),
        ("InvalidToken", "the session token is not valid: AWS_SESSION_TOKEN belongs to AWS_ACCESS_KEY_ID"),
        ("InvalidAccessKeyId", "the access key is unknown there: check AWS_ACCESS_KEY_ID"),
        ("SignatureDoesNotMatch", "the secret does not belong to the access key: check AWS_SECRET_ACCESS_KEY"),
        ("RequestTimeTooSkewed", "this machine's clock is wrong by more than 15 minutes: set it (NTP)"),
        ("RequestExpired", "this machine's clock is wrong: set it (NTP)"),
        ("AuthorizationHeaderMalformed", "the bucket is in another region: set AWS_REGION to it"),
        ("PermanentRedirect", "the bucket is in another region: set AWS_REGION to it"),
        ("301", "the bucket is in another region: set AWS_REGION to it"),
        ("SlowDown", "the store is overloaded and kept refusing: try again later"),
        ("InvalidObjectState", "the object is archived (Glacier): restore it first"),
    ],
)
def test_an_answer_says_what_to_do(code: str, advice: str) -> None:
    assert said(answer(code)) == f"s3://models/it: {advice} ({code})"


def test_another_region_is_named() -> None:
    text = said(answer("PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"}))
    assert text.endswith("(PermanentRedirect, the bucket is in eu-west-1)")


def test_an_answer_that_nobody_knows_is_reported_as_it_is() -> None:
    assert said(answer("Teapot", 418, "short and stout")) == (
        "s3://models/it: the store answered Teapot (short and stout), status 418"
    )
    assert said(ClientError({}, "GetObject")) == "s3://models/it: the store answered  (), status 0"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (NoCredentialsError(), "there are no AWS credentials: give the machine a role, or set AWS_ACCESS_KEY_ID"),
        (
            PartialCredentialsError(provider="env", cred_var="x"),
            "there are no AWS credentials: give the machine a role",
        ),
        (CredentialRetrievalError(provider="sso", error_msg="no"), "cannot get the AWS credentials: "),
        (ProfileNotFound(profile="dev"), "The config profile (dev) could not be found: check AWS_PROFILE"),
        (EndpointConnectionError(endpoint_url="http://x"), "the store cannot be reached ("),
        (ConnectTimeoutError(endpoint_url="http://x"), "the store cannot be reached ("),
        (ParamValidationError(report="bad"), "ParamValidationError: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_fails_on_this_side_says_what_to_do(error: Exception, says: str) -> None:
    assert said(error).startswith(f"s3://models/it: {says}")


def test_the_network_and_the_endpoint_are_named() -> None:
    text = said(EndpointConnectionError(endpoint_url="http://x"))
    assert text.endswith("): check the network, the region and AWS_ENDPOINT_URL")


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(ValueError, match="mine"), s3.download_errors("it"):
        raise ValueError("mine")


def test_the_status_of_an_answer() -> None:
    assert s3.status(answer("x", 412)) == 412
    assert s3.status(ClientError({}, "GetObject")) == 0


# -- the client ----------------------------------------------------------------------------------------------------


def test_one_client_serves_until_the_environment_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = s3.client()
    monkeypatch.setenv("PATH", "/elsewhere")
    assert s3.client() is first
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert s3.client() is not first
    assert s3.client().meta.region_name == "eu-west-1"


def test_the_client_is_patient_and_has_connections_enough(store: Store) -> None:
    config = s3.client().meta.config
    assert (config.max_pool_connections, config.connect_timeout, config.read_timeout) == (64, 10, 30)
    assert config.retries == {"mode": "standard", "total_max_attempts": 6}


def test_a_client_that_cannot_be_made_is_reported(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(DownloadError, match=r"S3: .*no-such-profile.*check AWS_PROFILE"):
        s3.client()
