"""The patched model: one step through it, what its layers are replaced by, and its recorded graphs."""
