"""Errors as SageMaker's runtime sends them, for clients that use this server in its place.

boto3 raises `ModelError` by the type in a header. The fields are those of the shape `ModelError` in botocore's model of
sagemaker-runtime, the message is worded as SageMaker words it.
"""

from __future__ import annotations

from djl_trtllm.api.base import Reply
from djl_trtllm.errors import MethodNotAllowedError, UnknownModelError

_FAILED_DEPENDENCY = 424
_ERROR_TYPE = "x-amzn-errortype"


def endpoint_error(error: BaseException, reply: Reply) -> Reply:
    """What SageMaker's client gets where others get `reply`.

    boto3 raises `ValidationError` for an endpoint that is no model, and `ModelError` for all else. No method but POST
    comes from boto3: the reply to others stays.
    """
    if isinstance(error, MethodNotAllowedError):
        return reply
    if isinstance(error, UnknownModelError):
        return Reply.json({"Message": str(error)}, 400)._replace(headers=((_ERROR_TYPE, "ValidationError"),))
    content = reply.body.decode("utf-8", "replace").strip()
    side = "client" if reply.status < 500 else "server"
    body = {
        "Message": f'Received {side} error ({reply.status}) from primary with message "{content}"',
        "OriginalMessage": content,
        "OriginalStatusCode": reply.status,
    }
    answer = Reply.json(body, _FAILED_DEPENDENCY)
    return answer._replace(headers=(*reply.headers, (_ERROR_TYPE, "ModelError")))
