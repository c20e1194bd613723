# Sourced by the other scripts: creates .venv from the lock file once, builds the compiled core if its
# sources have changed, and puts .venv on the PATH. Needs only python3 (3.11 or newer) and pip; Debian's
# python3 without python3-venv is enough. Without a C compiler the plain core is used.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-python3}"
lock=requirements/dev.lock
venv="$PWD/.venv"

fail() {
    printf 'turbopump: %s\n' "$*" >&2
    exit 1
}

command -v "$python" >/dev/null || fail "$python not found; install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "Python 3.11 or newer is required, but $python is older; set PYTHON to a newer one"

# For scripts called by scripts: there, .venv's python3 comes first on the PATH, and it has no pip.
PYTHON=$(command -v "$python")
export PYTHON

fingerprint() {
    { cat "$lock" pyproject.toml; "$python" --version; printf '%s' "$venv"; } | sha256sum | cut -d' ' -f1
}

# Sets `pip` to the command that installs into .venv.
find_pip() {
    if "$python" -m pip --version >/dev/null 2>&1; then
        pip=("$python" -m pip --python "$venv/bin/python")
    elif "$venv/bin/python" -m ensurepip >/dev/null 2>&1; then
        pip=("$venv/bin/python" -m pip)
    else
        fail "pip not found; install it (Debian: apt-get install python3-pip) and run this again"
    fi
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
}

make_venv() {
    printf 'turbopump: setting up %s; Spark is a large download (first run only)\n' "${venv#"$PWD"/}" >&2
    rm -rf "$venv"
    # --without-pip: Debian ships python3 without ensurepip; the system's pip can install into the venv.
    "$python" -m venv --without-pip "$venv"
    find_pip
    "${pip[@]}" install --quiet --quiet --require-hashes -r "$lock"
    # Without the hook that builds the core: pip would hide its warning.
    HATCH_BUILD_NO_HOOKS=true \
        "${pip[@]}" install --quiet --quiet --no-deps --no-build-isolation --editable .
    fingerprint >"$venv/.complete"
}

is_complete() {
    [ "$(cat "$venv/.complete" 2>/dev/null || true)" = "$(fingerprint)" ] &&
        "$venv/bin/python" -c 'import msgspec, numpy, pytest, turbopump' 2>/dev/null
}

# Of scripts that start at the same time, the first one installs, and the others wait for it.
make_venv_once() {
    mkdir -p build
    (
        ! command -v flock >/dev/null || flock 9
        is_complete || make_venv
    ) 9>build/setup.lock
}

is_complete || make_venv_once
# Does nothing if it is up to date.
"$venv/bin/python" hatch_build.py
export PATH="$venv/bin:$PATH"
# Tests start many processes: let them share compiled bytecode.
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE
