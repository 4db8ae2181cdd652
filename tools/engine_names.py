"""Reads the flags and fields of engines, and compares them with `djl_trtllm/translate/names.json`; nothing is run.

`python -m tools.engine_names` compares what is installed here, and `ENGINE=VERSION=DIR` an unpacked wheel: vllm,
sglang, truss and a worker of Dynamo (dynamo.vllm) by their package folder, trtllm-serve by a folder with
`trtllm_serve_cli.yaml` of TensorRT-LLM's `tests/unittest/api_stability/references` (`tools/tensorrt_llm` has that of
1.4.0rc1). Status 1 where something differs. `--write` makes the table of an engine from its versions, the oldest first:
the last one's names, and those that it dropped.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from djl_trtllm.backends.installed import classes_of, statements
from djl_trtllm.backends.tensorrt_llm.names import members
from djl_trtllm.files import read_table
from djl_trtllm.translate import translation
from tools.tensorrt_llm import manifest
from tools.vllm.names import declared_arguments

TABLE = Path(translation.__file__).with_name("names.json")
_SWITCHES = ("store_true", "store_false", "BooleanOptionalAction", "StoreTrue")


@dataclass
class Found:
    """The names of one version with their types, and other spellings of them."""

    names: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, flags: Sequence[str], kind: str) -> None:
        """Take in one flag with its spellings: a name that is known already is the one that the others mean."""
        spelled = [translation.bare(flag) for flag in flags]
        known = next((name for name in spelled if name in self.names), None)
        name = known or next(name for name in spelled if len(name) > 1)
        self.names.setdefault(name, kind)
        self.aliases |= {other: name for other in spelled if other != name and other not in self.names}

    def take_flags(self, file: Path) -> Found:
        """Take in what `add_argument("--name", "-n", ...)` and Dynamo's `add_argument(flag_name="--name", ...)` add."""
        for call in (node for node in _walk(file) if isinstance(node, ast.Call)):
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            words = {word.arg: word.value for word in call.keywords}
            parts = (*call.args, words.get("flag_name"), words.get("obsolete_flag"))
            texts = [text for part in parts for text in _texts(part)]
            flags = [text for text in texts if text.startswith("-") and text != "--version"]
            if called not in ("add_argument", "add_negatable_bool_argument") or not any(f[:2] == "--" for f in flags):
                continue
            action = ast.unparse(words.get("action", ast.Constant("")))
            switch = called != "add_argument" or any(each in action for each in _SWITCHES)
            kind = words.get("type", words.get("arg_type"))
            self.add(flags, "bool" if switch else "str" if kind is None else ast.unparse(kind))
        return self


def vllm(package: Path) -> Found:
    """The flags of `vllm serve`, with the arguments of EngineArgs, which `backends/vllm/names.json` has too."""
    found = Found(dict(declared_arguments(package)))
    files = [*sorted((package / "entrypoints").rglob("cli_args.py")), package / "engine" / "arg_utils.py"]
    classes = classes_of(*files)
    for name in ("FrontendArgs", "AsyncEngineArgs"):
        found.names = classes.get(name, {}) | found.names
    for file in files:
        found.take_flags(file)
    return found


def sglang(package: Path) -> Found:
    """The flags of `sglang.launch_server`: fields of ServerArgs, which are in `arg_groups` since 0.5.10 or so.

    There a field is `A[int, Arg(help="...", aliases=["--tensor-parallel-size"])]`.
    """
    found = Found()
    files = sorted((package / "srt" / "arg_groups" / "fields").glob("*.py"))
    for item in (item for file in files for node in statements(file) for item in getattr(node, "body", ())):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        words = {word.arg: word.value for word in ast.walk(item.annotation) if isinstance(word, ast.keyword)}
        inside = getattr(item.annotation, "slice", None)
        if isinstance(inside, ast.Tuple) and not item.target.id.startswith("_") and "no_cli" not in words:
            flags = [*_texts(words.get("cli_name")), *_texts(words.get("aliases"))]
            name = flags[0] if "cli_name" in words else item.target.id
            found.add([name, *flags], ast.unparse(inside.elts[0]))
    server = package / "srt" / "server_args.py"
    found.names = classes_of(server).get("ServerArgs", {}) | found.names
    return found.take_flags(server)


def truss(package: Path) -> Found:
    """The paths of `trt_llm` with `inference_stack: v2`, from the models of `truss/base/trt_llm_config.py`."""
    file, found = package / "base" / "trt_llm_config.py", Found()
    assigned = [node for node in _walk(file) if isinstance(node, ast.Assign)]
    modified = [node.value for node in assigned if ast.unparse(node.targets[0]) == "allowed_modify_fields"]
    permitted, classes = [text for value in modified for text in _texts(value)], classes_of(file)
    pending = [("trt_llm", "TRTLLMConfigurationV2")]
    while pending:
        path, kind = pending.pop()
        inner, depth = kind.removeprefix("Optional[").removesuffix("]"), path.count(".")
        if path.startswith("trt_llm.build.") and path.split(".")[2] not in permitted:
            continue
        if classes.get(inner) and depth <= _DEEPEST:
            pending += [(f"{path}.{name}", kind) for name, kind in classes[inner].items()]
        else:
            found.names[path] = kind
    return found


_DEEPEST = 3  # a draft model may have a draft model of its own


def dynamo(package: Path, worker: str) -> Found:
    """Dynamo's own flags of one of its workers: those of all of them, and its own."""
    found = Found().take_flags(package / "common" / "configuration" / "groups" / "runtime_args.py")
    return found.take_flags(package / worker / "backend_args.py")


def trtllm_serve(folder: Path) -> Found:
    """The flags of `trtllm-serve serve`, and the paths of its YAML file: the table's and the manifest's."""
    found = Found(dict.fromkeys(manifest.paths(manifest.PATHS), ""))
    found.names |= {path: member.type for path, member in manifest.tabled(manifest.VERSION)}
    found.names |= {name: member.type for name, member in members("LLM.pytorch", manifest.VERSION).items()}
    found.names.setdefault("model", "str")
    fields = set(found.names)
    options = yaml.safe_load((folder / "trtllm_serve_cli.yaml").read_text(encoding="utf-8"))
    for name, option in options["commands"]["serve"]["options"].items():
        found.add([name, *option["flags"]], option["type"])
    for name in set(found.names) - fields:
        kind = found.names.pop(name)
        target = _INSIDE.get(name, f"--{name}")
        found.names.setdefault(target, kind)
        found.aliases = {other: target if name == known else known for other, known in found.aliases.items()}
        found.aliases[name] = target
    return found


# Flags that are arguments of the YAML file under another name. The other flags that it does not have get `--` in front.
_INSIDE = {
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "kv_cache_dtype": "kv_cache_config.dtype",
}
READERS: Mapping[str, Callable[[Path], Found]] = {
    "vllm": vllm,
    "sglang": sglang,
    "trtllm-serve": trtllm_serve,
    "truss": truss,
    **{worker: partial(dynamo, worker=worker.removeprefix("dynamo.")) for worker in translation.WORKERS},
}


def _texts(node: ast.expr | None) -> list[str]:
    """The texts of a constant, or of the members of a list."""
    parts = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def _walk(file: Path) -> Iterator[ast.AST]:
    return (node for statement in statements(file) for node in ast.walk(statement))


def rows(engine: str, versions: Mapping[str, Path]) -> dict[str, Any]:
    """The table of one engine. `dropped` has the last version read with the name and the first one without it."""
    found = {version: READERS[engine](folder) for version, folder in versions.items()}
    newest = list(found)[-1]
    names, aliases = found[newest].names, found[newest].aliases
    if not names:
        raise SystemExit(f"{engine} {newest}: nothing can be read in {versions[newest]}")
    dropped: dict[str, list[str]] = {}
    for earlier, later in zip(list(found), list(found)[1:], strict=False):
        gone = {*found[earlier].names, *found[earlier].aliases} - {*found[later].names, *found[later].aliases}
        dropped |= {name: [earlier, later] for name in gone - {*names, *aliases} if len(name) > 1}
    if engine == "vllm":
        names = {name: kind for name, kind in names.items() if name not in declared_arguments(versions[newest])}
    parts: dict[str, dict[str, Any]] = {"names": names, "aliases": aliases, "dropped": dropped}
    return {"version": newest, **{part: dict(sorted(pairs.items())) for part, pairs in parts.items()}}


def written(table: Mapping[str, Any]) -> str:
    """The text of the table: a line for each name."""
    pairs = re.compile(r'\[\n("[^"\n]*"),\n("[^"\n]*")\n\]')
    return pairs.sub(r"[\1, \2]", json.dumps(table, indent=0)) + "\n"


def differences(engine: str, version: str, folder: Path) -> list[str]:
    """What the engine has otherwise than the table says, one line each."""
    own, read = json.loads(TABLE.read_text(encoding="utf-8"))[engine], rows(engine, {version: folder})
    lines = [] if own["version"] == version else [f"{engine}: the table is of {own['version']}, this is {version}"]
    for part in ("names", "aliases"):
        for name in sorted({*own[part], *read[part]}):
            ours, theirs = (found[part].get(name, "nothing") for found in (own, read))
            lines += [f"{engine} {name}: {ours} in the table, {theirs} in {version}"] if ours != theirs else []
    return lines


def installed() -> Iterator[tuple[str, str, Path]]:
    """The engines of this environment: name, version and package folder."""
    for engine, row in read_table("engines.toml", translation.__package__).items():
        spec = importlib.util.find_spec(engine.partition(".")[0]) if "packages" in row else None
        places = [] if spec is None else list(spec.submodule_search_locations or ())
        versions = [
            d.version for d in importlib.metadata.distributions() if d.metadata["Name"] in row.get("packages", ())
        ]
        yield from ((engine, version, Path(places[0])) for version in versions[:1] if places)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; the status."""
    parser = argparse.ArgumentParser(prog="python -m tools.engine_names", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*", metavar="ENGINE=VERSION=DIR")
    parser.add_argument("--write", action="store_true", help="make the tables of these engines")
    options = parser.parse_args(argv)
    given = [(engine, version, Path(folder)) for engine, version, folder in (e.split("=") for e in options.engines)]
    if options.write:
        table = json.loads(TABLE.read_text(encoding="utf-8"))
        for engine in {engine for engine, _, _ in given}:
            table[engine] = rows(engine, {version: folder for name, version, folder in given if name == engine})
        TABLE.write_text(written(table), encoding="utf-8")
        return 0
    found = given or list(installed())
    if not found:
        parser.error("no engine is installed here: name an unpacked one, ENGINE=VERSION=DIR")
    lines = [line for each in found for line in differences(*each)]
    print("\n".join(lines) or "as in the table: " + ", ".join(f"{engine} {version}" for engine, version, _ in found))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
