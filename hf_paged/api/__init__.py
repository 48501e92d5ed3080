"""What users call: `patch`, `is_supported`, and what a patched model's class overrides."""
