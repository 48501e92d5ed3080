"""Programs around the package: the command line, and its report."""
