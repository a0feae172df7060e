"""Machine code for CPUs, written through LLVM; nobody outside this folder sees llvmlite."""
