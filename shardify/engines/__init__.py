"""Who runs the work of a build: this machine's processes."""
