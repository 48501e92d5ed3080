"""The loop: it owns queues, tables and pool, and serves every caller of one model."""
