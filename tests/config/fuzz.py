"""Throw generated property files and variables at the configuration, and see that nothing but ConfigError comes back.

`python -m tests.config.fuzz --runs 1000000` makes them with a plain random generator, from the names and values of all
options. `--atheris ARGUMENTS` lets atheris, where it is installed, search for inputs by coverage instead.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Mapping, Sequence

from djl_trtllm.config import Config, Source, parse_properties, read_arguments, read_environment, resolve
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.rules import check_model
from djl_trtllm.config.sources import IGNORED_VARIABLES, variables_of
from djl_trtllm.errors import ConfigError

KEYS = tuple(spelling for declared in OPTIONS.values() for spelling in declared.spellings)
VARIABLES = (
    *dict.fromkeys(name for declared in OPTIONS.values() for name in variables_of(declared.key)),
    *IGNORED_VARIABLES,
)
NAMES = tuple(OPTIONS)
MODEL_TYPES = (None, "llama", "mistral", "qwen2", "gptj", "chatglm", "baichuan", "", "\0", "falcon")
_WORDS = """true false none max auto 0 1 -1 0.5 1.0 1e5 nan inf 4096 99999999999999999999 1,2,3 [ ["a"] [[1]] [true]
a,,b , "4" K=V,K2=V2 http://[::1 https://u:p@h/x s3://b/k ~nobody é {} %s [red]"""
WORDS = (*_WORDS.split(), "8 # comment", "[1, 2]", "", " ", "\0", "\ud800", "\u2028")


class Broken(AssertionError):
    """A configuration whose resolution is not what it has to be."""


def word(choose: random.Random) -> str:
    """A value: of some option, of a list of nasty ones, or noise."""
    kind = choose.randrange(6)
    if kind == 0:
        return choose.choice(WORDS)
    if kind == 1:
        return str(choose.randint(-2, 1 << choose.randrange(1, 40)))
    if kind == 2:
        return "".join(chr(choose.randrange(1, 0x250)) for _ in range(choose.randrange(12)))
    declared = OPTIONS[choose.choice(NAMES)] if kind == 3 else None
    return declared.example if declared else f"{choose.uniform(-1, 2):.3g}"


def pair(choose: random.Random, names: Sequence[str]) -> tuple[str, str]:
    """A name and a value, which is often one that the option could have."""
    name = choose.choice(names)
    declared = OPTIONS.get(name.removeprefix("option."))
    if declared is not None and choose.random() < 0.85:
        choices = (*declared.type.choices, *declared.option.value_aliases, declared.example)
        return name, choose.choice(choices)
    if choose.random() < 0.02:
        name = name[: choose.randrange(len(name))] + choose.choice(("", "x", "_", " ", "\\u00", "=", "é"))
    return name, word(choose)


def generated(choose: random.Random) -> tuple[str, dict[str, str], list[str]]:
    """A properties file, an environment and a command line."""
    separators = ("=", ":", " ", " = ", "\\\n=")
    lines = [choose.choice(separators).join(pair(choose, KEYS)) for _ in range(choose.randrange(6))]
    environ = dict(pair(choose, VARIABLES) for _ in range(choose.randrange(4)))
    arguments = ["=".join(pair(choose, KEYS)) for _ in range(choose.randrange(2))]
    return choose.choice(("\n", "\r\n", "\r")).join(lines), environ, arguments


def resolved(text: str, environ: Mapping[str, str], arguments: Sequence[str], model_type: str | None) -> Config | None:
    """The configuration, None where it is refused as it should be. Raises Broken, and whatever else goes wrong."""
    sources: list[Source] = [*read_environment(environ), parse_properties(text, "f"), read_arguments(arguments)]
    try:
        config = check_model(resolve(sources), model_type, is_engine=len(text) % 2 == 0)
    except ConfigError as error:
        if not error.problems or not all(problem.strip() for problem in error.problems):
            raise Broken("a ConfigError without a message") from error
        return None
    if config.origins.keys() != OPTIONS.keys():
        raise Broken("a value without an origin")
    for name in config.user_set:
        declared = OPTIONS[name]
        value = getattr(config.options, name)
        if declared.type.check(value, declared.option) != value:
            raise Broken(f"{name} has a value that is none: {value!r}")
    return config


def run(runs: int, seed: int, seconds: float) -> int:
    """Run this number of cases, or as many as fit into the time; returns the exit status."""
    choose = random.Random(seed)
    begin = time.monotonic()
    accepted = done = 0
    for done in range(1, runs + 1):
        text, environ, arguments = generated(choose)
        model_type = choose.choice(MODEL_TYPES)
        try:
            accepted += resolved(text, environ, arguments, model_type) is not None
        except Exception:
            print(f"case {done} of seed {seed} fails:\n{text!r}\n{environ!r}\n{arguments!r}\n{model_type!r}")
            raise
        if done % 1000 == 0 and time.monotonic() - begin > seconds:
            break
    took = time.monotonic() - begin
    print(f"{done} cases of seed {seed} in {took:.0f} s: {accepted} accepted, {done - accepted} refused, none broken")
    return 0


def run_atheris(arguments: Sequence[str]) -> None:
    """Let atheris look for inputs: the first byte that is 0 parts the file from variables, NAME=VALUE per line."""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def one(data: bytes) -> None:
        text, _, rest = data.decode("utf-8", "surrogateescape").partition("\0")
        environ = dict(line.split("=", 1) for line in rest.split("\n") if "=" in line)
        resolved(text, environ, (), MODEL_TYPES[len(data) % len(MODEL_TYPES)])

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m tests.config.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--atheris", nargs=argparse.REMAINDER, help="run atheris with these arguments")
    parsed = parser.parse_args()
    if parsed.atheris is not None:
        run_atheris(parsed.atheris)
        return 0
    return run(parsed.runs, parsed.seed, parsed.seconds)


if __name__ == "__main__":
    sys.exit(main())
