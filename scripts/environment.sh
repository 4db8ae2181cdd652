# shellcheck shell=sh
# uv leaves bytecode to the first import. If that may not write it, every start compiles all its imports.
unset PYTHONDONTWRITEBYTECODE

install() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# make_environment VENV PROJECT EXTRA[,EXTRA...] [OPTION ...]: create a virtual environment with the project (editable)
# and these extras: with the versions of uv.lock, or those that `uv pip install OPTION ...` chooses.
# make_environment VENV PROJECT --only-group=GROUP: one with the locked packages of a dependency group alone.
# Uses the Python that PYTHON names, else the first that is new enough.
# Creates it once, and again when pyproject.toml, uv.lock or the extras have changed. Uses uv if possible (8 s instead of a minute for
# serving, 25 s instead of 4.5 minutes with torch), else pip.
make_environment() {
    venv=$1 project=$2 extra=$3
    shift 3
    if asked_for | cmp -s - "$venv/.complete"; then
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
    if [ $# -gt 0 ]; then
        install uv
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --editable "${project}[$extra]" "$@"
    elif ! { install uv && sync_environment; }; then
        case $extra in --only-group=*) exit 1 ;; esac
        echo "uv could not do it; trying again with pip, which takes longer and chooses the versions itself" >&2
        install --editable "${project}[$extra]"
    fi
    asked_for >"$venv/.complete"
}

# One extra is what the environment's folder is for; several may change.
asked_for() {
    cat "$project/pyproject.toml" "$project/uv.lock"
    case $extra in *,*) echo "$extra" ;; esac
}

# --inexact keeps uv itself.
sync_environment() {
    set --
    case $extra in
    --*) set -- "$extra" ;;
    *) for each in $(echo "$extra" | tr , ' '); do set -- "$@" "--extra=$each"; done ;;
    esac
    UV_PROJECT_ENVIRONMENT=$venv "$venv/bin/uv" sync --quiet --locked --inexact --project "$project" \
        --config-file "$project/tools/uv.toml" --python "$venv/bin/python" "$@"
}
