"""The PagedAttention paper's evaluation, on this engine's scheduler and tables: `make paper`. README.md is the page."""
