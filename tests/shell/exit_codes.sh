#!/bin/bash
# Every exit code of the contract, as a script meets it. usage: exit_codes.sh MODELS ARTIFACT.pte
set -u
models=$1
artifact=$2
failed=0

expect() { # expect CODE WORDS...: runs devplan, compares the exit code, and looks at the last line
    local wanted=$1 code=0 last
    shift
    devplan "$@" >out.txt 2>err.txt || code=$?
    last=$(tail -n 1 err.txt)
    if [ "$code" != "$wanted" ]; then
        echo "devplan $*: exit $code instead of $wanted: $last"
        failed=1
    elif [ "$wanted" != 0 ] && [[ $last != "error: "*"(code $wanted)"* ]]; then
        echo "devplan $*: the last line is not the contract's: $last"
        failed=1
    fi
}

head -c 1000 "$artifact" >cut.pte
expect 0 inspect "$artifact"
expect 0 run "$artifact" --outputs good.npz
expect 0 run "$artifact" --expect good.npz
expect 0 diff "$artifact" "$artifact"
expect 0 doctor
expect 1 run "$artifact" --device emulator --require-cuda-graph
expect 2 export "$models/misspelled.py"
expect 3 export "$models/eigenvalues.py"
expect 4 run "$artifact" --seed 7 --expect good.npz
expect 5 export "$models/tiny.py" --fail-on-copy
expect 6 run "$artifact" --device cuda:77
expect 7 inspect cut.pte
[ -e tiny.pte ] && { echo "a refused export has left a file"; failed=1; }
exit $failed
