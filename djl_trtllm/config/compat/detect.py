"""Find the configuration files of a model and their formats.

A directory may hold several: a repository compiled by DJL Serving has a `serving.properties` and a `config.pbtxt`.
"""

from pathlib import Path

from djl_trtllm.config.compat import triton, truss
from djl_trtllm.config.compat.truss import TRUSS_REPOSITORY
from djl_trtllm.config.sources import Layer, Source, read_properties
from djl_trtllm.files import MOST_SETTINGS_BYTES, read_file

PROPERTIES_FILE = "serving.properties"
_YAML = (".yaml", ".yml")
CONFIGURATION_SUFFIXES = (".pbtxt", ".properties", *_YAML)
"""Files that `read_source` reads without the rest of a model directory."""


def names_configuration(path: Path) -> bool:
    """Return whether `path` is itself a file that `read_source` reads, and not a directory or an archive of a model."""
    return path.exists() and not path.is_dir() and path.suffix in CONFIGURATION_SUFFIXES


def read_source(path: Path) -> list[Source]:
    """The configuration at `path`: a model directory, or a file of another server.

    Files are `serving.properties`, a Triton model repository or one `config.pbtxt` of it, and a Truss `config.yaml`. A
    directory without any of them is one empty source.
    """
    if path.suffix == ".pbtxt" and not path.is_dir():
        return [triton.read_config(path), triton.triton_presets()]
    if path.suffix in _YAML and not path.is_dir():
        return _truss(path)
    if path.suffix == ".properties" and not path.is_dir():
        return [read_properties(path)]
    sources = [read_properties(path / PROPERTIES_FILE)]
    config = path / truss.CONFIG_FILE
    if config.is_file() and _is_truss(config):
        return [*sources, *_truss(config)]
    return sources + triton.read_repository(triton.repository_files(path))


def read_model(model_dir: Path | None, model_id: str) -> list[Source]:
    """The configuration that comes with the model `model_id`, a directory seen from `model_dir` or from here.

    That is what its compiler wrote into a Triton or LMI repository's `config.pbtxt`; a `serving.properties` there is
    for serving that directory itself.
    """
    places = [Path(model_id)] if model_dir is None else [model_dir / model_id, Path(model_id)]
    directory = next((place for place in places if _is_directory(place)), None)
    if directory is None:
        return []
    known = set() if model_dir is None else {file.resolve() for file in triton.repository_files(model_dir)}
    files = triton.repository_files(directory)
    return triton.read_repository(tuple(file for file in files if file.resolve() not in known))


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # a name that no file system takes


def _truss(config: Path) -> list[Source]:
    """A `config.yaml`, and the Triton model repository that its Truss brings along."""
    files = triton.repository_files(config.parent / TRUSS_REPOSITORY)
    repository = [source for source in triton.read_repository(files) if source.layer is Layer.FOREIGN]
    return truss.read_config(config, has_repository=bool(files)) + repository


def _is_truss(config: Path) -> bool:
    try:
        return truss.is_truss(read_file(config, MOST_SETTINGS_BYTES).decode(errors="replace"))
    except OSError:
        return False
