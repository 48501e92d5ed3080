#!/usr/bin/env bash
# What a release must pass beyond .ci/run: a clone, the wheel and the sdist in bare environments, as a new user has them
# (no variables, an empty home), and the demo in Firefox. Nothing is uploaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

root=$PWD
work=$(mktemp -d)
python=$(command -v python3.11 || command -v python3)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/home" "$work/empty"

say() { printf '\n== %s\n' "$*"; }
bare=(env -i HOME="$work/home" PATH="$(dirname "$python"):/usr/local/bin:/usr/bin:/bin" LANG=C.UTF-8)

# Waits for an address, two minutes at most.
answers() { for _ in $(seq 120); do curl -sf "$1" >/dev/null && return; sleep 1; done; echo "nothing at $1" >&2; return 1; }

say "wheel and sdist"
.venv/bin/python -m hatchling build -d "$work/dist"
ls -l "$work/dist"

for kind in whl tar.gz; do
    say "$kind in an environment of its own"
    package=$(ls "$work"/dist/*."$kind")
    "${bare[@]}" "$python" -m venv "$work/$kind"
    "${bare[@]}" "$work/$kind/bin/pip" install -q -c "$root/constraints.txt" "hf-paged[server,demo] @ file://$package"
    cd "$work/empty"
    "${bare[@]}" "$work/$kind/bin/hf-paged" run --limit 4
    "${bare[@]}" "$work/$kind/bin/hf-paged" models llama qwen3
    "${bare[@]}" "$work/$kind/bin/python" -c 'import hf_paged, pathlib; assert (pathlib.Path(hf_paged.__file__).parent / "py.typed").is_file()'
    "${bare[@]}" "$work/$kind/bin/hf-paged" serve --port 8765 2>"$work/serve.log" &
    answers http://127.0.0.1:8765/ready
    curl -sf http://127.0.0.1:8765/v1/completions -H 'Content-Type: application/json' \
        -d '{"model": "tiny_lm", "prompt": "The old king", "max_tokens": 8}' | grep '"text"'
    kill $! && wait $! || true
    "${bare[@]}" "$work/$kind/bin/hf-paged" demo --port 8766 &
    answers http://127.0.0.1:8766/
    kill $! && wait $! || true
    cd "$root"
done

say "the README's commands in a fresh clone"
git clone -q . "$work/clone"
cd "$work/clone"
"${bare[@]}" "$python" -m venv "$work/own"
"${bare[@]}" "$work/own/bin/pip" install -q -c constraints.txt .
"${bare[@]}" "$work/own/bin/hf-paged" run --limit 4
"${bare[@]}" make run ARGS="--limit 4"
cd "$root"

say "the documentation"
make docs

say "the demo in Firefox"
make test-firefox

say "all of it passed"
