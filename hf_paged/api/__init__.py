"""`patch`, `unpatch`, `is_supported`, and the methods that a patched model's class overrides."""
