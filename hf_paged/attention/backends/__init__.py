"""Attention backends, one module each; `registry.py` finds them and chooses among them."""
