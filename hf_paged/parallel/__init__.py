"""Several ranks of one tensor-parallel model: how it is shared out, and what they tell each other."""
