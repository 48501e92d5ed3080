"""The demo: watch the paged cache of hf_paged work (`make demo`, or `python -m demo`)."""
