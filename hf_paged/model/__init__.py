"""The patched model: the runner of its steps, the overrides of its layers, and its recorded graphs."""
