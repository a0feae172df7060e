#!/bin/sh
# Every kind of convolution against float64, 1,000 random problems a kind on each row of ISA: about
# half an hour on two cores. CI runs a sample. scripts/prove_kinds.sh [arguments of pytest]
set -eu
export TILEWISE_LONG=1
python -m pytest -q -n 2 "$@" tests/kernels/test_grids.py tests/kernels/test_dilated.py
for row in avx512 avx2 generic; do
    echo "calls on $row"
    TILEWISE_ISA=$row python -m pytest -q -n 2 -k random "$@" tests/conv/test_transposed.py \
        tests/conv/test_conv1d_conv3d.py tests/conv/test_transposed_volumes.py
done
