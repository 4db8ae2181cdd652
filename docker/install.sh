#!/bin/sh
# Install the project's dependencies beside the image's packages: install.sh PYPROJECT LOCKED [EXTRA ...]
#
# The image's packages do not change: TensorRT-LLM's release image is a set of versions that work together. New packages
# have the versions and hashes in LOCKED (scripts/lock writes it).
set -eu
pyproject=$1 locked=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Not `pip freeze`: for a package installed from a file it prints the file instead of the version.
python3 -m pip list --format=freeze >"$work/installed"
# A package has a line with its version, which ends in a backslash, and lines with its hashes.
awk -F '==' '
    NR == FNR { name = tolower($1); gsub(/[-_.]+/, "-", name); there[name] = 1; next }
    /^[a-z0-9]/ { name = $1; sub(/\[.*/, "", name) }
    !(name in there)
' "$work/installed" "$locked" >"$work/new"
python3 - "$pyproject" "$@" >"$work/requirements" <<'END'
import sys, tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"] + [line for extra in sys.argv[2:] for line in project["optional-dependencies"][extra]]
# An extra that includes another one.
name = project["name"]
while nested := [line for line in wanted if line.startswith(f"{name}[")]:
    wanted = [line for line in wanted if line not in nested]
    for line in nested:
        for extra in line[len(name) + 1 :].rstrip("]").split(","):
            wanted += project["optional-dependencies"][extra]
print(*wanted, sep="\n")
END

python3 -m pip install --require-hashes --no-deps --requirement "$work/new"
# What is not locked: other extras, and versions that do not fit beside the image's packages. Usually nothing.
python3 -m pip install --constraint "$work/installed" --requirement "$work/requirements"
