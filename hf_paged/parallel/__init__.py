"""Several ranks of one tensor-parallel model: how it is split, and what they tell each other."""
