"""What hf_paged knows of other packages that change a model."""
