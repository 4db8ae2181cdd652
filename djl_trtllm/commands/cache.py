"""`djl-trtllm cache`: list, verify and prune the local engine cache."""

import os
import time
from typing import Annotated

import typer
from rich.console import Console

from djl_trtllm.commands.console import errors_for_the_reader, progress_printer, say
from djl_trtllm.config import load
from djl_trtllm.engines.cache import EngineCache, Manifest, find_leftovers
from djl_trtllm.errors import EngineError, EngineMismatchError
from djl_trtllm.model.remote.s3 import S3Address
from djl_trtllm.progress import format_bytes

app = typer.Typer(help="List, verify and prune the engine cache.", no_args_is_help=True, add_completion=False)


def _cache() -> EngineCache:
    config = load(None, os.environ)
    root = config.engine_cache_dir
    if root.exists() and not root.is_dir():
        raise EngineError(f"{config.format_setting('engine_cache_dir')} is a file: expected the folder of the cache")
    return EngineCache(root)


@app.command("ls")
def list_entries() -> None:
    """List the cached engines, the most recently used first."""
    with errors_for_the_reader():
        cache = _cache()
        entries = cache.entries()
        console = Console()
        say(console, f"{cache.root}: {format_bytes(sum(entry.size for entry in entries))}")
        for entry in entries:
            compiled, options = "", ""
            try:
                if (manifest := Manifest.read(entry.path)) is not None:
                    compiled = f", compiled {manifest.created}"
                    options = "".join(f", {name}={value}" for name, value in manifest.options.items())
            except EngineMismatchError:
                compiled = ", unreadable manifest"
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used))
            facts = f"{format_bytes(entry.size)}, last used {used}{compiled}{options}"
            say(console, facts, label=f"{entry.key}:", style="bold")
        left = find_leftovers(cache.root)
        if left:
            say(console, "left by interrupted processes; `prune` removes it:")
        for item in left:
            say(console, f"  {item.path} ({format_bytes(item.size)})")


@app.command()
def verify() -> None:
    """Read every byte of every engine; exit with status 1 if one is damaged."""
    with errors_for_the_reader():
        damaged = 0
        progress = progress_printer()
        for entry in _cache().entries():
            problems = entry.verify()
            damaged += bool(problems)
            progress(f"{entry.key}: " + ("; ".join(problems) if problems else "whole"))
        if damaged:
            raise EngineError(
                f"{damaged} engines are damaged: the next start that needs one compiles it again "
                "(`djl-trtllm cache prune` removes all that are not in use)"
            )


@app.command()
def prune(
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[s3://BUCKET/PREFIX]", help="A fleet's cache (option.engine_cache) instead.", show_default=False
        ),
    ] = None,
    keep_gb: Annotated[
        float, typer.Option("--keep", help="GB to keep, most recently used (in S3: compiled) first.", min=0)
    ] = 0.0,
) -> None:
    """Remove leftovers of interrupted processes, and engines, the least recently used first; engines in use stay.

    In S3 it is not known who uses an engine: those go first that were compiled first.
    """
    with errors_for_the_reader():
        progress = progress_printer()
        if address is not None:
            from djl_trtllm.engines.fleet_cache import FleetCache

            freed = FleetCache(S3Address.parse(address)).prune(int(keep_gb * 1e9), progress)
            progress(f"{format_bytes(freed)} freed")
            return
        cache = _cache()
        left = find_leftovers(cache.root)
        for item in left:
            item.remove()
            progress(f"removed {item.path} ({format_bytes(item.size)}), left by an interrupted process")
        removed = cache.prune(int(keep_gb * 1e9))
        for entry in removed:
            progress(f"removed {entry.key} ({format_bytes(entry.size)})")
        freed = sum(item.size for item in left) + sum(entry.size for entry in removed)
        progress(f"{format_bytes(freed)} freed; {len(cache.entries())} engines are left")
