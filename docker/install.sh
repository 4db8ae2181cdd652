#!/bin/sh
# Install the project's dependencies beside the image's packages: install.sh PYPROJECT LOCKED [EXTRA ...]
#
# The image's packages do not change: TensorRT-LLM's release image is a set of versions that work together. A package that
# is older than PYPROJECT asks for is the exception (uvicorn, of which TensorRT-LLM takes any version): it is replaced, and
# this fails if a package of the image then lacks what it requires. New packages have the versions and hashes in LOCKED
# (scripts/lock writes it). Nothing else is fetched: where the two together are not what PYPROJECT asks for, this fails and
# names the package.
set -eu
pyproject=$1 locked=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Not `pip freeze`: for a package installed from a file it prints the file instead of the version.
python3 -m pip list --format=freeze >"$work/installed"
python3 -m pip check | sort >"$work/broken" || true
# Writes what is asked for, and the packages of the image that stay.
python3 - "$work" "$pyproject" "$@" <<'END'
import pathlib, sys, tomllib
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

work = pathlib.Path(sys.argv[1])
project = tomllib.loads(pathlib.Path(sys.argv[2]).read_text())["project"]
wanted = project["dependencies"] + [line for extra in sys.argv[3:] for line in project["optional-dependencies"][extra]]
# An extra that includes another one.
name = project["name"]
while nested := [line for line in wanted if line.startswith(f"{name}[")]:
    wanted = [line for line in wanted if line not in nested]
    for line in nested:
        for extra in line[len(name) + 1 :].rstrip("]").split(","):
            wanted += project["optional-dependencies"][extra]
(work / "requirements").write_text("\n".join(wanted) + "\n")

asked = [requirement for requirement in map(Requirement, wanted) if not requirement.marker or requirement.marker.evaluate()]
with open(work / "kept", "w") as kept:
    for line in (work / "installed").read_text().splitlines():
        package, _, version = line.partition("==")
        lacking = [
            requirement
            for requirement in asked
            if canonicalize_name(requirement.name) == canonicalize_name(package)
            and not requirement.specifier.contains(version, prereleases=True)
        ]
        if lacking:
            print(f"replacing {package} {version} of the image: {lacking[0]} is asked for")
        else:
            print(line, file=kept)
END
# A package has a line with its version, which ends in a backslash, and lines with its hashes.
awk -F '==' '
    NR == FNR { name = tolower($1); gsub(/[-_.]+/, "-", name); there[name] = 1; next }
    /^[a-z0-9]/ { name = $1; sub(/\[.*/, "", name) }
    !(name in there)
' "$work/kept" "$locked" >"$work/new"

python3 -m pip install --require-hashes --no-deps --requirement "$work/new"
python3 -m pip install --no-index --constraint "$work/kept" --requirement "$work/requirements"
python3 -m pip check | sort >"$work/broken-now" || true
# A new package that nothing requires beside the image's versions is no harm.
if comm -13 "$work/broken" "$work/broken-now" | awk '
    { name = tolower($1); sub(/==.*/, "", name); gsub(/[-_.]+/, "-", name) }
    NR == FNR { there[name] = 1; next }
    name in there
' "$work/installed" - | grep .; then
    echo "install.sh: packages of the image lack what they require (above)" >&2
    exit 1
fi
