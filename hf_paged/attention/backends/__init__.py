"""What carries out a step's attention: one module each, found by `registry.py`, which chooses among them."""
