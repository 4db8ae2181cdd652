"""What the chart of `serving/kubernetes` renders, and the schemas of Kubernetes and of custom resources.

custom_resources.json has the fields that the objects use, with their types, read from the CustomResourceDefinitions
of KEDA (8b4f083), the Prometheus operator (6adcebc), KubeRay (feeaf72), LeaderWorkerSet (024af08), the Gateway API
Inference Extension (84436a9) and the Gateway API (4564255). A field that is not there is an error: add it after a look
at the definition. With `KUBERNETES_CRDS=DIR` the definitions themselves are used too, if the folder has them
(docs/kubernetes.md).
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

FOLDER = Path(__file__).parents[2] / "serving" / "kubernetes"
CHART = FOLDER / "djl-trtllm"
NAMESPACE = "llm"
CORE = "1.33"
"""The version of Kubernetes whose schemas the objects have to follow."""
_CRDS = os.environ.get("KUBERNETES_CRDS")

Object = dict[str, Any]
FIELDS: Object = json.loads(Path(__file__).with_name("custom_resources.json").read_text())


def helm() -> Any:
    """The library. Go starts threads when it is loaded: only tests that use it have them."""
    import helm_python

    return helm_python


def rendered(values: Object | None = None, release: str = "story") -> list[Object]:
    """The objects of a release of the chart with these values, as Helm sends them. Raises HelmError."""
    return copy.deepcopy(_rendered(json.dumps(values or {}), release))


@cache
def _rendered(values: str, release: str) -> list[Object]:
    with helm().Chart.load(str(CHART)) as chart:
        files = chart.render(json.loads(values), name=release, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if not name.endswith("NOTES.txt")]
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def one(kind: str, values: Object | None = None, release: str = "story") -> Object:
    """The object of a kind in a release."""
    (found,) = [each for each in rendered(values, release) if each["kind"] == kind]
    return found


def check(found: Object) -> None:
    """Raise what is wrong with an object: with its fields, their types, and their names."""
    name = found["apiVersion"], found["kind"]
    if (kind := FIELDS["kinds"].get(" ".join(name))) is None:
        kubernetes_validate.validate(found, CORE, strict=True)
        return
    jsonschema.validate(found, {"$ref": f"#/$defs/{kind}", "$defs": FIELDS["$defs"]})
    if _CRDS is not None and name in _crds():
        jsonschema.validate(found, _crds()[name])
    for template in _pod_templates(found):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, CORE, strict=True
        )


def _pod_templates(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in ("template", "leaderTemplate", "workerTemplate"):
                yield inner
            else:
                yield from _pod_templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _pod_templates(inner)


@cache
def _crds() -> dict[tuple[str, str], Object]:
    """The schemas of the CustomResourceDefinitions in the folder KUBERNETES_CRDS, by version and kind."""
    schemas = {}
    for file in sorted(Path(str(_CRDS)).glob("*.yaml")):
        spec = yaml.safe_load(file.read_text(encoding="utf-8"))["spec"]
        for version in spec["versions"]:
            name = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
            schemas[name] = _closed(version["schema"]["openAPIV3Schema"], top=True)
    return schemas


def _closed(schema: Object, *, top: bool = False) -> Object:
    """A schema that refuses names that it does not have, as a server with strict validation does."""
    closed = {key: inner for key, inner in schema.items() if key not in ("properties", "items", "additionalProperties")}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
    if "properties" in schema:
        known = {name: _closed(inner) for name, inner in schema["properties"].items()}
        if top:
            # The API server itself knows the metadata of every object.
            known["metadata"] = {}
        kept = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
        closed |= {"properties": known, "additionalProperties": kept}
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            closed[key] = _closed(schema[key])
    return closed
