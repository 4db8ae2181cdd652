"""The old container's document, walked from its first line to its last: by boto3, by SageMaker's SDK, by our cells.

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
from botocore.session import Session

from tests.fakes.installation import fake_tensorrt_llm
from tests.support.s3 import MOTO_BUCKET
from tests.support.sagemaker_front import Hosted, SageMaker, sagemaker
from tests.support.server import environment

pytestmark = pytest.mark.slow

REQUIREMENT = "sagemaker>=2.240,<3"
CHECKPOINT = f"s3://{MOTO_BUCKET}/little-llama"
OLD_IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.26.0-tensorrtllm0.7.1-cu122"
NEW_IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/djl-trtllm:0.1"
INSTANCE = "ml.g4dn.2xlarge"
REQUEST = {
    "inputs": "tell me a story of the little red riding hood",
    "parameters": {"max_new_tokens": 128, "do_sample": True},
}

# -- the document's text -----------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = Path(__file__).with_name("sagemaker_walk.md")


def blocks(file: Path, language: str) -> list[str]:
    """The blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(), re.DOTALL | re.MULTILINE)


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
STRINGS = "{name: value for name, value in globals().items() if isinstance(value, str)}"
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
json.dump(values, open(sys.argv[1], "w"))
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
            account.client("s3").upload_file(str(tiny_stories / name), MOTO_BUCKET, f"little-llama/{name}")
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
    (folder / "serving.properties").write_text(filled_in(*blocks(DOCUMENT, "properties")))
    subprocess.run(["sh", "-e", "-c", *blocks(DOCUMENT, "sh")], cwd=folder, check=True, capture_output=True)
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


def run_notebook(python: str, cells: list[str], folder: Path, aws: SageMaker) -> list[Any]:
    """The values of the cells that have one. No other host is reached."""
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
        timeout=840,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    values: list[Any] = json.loads((folder / "result.json").read_text())
    return values


def engine_arguments(calls: Path) -> list[dict[str, Any]]:
    """What TensorRT-LLM's constructors got: the compiler's, and the executor's."""
    made = map(json.loads, calls.read_text().splitlines())
    return [call["arguments"] for call in made if call["call"] == "LLM.tensorrt"]


def served_as_the_document_says(hosted: Hosted, calls: Path) -> None:
    """The document's image and values are those of the container; nothing was written beside the model's file."""
    assert hosted.image == OLD_IMAGE
    below = sorted(path.relative_to(hosted.model).as_posix() for path in hosted.model.rglob("*"))
    assert below == ["model", "model/serving.properties"]
    built, loaded = engine_arguments(calls)[:2]
    wanted = {"max_batch_size": 16, "max_input_len": 256, "max_seq_len": 512}
    assert wanted.items() <= built["build_config"].items()
    assert built["tensor_parallel_size"] == loaded["tensor_parallel_size"] == 1


# -- the walk ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
def test_the_python_of_the_document_and_of_our_page_serves_and_removes_the_model(
    aws: SageMaker, archive: Path, sdk: str, tmp_path: Path
) -> None:
    """In one notebook: importing the SDK takes longer than either walk."""
    *before, cleaning = map(filled_in, blocks(DOCUMENT, "python"))
    (code,) = blocks(DOCS / "remote-models.md", "python")
    for placeholder, value in {"ACCOUNT.dkr.ecr.REGION.amazonaws.com/djl-trtllm": NEW_IMAGE, **TO_FILL_IN}.items():
        code = code.replace(placeholder, value)
    # moto knows instances of some years ago.
    code, removing = code.replace("ml.g5.2xlarge", INSTANCE).split("predictor.delete_endpoint()")
    ours = [
        code,
        "[predictor.predict(request), json.loads(line)]",
        "predictor.delete_endpoint()" + removing,
        LEFT,
        "name",
    ]
    values = run_notebook(sdk, [*before, STREAMING, STRINGS, cleaning, LEFT, *ours], archive.parent, aws)

    answer, lines, names, _, left = values[:5]
    assert list(json.loads(answer)) == ["generated_text"] and json.loads(answer)["generated_text"]
    assert len(lines) == 8
    assert "".join(line["token"]["text"] for line in lines) == lines[-1]["generated_text"]
    assert left == [[], [], []]
    assert names["role"] == aws.role
    assert names["image_uri"] == OLD_IMAGE
    assert names["model_s3_url"] == "s3://sagemaker-us-east-1-123456789012/your_s3_model_prefix/model.tar.gz"
    served_as_the_document_says(aws.hosted[names["endpoint_name"]], tmp_path / "calls.jsonl")

    (answer, last), *_, left, name = values[5:]
    assert list(answer) == ["generated_text"]
    assert {"token", "generated_text"} <= last.keys()
    assert left == [[], [], []]
    assert aws.hosted[name].image == NEW_IMAGE
    loaded = engine_arguments(tmp_path / "calls.jsonl")[-1]
    assert loaded["kv_cache_config"]["free_gpu_memory_fraction"] == 0.9


def test_the_documents_walk_by_boto3(aws: SageMaker, archive: Path, tmp_path: Path) -> None:
    name = "trt-llm-lmi-model"
    aws.client("s3").upload_file(str(archive), MOTO_BUCKET, "your_s3_model_prefix/model.tar.gz")
    control, runtime = aws.client("sagemaker"), aws.client("sagemaker-runtime")
    container = {"Image": OLD_IMAGE, "ModelDataUrl": f"s3://{MOTO_BUCKET}/your_s3_model_prefix/model.tar.gz"}
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


def test_the_cells_of_the_page_serve_scale_and_remove_the_model(
    aws: SageMaker, archive: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in aws.variables().items():
        monkeypatch.setenv(variable, value)
    aws.client("s3").upload_file(str(archive), MOTO_BUCKET, "djl-trtllm/tiny-llama/model.tar.gz")
    request, create, scale, delete = blocks(DOCS / "sagemaker.md", "python")
    names: dict[str, Any] = {}
    for cell in (create, scale, request):
        exec(cell.replace("BUCKET", MOTO_BUCKET).replace("ml.g5.2xlarge", INSTANCE), names)
    assert len(capsys.readouterr().out.split()) > 20, "a response and a stream"
    assert aws.hosted["tiny-llama"].model.is_dir()
    scaling = aws.client("application-autoscaling")
    (policy,) = scaling.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    tracking = policy["TargetTrackingScalingPolicyConfiguration"]
    assert tracking["TargetValue"] == round(0.7 * 16), "of the max_rolling_batch_size of the page"
    model = Session().get_service_model("application-autoscaling")
    known = model.shape_for("MetricType").metadata["enum"]
    assert tracking["PredefinedMetricSpecification"]["PredefinedMetricType"] in known
    exec(delete, names)
    assert aws.client("sagemaker").list_models()["Models"] == []
    assert scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"] == []
