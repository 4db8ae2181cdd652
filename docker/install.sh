#!/bin/sh
# Install the project's dependencies beside the image's packages: install.sh PYPROJECT PINS [EXTRA ...]
#
# The image's packages do not change: TensorRT-LLM's release image is a set of versions that work together. New packages
# have the versions in PINS.
set -eu
pyproject=$1 pins=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Not `pip freeze`: for a package installed from a file it prints the file instead of the version.
python3 -m pip list --format=freeze >"$work/installed"
awk -F '==' '
    { name = tolower($1); gsub(/[-_.]+/, "-", name) }
    NR == FNR { there[name] = 1; next }
    !/^#/ && !(name in there)
' "$work/installed" "$pins" >"$work/pins"
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

export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
set -- --constraint "$work/installed" --requirement "$work/requirements"
if ! python3 -m pip install --constraint "$work/pins" "$@"; then
    echo "install.sh: beside the packages of this image the versions in $pins do not fit; pip chooses others" >&2
    python3 -m pip install "$@"
fi
