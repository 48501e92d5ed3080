"""The CUDA path, on a device that isn't there (`tests/pretend_cuda`). In a process of its own: `make pretend`."""
