"""The paged cache as transformers sees it: the attention function of a step, and `PagedCache`."""
