"""Operations on the paged KV tensor. `reference.py` holds the plain-torch truth of each, which is also the CPU path."""
