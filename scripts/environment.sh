# shellcheck shell=sh
# uv leaves bytecode to the first import. If that may not write it, every start compiles all its imports.
unset PYTHONDONTWRITEBYTECODE

install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# make_environment VENV PROJECT EXTRA [OPTION ...]: create a virtual environment with the project (editable) and one of
# its extras; the options are those of `uv pip install`.
# Uses the Python that PYTHON names, else the first that is new enough.
# Creates it once, and again when pyproject.toml has changed. Uses uv if possible (8 s instead of a minute for serving,
# 25 s instead of 4.5 minutes with torch), else pip.
make_environment() {
    venv=$1 project=$2 extra=$3
    shift 3
    if [ -f "$venv/.complete" ] && cmp -s "$venv/.complete" "$project/pyproject.toml"; then
        return
    fi
    python=""
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python3.13}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    if [ -z "$python" ]; then
        echo "djl-trtllm needs Python 3.10 or newer as ${PYTHON:-python3}; none was found" >&2
        exit 1
    fi
    echo "Setting up $venv (once)" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv"
    if ! { install uv && "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --editable "${project}[$extra]" "$@"; }; then
        [ $# -eq 0 ] || exit 1
        echo "uv could not do it; trying again with pip, which takes longer" >&2
        install --editable "${project}[$extra]"
    fi
    cp "$project/pyproject.toml" "$venv/.complete"
}
