# What the scripts share: find Python and a compiler or say what to install, and make a virtual environment that holds
# this checkout *installed*. Sourced by scripts/up, test, check and bench; never run on its own.
#
# Two steps, each with a stamp: a wheel is built from the sources (in build/, with build tools of its own), and the wheel
# is installed into the environment that asked. A stamp is the digest of every file that the package is built from, of the
# wanted extras and of the Python that made it. Equal stamp, nothing to do: the second start costs one pass over the
# sources, and the test environment compiles nothing that the first command has compiled.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '%s\n' "$*" >&2; }

# Prints the command that installs what "python" or "compiler" stands for on this distribution.
package_hint() {
    local ids=""
    if [[ -r /etc/os-release ]]; then
        ids=$(. /etc/os-release && printf '%s %s' "${ID:-}" "${ID_LIKE:-}")
    elif [[ "$(uname -s)" == Darwin ]]; then
        ids=macos
    fi
    case "$1:$ids" in
        compiler:*debian* | compiler:*ubuntu*) echo "apt install g++" ;;
        compiler:*fedora* | compiler:*rhel*) echo "dnf install gcc-c++" ;;
        compiler:*arch*) echo "pacman -S gcc" ;;
        compiler:*suse*) echo "zypper install gcc-c++" ;;
        compiler:macos) echo "xcode-select --install" ;;
        compiler:*) echo "Debian, Ubuntu: apt install g++ · Fedora: dnf install gcc-c++ · Arch: pacman -S gcc" ;;
        python:*debian* | python:*ubuntu*) echo "apt install python3 python3-venv" ;;
        python:*fedora* | python:*rhel*) echo "dnf install python3.11" ;;
        python:*arch*) echo "pacman -S python" ;;
        python:*suse*) echo "zypper install python311" ;;
        python:macos) echo "brew install python" ;;
        python:*) echo "Debian, Ubuntu: apt install python3 python3-venv · Fedora: dnf install python3.11 · Arch: pacman -S python" ;;
    esac
}

# Sets PYTHON to an interpreter of 3.11 or newer. PYTHON in the environment wins, and is refused when too old.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            PYTHON=$candidate
            return 0
        fi
        [[ "${PYTHON:-}" != "$candidate" ]] || return 1
    done
    return 1
}

# The compiler that CMake will find: CXX if it is set, else the usual names.
find_compiler() {
    local candidate
    if [[ -n "${CXX:-}" ]]; then
        command -v "${CXX%% *}" >/dev/null
        return
    fi
    for candidate in c++ g++ clang++; do
        command -v "$candidate" >/dev/null && return 0
    done
    return 1
}

# Everything that is missing is named at once, each with the command that brings it. Exit 2 where something is.
require_tools() {
    local missing=0
    if ! find_python; then
        say "error: Python 3.11 or newer is needed and none was found."
        say "  install it:  $(package_hint python)"
        missing=1
    elif ! "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null; then
        say "error: $PYTHON has no 'venv' and 'ensurepip', which make a virtual environment."
        say "  install them:  $(package_hint python)"
        missing=1
    fi
    if ! find_compiler; then
        say "error: no C++ compiler was found; the CPU kernels are compiled on this machine."
        say "  install one:  $(package_hint compiler)"
        missing=1
    fi
    if ((missing)); then
        say "then run this command again."
        exit 2
    fi
}

# wanted_stamp PYTHON EXTRAS: what the stamp of an up-to-date environment holds. The files are those that the package is
# built from, whether or not this is a git checkout.
wanted_stamp() {
    (
        cd "$ROOT"
        find pyproject.toml CMakeLists.txt README.md LICENSE homeserve backends budget cuda_kernels hip_kernels \
            -type f ! -path '*/__pycache__/*' ! -name '*.so' ! -name '*.dylib' -print0 2>/dev/null |
            LC_ALL=C sort -z | "$1" -I -S -c '
import hashlib, sys
total = hashlib.sha256()
for path in sys.stdin.buffer.read().split(b"\0")[:-1]:
    total.update(path + b"\0")
    with open(path, "rb") as file:
        total.update(hashlib.sha256(file.read()).digest())
print(total.hexdigest(), "extras=" + sys.argv[1], " ".join(sys.version.split()))' "$2"
    )
}

# up_to_date FOLDER EXTRAS: whether the environment's stamp is the wanted one.
up_to_date() {
    [[ -x "$1/bin/python" && -f "$1/stamp" ]] && [[ "$(cat "$1/stamp")" == "$(wanted_stamp "$1/bin/python" "$2")" ]]
}

# make_environment FOLDER EXTRAS: a virtual environment with this checkout and the extras installed, if it is not so yet.
# An environment that is up to date needs neither Python of the system nor a compiler, so those are asked for after.
make_environment() {
    up_to_date "$1" "$2" && return 0
    require_tools
    # Two starts at once would build into the same folder; the second one waits and then finds the work done.
    mkdir -p "$ROOT/build"
    if command -v flock >/dev/null; then
        exec 9>"$ROOT/build/lock"
        flock -w 1800 9
    fi
    up_to_date "$1" "$2" || install_wheel "$1" "$2"
    exec 9>&-
}

# install_wheel FOLDER EXTRAS
install_wheel() {
    local folder=$1 extras=$2 wheel
    make_venv "$folder"
    rm -f "$folder/stamp"
    build_wheel
    wheel=$(ls "$ROOT"/build/wheel/*.whl)
    say "installing homeserve into $(basename "$folder")"
    pip_install "$folder" "$wheel${extras:+[$extras]}"
    # The first install leaves a homeserve of the same version as it is; this one replaces it.
    pip_install "$folder" --no-deps --force-reinstall "$wheel"
    wanted_stamp "$folder/bin/python" "$extras" >"$folder/stamp"
}

# One wheel in build/wheel. The build tools have an environment of their own, so that the persistent build folder always
# sees the same CMake and a second build compiles only what changed.
build_wheel() {
    local tools="$ROOT/build/tools"
    if [[ -f "$ROOT/build/wheel/stamp" ]] && [[ "$(cat "$ROOT/build/wheel/stamp")" == "$(wanted_stamp "$PYTHON" "")" ]]; then
        return 0
    fi
    rm -rf "$ROOT/build/wheel"
    if [[ ! -f "$tools/complete" ]]; then
        make_venv "$tools"
        pip_install "$tools" 'scikit-build-core>=0.11,<2' 'cmake>=3.22,<5' 'ninja>=1.11,<2'
        touch "$tools/complete"
    fi
    say "compiling the kernels of homeserve: 4 to 5 minutes with 2 cores; later only what has changed"
    tell_build "$tools/pip.log" 9>&- &
    local teller=$!
    PATH="$tools/bin:$PATH" pip_run "$tools" wheel -v --no-deps --no-build-isolation --wheel-dir "$ROOT/build/wheel" "$ROOT"
    kill "$teller" 2>/dev/null || true
    wait "$teller" 2>/dev/null || true
    wanted_stamp "$PYTHON" "" >"$ROOT/build/wheel/stamp"
}

# tell_build LOG: a line now and then while this script lives: how far the build is whose output goes to the log.
tell_build() {
    local began=$SECONDS told=$SECONDS step
    while sleep 1 && kill -0 $$ 2>/dev/null; do
        ((SECONDS - told < 15)) && continue
        told=$SECONDS
        step=$(grep -oE '\[[0-9]+/[0-9]+\]' "$1" 2>/dev/null | tail -n 1) || true
        say "  compiling ${step:-(preparing)}, $((SECONDS - began)) s"
    done
}

# make_venv FOLDER: an environment with a pip that works; one whose Python is gone is made anew.
make_venv() {
    if ! "$1/bin/python" -c 'import pip' 2>/dev/null; then
        say "making $(basename "$1") with $("$PYTHON" --version)"
        rm -rf "$1"
        "$PYTHON" -m venv "$1"
    fi
}

# pip_install FOLDER ARGUMENT...
pip_install() { pip_run "$1" install "${@:2}"; }

# pip_run FOLDER COMMAND ARGUMENT...: pip, quiet when it works, the end of its output when it does not.
pip_run() {
    local log="$1/pip.log"
    if ! "$1/bin/python" -m pip "$2" --no-input --disable-pip-version-check "${@:3}" >"$log" 2>&1; then
        tail -n 60 "$log" >&2
        say "error: pip $2 failed; its whole output is in $log"
        exit 2
    fi
}
