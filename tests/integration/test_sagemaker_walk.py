"""The old container's document, walked from its first line to its last: by boto3, by SageMaker's SDK, by `deploy`.

The control plane is moto's. What is uploaded is fetched again and served by a real server, which answers predictions.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest
from botocore.exceptions import ClientError

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.moto_server import BUCKET
from tests.support.sagemaker_front import Hosted, SageMaker, sagemaker
from tests.support.server import environment, run_cli

pytestmark = pytest.mark.slow

REQUIREMENT = "sagemaker>=2.240,<3"
CHECKPOINT = f"s3://{BUCKET}/little-llama"
OLD_IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.26.0-tensorrtllm0.7.1-cu122"
NEW_IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/djl-trtllm:0.1"
INSTANCE = "ml.g4dn.2xlarge"
REQUEST = {
    "inputs": "tell me a story of the little red riding hood",
    "parameters": {"max_new_tokens": 128, "do_sample": True},
}

# -- the document's text -----------------------------------------------------------------------------------------------

PROPERTIES = """\
option.model_id=<your model>
option.tensor_parallel_degree=1
option.max_rolling_batch_size=16 # default is 32
option.max_input_len=256 # default is 1024
option.max_output_len=256 # default is 512
"""

PACKING = """\
mkdir model
mv serving.properties model/
tar czvf model.tar.gz model/
rm -rf model
"""

CELLS = (
    """\
import boto3
import sagemaker

role = sagemaker.get_execution_role()
sess = sagemaker.session.Session()
aws_region = sess._region_name
""",
    """\
from sagemaker import Model, image_uris, serializers

# fetch TRT-LLM image uri
image_uri = image_uris.retrieve(
                framework="djl-tensorrtllm",
                region=sess.boto_session.region_name,
                version="0.26.0"
                )
                
# publish model artifacts to s3
s3_model_prefix = "your_s3_model_prefix"
bucket = sess.default_bucket()  # bucket to house artifacts
model_s3_url = sess.upload_data("mymodel.tar.gz", bucket, s3_model_prefix)
     

# create sagemaker model
model = Model(
    image_uri=image_uri,
    model_data=model_s3_url,
    role=role,
   )
""",  # noqa: W293
    """\
instance_type = "<choose_your_instance_type>"
endpoint_name = sagemaker.utils.name_from_base("trt-llm-lmi-model")
model.deploy(initial_instance_count=1,
    instance_type=instance_type,
    endpoint_name=endpoint_name,
    )

# our requests and responses will be in json format so we specify the serializer and the deserializer
predictor = sagemaker.Predictor(
        endpoint_name=endpoint_name,
        sagemaker_session=sess,
        serializer=serializers.JSONSerializer(),
        )
""",
    """\
predictor.predict(
{"inputs": "tell me a story of the little red riding hood", "parameters": {"max_new_tokens":128, "do_sample":True}}
)
""",
    """\
sess.delete_endpoint(endpoint_name)
sess.delete_endpoint_config(endpoint_name)
model.delete_model()
""",
)
TO_FILL_IN = {
    "<your model>": CHECKPOINT,
    "<choose_your_instance_type>": INSTANCE,
    "mymodel.tar.gz": "model.tar.gz",  # the document packs the one and uploads the other
}

# What the walk looks at beside the document's own cells.
STREAMING = """\
import json
from sagemaker.iterators import LineIterator

request = {"inputs": "tell me a story", "parameters": {"max_new_tokens": 8}, "stream": True}
[json.loads(line) for line in predictor.predict_stream(request, iterator=LineIterator)]
"""
LEFT = """\
listed = sess.sagemaker_client
[listed.list_endpoints()["Endpoints"], listed.list_endpoint_configs()["EndpointConfigs"],
 listed.list_models()["Models"]]
"""

# A notebook: runs each cell, and keeps the value of one that ends with an expression. The SDK asks STS at its regional
# address whatever AWS_ENDPOINT_URL says, so that this one address is replaced; and it looks whether an endpoint is in
# service after half a minute first.
NOTEBOOK = """\
import ast, json, os, sys
import sagemaker.session
sagemaker.session.sts_regional_endpoint = lambda region: os.environ["AWS_ENDPOINT_URL"]
sagemaker.session.Session.wait_for_endpoint.__defaults__ = (0.1, False)
names = {}
values = []
for cell in json.load(sys.stdin):
    *statements, last = ast.parse(cell).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        values.append(value.decode() if isinstance(value, bytes) else value)
    else:
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
json.dump({"values": values, "names": {k: v for k, v in names.items() if isinstance(v, str)}}, open(sys.argv[1], "w"))
"""


def filled_in(text: str) -> str:
    """The document's text with its placeholders replaced."""
    for placeholder, value in TO_FILL_IN.items():
        text = text.replace(placeholder, value)
    return text


# -- what is there before the walk -------------------------------------------------------------------------------------


@pytest.fixture
def aws(tmp_path: Path, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SageMaker]:
    """An account with a checkpoint in S3, whose image has TensorRT-LLM (the fake)."""
    without_account(monkeypatch)
    image = fake_tensorrt_llm(tmp_path / "image", log=tmp_path / "calls.jsonl", script={"steps_per_second": 200})
    with sagemaker(tmp_path / "instances", **image) as account:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            account.client("s3").upload_file(str(tiny_stories / name), BUCKET, f"little-llama/{name}")
        yield account


def without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's own AWS variables away."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The document's serving.properties, packed by the document's commands."""
    folder = tmp_path / "notebook"
    folder.mkdir()
    (folder / "serving.properties").write_text(filled_in(PROPERTIES))
    subprocess.run(["sh", "-e", "-c", PACKING], cwd=folder, check=True, capture_output=True)
    assert [path.name for path in folder.iterdir()] == ["model.tar.gz"]
    return folder / "model.tar.gz"


@pytest.fixture(scope="session")
def sdk() -> str:
    """A Python that has the SDK: its pins do not fit ours, so it lives in a virtual environment of its own."""
    folder = Path(__file__).parents[2] / ".venv-sagemaker"
    folder.mkdir(exist_ok=True)
    venv, complete = folder / "venv", folder / "complete"
    wanted = f"{REQUIREMENT} {sys.version}"
    python = str(venv / "bin" / "python")
    with filelock.FileLock(folder / "lock"):
        if complete.is_file() and complete.read_text() == wanted:
            return python
        shutil.rmtree(venv, ignore_errors=True)
        uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
        try:
            for command in ([sys.executable, "-m", "venv", str(venv)], [*install, "--quiet", REQUIREMENT]):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=400)
        except (subprocess.SubprocessError, OSError) as error:
            reason = f"{REQUIREMENT} cannot be installed: {error} {getattr(error, 'stderr', '')}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
        complete.write_text(wanted)
    return python


def run_notebook(python: str, cells: list[str], folder: Path, aws: SageMaker) -> dict[str, Any]:
    """The values of the cells that have one, and the strings that they have named. No other host is reached."""
    (folder / "config.yaml").write_text(
        "SchemaVersion: '1.0'\nSageMaker:\n  PythonSDK:\n    Modules:\n      TelemetryOptOut: true\n"
    )
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    ours = {"SAGEMAKER_USER_CONFIG_OVERRIDE": str(folder / "config.yaml"), "SAGEMAKER_SUPPRESS_V2_WARNING": "1"}
    environ = environment(folder, **nowhere, **aws.variables(), **ours)
    done = subprocess.run(
        [python, "-W", "ignore", "-c", NOTEBOOK, "result.json"],
        input=json.dumps(cells),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def engine_arguments(calls: Path) -> list[dict[str, Any]]:
    """What TensorRT-LLM's constructors got: the compiler's, and the executor's."""
    made = map(json.loads, calls.read_text().splitlines())
    return [call["arguments"] for call in made if call["call"] == "LLM.tensorrt"]


def served_as_the_document_says(hosted: Hosted, calls: Path) -> None:
    """The document's image and values are those of the container; nothing was written beside the model's file."""
    assert hosted.image == OLD_IMAGE
    below = sorted(path.relative_to(hosted.model).as_posix() for path in hosted.model.rglob("*"))
    assert below == ["model", "model/serving.properties"]
    built, loaded = engine_arguments(calls)
    wanted = {"max_batch_size": 16, "max_input_len": 256, "max_seq_len": 512}
    assert wanted.items() <= built["build_config"].items()
    assert built["tensor_parallel_size"] == loaded["tensor_parallel_size"] == 1


# -- the walk ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_the_documents_own_python_serves_and_removes_the_model(
    aws: SageMaker, archive: Path, sdk: str, tmp_path: Path
) -> None:
    *before, cleaning = map(filled_in, CELLS)
    result = run_notebook(sdk, [*before, STREAMING, cleaning, LEFT], archive.parent, aws)
    answer, lines, _, left = result["values"]
    assert list(json.loads(answer)) == ["generated_text"] and json.loads(answer)["generated_text"]
    assert len(lines) == 8
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert left == [[], [], []]

    names = result["names"]
    assert names["role"] == aws.role
    assert names["image_uri"] == OLD_IMAGE
    assert names["model_s3_url"] == "s3://sagemaker-us-east-1-123456789012/your_s3_model_prefix/model.tar.gz"
    served_as_the_document_says(aws.hosted[names["endpoint_name"]], tmp_path / "calls.jsonl")


@pytest.mark.timeout(900)
def test_the_code_in_our_documents_serves_and_removes_the_model(
    aws: SageMaker, archive: Path, sdk: str, tmp_path: Path
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "remote-models.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for placeholder, value in {"ACCOUNT.dkr.ecr.REGION.amazonaws.com/djl-trtllm": NEW_IMAGE, **TO_FILL_IN}.items():
        code = code.replace(placeholder, value)
    # moto knows instances of some years ago.
    code, cleaning = code.replace("ml.g5.2xlarge", INSTANCE).split("predictor.delete_endpoint()")
    cells = [code, "[predictor.predict(request), json.loads(line)]", "predictor.delete_endpoint()" + cleaning, LEFT]
    result = run_notebook(sdk, cells, archive.parent, aws)
    (answer, last), *_, left = result["values"]
    assert list(answer) == ["generated_text"]
    assert {"token", "generated_text"} <= last.keys()
    assert left == [[], [], []]
    assert aws.hosted[result["names"]["name"]].image == NEW_IMAGE
    _, loaded = engine_arguments(tmp_path / "calls.jsonl")
    assert loaded["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9


def test_the_documents_walk_by_boto3(aws: SageMaker, archive: Path, tmp_path: Path) -> None:
    name = "trt-llm-lmi-model"
    aws.client("s3").upload_file(str(archive), BUCKET, "your_s3_model_prefix/model.tar.gz")
    control, runtime = aws.client("sagemaker"), aws.client("sagemaker-runtime")
    container = {"Image": OLD_IMAGE, "ModelDataUrl": f"s3://{BUCKET}/your_s3_model_prefix/model.tar.gz"}
    variant = {"VariantName": "AllTraffic", "ModelName": name, "InstanceType": INSTANCE, "InitialInstanceCount": 1}
    control.create_model(ModelName=name, ExecutionRoleArn=aws.role, PrimaryContainer=container)
    control.create_endpoint_config(EndpointConfigName=name, ProductionVariants=[variant])
    control.create_endpoint(EndpointName=name, EndpointConfigName=name)
    control.get_waiter("endpoint_in_service").wait(EndpointName=name)

    def arguments(**request: object) -> dict[str, Any]:
        return {"EndpointName": name, "ContentType": "application/json", "Body": json.dumps({**REQUEST, **request})}

    answer = runtime.invoke_endpoint(**arguments(), InferenceId="walk-1")
    assert answer["ContentType"] == "application/json"
    assert answer["InvokedProductionVariant"] == "AllTraffic"
    assert list(json.loads(answer["Body"].read())) == ["generated_text"]
    assert aws.forwarded[0]["X-Amzn-SageMaker-Inference-Id"] == "walk-1"

    streamed = runtime.invoke_endpoint_with_response_stream(**arguments(stream=True))
    assert streamed["ContentType"] == "application/jsonlines"
    parts = [event["PayloadPart"]["Bytes"] for event in streamed["Body"]]
    lines = [json.loads(line) for line in b"".join(parts).splitlines()]
    assert len(parts) > 1
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]

    whole = runtime.invoke_endpoint_with_response_stream(**arguments())
    assert whole["ContentType"] == "application/json"
    assert json.loads(b"".join(event["PayloadPart"]["Bytes"] for event in whole["Body"]))["generated_text"]

    with pytest.raises(ClientError) as refused:
        runtime.invoke_endpoint(**arguments(parameters={"max_new_tokens": "many"}))
    assert refused.value.response["Error"]["Code"] == "ModelError"
    assert 400 <= refused.value.response["OriginalStatusCode"] < 500
    assert "max_new_tokens" in refused.value.response["OriginalMessage"]

    served_as_the_document_says(aws.hosted[name], tmp_path / "calls.jsonl")
    assert aws.credentials_given  # the checkpoint was fetched as the role
    control.delete_endpoint(EndpointName=name)
    control.delete_endpoint_config(EndpointConfigName=name)
    control.delete_model(ModelName=name)
    with pytest.raises(ClientError, match="not found"):
        runtime.invoke_endpoint(**arguments())


def test_package_and_deploy_walk_the_same_way_with_the_models_files_in_the_archive(
    tmp_path: Path, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_account(monkeypatch)
    archive = tmp_path / "model.tar.gz"
    with sagemaker(tmp_path / "instances") as aws:
        environ = environment(tmp_path, **aws.variables())
        packed = run_cli("package", str(tiny_stories), "--out", str(archive), environ=environ)
        assert packed.returncode == 0, packed.stderr
        options = ("--image", NEW_IMAGE, "--role", aws.role, "--name", "story", "--instance-type", INSTANCE)
        made = run_cli("deploy", str(archive), *options, "-e", "OPTION_MAX_INPUT_LEN=64", environ=environ)
        assert made.returncode == 0, made.stderr

        runtime = aws.client("sagemaker-runtime")
        asked = {"EndpointName": "story", "ContentType": "application/json"}
        answer = runtime.invoke_endpoint(**asked, Body=json.dumps(REQUEST))
        assert len(json.loads(answer["Body"].read())["generated_text"].split()) > 20
        with pytest.raises(ClientError, match="max_input_len is 64"):
            runtime.invoke_endpoint(**asked, Body=json.dumps({"inputs": "once upon a time " * 50}))
        assert aws.hosted["story"].image == NEW_IMAGE

        gone = run_cli("deploy", "--delete", "story", environ=environ)
        assert gone.returncode == 0, gone.stderr
        assert aws.client("sagemaker").list_models()["Models"] == []
        with pytest.raises(ClientError, match="not found"):
            runtime.invoke_endpoint(**asked, Body=json.dumps(REQUEST))
