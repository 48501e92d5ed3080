"""The engine of one model: its queues, its runs, and the loop that serves all callers."""
