"""The pool's tensor, CPU memory for swapped blocks, and the CUDA stream of the steps."""
