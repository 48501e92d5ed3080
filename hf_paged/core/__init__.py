"""Values and bookkeeping, without torch: settings, sequences, blocks, block tables, and what runs next."""
