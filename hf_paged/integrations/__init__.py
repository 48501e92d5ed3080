"""Knowledge about other packages that change a model."""
